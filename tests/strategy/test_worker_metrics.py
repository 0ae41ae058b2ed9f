"""Metrics of two workers, here two models in one process."""

import keras
import numpy as np
import pytest
import toys

from tf_avgstrategy.strategy import worker_metrics


class NumRows(keras.metrics.Metric):
    """Counts rows in an integer, and returns the variable itself."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", name="count"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return self.count


def evaluated(replicas, rows):
    """A model that has evaluated |x| of these rows, times 4."""
    with toys.make_strategy(replicas).scope():
        model = toys.slope_model(
            keras.optimizers.SGD(0.0), metrics=["mae", NumRows()]
        )
    x = np.array(rows, "float32").reshape(-1, 1)
    model.evaluate(x, 0 * x, batch_size=4, verbose=0)
    return model


def meet(*workers):
    """What `over_workers` gives each of these pairs of model and logs."""
    parts = []

    def results(gather):
        return [
            worker_metrics.over_workers(
                model,
                logs,
                lambda _, model=model: model.get_metrics_result(),
                gather=gather,
                is_chief=rank == 0,
            )
            for rank, (model, logs) in enumerate(workers)
        ]

    results(lambda own: parts.append(own) or [own])
    return [_numbers(logs) for logs in results(lambda own: parts)]


def _numbers(logs):
    return {key: float(value) for key, value in logs.items()}


def some_logs(model):
    return dict.fromkeys(model.get_metrics_result(), 0.0)


@pytest.mark.core
def test_results_are_those_of_all_rows():
    first = evaluated(2, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    second = evaluated(1, [-8.0])
    one, other = meet((first, some_logs(first)), (second, some_logs(second)))
    # Of 7 rows: 16 times the squares, and 4 times the sizes.
    assert (
        one
        == other
        == {
            "loss": np.float32(16 * 155) / np.float32(7),
            "mae": np.float32(4 * 29) / np.float32(7),
            "rows": 7.0,
        }
    )


def test_a_worker_without_rows_gets_them_too():
    first = evaluated(2, [1.0, 2.0, 3.0])
    second = evaluated(1, [1.0])
    second.reset_metrics()
    one, other = meet((first, some_logs(first)), (second, {}))
    assert one == other
    assert other["rows"] == 3


def test_a_worker_that_waits_adds_nothing():
    model = evaluated(2, [1.0, 2.0, 3.0])
    logs = worker_metrics.over_workers(
        model,
        some_logs(model),
        lambda _, model=model: model.get_metrics_result(),
        gather=lambda own: [own, b""],
        is_chief=True,
    )
    assert float(logs["rows"]) == 3


def test_the_state_is_afterwards_as_before():
    model = evaluated(2, [1.0, 2.0, 3.0])
    before = [
        [copy.numpy() for copy in copies]
        for copies in worker_metrics.metric_copies(model)
    ]
    meet((model, some_logs(model)), (model, some_logs(model)))
    after = [
        [copy.numpy() for copy in copies]
        for copies in worker_metrics.metric_copies(model)
    ]
    assert before == after
    assert meet((model, some_logs(model)))[0]["rows"] == 3


def test_logs_of_a_custom_step_are_the_mean_over_replicas():
    workers = [
        (evaluated(2, [1.0]), {"own": np.float32(1.5), "text": "kept"}),
        (evaluated(1, [1.0]), {"own": 6.0}),
    ]
    parts = []

    def results(gather):
        return [
            worker_metrics.over_workers(
                model, logs, None, gather=gather, is_chief=False
            )
            for model, logs in workers
        ]

    results(lambda own: parts.append(own) or [own])
    first, second = results(lambda own: parts)
    # 2 replicas of 1.5 and one of 6.
    assert float(first["own"]) == float(second["own"]) == 3.0
    assert first["text"] == "kept"


class Smallest(keras.metrics.Metric):
    """One number for all replicas, infinite until the first batch."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(np.inf),
            aggregation="only_first_replica",
            name="value",
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return self.value

    def reset_state(self):
        self.value.assign(np.inf)


def test_the_state_of_the_chief_alone_may_be_infinite():
    with toys.make_strategy().scope():
        model = toys.slope_model(metrics=[Smallest()])
    model.evaluate(np.ones([2, 1]), np.ones([2, 1]), verbose=0)
    parts = []

    def smallest(gather, is_chief):
        logs = worker_metrics.over_workers(
            model,
            dict.fromkeys(model.get_metrics_result(), 0.0),
            lambda _: model.get_metrics_result(),
            gather=gather,
            is_chief=is_chief,
        )
        return float(logs["smallest"])

    for is_chief in (True, False):
        smallest(lambda own: parts.append(own) or [own], is_chief)
    assert smallest(lambda _: parts, True) == np.inf
