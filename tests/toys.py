"""Small exact models that many tests share, and ways to look at replicas."""

import keras
import numpy as np
import tensorflow as tf

import tf_avgstrategy as avg
from tf_avgstrategy.state import variables

# T1, the two-slope toy: y = w * x from w = 4, squared error, SGD 0.125. A step
# on row A multiplies w by 0.75, a step on row B sets w to 8. All values are
# exact in float32.
ROW_A = (1.0, 0.0)
ROW_B = (2.0, 16.0)
T1_LEARNING_RATE = 0.125
# After step n with period k, from the weights 2.25 and 8 that two local steps
# give: (2.25 + 8) / 2 = 5.125, and so on.
T1_WEIGHTS = {
    (1, 1): 5.5,
    (1, 2): 6.0625,
    (2, 2): 5.125,
    (2, 4): 5.44140625,
    (2, 6): 5.5303955078125,
    (2, 8): 5.555423736572265625,
    (3, 3): 4.84375,
    (3, 6): 5.021728515625,
    (4, 4): 4.6328125,
}


def make_strategy(num_replicas=2, **arguments):
    return avg.ParameterAveragingStrategy(
        [f"CPU:{index}" for index in range(num_replicas)], **arguments
    )


class TwinCommunicator(avg.Communicator):
    """As if there were a second worker that always holds the same state."""

    name = "twin"

    def __init__(self):
        super().__init__(rank=0, size=2)
        self.fails = False

    def _gather(self, array):
        return np.stack([array, array])

    def _reduce(self, tensors):
        sums = [tensor + tensor for tensor in tensors]
        if self.fails:
            raise RuntimeError("on purpose")
        return sums

    def _broadcast(self, tensors, root):
        return tensors


def sgd(**arguments):
    return keras.optimizers.SGD(T1_LEARNING_RATE, **arguments)


def slope_layer(**arguments):
    return keras.layers.Dense(
        1, use_bias=False, kernel_initializer=constant(4.0), **arguments
    )


def constant(value):
    return keras.initializers.Constant(value)


def slope_model(optimizer=None, **compile_arguments):
    model = keras.Sequential([keras.layers.Input((1,)), slope_layer()])
    model.compile(optimizer or sgd(), "mse", **compile_arguments)
    return model


class CustomStep(keras.Model):
    """T1 with a `train_step` whose loss no metric tracks."""

    def __init__(self):
        super().__init__()
        self.slope = slope_layer()

    def call(self, x):
        return self.slope(x)

    def update(self, x, y):
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return loss

    def train_step(self, data):
        return {"own": self.update(*data)}


def slope_rows(steps, rows=(ROW_A, ROW_B)):
    """`steps` batches of one row per replica, as arrays x and y."""
    data = np.array(rows * steps, "float32")
    return data[:, :1], data[:, 1:]


def fit_slope(steps, period, **options):
    """Trains T1, one row per replica. Returns model and callback."""
    optimizer = options.pop("optimizer", sgd)
    model_arguments = options.pop("model_arguments", {})
    with make_strategy().scope():
        model = slope_model(optimizer(), **model_arguments)
    repeats = options.pop("repeats", 1)
    callbacks = options.pop("callbacks", [])
    averaging = avg.PeriodicAveraging(period, **options)
    # Each batch `repeats` times in a row.
    x, y = (
        np.repeat(array.reshape(steps, 2, 1), repeats, axis=0).reshape(-1, 1)
        for array in slope_rows(steps)
    )
    fit(model, x, y, batch_size=2, callbacks=[averaging, *callbacks])
    return model, averaging


def fit(model, x, y=None, *, batch_size=None, **arguments):
    """`model.fit` in order and without output."""
    if batch_size is not None:
        x, y = dataset((x, y), batch_size), None
    return model.fit(x, y, verbose=0, shuffle=False, **arguments)


def dataset(arrays, batch_size):
    """Batches in order, without the autotuner, which idles between epochs."""
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)
    return data.with_options(options)


def weight(model):
    """The slope as seen from outside a replica, a float."""
    return float(model.trainable_variables[0].numpy().ravel()[0])


def copies(variable):
    """A variable's value on each replica, as arrays."""
    return [copy.numpy() for copy in variables.replica_copies(variable)]


def scalars(variable):
    """A one-element variable's value on each replica, as floats."""
    return [float(value.ravel()[0]) for value in copies(variable)]


def assign_per_replica(variable, values):
    for copy, value in zip(variables.replica_copies(variable), values):
        copy.assign(tf.broadcast_to(tf.cast(value, copy.dtype), copy.shape))


def assert_replicas_equal(model):
    for variable in model.variables:
        if variables.replica_copies(variable) and "seed" not in variable.path:
            first, *others = copies(variable)
            for other in others:
                np.testing.assert_array_equal(first, other, variable.path)
