"""What `fit` and `save` do under the strategy, and nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg


class RankOne(toys.TwinCommunicator):
    """The second of two workers that hold the same state."""

    def __init__(self):
        super().__init__()
        self.rank = 1


def see_weights(model, seen):
    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(toys.weight(model))
    )


def model_under(strategy):
    with strategy.scope():
        return toys.slope_model()


class TestOtherStrategies:
    def test_plain_keras_is_as_ever(self, tmp_path):
        toys.make_strategy()
        model = toys.slope_model()
        x, y = toys.slope_rows(2)
        seen = []
        toys.fit(
            model, x, y, batch_size=2, callbacks=[see_weights(model, seen)]
        )
        # T1 with period 1: the mean gradient of both rows.
        assert seen == [6.0625]
        model.save(tmp_path / "a.keras")
        assert toys.weight(keras.models.load_model(tmp_path / "a.keras")) == (
            6.0625
        )

    def test_mirrored_strategy_is_as_ever(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            model = toys.slope_model()
        toys.fit(model, *toys.slope_rows(2), batch_size=2)
        assert toys.weight(model) == 6.0625

    def test_averaging_there_is_an_error(self):
        model = toys.slope_model()
        with pytest.raises(ValueError, match="needs a `ParameterAveraging"):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(1)],
            )


class TestWithoutAveraging:
    def messages(self, caplog, strategy, fits):
        model = model_under(strategy)
        for _ in range(fits):
            toys.fit(model, *toys.slope_rows(1), batch_size=2)
        return [m for m in caplog.messages if "averages nothing" in m]

    def test_a_fit_warns_once(self, caplog):
        assert len(self.messages(caplog, toys.make_strategy(2), 2)) == 1

    def test_one_replica_needs_none(self, caplog):
        assert self.messages(caplog, toys.make_strategy(1), 1) == []


class TestOrder:
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_others_see_the_average_from_any_place(self, place):
        strategy = toys.make_strategy()
        model = model_under(strategy)
        first, second = [], []
        callbacks = [see_weights(model, first), see_weights(model, second)]
        callbacks.insert(place, avg.PeriodicAveraging(4))
        toys.fit(model, *toys.slope_rows(2), batch_size=2, callbacks=callbacks)
        assert first == second == [5.125]

    def test_in_a_nested_list_and_alone(self):
        for callbacks in (
            [[keras.callbacks.Callback()], [avg.PeriodicAveraging(2)]],
            avg.PeriodicAveraging(2),
        ):
            model = model_under(toys.make_strategy())
            toys.fit(
                model, *toys.slope_rows(4), batch_size=2, callbacks=callbacks
            )
            assert toys.weight(model) == 5.44140625

    def test_in_a_callback_list_with_a_backup(self, tmp_path):
        model = model_under(toys.make_strategy())
        seen = []
        callbacks = keras.callbacks.CallbackList(
            [
                see_weights(model, seen),
                keras.callbacks.BackupAndRestore(
                    tmp_path / "backup", delete_checkpoint=False
                ),
                avg.PeriodicAveraging(4),
            ],
            add_history=True,
            model=model,
            epochs=1,
            steps=2,
        )
        toys.fit(model, *toys.slope_rows(2), batch_size=2, callbacks=callbacks)
        assert seen == [5.125]
        files = [path.name for path in (tmp_path / "backup").iterdir()]
        assert files == ["latest.averaging.npz"]
        # The list is the caller's.
        kinds = [type(callback).__name__ for callback in callbacks.callbacks]
        assert kinds == [
            "LambdaCallback",
            "BackupAndRestore",
            "PeriodicAveraging",
            "History",
        ]

    def test_a_fit_that_failed_leaves_nothing_behind(self):
        strategy = toys.make_strategy()
        model = model_under(strategy)

        def fail(batch, logs):
            raise KeyError("on purpose")

        callbacks = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
        with pytest.raises(KeyError):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(1), callbacks],
            )
        assert strategy.extended.fit_in_progress is None
        assert np.isfinite(model.evaluate(*toys.slope_rows(1), verbose=0))


class TestSave:
    def test_others_than_the_chief_leave_it_and_say_so(self, tmp_path, caplog):
        strategy = toys.make_strategy(communicator=RankOne())
        model = model_under(strategy)
        for save, name in (
            (model.save, "a.keras"),
            (model.save_weights, "a.weights.h5"),
            (model.export, "a"),
        ):
            save(tmp_path / name)
        assert list(tmp_path.iterdir()) == []
        assert caplog.text.count("Worker 1 saves nothing: the chief") == 1
        keras.saving.save_model(model, tmp_path / "own.keras")
        assert (tmp_path / "own.keras").exists()

    def test_who_has_lost_the_others_saves(self, tmp_path):
        communicator = RankOne()
        model = model_under(toys.make_strategy(communicator=communicator))
        communicator.close()
        model.save(tmp_path / "a.keras")
        assert toys.weight(keras.models.load_model(tmp_path / "a.keras")) == 4

    def test_what_fails_halfway_leaves_the_old_file(self, tmp_path):
        model = model_under(toys.make_strategy())
        path = tmp_path / "a.keras"
        model.save(path)
        before = path.read_bytes()

        def fail(config=None):
            raise KeyError("on purpose")

        model.get_config = fail
        with pytest.raises(KeyError):
            model.save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["a.keras"]

    def test_arguments_of_keras_are_passed_on(self, tmp_path):
        model = model_under(toys.make_strategy())
        model.save(tmp_path / "a.keras", True, None)
        model.save(filepath=str(tmp_path / "b.keras"), overwrite=False)
        model.save_weights(str(tmp_path / "c.weights.h5"), overwrite=True)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["a.keras", "b.keras", "c.weights.h5"]
