"""Two workers train together: T1, T2 and T3, start, state, uneven data."""

import pytest
import toys

# With worker 0 on row A and worker 1 on row B, or two replicas on each.
# A trajectory contains its beginning.
T1 = [(1, 2), (2, 8), (3, 6), (4, 4)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("period", "steps"), T1)
def test_t1_follows_the_hand_computed_trajectory(pool, period, steps, replicas):
    expected = [toys.T1_WEIGHTS[period, steps]] * replicas
    for result in pool.run("slope", steps, period, replicas=replicas):
        assert result["weights"] == expected
        assert result["iterations"] == [steps] * replicas
        # A last round comes only after a step that had none.
        assert result["rounds"] == -(-steps // period)


@pytest.mark.parametrize(
    ("slots", "weight", "velocities"),
    [
        ("mean", 5.98046875, [-0.41015625, -0.41015625]),
        ("keep", 5.67578125, [-1.9921875, 0.5625]),
        ("reset", 5.81640625, [0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_t2_with_every_rule_of_slots(pool, slots, weight, velocities, replicas):
    results = pool.run(
        "slope", 4, 2, optimizer="momentum", slots=slots, replicas=replicas
    )
    for result, velocity in zip(results, velocities):
        assert result["weights"] == [weight] * replicas
        assert result["slots"] == [[velocity] * replicas]


def test_t2_after_the_first_round(pool):
    for result in pool.run("slope", 2, 2, optimizer="momentum"):
        assert result["weights"] == [5.875]
        assert result["slots"] == [[0.375]]


@pytest.mark.parametrize(
    ("slots", "momenta", "variances"),
    [
        ("mean", [-2.25, -2.25], [1.060596, 1.060596]),
        ("keep", [1.5, -6.0], [0.124776, 1.996416]),
        ("reset", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_t3_with_every_rule_of_slots(pool, slots, momenta, variances):
    results = pool.run("slope", 2, 2, optimizer="adam", slots=slots)
    for result, momentum, variance in zip(results, momenta, variances):
        # Adam divides and takes roots: float32 rounding.
        assert result["weights"] == [pytest.approx(4.0, abs=1e-5)]
        assert result["slots"] == [
            [pytest.approx(momentum, abs=1e-5)],
            [pytest.approx(variance, abs=1e-5)],
        ]
        assert result["iterations"] == [2]
    assert results[0]["weights"] == results[1]["weights"]


def test_communicators_give_the_same_bits(pools):
    pytest.importorskip("horovod")
    results = [
        pools(2, communicator).run(
            "slope", 5, 2, optimizer=optimizer, replicas=2
        )
        for optimizer in ("momentum", "adam")
        for communicator in ("collective", "horovod")
    ]
    assert results[0] == results[1]
    assert results[2] == results[3]


def test_epochs_close_with_a_round(pool):
    # 3 steps an epoch, period 2: rounds after steps 2, 3, 4 and 6.
    for result in pool.run("slope", 3, 2, epochs=2):
        assert result["rounds"] == 4


def test_models_are_bit_equal_on_all_workers(pool):
    first, second = pool.run("train_dense_model")
    assert first["bits"] == second["bits"]
    # Every replica of every worker has masks of its own.
    masks = first["masks"] + second["masks"]
    assert len(set(masks)) == 4


def test_frozen_layers_do_not_drift(pool):
    for before, after in pool.run("train_with_a_frozen_layer"):
        assert before == after


class TestStart:
    def test_another_model_is_an_error_that_names_the_variable(self, pool):
        for message in pool.run("start_with_another_model"):
            assert "place" in message and "worker 1" in message
            assert "(1, 2)" in message and "(1, 1)" in message

    def test_another_period_is_an_error(self, pool):
        for message in pool.run("start_with_another_period"):
            assert "period=2" in message and "period=3" in message

    def test_a_second_fit_starts_from_the_chief(self, pool):
        assert pool.run("change_a_weight_between_fits") == [4.75, 4.75]


class TestUnevenWork:
    def test_counters_of_steps_meet_at_the_end_of_the_epoch(self, pool):
        # Worker 0 has 4 batches an epoch, worker 1 has 9: the schedule counts
        # 9, so the next rounds come after steps 10, 12, ...
        results = pool.run("uneven", [4, 9], period=2, epochs=2)
        for result in results:
            assert result["steps"] == 18
            assert result["weights"] == results[0]["weights"]
            assert result["rounds"] == results[0]["rounds"]

    def test_who_has_no_data_gets_the_mean(self, pool):
        # Worker 1 alone sets w to 8 and stays there; worker 0 adopts it.
        for result in pool.run("uneven_loop", [0, 4], period=2):
            assert result == {"weight": 8.0, "steps": 4, "rounds": 2}

    @pytest.mark.parametrize("shuffled", [False, True])
    def test_validation_waits_for_all(self, pool, shuffled):
        # Keras distributes validation data as soon as its own epoch ends.
        first, second = pool.run(
            "uneven", [2, 7], period=2, epochs=2, validates=1 + shuffled
        )
        assert first == second

    def test_who_stops_early_ends_with_the_same_moving_average(self, pool):
        results = pool.run("stop_one_worker_early", use_ema=True)
        assert results[0]["weights"] == results[1]["weights"]

    def test_rounds_on_demand_are_for_all(self, pool):
        # Worker 1 alone has stepped; worker 0 takes part all the same.
        for weight, was_run in pool.run("average_what_one_has_done"):
            assert (weight, was_run) == (8.0, [True, False])

    def test_without_sharding_fit_sees_all_rows_on_each(self, pool):
        for seen in pool.run("rows_of_fit_without_sharding"):
            assert seen == list(range(12))

    def test_more_steps_than_data(self, pool):
        results = pool.run("uneven", [3, 4], period=2, steps_per_epoch=5)
        assert results[0]["weights"] == results[1]["weights"]

    def test_early_stopping_on_one_worker(self, pool):
        results = pool.run("stop_one_worker_early")
        assert results[0]["weights"] == results[1]["weights"]
        assert [r["epochs"] for r in results] == [1, 4]
        assert results[0]["rounds"] == results[1]["rounds"]

    def test_replicas_are_weighted_by_rows(self, pool):
        # Worker 0 has 3 rows in its batch, worker 1 has 1: (3 * 3 + 8) / 4.
        assert pool.run("rows_three_to_one") == [4.25, 4.25]
