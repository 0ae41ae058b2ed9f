"""API-01 to API-04: how the library is called, in one process."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg


def test_api_01_fit_and_a_custom_loop_agree():
    model, _ = toys.fit_slope(4, 2)
    assert toys.weight(model) == 5.44140625
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=2
    )
    data = toys.dataset(toys.slope_rows(4), 2)

    @tf.function
    def train_step(batch):
        strategy.run(model.train_step, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(data):
        train_step(batch)
        averager.step()
    assert toys.weight(model) == 5.44140625


@pytest.mark.core
@pytest.mark.parametrize("jit_compile", [True, "auto", False])
def test_api_02_xla_trains_normally(jit_compile):
    model, _ = toys.fit_slope(
        4, 2, model_arguments={"jit_compile": jit_compile}
    )
    assert toys.weight(model) == 5.44140625


def test_api_02_an_optimizer_with_slots_from_outside_is_refused():
    optimizer = toys.sgd(momentum=0.5)
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model(optimizer)
    with pytest.raises(ValueError, match="Move the line"):
        toys.fit(
            model,
            *toys.slope_rows(2),
            batch_size=2,
            callbacks=[avg.PeriodicAveraging(2)],
        )


def test_api_02_compile_outside_the_scope_trains_normally():
    weights = []
    for inside in (True, False):
        with toys.make_strategy().scope():
            model = keras.Sequential([layers.Input((1,)), toys.slope_layer()])
            if inside:
                model.compile("sgd", "mse")
        if not inside:
            model.compile("sgd", "mse")
        toys.fit(
            model,
            *toys.slope_rows(4),
            batch_size=2,
            callbacks=[avg.PeriodicAveraging(2)],
        )
        weights.append(toys.weight(model))
    assert weights[0] == weights[1] != 4.0


class Holder(keras.Model):
    """Layers in a list and in a dict, and one model used twice."""

    def __init__(self):
        super().__init__()
        self.several = [layers.Dense(3), layers.Dense(3)]
        self.named = {"last": layers.Dense(1)}
        self.twice = keras.Sequential([layers.Input((3,)), layers.Dense(3)])

    def call(self, x):
        for layer in self.several:
            x = layer(x)
        return self.named["last"](self.twice(self.twice(x)))


def nested_model():
    inner = keras.Sequential(
        [layers.Input((3,)), layers.Dense(3), layers.BatchNormalization()]
    )
    return keras.Sequential([layers.Input((3,)), inner, layers.Dense(1)])


def dict_model():
    inputs = {name: layers.Input((3,), name=name) for name in "ab"}
    hidden = layers.Concatenate()(list(inputs.values()))
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in "cd"}
    return keras.Model(inputs, outputs)


class EqualNames(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(3, name="same")
        self.second = layers.Dense(3, name="same")
        self.norms = [layers.BatchNormalization(name="norm") for _ in "ab"]

    def call(self, x):
        x = self.norms[0](self.first(x))
        return self.norms[1](self.second(x))


def frozen_model():
    model = nested_model()
    model.layers[0].trainable = False
    return model


@pytest.mark.parametrize(
    "build", [nested_model, Holder, dict_model, EqualNames, frozen_model]
)
def test_api_03_every_shape_of_model_is_averaged_whole(build):
    strategy = toys.make_strategy(3)
    with strategy.scope():
        model = build()
        if not model.built:
            model(np.zeros([1, 3], "float32"))
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    state = [
        variable
        for variable in model.variables + model.optimizer.variables
        if variable.dtype == "float32" and "learning_rate" not in variable.path
    ]
    assert len(state) > 5
    for variable in state:
        toys.assign_per_replica(variable, range(3))
    avg.ParameterAverager(
        strategy,
        model.variables,
        model.optimizer,
        period=1,
        # The pooled variance would be 1 + 2 / 3.
        overrides={"moving_variance": "mean"}
        if any("moving_variance" in v.path for v in state)
        else None,
    ).average()
    for variable in state:
        for value in toys.copies(variable):
            np.testing.assert_array_equal(
                value, np.ones_like(value), variable.path
            )


def test_api_03_a_model_that_is_not_built_yet():
    with toys.make_strategy().scope():
        model = Holder()
        model.compile("adam", "mse")
    x = np.ones([8, 3], "float32")
    toys.fit(
        model, x, x[:, :1], batch_size=4, callbacks=[avg.PeriodicAveraging(1)]
    )
    toys.assert_replicas_equal(model)


@pytest.mark.core
@pytest.mark.parametrize("with_cluster", [False, True])
def test_api_04_one_device_runs_the_same_script(with_cluster, monkeypatch):
    if with_cluster:
        cluster = {
            "cluster": {"worker": ["localhost:12345"]},
            "task": {"type": "worker", "index": 0},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    strategy = toys.make_strategy(1)
    with strategy.scope():
        model = toys.slope_model()
    toys.fit(
        model,
        *toys.slope_rows(2, (toys.ROW_A,)),
        batch_size=1,
        callbacks=[avg.PeriodicAveraging(2)],
    )
    assert toys.weight(model) == 2.25
