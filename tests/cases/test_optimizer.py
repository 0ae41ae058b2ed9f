"""OPT-02 to OPT-07: what averaging does to optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers
from keras import optimizers

import tf_avgstrategy as avg


def momentum(**arguments):
    return toys.sgd(momentum=0.5, **arguments)


def adam():
    return optimizers.Adam(0.1)


@pytest.mark.core
@pytest.mark.parametrize(
    ("slots", "weight", "velocities"),
    [
        # v after two steps: -1.25 on A and 2 on B; their mean is 0.375.
        ("mean", 5.98046875, [-0.41015625] * 2),
        ("keep", 5.67578125, [-1.9921875, 0.5625]),
        ("reset", 5.81640625, [0.0, 0.0]),
    ],
)
def test_opt_02_momentum_under_each_slot_rule(slots, weight, velocities):
    model, _ = toys.fit_slope(4, 2, slots=slots, optimizer=momentum)
    assert toys.scalars(model.trainable_variables[0]) == [weight] * 2
    assert toys.scalars(model.optimizer.variables[-1]) == velocities


@pytest.mark.core
@pytest.mark.parametrize(
    ("slots", "first_moments", "second_moments"),
    [
        ("mean", [-2.25] * 2, [1.060596] * 2),
        ("keep", [1.5, -6.0], [0.124776, 1.996416]),
        ("reset", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_opt_02_adam_under_each_slot_rule(slots, first_moments, second_moments):
    model, _ = toys.fit_slope(2, 2, slots=slots, optimizer=adam)
    m, v = model.optimizer.variables[-2:]
    # 0.9 and 0.999 are not exact in float32.
    np.testing.assert_allclose(toys.weight(model), 4.0, atol=1e-6)
    np.testing.assert_allclose(toys.scalars(m), first_moments, atol=1e-5)
    np.testing.assert_allclose(toys.scalars(v), second_moments, atol=1e-5)
    assert min(toys.scalars(v)) >= 0
    iterations = toys.copies(model.optimizer.iterations)
    assert iterations == [2, 2]
    assert iterations[0].dtype == np.int64


def test_opt_02_period_1_equals_averaging_gradients():
    model, _ = toys.fit_slope(2, 1)
    assert toys.weight(model) == 6.0625


@pytest.mark.parametrize("kind", ["piecewise", "cosine"])
def test_opt_03_the_schedule_goes_on(kind):
    def schedule():
        if kind == "piecewise":
            return optimizers.schedules.PiecewiseConstantDecay(
                [1], [0.125, 0.0]
            )
        return optimizers.schedules.CosineDecay(0.125, 4)

    class Log(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rates = []
            self.weights = []

        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            self.rates.append(float(optimizer.learning_rate))
            self.weights.append(toys.weight(self.model))

    logs = []
    for replicas in (1, 2):
        log = Log()
        with toys.make_strategy(replicas).scope():
            model = toys.slope_model(optimizers.SGD(schedule()))
        toys.fit(
            model,
            *toys.slope_rows(4, (toys.ROW_A, toys.ROW_B)[:replicas]),
            batch_size=replicas,
            callbacks=[avg.PeriodicAveraging(2), log],
        )
        logs.append(log)
        assert toys.scalars(model.optimizer.iterations) == [4] * replicas
    alone, together = logs
    assert together.rates == alone.rates
    if kind == "piecewise":
        assert together.weights[1:] == [5.125] * 3


@pytest.mark.core
@pytest.mark.parametrize("built_by", ["averager", "step"])
def test_opt_04_an_optimizer_that_nobody_built(built_by):
    strategy = toys.make_strategy()
    with strategy.scope():
        model = keras.Sequential([layers.Input((1,)), toys.slope_layer()])
        optimizer = adam()
    if built_by == "averager":
        averager = avg.ParameterAverager(
            strategy, model.variables, optimizer, period=2
        )

    def step(x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    @tf.function
    def train_step(x, y):
        strategy.run(step, args=(x, y))

    data = toys.dataset(toys.slope_rows(2), 2)
    for x, y in strategy.experimental_distribute_dataset(data):
        train_step(x, y)
    if built_by == "step":
        averager = avg.ParameterAverager(
            strategy, model.variables, optimizer, period=2
        )
    averager.average()
    m, v = optimizer.variables[-2:]
    np.testing.assert_allclose(toys.weight(model), 4.0, atol=1e-6)
    np.testing.assert_allclose(toys.scalars(m), [-2.25] * 2, atol=1e-5)
    np.testing.assert_allclose(toys.scalars(v), [1.060596] * 2, atol=1e-5)


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(
    "clipping", ["clipnorm", "global_clipnorm", "clipvalue"]
)
def test_opt_05_each_replica_clips_its_own_gradient(clipping, period):
    # Gradients 8 and -32, clipped to 4 and -4: A 3.5, B 4.5. The mean
    # gradient clipped would be -4 and the weight 4.5.
    model, _ = toys.fit_slope(
        period, period, optimizer=lambda: toys.sgd(**{clipping: 4.0})
    )
    assert toys.weight(model) == 4.0


@pytest.mark.parametrize(
    ("slots", "weight"),
    [("mean", 5.98046875), ("keep", 5.67578125), ("reset", 5.81640625)],
)
def test_opt_06_accumulated_gradients_with_momentum(slots, weight):
    model, averaging = toys.fit_slope(
        4,
        2,
        slots=slots,
        optimizer=lambda: momentum(gradient_accumulation_steps=2),
        repeats=2,
    )
    assert toys.weight(model) == weight
    assert averaging.averager.rounds == 2


def test_opt_06_period_counts_applied_updates():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(toys.scalars(self.model.trainable_variables[0]))

    model, averaging = toys.fit_slope(
        4,
        2,
        optimizer=lambda: toys.sgd(gradient_accumulation_steps=2),
        repeats=2,
        callbacks=[Look()],
    )
    assert toys.weight(model) == 5.44140625
    assert averaging.averager.rounds == 2
    # The first of two equal micro-batches changes nothing.
    assert seen[0] == [4.0, 4.0]
    assert seen[1] == seen[2] == [3.0, 8.0]
    assert seen[3] == seen[4] == [5.125, 5.125]


@pytest.mark.core
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_opt_07_sparse_gradients_average_over_all_replicas(name):
    with toys.make_strategy().scope():
        model = keras.Sequential(
            [
                layers.Input((1,), dtype="int32"),
                layers.Embedding(
                    10, 4, embeddings_initializer="ones", name="table"
                ),
                layers.Flatten(),
            ]
        )
        optimizer = getattr(optimizers, name)(0.5)
        model.compile(
            optimizer, lambda y_true, y_pred: tf.reduce_sum(y_pred, axis=-1)
        )
    rows = np.array([[1], [2]] * 2, "int32")
    toys.fit(
        model,
        rows,
        np.zeros([4, 4], "float32"),
        batch_size=2,
        callbacks=[avg.PeriodicAveraging(2)],
    )
    for table in toys.copies(model.trainable_variables[0]):
        untouched = np.delete(table, [1, 2], axis=0)
        np.testing.assert_array_equal(untouched, np.ones([8, 4]))
        if name == "SGD":
            # 1 - 2 * 0.5 on the replica that saw the row, 1 on the other.
            np.testing.assert_array_equal(table[1:3], np.full([2, 4], 0.5))
    if name == "Adam":
        for slot in optimizer.variables[2:]:
            for value in toys.copies(slot):
                untouched = np.delete(value, [1, 2], axis=0)
                np.testing.assert_array_equal(untouched, np.zeros([8, 4]))
                assert (value[1:3] != 0).all()
