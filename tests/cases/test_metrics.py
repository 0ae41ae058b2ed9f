"""METR-04: metrics over replicas are those of one device."""

import keras
import numpy as np
import pytest
import toys
from keras import layers

import tf_avgstrategy as avg


@pytest.mark.core
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_metr_04_evaluate_is_the_mean_over_rows(replicas):
    with toys.make_strategy(replicas).scope():
        model = toys.slope_model()
    x = np.arange(1, 13, dtype="float32").reshape(-1, 1)
    zeros = np.zeros_like(x)
    # 16 * (1**2 + ... + 12**2) / 12, and of 10 rows in batches of 8.
    twelve = model.evaluate(x, zeros, batch_size=12, verbose=0)
    assert twelve == pytest.approx(866.6667, rel=1e-6)
    assert model.evaluate(x[:10], zeros[:10], batch_size=8, verbose=0) == 616.0


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_metr_04_accuracy_equals_one_device(replicas):
    with toys.make_strategy(replicas).scope():
        model = keras.Sequential(
            [
                layers.Input((2,)),
                layers.Dense(2, use_bias=False, kernel_initializer="identity"),
            ]
        )
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    labels = np.array([0, 1, 1, 0, 1, 0, 1])
    x = np.eye(2, dtype="float32")[labels]
    labels[:2] = 1 - labels[:2]
    _, accuracy = model.evaluate(x, labels, batch_size=4, verbose=0)
    assert accuracy == np.float32(5 / 7)


def test_metr_04_a_custom_loss_is_the_mean_over_replicas():
    with toys.make_strategy().scope():
        model = toys.CustomStep()
        model.compile(toys.sgd())
    history = toys.fit(
        model,
        *toys.slope_rows(1),
        batch_size=2,
        callbacks=[avg.PeriodicAveraging(1)],
    )
    # At w = 4: 4**2 on row A, (8 - 16)**2 on row B.
    assert history.history["own"] == [(16.0 + 64.0) / 2]


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


@pytest.mark.core
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_metr_04_integer_counters_are_sums(replicas):
    with toys.make_strategy(replicas).scope():
        model = toys.slope_model(metrics=[NumRows()])
    x = np.zeros([10, 1], "float32")
    # The last batch has 2 rows: none for some of 4 replicas.
    history = model.fit(
        x,
        x,
        batch_size=8,
        verbose=0,
        callbacks=[avg.PeriodicAveraging(1)],
    )
    assert history.history["rows"] == [10]
    assert model.evaluate(x, x, batch_size=8, verbose=0)[1] == 10
