"""PREC-01 to PREC-03: dtypes, loss scales and overflow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import optimizers

import tf_avgstrategy as avg


def scaled(**arguments):
    # 32 * 2**8 fits into float16.
    return optimizers.LossScaleOptimizer(
        toys.sgd(**arguments), initial_scale=2.0**8
    )


@pytest.mark.core
def test_prec_01_mixed_precision_averages_float32_weights():
    keras.config.set_dtype_policy("mixed_float16")
    model, _ = toys.fit_slope(2, 2, optimizer=scaled)
    (weight,) = model.trainable_variables
    assert toys.scalars(weight) == [5.125, 5.125]
    assert weight.dtype == "float32"
    optimizer = model.optimizer
    assert toys.scalars(optimizer.dynamic_scale) == [2.0**8] * 2
    assert toys.scalars(optimizer.step_counter) == [2, 2]


@pytest.mark.core
def test_prec_02_a_skipped_step_does_not_move_the_round():
    with toys.make_strategy().scope():
        model = toys.slope_model(scaled())
    x, y = toys.slope_rows(4)
    x[2] = np.inf  # Row A of step 2.
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(toys.scalars(model.trainable_variables[0]))

    averaging = avg.PeriodicAveraging(2)
    toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
    # A skips step 2 and keeps 3; B is at 8.
    assert seen[1] == [5.5, 5.5]
    # A: 4.125 and 3.09375; B: 8.
    assert seen[3] == [5.546875, 5.546875]
    assert averaging.averager.rounds == 2
    optimizer = model.optimizer
    # Documented: all replicas go on with the smallest scale, counting anew.
    assert toys.scalars(optimizer.dynamic_scale) == [2.0**7] * 2
    assert toys.scalars(optimizer.step_counter) == [2, 2]
    # Not `optimizer.iterations`, which is the wrapper's own in Keras 3.5.
    assert toys.scalars(optimizer.inner_optimizer.iterations) == [4, 4]


@pytest.mark.core
def test_prec_03_every_dtype_is_averaged_or_kept_as_documented(tmp_path):
    before = {
        "float16": [60000, 60000],
        "float64": [1, 1 + 2**-40],
        "bfloat16": [1, 3],
        "int32": [3, 4],
        "int64": [2**53 + 1, 2**53 + 1],
        "bool": [True, False],
    }
    after = {
        "float16": [60000, 60000],
        "float64": [1 + 2**-41] * 2,
        "bfloat16": [2, 2],
        # Counters are set to the largest.
        "int32": [4, 4],
        "int64": [2**53 + 1] * 2,
        # Other discrete state stays on its replica.
        "bool": [True, False],
    }
    strategy = toys.make_strategy()
    with strategy.scope():
        made = {
            name: tf.Variable(before[name][0], dtype=name) for name in before
        }
    for name, variable in made.items():
        for copy, value in zip(variable.values, before[name]):
            copy.assign(tf.constant(value, name))
    avg.ParameterAverager(strategy, list(made.values()), [], period=1).average()
    for name, variable in made.items():
        assert variable.dtype == tf.as_dtype(name)
        assert [v.numpy() for v in variable.values] == after[name], name
    path = tf.train.Checkpoint(**made).write(str(tmp_path / "file"))
    with toys.make_strategy(3).scope():
        loaded = {name: tf.Variable(tf.zeros([], name)) for name in before}
    tf.train.Checkpoint(**loaded).read(path).assert_consumed()
    for name, variable in loaded.items():
        values = [v.numpy() for v in variable.values]
        assert values == [after[name][0]] * 3, name
