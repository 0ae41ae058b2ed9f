"""Schedules, outer optimizers, fragments and levels on several workers.

The numbers are worked out in `tests/test_paths.py`, but for those here.
"""

import pytest
import toys

PATHS = [
    ("half of the way", 4, 4.9228515625, 2),
    ("nesterov", 4, 5.373291015625, 2),
    ("nesterov in a fragment", 4, 5.373291015625, 2),
    ("elastic", 4, 5.037109375, 3),
    ("stages", 6, 5.60455322265625, 4),
    ("growing", 6, 5.302978515625, 2),
    # 5.125 after step 2, (0.75 ** 4 * 5.125 + 8) / 2 after step 6.
    ("apart", 6, 4.810791015625, 2),
    ("time", 2, 6.0625, 2),
]
A, B = toys.ROW_A, toys.ROW_B


@pytest.mark.parametrize(("scheme", "steps", "weight", "rounds"), PATHS)
def test_t1_on_two_workers(some_pool, scheme, steps, weight, rounds):
    for result in some_pool.run("schemes:path", scheme, steps, (A, B)):
        assert result == ([weight], rounds)


@pytest.mark.parametrize("scheme", ["nesterov", "elastic", "apart"])
def test_t1_on_two_workers_with_two_replicas_each(some_pool, scheme):
    ((_, steps, weight, rounds),) = [p for p in PATHS if p[0] == scheme]
    rows = A, A, B, B
    results = some_pool.run("schemes:path", scheme, steps, rows, replicas=2)
    assert results == [([weight] * 2, rounds)] * 2


def test_replicas_of_a_worker_meet_more_often(pool):
    # Worker 0: 2.25 and 8, 5.125 after step 2, then 2.8828125 and 8. Worker 1:
    # 4 * 0.75 ** 4 = 1.265625 twice. One round of all of them.
    results = pool.run(
        "schemes:path", "two levels", 4, (A, B, A, A), replicas=2
    )
    assert results == [([3.353515625] * 2, 1)] * 2


@pytest.mark.parametrize("scheme", ["loss", "apart", "growing", "time"])
def test_uneven_data_and_losses(pool, scheme):
    first, second = pool.run("schemes:uneven", scheme, [3, 7])
    assert first == second
    assert first["steps"] == 14


def test_the_chiefs_learning_rate_counts(pool):
    assert pool.run("schemes:other_learning_rates") == [[4, 8, 12]] * 2


def test_other_settings_are_an_error(pool):
    for message in pool.run("schemes:other_settings"):
        assert "'momentum': 0.5" in message
        assert "'momentum': 0.75" in message


def test_the_running_mean_is_the_same_on_all(pool):
    mean = (5.125 + 5.44140625) / 2
    assert pool.run("schemes:running_mean") == [(mean, 5.44140625)] * 2


class TestSynchronousSteps:
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_t1(self, pool, replicas):
        rows = (A,) * replicas + (B,) * replicas
        results = pool.run(
            "schemes:path",
            "seldom",
            3,
            rows,
            replicas=replicas,
            gradient_sync="global",
        )
        # The mean gradient, as rounds after every step.
        assert results == [([6.2734375] * replicas, 1)] * 2

    def test_gradients_within_workers_and_rounds_between(self, pool):
        # Worker 0: 5.5, 6.0625; worker 1: 3, 2.25. The mean is 4.15625. Then
        # 5.55859375, 6.084... as (0.75 w + 8) / 2, and 0.5625 w.
        results = pool.run(
            "schemes:path",
            "every 2",
            4,
            (A, B, A, A),
            replicas=2,
            gradient_sync="worker",
        )
        first = (0.75 * (0.75 * 4.15625 + 8) / 2 + 8) / 2
        mean = (first + 0.5625 * 4.15625) / 2
        assert results == [([mean] * 2, 2)] * 2

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_a_network_equals_one_device(self, pool, replicas):
        results = pool.run("schemes:synchronous_network", replicas)
        (first, _, _), (second, _, _) = results
        assert first == second
        for _, weights, logs in results:
            # Sums of float32 in another order.
            assert weights < 2e-5
            assert logs < 2e-4

    @pytest.mark.parametrize("gradient_sync", ["none", "worker"])
    def test_warm_up(self, pool, gradient_sync):
        # As in tests/test_gradient_exchange.py.
        results = pool.run(
            "schemes:path", "warm-up", 4, (A, B), gradient_sync=gradient_sync
        )
        assert results == [([5.705078125], 2)] * 2

    @pytest.mark.parametrize("batches", [[2, 5], [5, 2]])
    def test_uneven_data(self, pool, batches):
        first, second = pool.run("schemes:synchronous_uneven", batches)
        assert first == second
        # 5.5 and 6.0625 together. Then B alone: 8. Or A alone: 0.75 ** 3.
        weight = 8.0 if batches[1] == 5 else 6.0625 * 0.75**3
        assert first["weights"] == [weight]
        assert first["steps"] == first["iterations"] == 5
        assert first["rounds"] == 2

    def test_uneven_data_and_files_within_epochs(self, pool, tmp_path):
        first, second = pool.run(
            "schemes:synchronous_uneven",
            [2, 7],
            epochs=2,
            save_freq=3,
            folder=str(tmp_path),
        )
        assert first == second
        assert first["iterations"] == 14

    def test_uneven_data_in_a_custom_loop(self, pool):
        assert pool.run("schemes:synchronous_loop", [2, 5]) == [(8.0, 5, 2)] * 2

    def test_uneven_data_of_two_models(self, pool):
        # B alone ends at 8 whatever came before.
        assert (
            pool.run("schemes:synchronous_models", [2, 4]) == [(8.0, 8.0)] * 2
        )

    def test_uneven_images_of_unknown_size(self, pool):
        first, second = pool.run("schemes:synchronous_images", [1, 3])
        assert first == second

    def test_resumed_where_one_has_no_data_left(self, pool, tmp_path):
        first, second = pool.run("schemes:synchronous_resume", str(tmp_path))
        assert first == second
        whole, resumed = first
        assert resumed == whole

    def test_several_steps_an_execution_are_refused(self, pool):
        for message in pool.run("schemes:synchronous_executions"):
            assert "steps_per_execution=4" in message

    def test_one_worker_stops_all(self, pool):
        first, second = pool.run("schemes:synchronous_stop")
        assert first == second
        assert first[0] == 1

    def test_a_worker_without_data_is_named(self, pool):
        for message in pool.run("schemes:synchronous_without_data"):
            assert "without any" in message


def test_round_records(pool, tmp_path):
    first, second = pool.run("schemes:telemetry", str(tmp_path))
    # One file, of the chief.
    assert first == second
    divergence, megabytes, lines = first
    start, *others = lines
    assert start["kind"] == "start"
    assert (start["workers"], start["bytes_per_round"]) == (2, 8)
    rounds = [line for line in others if line["kind"] == "round"]
    assert [line["step"] for line in rounds] == [2, 4, 6, 8]
    # T2: 3.0, 1.75 and 8, 10: both 4.125 from 5.875.
    assert rounds[0]["divergence"] == pytest.approx(4.125 / 5.875, rel=1e-6)
    for line in rounds:
        # Weight and momentum, to and fro of two halves.
        assert (line["payload_bytes"], line["bytes_sent"]) == (8, 8)
        assert line["weights"] == [2.0, 2.0]
        parts = (
            line["waiting_seconds"],
            line["exchanging_seconds"],
            line["computing_seconds"],
        )
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(line["seconds"])
        # Worker 1 begins its last step half a second after the chief, whose
        # own last step may take longer on a busy machine.
        assert line["late"] == 1
        assert line["late_seconds"] > 0.2
        assert line["waiting_seconds"] > 0.2
    epochs = [line for line in others if line["kind"] == "epoch"]
    assert [line["logs"]["rounds"] for line in epochs] == [2, 2]
    assert divergence[0] == pytest.approx(
        (rounds[0]["divergence"] + rounds[1]["divergence"]) / 2
    )
    assert megabytes == [16e-6, 16e-6]
