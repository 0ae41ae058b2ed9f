import json
import math

import keras
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.telemetry import telemetry


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fit(tmp_path, steps=5, epochs=1, **options):
    """T1 with period 2. Returns the history and the lines of the file."""
    options = {"log_file": tmp_path / "run.jsonl", **options}
    with toys.make_strategy().scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(2, **options)
    history = toys.fit(
        model,
        *toys.slope_rows(steps),
        batch_size=2,
        epochs=epochs,
        callbacks=[averaging],
    ).history
    return history, lines(tmp_path / "run.jsonl")


class TestFile:
    def test_has_a_line_for_each_round_and_epoch(self, tmp_path):
        _, (start, *others) = fit(tmp_path, epochs=2)
        assert start["kind"] == "start"
        assert start["replicas"] == 2
        assert "Periodic(period=2" in start["schedule"]
        kinds = [(line["kind"], line["step"]) for line in others]
        assert kinds == [
            *[("round", step) for step in (2, 4, 5)],
            ("epoch", 5),
            *[("round", step) for step in (6, 8, 10)],
            ("epoch", 10),
        ]
        assert [line["period"] for line in others[:3]] == [2, 2, 1]
        scheduled = [line["is_scheduled"] for line in others[:3]]
        assert scheduled == [True, True, False]

    def test_divergence_is_that_of_the_weights(self, tmp_path):
        _, (_, first, second, *_) = fit(tmp_path)
        # 2.25 and 8 around 5.125, 2.8828125 and 8 around 5.44140625.
        assert first["divergence"] == pytest.approx(2.875 / 5.125)
        assert second["divergence"] == pytest.approx(2.55859375 / 5.44140625)

    def test_of_fragments_each_has_its_own(self, tmp_path):
        # The one weight is the second fragment: it travels at even ticks.
        _, (_, first, *_) = fit(tmp_path, steps=2, fragments=2)
        assert first["fragments"] == [0]
        assert first["payload_bytes"] == 4

    def test_is_added_to(self, tmp_path):
        fit(tmp_path)
        _, twice = fit(tmp_path)
        assert [line["kind"] for line in twice].count("start") == 2

    def test_what_is_not_finite_is_null(self, tmp_path):
        log = telemetry.RoundLog(str(tmp_path / "run.jsonl"), None)
        log.write_epoch(0, 1, {"loss": math.nan, "more": [1.0][0]})
        (line,) = lines(tmp_path / "run.jsonl")
        assert line["logs"] == {"loss": None, "more": 1.0}


class TestLogs:
    def test_are_means_over_the_rounds_of_an_epoch(self, tmp_path):
        history, written = fit(tmp_path, epochs=2)
        assert history["rounds"] == [3, 3]
        for epoch, found in enumerate(history["divergence"]):
            own = [r for r in written if r["kind"] == "round"]
            own = own[3 * epoch : 3 * epoch + 3]
            expected = sum(line["divergence"] for line in own) / 3
            assert found == pytest.approx(expected)
        assert history["megabytes_sent"] == [0, 0]

    def test_csv_logger_and_history_have_them(self, tmp_path):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        toys.fit(
            model,
            *toys.slope_rows(4),
            batch_size=2,
            callbacks=[logger, avg.PeriodicAveraging(2, telemetry=True)],
        )
        assert "divergence" in (tmp_path / "log.csv").read_text()

    def test_off_there_are_none(self):
        model, averaging = toys.fit_slope(4, 2)
        assert set(model.history.history) == {"loss"}
        assert not averaging.get_config()["telemetry"]

    def test_of_no_rounds(self):
        assert telemetry.epoch_logs([]) == {"rounds": 0}


def test_tensorboard_has_scalars(tmp_path):
    fit(tmp_path, log_dir=tmp_path / "board")
    found = {}
    for path in (tmp_path / "board").iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor).item()
                found.setdefault(value.tag, []).append((event.step, number))
    steps = [step for step, _ in found["rounds/divergence"]]
    assert steps == [2, 4, 5]
    assert found["rounds/divergence"][0][1] == pytest.approx(2.875 / 5.125)
    assert found["rounds/period"] == [(2, 2.0), (4, 2.0), (5, 1.0)]


def test_rounds_are_bit_equal_with_and_without(tmp_path):
    def weights(**options):
        keras.utils.set_random_seed(0)
        with toys.make_strategy(3).scope():
            model = keras.Sequential(
                [keras.layers.Input((1,)), keras.layers.Dense(7)]
            )
            model.compile("adam", "mse")
        x, y = toys.slope_rows(6)
        averaging = avg.PeriodicAveraging(2, **options)
        toys.fit(model, x, y, batch_size=3, callbacks=[averaging])
        return [w.tobytes() for w in model.get_weights()]

    assert weights() == weights(telemetry=True)
