"""Troubles of users of other libraries that need several workers, by id."""

import pytest


def test_laun_04_replicas_are_counted_not_workers(pool):
    # Worker 0 has one replica on A, worker 1 two on B: (2.25 + 8 + 8) / 3.
    results = pool.run("one_and_two_replicas")
    for weights in results:
        # A third is not exact in float32.
        assert weights == pytest.approx([18.25 / 3] * len(weights), rel=1e-6)
    assert results[0][0] == results[1][0] == results[1][1]


class TestData01:
    """One file with 8 rows; which rows each worker sees."""

    @pytest.mark.parametrize("policy", ["AUTO", "DATA"])
    def test_data_01_each_row_once(self, pool, policy, tmp_path):
        seen = pool.run("rows_of_files", [8], policy, str(tmp_path))
        assert sorted(seen[0] + seen[1]) == list(range(8))
        assert len(seen[0]) == len(seen[1]) == 4

    def test_data_01_without_sharding_all_rows_on_each(self, pool, tmp_path):
        seen = pool.run("rows_of_files", [8], "OFF", str(tmp_path))
        assert [sorted(rows) for rows in seen] == [list(range(8))] * 2

    def test_data_01_files_are_dealt_out(self, pool, tmp_path):
        seen = pool.run("rows_of_files", [4, 4], "FILE", str(tmp_path))
        assert sorted(map(sorted, seen)) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_data_01_too_few_files_name_files_and_workers(self, pool, tmp_path):
        for text in pool.run("rows_of_files", [8], "FILE", str(tmp_path)):
            assert "1 file" in text and "2 workers" in text

    def test_data_01_three_workers_and_two_files(self, pools, tmp_path):
        seen = pools(3, "collective").run(
            "rows_of_files", [4, 4], "AUTO", str(tmp_path)
        )
        assert sorted(sum(seen, [])) == list(range(8))

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_arrays_are_shuffled_alike_whatever_the_seeds(self, pool, replicas):
        results = pool.run("rows_of_arrays", rows=23, replicas=replicas)
        for epoch in range(3):
            seen = [result[epoch] for result in results]
            assert sorted(seen[0] + seen[1]) == list(range(23))
        orders = [str(epoch) for epoch in results[0]]
        assert len(set(orders)) == 3


class TestData02:
    """Worker 0 has 4 batches, worker 1 has 5."""

    def test_data_02_ends_with_equal_weights_and_rounds(self, pool):
        first, second = pool.run("uneven", [4, 5], period=2, epochs=2)
        assert first == second
        # After step 4 the weights are 5.44140625. Step 5 is worker 1's alone,
        # which sets w to 8, and its row is the only one of that round.
        assert first["weights"][0] == 8.0
        # After steps 2, 4 and 5, 6, 8 and 10.
        assert first["rounds"] == 6

    def test_data_02_a_message_names_who_ran_dry(self, pool):
        for messages in pool.run("uneven_messages", [4, 5]):
            (message,) = messages
            assert "Worker 0 ran out of data after step 4" in message

    def test_data_02_more_steps_than_data(self, pool):
        first, second = pool.run(
            "uneven", [4, 4], period=2, epochs=2, steps_per_epoch=5
        )
        assert first == second
        assert first["weights"][0] == 5.44140625


def test_opt_01_all_start_from_the_chief(pool):
    for result in pool.run("start_differently"):
        assert result["learning_rates"] == [0.125]
        assert result["before"] == {
            "weight": 4.0,
            "velocity": 0.0,
            "iterations": 0,
        }
        assert result["weight"] == 5.875


@pytest.mark.parametrize("schedule", ["piecewise", "cosine"])
def test_opt_03_schedules_of_the_learning_rate_go_on(pool, schedule):
    results = pool.run("follow_a_learning_rate", schedule)
    for result in results:
        assert result["iterations"] == 4
        assert result["rates"] == result["rates of one process"]
    if schedule == "piecewise":
        assert results[0]["weights"][1:] == [5.125, 5.125]


@pytest.mark.parametrize("by", ["fit", "loop"])
def test_api_01_fit_and_a_custom_loop_train(pool, by):
    for result in pool.run("slope", 4, 2, by=by):
        assert result["weights"] == [5.44140625]


def test_fail_02_a_failed_exchange_writes_nothing(pool):
    for before, failed, retried in pool.run("fail_within_a_round"):
        assert failed == before
        assert retried == [5.125, 5.125]


class TestFail03:
    def test_fail_03_nan_stops_every_worker_and_is_named(self, pools):
        for text in pools(3, "collective").run("step_to_nan"):
            assert "dense/kernel" in text and "worker 2" in text
            assert "step 2" in text

    def test_fail_03_the_largest_numbers_do_not_overflow(self, pools):
        for weight in pools(3, "collective").run("average_large_weights"):
            # A third is not exact in float32.
            assert weight == pytest.approx(3e38, rel=1e-6)
