"""Metrics, callbacks and files of two workers: CKPT and METR cases."""

import observers
import pytest


def test_metr_01_validation_is_weighted_by_rows(some_pool, tmp_path):
    # (100 * 1 + 10 * 2) / 110, in float32.
    expected = pytest.approx(120 / 110, rel=1e-7)
    first, second = some_pool.run(
        "observers:validate_with_unequal_shards", str(tmp_path)
    )
    assert first == second
    assert first["history"] == first["seen"] == [expected]
    assert first["file"] == first["evaluate"] == expected


def test_metr_02_callbacks_on_the_chief_alone_change_nothing(
    some_pool, tmp_path
):
    run = "observers:observe_on_the_chief_alone"
    weights = some_pool.run(run, str(tmp_path), "callbacks")
    assert weights == [5.555423736572265625] * 2
    assert (tmp_path / "model.keras").exists()


def test_metr_02_validation_data_on_the_chief_alone(some_pool, tmp_path):
    run = "observers:observe_on_the_chief_alone"
    for error in some_pool.run(run, str(tmp_path), "validation"):
        assert "worker 0 with validation data, worker 1 without" in error


def test_metr_03_all_workers_decide_the_same(pool, tmp_path):
    losses = [[1.0, 0.9, 0.8, 0.7], [1.0, 1.2, 1.4, 1.6]]
    first, second = pool.run(
        "observers:decide_on_validation", str(tmp_path), losses
    )
    assert first == second
    assert first["val_loss"] == pytest.approx([1.0, 1.05], rel=1e-7)
    assert first["rates"] == [0.125, 0.125]
    assert first["learning_rate"] == 0.0625
    assert [path.name for path in tmp_path.iterdir()] == ["1.keras"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_are_those_of_one_device(some_pool, replicas):
    rows = 45
    one_device = observers.evaluate_on_one_device(rows)
    results = some_pool.run("observers:evaluate_many_metrics", rows, replicas)
    assert results[0] == results[1]
    in_fit, evaluated = results[0]
    assert set(evaluated) == set(one_device)
    for key, expected in one_device.items():
        # Float32 sums in another order; counts are exact.
        tolerance = 0 if key == "mistakes" else 1e-6
        assert evaluated[key] == pytest.approx(expected, rel=tolerance)
        assert in_fit[f"val_{key}"] == evaluated[key]
        # The weights do not change while training.
        assert in_fit[key] == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ("replicas", "expected"), [(1, 16 * 25 / 2), (2, 16 * 174 / 4)]
)
def test_what_an_own_step_returns_is_the_mean(some_pool, replicas, expected):
    # Of the last batch, rows 3 and 4 or 5 to 8: 16 times their squares.
    results = some_pool.run("observers:train_by_an_own_step", replicas)
    assert results == [[expected]] * 2


def test_ckpt_01_three_workers_save_to_one_path(pools, communicator, tmp_path):
    pool = pools(3, communicator)
    results = pool.run("observers:save_on_all_workers", str(tmp_path), 3)
    for weights in results:
        for own, saved in weights:
            assert own == saved == results[0][0][0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.parametrize("kind", ["sgd", "adam", "user"])
def test_ckpt_04_a_loaded_model_is_averaged(some_pool, kind, tmp_path):
    results = some_pool.run(
        "observers:go_on_from_a_file", str(tmp_path), kind, with_callback=True
    )
    for straight, loaded, messages in results:
        assert loaded == straight == results[0][0]
        assert messages == []
        if kind != "adam":
            assert loaded == 5.44140625


def test_ckpt_04_without_the_callback_there_is_a_warning(some_pool, tmp_path):
    results = some_pool.run(
        "observers:go_on_from_a_file",
        str(tmp_path),
        "sgd",
        with_callback=False,
    )
    for (_, loaded, messages), drifted in zip(results, [2.8828125, 8.0]):
        assert loaded == drifted
        (message,) = messages
        assert "averages nothing" in message


def test_all_callbacks_together(pool, tmp_path):
    first, second = pool.run("observers:all_callbacks_together", str(tmp_path))
    assert first["decisions"] == second["decisions"]
    assert first["bits"] == second["bits"]
    # Stopped early, after the learning rate was halved.
    assert 2 < first["epochs"] < 6
    assert first["decisions"][-1][1] < 0.05 * 0.9 ** first["epochs"] * 0.6
    weights = [f"every_{n + 1}.weights.h5" for n in range(first["epochs"])]
    # The backup is gone, as training came to its end.
    assert first["files"] == sorted(["best.keras", "log.csv", *weights])
    # TensorBoard writes one for training and one for validation.
    assert first["boards"] == 2


def test_fail_03_a_sick_worker_adopts_the_others_mean(pools, communicator):
    pool = pools(3, communicator)
    for result in pool.run("observers:train_with_nan", "exclude"):
        assert result == (5.125, [1])


def test_metrics_are_exchanged_once_an_epoch(pool):
    counts = pool.run("observers:count_exchanges", 4)
    counts += pool.run("observers:count_exchanges", 16)
    # One closes the epoch, two are for its metrics, one asks for a round before
    # validation, two are for its metrics.
    assert counts == [6] * 4


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_ckpt_05_each_worker_restores_its_replicas(some_pool, stop, tmp_path):
    run = "observers:restore_within_a_period"
    assert some_pool.run(run, str(tmp_path), stop) == [(True, 7, 2)] * 2


def test_looks_within_an_epoch_are_no_rounds(some_pool):
    """One worker alone may predict; all together may evaluate."""
    run = "observers:look_within_an_epoch"
    untouched = some_pool.run(run, "nobody")
    expected = {
        "weight": (4.6328125 * 0.75**4 + 8) / 2,
        "rounds": 2,
        "steps": 8,
    }
    assert untouched == [expected] * 2
    chief, other = some_pool.run(run, "chief")
    # Its two rows of four, and all four, by its own weight: 4 * 0.75**2.
    assert chief == {
        **expected,
        "predicted": [2.25, 4.5],
        "on_batch": [2.25, 4.5, 6.75, 9],
    }
    assert other == expected
    chief, other = some_pool.run(run, "all")
    assert chief["predicted"] == [2.25, 4.5]
    assert other["predicted"] == [24, 32]
    # Each worker's rows by its weights, which are 2.25 and 8.
    loss = (2.25**2 * (1 + 4) + 8**2 * (9 + 16)) / 4
    assert chief["loss"] == other["loss"] == loss
    for found in (chief, other):
        assert {key: found[key] for key in expected} == expected


def test_a_look_within_an_epoch_that_cannot_be(some_pool):
    run = "observers:look_within_an_epoch"
    for error in some_pool.run(run, "alone"):
        assert "workers that do so at the same time: [0] of [0, 1]" in error
    for error in some_pool.run(run, "as ready"):
        assert "`predict` gives each worker the predictions of its" in error


def test_evaluate_where_a_worker_has_no_data_left(some_pool):
    """It waits for the others, which see what they have."""
    run = "observers:look_within_an_epoch"
    chief, other = some_pool.run(run, "all", (8, 1))
    assert chief["predicted"] == [2.25, 4.5]
    assert "predicted" not in other
    # The chief's rows alone.
    assert chief["loss"] == 2.25**2 * (1 + 4) / 2
    assert chief["weight"] == other["weight"]
    assert chief["rounds"] == other["rounds"] == 2
