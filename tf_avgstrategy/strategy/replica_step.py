"""How one replica runs one step: its rows, its random numbers, its XLA."""

import contextlib
import inspect
import weakref

import tensorflow as tf

__all__ = [
    "ReplicaStep",
    "num_rows",
    "specs_without_rows",
    "static_arguments",
    "zeros",
]

# Operations that contain a whole step.
_CALLS = (
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessIf",
)
_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor)


class ReplicaStep:
    """A function that runs on every replica, made for one run of it.

    Args:
        fn: The function of one replica. It returns a nested structure of
            tensors (dense, ragged or sparse), None, or what converts to one.
        compiled: Bool, whether XLA compiles it, into one program per replica.
        skips_empty: Bool. A replica whose arguments have no rows returns zeros
            in place of calling `fn`, which leaves its state as it is.
        seed_offset: Function of the local replica id: the int to add to the
            graph's seed, so that TensorFlow's random ops differ per replica.
    """

    def __init__(self, fn, *, compiled, skips_empty, seed_offset):
        self._fn = fn
        self._compiled = compiled
        self._skips_empty = skips_empty
        self._seed_offset = seed_offset
        self._eager_outputs = None

    @property
    def given_function(self):
        """The function as it was given."""
        return self._fn

    @property
    def function(self):
        """What stays the same when the function is passed to a run again.

        That is the function, or for a lambda its code: a loop that passes
        `lambda: step(batch)` makes a new lambda each time.
        """
        fn = inspect.unwrap(self._fn)
        fn = getattr(fn, "func", fn)  # Of a `functools.partial`.
        fn = getattr(fn, "__func__", fn)  # Of a bound method.
        if getattr(fn, "__name__", None) == "<lambda>":
            return fn.__code__
        try:
            hash(weakref.ref(fn))
        except TypeError:
            return type(fn)  # An object that cannot be a weak key.
        return fn

    def __call__(self, replica_id, rows, args, kwargs, exchanging=None):
        """Runs the function on the replica.

        Args:
            replica_id: Int, the local replica.
            rows: Int or int32 scalar, the rows in `args` and `kwargs`.
            args: Tuple, positional arguments.
            kwargs: Dict, keyword arguments.
            exchanging: The step of `GradientExchange`, which a replica without
                rows takes part in. `None`: there is none.

        Returns:
            What the function returns, or zeros in its shape where a dimension
            that is only known at run time counts as 0.
        """

        def call():
            with _graph_seed_moved_by(self._seed_offset(replica_id)):
                return self._fn(*args, **kwargs)

        if exchanging is not None and not tf.executing_eagerly():
            with _independent_of_other_replicas():
                return self._call_and_exchange(call, rows, exchanging)
        if self._compiled:
            call = tf.function(call, jit_compile=True, autograph=False)
        if not self._skips_empty:
            return call()
        if tf.executing_eagerly():
            return self._call_eagerly(call, int(rows))
        if not tf.is_tensor(rows):
            return call() if rows > 0 else zeros(_output_specs(call))
        specs = []

        def call_and_note_specs():
            outputs = _as_tensors(call())
            specs.append(_specs_of(outputs))
            return outputs

        # TensorFlow traces the first branch first.
        return tf.cond(rows > 0, call_and_note_specs, lambda: zeros(specs[0]))

    def _call_and_exchange(self, call, rows, exchanging):
        specs = []

        def call_and_note_specs():
            outputs = _as_tensors(call())
            specs.append(_specs_of(outputs))
            return outputs

        def take_part():
            exchanging.repeat_updates()
            return zeros(specs[0])

        if tf.is_tensor(rows) and self._skips_empty:
            return tf.cond(rows > 0, call_and_note_specs, take_part)
        if rows > 0 or not self._skips_empty:
            return tf.function(call, autograph=False)()
        # Traced to see which updates it makes, never run.
        traced = tf.function(call_and_note_specs, autograph=False)
        traced.get_concrete_function()
        return tf.function(take_part, autograph=False)()

    def _call_eagerly(self, call, rows):
        if rows > 0:
            outputs = call()
            self._eager_outputs = (outputs, rows)
            return outputs
        if self._eager_outputs is None:
            # The last resort: an eager step may want to read numbers.
            return zeros(_output_specs(call))
        outputs, rows = self._eager_outputs
        return zeros(_specs_of(_as_tensors(outputs), rows))


def num_rows(args):
    """Returns the number of rows (examples) that a step's arguments hold.

    Args:
        args: Nested structure. The first tensor with at least one axis counts.

    Returns:
        Int if it is known without running anything, else an int32 scalar
        tensor. 1 if there is no such tensor.
    """
    for value in tf.nest.flatten(args):
        if isinstance(value, tf.RaggedTensor):
            return value.nrows(out_type=tf.int32)
        if isinstance(value, tf.SparseTensor):
            return tf.cast(value.dense_shape[0], tf.int32)
        if hasattr(value, "shape") and tf.TensorShape(value.shape).rank:
            rows = value.shape[0]
            return tf.shape(value)[0] if rows is None else rows
    return 1


def static_arguments(args):
    """Returns what a step is told in plain Python, such as `training=False`.

    Args:
        args: Nested structure.

    Returns:
        Tuple of the bools, ints and strings in it.
    """
    return tuple(
        value
        for value in tf.nest.flatten(args)
        if isinstance(value, (bool, int, str))
    )


def specs_without_rows(args):
    """Returns the specs of a step's arguments, less their number of rows.

    Args:
        args: Nested structure. What is no tensor is returned as it is.
    """

    def spec(value):
        if isinstance(value, _COMPOSITES):
            return tf.type_spec_from_value(value)
        if not tf.is_tensor(value):
            return value
        shape = value.shape.as_list()
        return tf.TensorSpec([None, *shape[1:]] if shape else [], value.dtype)

    return tf.nest.map_structure(spec, args)


def zeros(specs):
    """Returns zeros of these specs, in which an unknown size counts as 0.

    Args:
        specs: Nested structure of `tf.TensorSpec`, `tf.RaggedTensorSpec`,
            `tf.SparseTensorSpec`. What is no spec is returned as it is.
    """

    def zeros_of(spec):
        if not isinstance(spec, tf.TypeSpec):
            return spec
        # A size that is only known at run time is a number of rows: 0.
        shape = [size or 0 for size in spec.shape]
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = shape[spec.ragged_rank + 1 :]
            splits = tf.zeros([1], spec.row_splits_dtype)
            return tf.RaggedTensor.from_nested_row_splits(
                tf.zeros([0, *inner], spec.dtype), [splits] * spec.ragged_rank
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensor(
                tf.zeros([0, len(shape)], tf.int64),
                tf.zeros([0], spec.dtype),
                tf.constant(shape, tf.int64),
            )
        return tf.zeros(shape, spec.dtype)

    return tf.nest.map_structure(zeros_of, specs)


@contextlib.contextmanager
def _graph_seed_moved_by(offset):
    if tf.executing_eagerly():
        yield  # Eager ops draw their seeds one after the other.
        return
    graph = tf.compat.v1.get_default_graph()
    seed = graph.seed
    if seed is not None:
        graph.seed = (seed + offset) % (2**31 - 1)
    try:
        yield
    finally:
        graph.seed = seed


@contextlib.contextmanager
def _independent_of_other_replicas():
    """Lets the step of one replica wait for nothing that another one does.

    Both may look into one table, and would do so one after the other, while
    the first one waits for the second one's gradients.
    """
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[num_before:]:
        if operation.type in _CALLS:
            graph.experimental_acd_manager.run_independently(operation)


def _output_specs(fn):
    """The specs of what a function returns, without running it."""
    traced = tf.function(lambda: _as_tensors(fn()), autograph=False)
    return _specs_of(traced.get_concrete_function().structured_outputs)


def _as_tensors(outputs):
    return tf.nest.map_structure(
        lambda v: (
            v
            if v is None or isinstance(v, _COMPOSITES)
            else tf.convert_to_tensor(v)
        ),
        outputs,
    )


def _specs_of(outputs, rows=None):
    """The specs of outputs, in which a size of `rows` on axis 0 is unknown."""

    def spec(value):
        if value is None or isinstance(value, tf.TypeSpec):
            return value
        if isinstance(value, _COMPOSITES):
            return tf.type_spec_from_value(value)
        shape = value.shape.as_list()
        if shape and rows is not None and shape[0] == rows:
            shape[0] = None
        return tf.TensorSpec(shape, value.dtype)

    return tf.nest.map_structure(spec, outputs)
