"""A replica is bit-equal to a single device that sees the same rows."""

import operator

import keras
import numpy as np
import pytest
import toys
from keras import layers
from keras import optimizers

from tf_avgstrategy.state import variables

BATCHES = 5
ROWS_PER_REPLICA = 4


def _keras_optimizers():
    base = {"Optimizer", "TFOptimizer", "LossScaleOptimizer", "MultiOptimizer"}
    for name in sorted(set(dir(optimizers)) - base):
        cls = getattr(optimizers, name)
        if isinstance(cls, type) and issubclass(cls, optimizers.Optimizer):
            yield pytest.param(lambda cls=cls: cls(0.01), id=name)


def _sgd(**arguments):
    return lambda: optimizers.SGD(0.1, **arguments)


VARIANTS = {
    "momentum": _sgd(momentum=0.9),
    "nesterov": _sgd(momentum=0.9, nesterov=True),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "weight_decay": _sgd(weight_decay=0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.05),
    "clipvalue": _sgd(clipvalue=0.01),
    "ema": _sgd(use_ema=True, ema_momentum=0.9),
    "ema_overwrite": _sgd(use_ema=True, ema_overwrite_frequency=2),
    "accumulation": _sgd(gradient_accumulation_steps=2),
    "schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    ),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
}
# Those that also run on the oldest releases.
CORE = ("SGD", "Adam", "Adagrad", "ema", "accumulation", "loss_scale")
ALL = [
    pytest.param(
        *parameters.values,
        id=parameters.id,
        marks=[pytest.mark.core] if parameters.id in CORE else [],
    )
    for parameters in (
        *_keras_optimizers(),
        *(pytest.param(make, id=name) for name, make in VARIANTS.items()),
    )
]


class ActivityLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(x * x))
        return x


def dense_model():
    """BatchNormalization, a regulariser and `add_loss` on 8 features."""
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            ActivityLoss(),
            layers.Dense(3),
        ]
    )


def normalized_model():
    """Without `add_loss`, which Keras cannot add up in mixed precision."""
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


def network():
    """`dense_model` and, for sparse gradients, 5 tokens of 20, added up."""
    x = keras.Input((8,), name="x")
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    embedded = layers.Flatten()(layers.Embedding(20, 4)(tokens))
    outputs = layers.Add()([dense_model()(x), layers.Dense(3)(embedded)])
    return keras.Model({"x": x, "tokens": tokens}, outputs)


def _compiled(build, optimizer, **arguments):
    keras.utils.set_random_seed(3)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], **arguments)
    # Keras builds the optimizer inside the traced step otherwise, where
    # ScheduleFreeAdamW loses the initial value of its slots.
    model.optimizer.build(model.trainable_variables)
    return model


def _rows(build, num_replicas):
    rng = np.random.default_rng(0)
    num_rows = BATCHES * num_replicas * ROWS_PER_REPLICA
    x = rng.normal(size=(num_rows, 8)).astype("float32")
    if build is network:
        x = {"x": x, "tokens": rng.integers(0, 20, (num_rows, 5), "int32")}
    return x, rng.integers(0, 3, num_rows)


def _single_device_states(build, optimizer, x, y, num_replicas, **arguments):
    """The variables after each replica's rows on one device, list of lists."""
    model = _compiled(build, optimizer, **arguments)
    state = model.variables + model.optimizer.variables
    initial = [variable.numpy() for variable in state]
    batches = np.arange(len(y)).reshape(BATCHES, num_replicas, -1)
    states = []
    for replica in range(num_replicas):
        for variable, value in zip(state, initial):
            variable.assign(value)
        rows = batches[:, replica].ravel()
        own = keras.tree.map_structure(operator.itemgetter(rows), x)
        toys.fit(model, own, y[rows], batch_size=ROWS_PER_REPLICA)
        states.append([variable.numpy() for variable in state])
    return states


def _assert_independent(build, optimizer, num_replicas, **arguments):
    x, y = _rows(build, num_replicas)
    strategy = toys.make_strategy(num_replicas)
    with strategy.scope():
        model = _compiled(build, optimizer, **arguments)
    toys.fit(model, x, y, batch_size=num_replicas * ROWS_PER_REPLICA)
    expected = _single_device_states(
        build, optimizer, x, y, num_replicas, **arguments
    )
    state = model.variables + model.optimizer.variables
    for index, variable in enumerate(state):
        assert variables.replica_copies(variable) is not None
        for replica, value in enumerate(toys.copies(variable)):
            np.testing.assert_array_equal(
                value,
                expected[replica][index],
                f"{variable.path} on replica {replica}",
            )
    for variable in model.trainable_variables:
        first, second, *_ = toys.copies(variable)
        assert not np.array_equal(first, second), variable.path


@pytest.mark.parametrize("optimizer", ALL)
def test_replicas_equal_single_devices(optimizer):
    _assert_independent(network, optimizer, 2)


@pytest.mark.parametrize("name", ["momentum", "clipnorm"])
def test_also_on_four_replicas(name):
    _assert_independent(network, VARIANTS[name], 4)


@pytest.mark.core
@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, {"steps_per_execution": 5}]
)
def test_also_with_compile_arguments(arguments):
    _assert_independent(dense_model, VARIANTS["momentum"], 2, **arguments)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float64"]
)
def test_also_with_dtype_policies(policy):
    keras.config.set_dtype_policy(policy)
    _assert_independent(normalized_model, VARIANTS["momentum"], 2)


def test_also_with_several_optimizers_in_one():
    if not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("This Keras has no MultiOptimizer.")

    def make():
        return optimizers.MultiOptimizer(
            optimizers.OptimizerMap(
                optimizers.SGD(0.1, momentum=0.9),
                {".*bias": optimizers.Adam(0.01)},
            )
        )

    _assert_independent(dense_model, make, 2)
