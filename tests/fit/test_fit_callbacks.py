"""Other callbacks in a `fit` of several workers."""

import json
import os

import keras
import numpy as np
import pytest
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.fit import fit_callbacks

callbacks = keras.callbacks


class Recorder(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def set_model(self, model):
        super().set_model(model)
        self.seen.append("set_model")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append("on_epoch_end")

    def on_test_end(self, logs=None):
        self.seen.append("on_test_end")


class RankOne(toys.TwinCommunicator):
    def __init__(self):
        super().__init__()
        self.rank = 1


class TestChiefOnly:
    def run(self, strategy):
        recorder = Recorder()
        with strategy.scope():
            model = toys.slope_model()
        x, y = toys.slope_rows(1)
        only = fit_callbacks.chief_only(recorder)
        toys.fit(model, x, y, batch_size=2, callbacks=[only])
        model.evaluate(x, y, verbose=0, callbacks=[only])
        return recorder.seen

    def test_the_chief_hears_everything(self):
        seen = self.run(toys.make_strategy())
        assert seen == ["set_model", "on_epoch_end"] + [
            "set_model",
            "on_test_end",
        ]

    def test_others_hear_nothing(self):
        strategy = toys.make_strategy(communicator=RankOne())
        assert not strategy.is_chief
        assert self.run(strategy) == []

    def test_is_not_for_averaging(self):
        with pytest.raises(ValueError, match="PeriodicAveraging in `chief_on"):
            avg.chief_only(avg.PeriodicAveraging(1))


class TestCheckSameFit:
    def check(self, *every):
        texts = []
        for arguments in every:
            fit_callbacks.check_same_fit(
                arguments, lambda own: texts.append(own) or [own]
            )
        fit_callbacks.check_same_fit(every[0], lambda _: texts)

    def test_the_same_is_fine(self):
        self.check({"validation_data": 1}, {"validation_split": 0.5})
        self.check({}, {"initial_epoch": np.int64(0), "epochs": 4})

    def test_validation_data_on_some(self):
        with pytest.raises(
            ValueError, match="worker 1 with .* workers 0, 2 without"
        ):
            self.check({}, {"validation_data": 1}, {})

    @pytest.mark.parametrize(
        ("name", "value"), [("validation_freq", 2), ("initial_epoch", 3)]
    )
    def test_another_number(self, name, value):
        with pytest.raises(ValueError, match=f"{name}={value} on worker 1"):
            self.check({}, {name: value})


class TestArrangeWriters:
    def arrange(self, *every):
        """What stays on each worker, by its place, and the counters."""
        texts = []
        for rank, of_one in enumerate(every):
            fit_callbacks.arrange_writers(
                of_one,
                rank=rank,
                # As if all others were ready: only the own text counts here.
                gather_strings=lambda own: texts.append(own) or (texts * 9),
            )
        kept = [
            fit_callbacks.arrange_writers(
                of_one, rank=rank, gather_strings=lambda _: texts
            )
            for rank, of_one in enumerate(every)
        ]
        places = [
            [of_one.index(callback) for callback in remaining]
            for of_one, (remaining, _) in zip(every, kept)
        ]
        return places, kept[0][1]

    def test_one_worker_writes_to_one_place(self):
        relative = os.path.relpath("/tmp/log")
        places, _ = self.arrange(
            [Recorder(), callbacks.CSVLogger("/tmp/log")],
            [callbacks.CSVLogger(relative), callbacks.CSVLogger("/tmp/own")],
            [callbacks.CSVLogger("/tmp/own"), Recorder()],
        )
        assert places == [[0, 1], [1], [1]]

    def test_remote_places_are_taken_as_they_are(self):
        places, _ = self.arrange(
            [callbacks.TensorBoard("gs://a/b")],
            [callbacks.TensorBoard("gs://a/b")],
            [callbacks.TensorBoard("gs://a/c")],
        )
        assert places == [[0], [], [0]]

    def test_only_the_chief_keeps_what_is_for_it(self):
        only = avg.chief_only(Recorder())
        kept, _ = fit_callbacks.arrange_writers(
            [only], rank=0, gather_strings=lambda own: [own] * 2
        )
        assert kept == [only.callback]
        kept, _ = fit_callbacks.arrange_writers(
            [only], rank=1, gather_strings=lambda own: [own] * 2
        )
        assert kept == []

    def test_counters_are_those_of_all(self):
        def checkpoint(freq):
            return callbacks.ModelCheckpoint(
                f"/tmp/{freq}.keras", save_freq=freq
            )

        _, counters = self.arrange(
            [checkpoint(4), checkpoint("epoch")], [checkpoint(4), checkpoint(3)]
        )
        assert counters == [(3, 0), (4, 0)]

    def test_the_chief_must_save_too(self):
        checkpoint = callbacks.ModelCheckpoint("a.keras")
        texts = ["[[], []]", json.dumps([["ModelCheckpoint /a.keras"], []])]
        with pytest.raises(
            ValueError, match="on worker 1 and none on worker 0"
        ):
            fit_callbacks.arrange_writers(
                [checkpoint], rank=1, gather_strings=lambda _: texts
            )


class FakeModel:
    """Notes when `ModelCheckpoint` saves."""

    def __init__(self):
        self.saves = 0

    def save(self, *args, **kwargs):
        self.saves += 1


@pytest.mark.parametrize("freq", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("executed", [1, 2])
def test_save_moments_are_those_of_model_checkpoint(freq, executed, tmp_path):
    checkpoint = callbacks.ModelCheckpoint(tmp_path / "a.keras", save_freq=freq)
    model = FakeModel()
    checkpoint.set_model(model)
    moments = fit_callbacks.SaveMoments([(freq, 0)])
    for epoch, batches in enumerate([4, 6, 2, 8]):
        checkpoint.on_epoch_begin(epoch)
        for first in range(0, batches, executed):
            before = model.saves
            checkpoint.on_train_batch_end(first + executed - 1, {})
            assert moments.advance(executed) == (model.saves > before)
        checkpoint.on_epoch_end(epoch, {})


class TestStates:
    def make(self):
        return [
            callbacks.EarlyStopping("loss", restore_best_weights=True),
            callbacks.ReduceLROnPlateau("loss"),
            callbacks.ModelCheckpoint("a.keras"),
            callbacks.ModelCheckpoint("b.keras", save_freq=3),
            Recorder(),
        ]

    def test_come_back(self):
        before = self.make()
        early, plateau, first, second, _ = before
        early.best, early.wait = np.float32(0.25), 2
        early.best_weights = [np.arange(3.0), np.zeros([0, 2])]
        plateau.wait, plateau.cooldown_counter = 1, 4
        first.best, second.best = 0.5, float("inf")
        second._batches_seen_since_last_saving = 2
        values, arrays = fit_callbacks.callback_states(before)
        after = self.make()
        fit_callbacks.restore_callback_states(
            after, json.loads(json.dumps(values)), arrays
        )
        early, plateau, first, second, _ = after
        assert (early.best, early.wait) == (0.25, 2)
        np.testing.assert_array_equal(early.best_weights[0], [0, 1, 2])
        assert early.best_weights[1].shape == (0, 2)
        assert (plateau.wait, plateau.cooldown_counter) == (1, 4)
        assert (first.best, second.best) == (0.5, float("inf"))
        assert second._batches_seen_since_last_saving == 2

    def test_settings_are_those_of_the_new_run(self):
        values, arrays = fit_callbacks.callback_states(
            [callbacks.EarlyStopping(patience=3)]
        )
        again = callbacks.EarlyStopping(patience=9)
        fit_callbacks.restore_callback_states([again], values, arrays)
        assert again.patience == 9
