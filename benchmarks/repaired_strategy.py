"""MultiWorkerMirroredStrategy with which Keras 3 can `fit`.

Keras asks it for the mean of scalars along axis 0, and for that of a nested
batch, of which it looks at shapes alone. Both end its `fit` at the first step.
"""

import tensorflow as tf


class RepairedMultiWorkerMirroredStrategy(
    tf.distribute.MultiWorkerMirroredStrategy
):
    """Synchronous training of several workers by TensorFlow's collectives."""

    def reduce(self, reduce_op, value, axis=None):
        is_batch = tf.nest.is_nested(value) and not hasattr(value, "values")
        if axis is None and is_batch:
            return tf.nest.map_structure(self._first, value)
        return tf.nest.map_structure(
            lambda part: self._reduce_one(reduce_op, part, axis), value
        )

    def _first(self, value):
        return self.experimental_local_results(value)[0]

    def _reduce_one(self, reduce_op, value, axis):
        is_scalar = getattr(self._first(value), "shape", [None]) == ()
        return super().reduce(reduce_op, value, None if is_scalar else axis)
