"""Variables of which every replica holds, reads and writes its own copy."""

from concurrent import futures

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import values
from tensorflow.python.distribute import values_util
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable

__all__ = [
    "ReplicaLocalVariable",
    "ReplicaSeedVariable",
    "aggregation",
    "all_copies",
    "assign_copies",
    "as_replica_local",
    "is_seed_name",
    "make_counter",
    "note_writes",
    "of_handle",
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
    # One `tf.Variable` on the device of each copy, for what is to read the
    # mean there, or None.
    means = None
    # What the `tf.Variable` call asked for. A replica asks nobody when it
    # writes, so it is said and not done.
    asked_aggregation = tf.VariableAggregation.NONE

    @property
    def unique_name(self):
        """String, that no other variable of the process has."""
        return self._unique_id

    @property
    def has_mean(self):
        """Bool, whether a replica can read the mean in place of its copy."""
        return self.dtype.is_numpy_compatible and self.dtype != tf.string

    def has_equal_copies(self):
        """Returns whether all copies have the same value, eagerly."""
        first, *others = [v.read_value() for v in self._values]
        return all(bool(tf.reduce_all(first == other)) for other in others)

    def make_means(self):
        """Makes `means`, which hold nothing yet."""
        with tf.init_scope():
            self.means = [_like(copy) for copy in self._values]

    def take_means(self):
        """Gives `means` the mean of the copies, eagerly or within a graph."""
        mean = self._mean()
        for variable in self.means:
            _put(variable, mean)

    def free_means(self):
        """Frees what `means` hold. Graphs may still read them, later."""
        for variable in self.means:
            _put(variable, tf.zeros([0], self.dtype))

    @property
    def aggregation(self):
        return self.asked_aggregation

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied.asked_aggregation = self.asked_aggregation
        return copied

    def _serialize_to_tensors(self):
        return {trackable.VARIABLE_VALUE_KEY: self._get()}

    def _restore_from_tensors(self, restored_tensors):
        copies, self.restored_copies = self.restored_copies, None
        if copies is None:
            return self.assign(restored_tensors[trackable.VARIABLE_VALUE_KEY])
        assign_copies(self._values, copies)
        return self

    def _mean(self):
        first, *others = [_read_where_it_is(v) for v in self._values]
        if not others or not self.dtype.is_floating:
            return tf.identity(first)
        dtype = tf.float32 if self.dtype.size < 4 else self.dtype
        with tf.device(first.device):
            first = tf.cast(first, dtype)
            # Around `first`: equal copies give back their own bits, which the
            # sum of 3 copies divided by 3 does not.
            offsets = [tf.cast(v, dtype) - first for v in others]
            offset = tf.add_n(offsets) / len(self._values)
            # A gradient for the variable is one for its first copy, all of it.
            mean = first + tf.stop_gradient(offset)
            return tf.cast(mean, self.dtype)

    def __array__(self, dtype=None, copy=None):
        del copy  # What is read is one already.
        return np.asarray(self.numpy(), dtype)

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
            if self._is_read_as_mean():
                return self._mean()
            read = self._read_in_replica()
            return super()._get() if read is None else read

    def _read_in_replica(self):
        """What a replica reads, None where files are written."""
        replica_id = values_util.get_current_replica_id_as_int()
        if replica_id is None or values_util.is_saving_non_distributed():
            return None
        return self._distribute_strategy.extended.read(self, replica_id)

    def _get_cross_replica(self):
        return self._get()

    def _as_graph_element(self):
        # What a session of TensorFlow 1 fetches.
        is_tensorflow_2 = tf.compat.v1.executing_eagerly_outside_functions()
        if is_tensorflow_2 or not self._is_read_as_mean():
            return super()._as_graph_element()
        return self._get()

    def value(self):
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            if self._is_read_as_mean():
                return self._mean()
            read = self._read_in_replica()
            return super().value() if read is None else read.value()

    @property
    def handle(self):
        read = self._read_in_replica()
        return super().handle if read is None else read.handle

    def _update_replica(self, update_fn, value, **kwargs):
        self._distribute_strategy.extended.note_write(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class ReplicaSeedVariable(ReplicaLocalVariable):
    """The state of a `keras.random.SeedGenerator`, another one per replica.

    Seen from outside there is one state, and that is what a file holds.
    Replica r keeps it with r strides added to the seed, so whatever is loaded
    gives every replica its own masks, for any number of replicas.
    """

    # Random numbers differ between replicas whatever is read beside them.
    has_mean = False

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


def _put(variable, value):
    """Assigns a value of any shape, for one of no size frees memory."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=value, validate_shape=False
        )


def _like(copy):
    """A variable of the shape and dtype of a copy, on its device."""
    # Scopes of strategies and of `tf.function` have no say in it.
    with tf.device(copy.device):
        return resource_variable_ops.UninitializedVariable(
            trainable=False, shape=copy.shape, dtype=copy.dtype
        )


def make_counter(value, device):
    """Returns a variable of one int64, whatever scopes are open.

    Args:
        value: Int.
        device: String.
    """
    with tf.init_scope(), tf.device(device):
        counter = resource_variable_ops.UninitializedVariable(
            trainable=False, shape=[], dtype=tf.int64
        )
        counter.assign(value)
    return counter


def as_replica_local(variable, *, name, aggregation):
    """Returns a replica-local variable over the copies of a mirrored one.

    Args:
        variable: What `MirroredStrategy` made of a `tf.Variable` call. What is
            not a mirrored variable (a metric's state) is returned as it is.
        name: String or None, the name that the call asked for.
        aggregation: `tf.VariableAggregation` or None, what it asked for.
    """
    if not isinstance(variable, values.MirroredVariable):
        return variable
    is_seed = is_seed_name(name)
    kind = ReplicaSeedVariable if is_seed else ReplicaLocalVariable
    none = tf.VariableAggregation.NONE
    local = kind(variable.distribute_strategy, variable.values, none)
    local.asked_aggregation = none if aggregation is None else aggregation
    _replace_in_collections(variable, local)
    return local


def _read_where_it_is(copy):
    """Reads a copy on its own device."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return copy.read_value()
    # In a graph of TensorFlow 1 what an initializer does is bound to the
    # device of the variable that it is for.
    graph = tf.compat.v1.get_default_graph()
    with graph._attr_scope({"_class": lambda _: None}), tf.device(copy.device):
        return copy.read_value()


def _replace_in_collections(old, new):
    """Puts a variable in the place of another one in a graph's collections.

    They say what `tf.compat.v1.global_variables_initializer` runs.
    """
    for key in tf.compat.v1.get_default_graph().collections:
        collection = tf.compat.v1.get_collection_ref(key)
        collection[:] = [new if item is old else item for item in collection]


def is_seed_name(name):
    """Whether a variable of this name is a seed generator's state."""
    return name is not None and _SEED_VARIABLE_NAME in name


def seed_offset(global_replica_id):
    """What is added to a seed on a replica; 0 on the first one."""
    return global_replica_id * _SEED_STRIDE


def assign_copies(copies, values):
    """Assigns each copy of a variable a value of its own.

    Args:
        copies: Tuple of R `tf.Variable`.
        values: List of R tensors or arrays.
    """
    for copy, value in zip(copies, values):
        with tf.device(copy.device):
            copy.assign(tf.cast(value, copy.dtype), read_value=False)
    note_writes(copies)


def note_writes(copies):
    """Lets replicas know that copies were written, without their knowledge.

    Args:
        copies: Tuple of `tf.Variable`, those of one variable of a strategy.
            Writes to others of it may be meant as well.
    """
    variable = of_handle(copies[0].handle)
    if variable is not None:
        variable.distribute_strategy.extended.mean_reads.note_writes()


def of_handle(handle):
    """Returns the `ReplicaLocalVariable` one of whose copies has a handle.

    Args:
        handle: Resource tensor, not of a graph.

    Returns:
        The variable, or None if it is not replica-local.
    """
    container = getattr(handle, "_distributed_container", None)
    variable = container and container()
    return variable if isinstance(variable, ReplicaLocalVariable) else None


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
    """Returns the `tf.VariableAggregation` by which a variable is read.

    NONE for a replica-local variable, whatever it asked for.
    """
    none = tf.VariableAggregation.NONE
    if replica_copies(variable) is not None:
        return none
    return getattr(raw(variable), "aggregation", none)
