"""What is saved or read is the mean of the replicas, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


def build():
    model = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return model


@pytest.fixture
def diverged():
    """A model whose replicas hold different weights, slots and statistics."""
    strategy = toys.make_strategy(2)
    with strategy.scope():
        model = build()
    toys.fit(model, X, X[:, :1], batch_size=4)
    kernel = toys.copies(model.layers[0].kernel)
    assert not np.array_equal(kernel[0], kernel[1])
    return model


def state(model):
    variables = model.variables + model.optimizer.variables
    return [toys.copies(variable) for variable in variables]


def means(model):
    """The mean of each weight, as Keras lists weights: without seeds."""
    result = []
    for variable in model.weights:
        first, second = toys.copies(variable)
        result.append(first + (second - first) / np.float32(2))
    return result


def assert_holds_means(other, model):
    for value, expected in zip(other.get_weights(), means(model), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.core
def test_get_weights(diverged):
    assert_holds_means(diverged, diverged)


@pytest.mark.core
@pytest.mark.parametrize("loaded_by", ["plain Keras", "three replicas"])
def test_keras_file(diverged, loaded_by, tmp_path):
    before = state(diverged)
    path = tmp_path / "model.keras"
    diverged.save(path)
    np.testing.assert_array_equal(
        np.concatenate([np.ravel(v) for v in state(diverged)]),
        np.concatenate([np.ravel(v) for v in before]),
    )
    scope = tf.distribute.get_strategy().scope()
    if loaded_by == "three replicas":
        scope = toys.make_strategy(3).scope()
    with scope:
        loaded = keras.models.load_model(path)
    assert_holds_means(loaded, diverged)
    for ours, theirs in zip(
        diverged.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    if loaded_by == "three replicas":
        toys.assert_replicas_equal(loaded)
        (seed,) = [v for v in loaded.variables if "seed" in v.path]
        assert len({value.tobytes() for value in toys.copies(seed)}) == 3


@pytest.mark.core
def test_weights_file(diverged, tmp_path):
    path = tmp_path / "model.weights.h5"
    diverged.save_weights(path)
    plain = build()
    plain.load_weights(path)
    assert_holds_means(plain, diverged)
    diverged.load_weights(path)
    toys.assert_replicas_equal(diverged)


@pytest.mark.core
def test_checkpoint(diverged, tmp_path):
    expected = means(diverged)
    path = tf.train.Checkpoint(model=diverged).save(str(tmp_path / "file"))
    plain = build()
    # Keras gives the optimizer its slots when it is built.
    plain.optimizer.build(plain.trainable_variables)
    tf.train.Checkpoint(model=plain).restore(path)
    for value, mean in zip(plain.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(value, mean)
    tf.train.Checkpoint(model=diverged).restore(path)
    toys.assert_replicas_equal(diverged)


@pytest.mark.core
def test_export(diverged, tmp_path):
    plain = build()
    plain.set_weights(diverged.get_weights())
    expected = plain.predict(X, verbose=0)
    before = state(diverged)
    diverged.export(str(tmp_path / "model"))
    for value, kept in zip(state(diverged), before):
        np.testing.assert_array_equal(value, kept)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(X), expected, rtol=1e-6)


def test_saved_model(diverged, tmp_path):
    tf.saved_model.save(diverged, str(tmp_path / "model"))
    reader = tf.train.load_checkpoint(
        str(tmp_path / "model" / "variables" / "variables")
    )
    saved = [
        reader.get_tensor(name)
        for name, shape in reader.get_variable_to_shape_map().items()
        if shape == [3, 4]
    ]
    kernel = means(diverged)[0]
    assert any(np.array_equal(value, kernel) for value in saved)


def test_evaluate_is_the_same_on_the_live_and_the_reloaded_model(
    diverged, tmp_path
):
    toys.fit(
        diverged,
        X,
        X[:, :1],
        batch_size=4,
        callbacks=[avg.PeriodicAveraging(2)],
    )
    live = diverged.evaluate(X, X[:, :1], batch_size=8, verbose=0)
    diverged.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # The sum over rows is taken in halves on two replicas.
    np.testing.assert_allclose(
        loaded.evaluate(X, X[:, :1], batch_size=8, verbose=0), live, rtol=1e-6
    )
    with toys.make_strategy(2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(X, X[:, :1], batch_size=8, verbose=0) == live


def test_ckpt_06_a_save_within_an_epoch_is_a_round(tmp_path):
    def run(*callbacks):
        model, averaging = None, avg.PeriodicAveraging(4)
        with toys.make_strategy().scope():
            model = toys.slope_model()
        toys.fit(
            model,
            *toys.slope_rows(4),
            batch_size=2,
            callbacks=[*callbacks, averaging],
        )
        return toys.weight(model), averaging.averager.rounds

    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "at_{batch}.keras", save_freq=2
    )
    assert run() == (4.6328125, 1)
    assert run(checkpoint) == (5.44140625, 2)
    saved = sorted(tmp_path.iterdir())[0]
    # Mid-period: the mean of 2.25 and 8.
    assert toys.weight(keras.models.load_model(saved)) == 5.125
