import keras
import numpy as np
import pytest
import toys

import tf_avgstrategy as avg

# T1 with K=2: 5.125, 5.44140625, 5.5303955078125, 5.555423736572265625.
PATH = [toys.T1_WEIGHTS[2, step] for step in (2, 4, 6, 8)]


def fit(tmp_path, epochs=2, **options):
    """Two rounds an epoch."""
    name = (
        "mean_{epoch}.weights.h5"
        if options.get("save_weights_only")
        else ("mean_{epoch}.keras")
    )
    with toys.make_strategy().scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(2)
    checkpoint = avg.AveragedModelCheckpoint(tmp_path / name, **options)
    x, y = toys.slope_rows(4)
    toys.fit(
        model,
        x,
        y,
        batch_size=2,
        epochs=epochs,
        callbacks=[checkpoint, averaging],
    )
    return model, averaging


def saved(path):
    return toys.weight(keras.models.load_model(path))


@pytest.mark.core
class TestAveragedModelCheckpoint:
    def test_saves_the_mean_of_all_rounds(self, tmp_path):
        model, _ = fit(tmp_path)
        assert toys.weight(model) == PATH[3]
        assert saved(tmp_path / "mean_1.keras") == (PATH[0] + PATH[1]) / 2
        # Each step of a running mean rounds to float32.
        assert saved(tmp_path / "mean_2.keras") == pytest.approx(
            np.mean(PATH), rel=2e-7
        )

    def test_saves_an_exponential_moving_average(self, tmp_path):
        fit(tmp_path, epochs=1, decay=0.75)
        expected = 0.75 * PATH[0] + 0.25 * PATH[1]
        assert saved(tmp_path / "mean_1.keras") == expected

    def test_counts_from_an_epoch_on(self, tmp_path):
        fit(tmp_path, start_from_epoch=1)
        assert not (tmp_path / "mean_1.keras").exists()
        expected = np.float32(PATH[2]) + (
            np.float32(PATH[3]) - np.float32(PATH[2])
        ) / np.float32(2)
        assert saved(tmp_path / "mean_2.keras") == expected

    def test_saves_weights_alone(self, tmp_path):
        fit(tmp_path, epochs=1, save_weights_only=True)
        model = toys.slope_model()
        model.load_weights(tmp_path / "mean_1.weights.h5")
        assert toys.weight(model) == (PATH[0] + PATH[1]) / 2

    def test_the_mean_is_there_after_training(self, tmp_path):
        model, averaging = fit(tmp_path, epochs=1)
        before = toys.copies(model.trainable_variables[0])
        with averaging.averager.averaged_weights():
            assert toys.weight(model) == (PATH[0] + PATH[1]) / 2
            loss = model.evaluate(*toys.slope_rows(1), verbose=0)
        assert loss > 0
        after = toys.copies(model.trainable_variables[0])
        assert [v.tobytes() for v in before] == [v.tobytes() for v in after]

    def test_the_mean_outlives_another_compile(self, tmp_path):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(1)
        checkpoint = avg.AveragedModelCheckpoint(tmp_path / "mean.keras")
        for _ in range(2):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[averaging, checkpoint],
            )
            with model.distribute_strategy.scope():
                model.compile(toys.sgd(), "mse")
        with averaging.averager.averaged_weights():
            assert toys.weight(model) == (5.5 + 6.0625) / 2

    def test_needs_averaging(self, tmp_path):
        checkpoint = avg.AveragedModelCheckpoint(tmp_path / "mean.keras")
        model = toys.slope_model()
        with pytest.raises(ValueError, match="without `PeriodicAveraging`"):
            toys.fit(model, *toys.slope_rows(1), callbacks=[checkpoint])

    @pytest.mark.parametrize(
        ("path", "options", "message"),
        [
            ("a.h5", {}, r"must end in '.keras'.*'a.h5'"),
            ("a.keras", {"save_weights_only": True}, r"in '.weights.h5'"),
            ("a.keras", {"decay": 2}, r"\(0, 1\).*decay=2"),
            ("a.keras", {"start_from_epoch": -1}, "integer >= 0.*=-1"),
            ("a.keras", {"start_from_epoch": 1.5}, "integer >= 0.*=1.5"),
        ],
    )
    def test_rejects(self, path, options, message):
        with pytest.raises(ValueError, match=message):
            avg.AveragedModelCheckpoint(path, **options)


class TestAverager:
    def make(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        return avg.ParameterAverager(
            strategy, model.variables, model.optimizer, period=2
        )

    def test_there_is_no_mean_unless_asked_for(self):
        with (
            pytest.raises(RuntimeError, match="keeps none.*keep_running_mean"),
            self.make().averaged_weights(),
        ):
            pass

    def test_there_is_one(self):
        averager = self.make()
        averager.keep_running_mean(0.5)
        averager.keep_running_mean(0.5)
        with pytest.raises(ValueError, match="decay=None where .*decay=0.5"):
            averager.keep_running_mean()
