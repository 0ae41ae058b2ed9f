"""Variables of which every replica holds, reads and writes its own copy."""

from concurrent import futures

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import values
from tensorflow.python.distribute import values_util
from tensorflow.python.trackable import base as trackable

__all__ = [
    "ReplicaLocalVariable",
    "ReplicaSeedVariable",
    "aggregation",
    "all_copies",
    "as_replica_local",
    "is_seed_name",
    "outside_of_scopes",
    "raw",
    "replica_copies",
    "seed_offset",
    "strategy_of",
]

# Coprime to 2**31 - 2, the range that Keras folds seeds into: no two replicas
# of one layer share a stream.
_SEED_STRIDE = 1_640_531_527
_SEED_VARIABLE_NAME = "seed_generator_state"


class ReplicaLocalVariable(values.MirroredVariable):
    """A variable of which every replica holds its own copy.

    Inside a replica, reads and writes go to that replica's copy and to no
    other. Outside, a read (saving, `numpy()`, `get_weights`) gives the mean
    over the local replicas for a floating point dtype and replica 0's value
    for any other; a write goes to every copy.
    """

    # What each copy gets in place of the value of a checkpoint that is being
    # restored, a list of tensors.
    restored_copies = None

    def _serialize_to_tensors(self):
        return {trackable.VARIABLE_VALUE_KEY: self._get()}

    def _restore_from_tensors(self, restored_tensors):
        copies, self.restored_copies = self.restored_copies, None
        if copies is None:
            return self.assign(restored_tensors[trackable.VARIABLE_VALUE_KEY])
        for copy, own in zip(self._values, copies):
            with tf.device(copy.device):
                copy.assign(own, read_value=False)
        return self

    def _mean(self):
        first, *others = [v.read_value() for v in self._values]
        if not others or not self.dtype.is_floating:
            return tf.identity(first)
        dtype = tf.float32 if self.dtype.size < 4 else self.dtype
        with tf.device(first.device):
            first = tf.cast(first, dtype)
            # Around `first`: equal copies give back their own bits, which the
            # sum of 3 copies divided by 3 does not.
            offsets = [tf.cast(v, dtype) - first for v in others]
            mean = first + tf.add_n(offsets) / len(self._values)
            return tf.cast(mean, self.dtype)

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())

    def _is_read_as_mean(self):
        return (
            not values_util.is_saving_non_distributed()
            and values_util.get_current_replica_id_as_int() is None
        )

    def _get(self):
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return self._mean() if self._is_read_as_mean() else super()._get()

    def _get_cross_replica(self):
        return self._get()

    def value(self):
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return self._mean() if self._is_read_as_mean() else super().value()

    def _update_replica(self, update_fn, value, **kwargs):
        self._distribute_strategy.extended.note_write(self)
        return super()._update_replica(update_fn, value, **kwargs)


class ReplicaSeedVariable(ReplicaLocalVariable):
    """The state of a `keras.random.SeedGenerator`, another one per replica.

    Seen from outside there is one state, and that is what a file holds.
    Replica r keeps it with r strides added to the seed, so whatever is loaded
    gives every replica its own masks, for any number of replicas.
    """

    def _mean(self):
        return self._values[0].read_value() - self._offset(0)

    def assign(self, value, use_locking=False, name=None, read_value=True):
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            if not self._is_read_as_mean():
                return super().assign(value, use_locking, name, read_value)
            for replica_id, copy in enumerate(self._values):
                with tf.device(copy.device):
                    copy.assign(
                        tf.cast(value, self.dtype) + self._offset(replica_id)
                    )
            return self

    def _offset(self, replica_id):
        extended = self._distribute_strategy.extended
        stride = seed_offset(extended.global_replica_id(replica_id))
        return tf.constant([stride, 0], self.dtype)


def as_replica_local(variable, *, name):
    """Returns a replica-local variable over the copies of a mirrored one.

    Args:
        variable: What `MirroredStrategy` made of a `tf.Variable` call. What is
            not a mirrored variable (a metric's state) is returned as it is.
        name: String or None, the name that the call asked for.
    """
    if not isinstance(variable, values.MirroredVariable):
        return variable
    is_seed = is_seed_name(name)
    kind = ReplicaSeedVariable if is_seed else ReplicaLocalVariable
    return kind(
        variable.distribute_strategy, variable.values, variable.aggregation
    )


def is_seed_name(name):
    """Whether a variable of this name is a seed generator's state."""
    return name is not None and _SEED_VARIABLE_NAME in name


def seed_offset(global_replica_id):
    """What is added to a seed on a replica; 0 on the first one."""
    return global_replica_id * _SEED_STRIDE


def outside_of_scopes(function):
    """Calls a function as if no strategy's scope was open.

    Scopes belong to a thread, so it runs in another one if there is one.

    Args:
        function: Function without arguments.

    Returns:
        What the function returns.
    """
    if not tf.distribute.has_strategy():
        return function()
    with futures.ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(function).result()


def raw(variable):
    """Returns the `tf.Variable` of a `keras.Variable`, or what is given."""
    # `_value` and not `value`: inside a dtype policy's scope the latter casts.
    return getattr(variable, "_value", variable)


def strategy_of(variable):
    """Returns the strategy in whose scope a variable was made, or None."""
    return getattr(raw(variable), "distribute_strategy", None)


def replica_copies(variable):
    """Returns a variable's copies, or None if it is not replica-local.

    Args:
        variable: A `keras.Variable` or a `tf.Variable`.

    Returns:
        A tuple of `tf.Variable`, one per local replica, or None.
    """
    variable = raw(variable)
    if isinstance(variable, ReplicaLocalVariable):
        return tuple(variable.values)
    return None


def all_copies(variable):
    """Returns a variable's copies, also of a metric's state.

    Args:
        variable: A `keras.Variable` or a `tf.Variable`.

    Returns:
        A tuple of `tf.Variable`, one per local replica; of a variable that was
        made outside of any strategy's scope itself alone.
    """
    variable = raw(variable)
    if isinstance(variable, values.DistributedVariable):
        return tuple(variable.values)
    return (variable,)


def aggregation(variable):
    """Returns the `tf.VariableAggregation` that a variable asked for."""
    default = tf.VariableAggregation.NONE
    return getattr(raw(variable), "aggregation", default)
