"""Row order: how all workers come to read a dataset's rows in one order."""

import hashlib
import secrets
from typing import NamedTuple

import tensorflow as tf
from google.protobuf import message
from tensorflow.python.data.ops import dataset_ops

__all__ = ["ORDER_OPS", "agree_on_order", "check_is_fixed", "walk"]

# The ops that decide an order: which of their inputs are the two seeds, or the
# number of datasets that are read in turn (by default it is that of CPUs).
_ORDER_INPUTS = {
    "InterleaveDataset": (-2,),
    "ParallelInterleaveDatasetV3": (-3,),
    "ParallelInterleaveDatasetV4": (-5,),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
}
ORDER_OPS = frozenset(_ORDER_INPUTS)
# The generator that draws a pair of seeds for each epoch from the two.
_GENERATOR_INPUTS = {
    "RandomDatasetV2": 2,
    "ShuffleAndRepeatDatasetV2": 5,
    "ShuffleDatasetV3": 4,
}
_UNSEEDED = (0, 0)
# In place of a value that the pipeline computes from its elements.
_COMPUTED = -1
_SEED_BITS = 62
_IGNORE_STATE = 1  # tf.data's ExternalStatePolicy.IGNORE.

# What an order that is drawn once and for all is derived from.
_RUN_SEED = secrets.randbits(_SEED_BITS)


def agree_on_order(dataset, *, agree):
    """Returns the dataset in an order that is the same on all workers.

    A dataset whose shuffles have the same seeds on all workers stays as it is.
    Otherwise the shuffles take the seeds of rank 0, or seeds that rank 0 draws
    where it has none. For that the dataset is written as a graph and read back,
    with the data that it holds in memory: that takes three times its memory
    for a moment, and fails above 2 GB. Shuffled arrays, of which Keras makes a
    dataset, are not copied.

    `reshuffle_each_iteration` keeps its meaning, but a shuffle inside the
    function of an `interleave` or `flat_map` repeats its order once seeded.
    Python's own random numbers in a generator cannot be seen from here.

    Args:
        dataset: `tf.data.Dataset`, built by the same code on every worker.
        agree: Function that takes a list of ints (int64) and returns the lists
            of all workers by rank. It is called equally often on each worker.

    Returns:
        `tf.data.Dataset` with the same rows, element spec and options.

    Raises:
        ValueError: If the workers' pipelines differ, or if seeds have to change
            in a pipeline that cannot be written as a graph.
    """
    arrays = _find_shuffled_arrays(dataset)
    values, is_sloppy = ((), False) if arrays else _order_of(dataset)
    if not arrays and not values and not is_sloppy:
        return dataset
    is_open = is_sloppy or _UNSEEDED in values
    found = agree([bool(arrays), len(values), is_open, _hash(values)])
    if len({tuple(f[:2]) for f in found}) > 1:
        raise ValueError(
            "All workers must build the same input pipeline. Received: "
            + "; ".join(
                f"worker {rank} shuffles {'arrays' if is_arrays else 'rows'} "
                f"at {num_places} places"
                for rank, (is_arrays, num_places, *_) in enumerate(found)
            )
            + ". Run the same code on every worker."
        )
    if arrays:
        is_unseeded = arrays.seeds == _UNSEEDED
        seed = _draw_seed() if is_unseeded else _hash(arrays.seeds)
        (seed,) = agree([seed])[0]
        return _reordered(arrays, seed).with_options(dataset.options())
    if any(f[2] for f in found) or len({f[3] for f in found}) > 1:
        return _with_agreed_seeds(dataset, agree)
    return dataset


def check_is_fixed(dataset):
    """Raises a ValueError if a dataset may be read in another order elsewhere.

    Args:
        dataset: `tf.data.Dataset`.
    """
    values, is_sloppy = _order_of(dataset)
    if is_sloppy or _UNSEEDED in values or _find_shuffled_arrays(dataset):
        raise ValueError(
            "`predict` gives each worker the predictions of its part of the "
            "rows, and exchanges nothing. Received: a dataset that is shuffled "
            "without a seed, or read in the order in which rows are ready, so "
            "that each worker would take its part of another order. Pass a "
            "`seed` to `shuffle` and leave out `deterministic=False`, or set "
            "`auto_shard_policy` to AutoShardPolicy.OFF to predict all rows."
        )


def walk(dataset, *, into_batches=True):
    """Yields the dataset and those that it is made of, each once.

    Args:
        dataset: `tf.data.Dataset`.
        into_batches: Bool. False leaves out what a batch is made of.
    """
    seen = set()
    waiting = [dataset]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if into_batches or "Batch" not in type(node).__name__:
            # A reader of files hides what it is made of.
            parts = [node._impl] if hasattr(node, "_impl") else node._inputs()
            waiting.extend(reversed(parts))


def _draw_seed():
    return secrets.randbits(_SEED_BITS)


def _hash(value):
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def _order_of(dataset):
    """The values that decide an order, and whether threads decide it too."""
    values = []
    is_sloppy = False
    for node in walk(dataset):
        if hasattr(node, "_seed"):
            values.append((int(node._seed), int(node._seed2)))
        is_sloppy |= getattr(node, "_deterministic", None) == "false"
        for graph in _graphs_within(node):
            if graph is None:
                # Nothing is known about it, so it has to be looked at closely.
                is_sloppy = True
                continue
            values += [decider.values for decider in _deciders(graph)]
            is_sloppy |= bool(_sloppy_nodes(graph))
    return tuple(values), is_sloppy


def _graphs_within(node):
    for wrapped in node._functions():
        function = wrapped.function
        yield function.graph.as_graph_def()
        for captured in function.captured_inputs:
            if captured.dtype == tf.variant:  # A dataset from outside.
                yield _as_graph(captured)
    # The number of CPUs, and whether it is sloppy, are in the graph alone.
    kind = type(node).__name__
    if kind == "_ParallelInterleaveDataset" or (
        kind == "_InterleaveDataset" and node._cycle_length < 0
    ):
        yield _as_graph(node._variant_tensor)


def _sloppy_nodes(graph):
    return [
        node
        for scope in _scopes(graph)
        for node in scope
        # Reading an attribute that is not there would add it.
        if "deterministic" in node.attr
        and node.attr["deterministic"].s == b"false"
    ]


def _as_graph(variant):
    """A dataset variant as a GraphDef, or None if it cannot be written."""
    try:
        written = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant,
            external_state_policy=_IGNORE_STATE,
            strip_device_assignment=False,
        )
        graph = tf.compat.v1.GraphDef.FromString(written.numpy())
    except (tf.errors.OpError, message.DecodeError):
        return None
    # More than 2 GB are written as nothing at all.
    return graph if graph.node else None


def _scopes(graph):
    """The graph's nodes, then those of its functions in order of first use.

    Names of functions count up in each process, so they give no order that is
    the same on all workers.
    """
    functions = {f.signature.name: f for f in graph.library.function}
    scopes = [graph.node]
    for scope in scopes:
        for node in scope:
            for _, value in sorted(node.attr.items()):
                for called in (value.func, *value.list.func):
                    if called.name in functions:
                        scopes.append(functions.pop(called.name).node_def)
    return scopes


class _Decider:
    """An op that decides an order, in the nodes of a graph or function."""

    def __init__(self, node, scope, *, in_function):
        self._node = node
        self._scope = scope
        self._in_function = in_function
        self._nodes = {n.name: n for n in scope}

    def _input(self, node, position):
        inputs = [name for name in node.input if name[0] != "^"]
        return self._nodes.get(inputs[position].split(":")[0])

    @property
    def values(self):
        """Tuple of ints: two seeds or a number of datasets."""
        return tuple(
            self._value(self._input(self._node, position))
            for position in _ORDER_INPUTS[self._node.op]
        )

    def _value(self, node):
        if node is not None and node.op in ("SelectV2", "Identity"):
            # tf.data picks another seed than (0, 0), the mark of no seed.
            return self._value(self._input(node, len(node.input) - 1))
        if node is None or node.op != "Const":
            return _COMPUTED
        return int(tf.make_ndarray(node.attr["value"].tensor))

    def chosen(self):
        """The values that this worker would have all workers take."""
        if self.values != _UNSEEDED:
            return self.values
        position = _GENERATOR_INPUTS.get(self._node.op)
        generator = position and self._input(self._node, position)
        is_drawn_once = (
            generator
            and generator.op == "Const"
            and not self._node.attr["reshuffle_each_iteration"].b
        )
        if not is_drawn_once:
            return _draw_seed(), _draw_seed()
        # `take` and `skip` of one dataset, shuffled once, are training and
        # validation rows. They must stay apart when each is sharded by itself,
        # so the seeds follow from the generator that they share.
        (handle,) = generator.attr["value"].tensor.resource_handle_val
        return _hash((_RUN_SEED, handle.name)), _hash((handle.name, _RUN_SEED))

    def take(self, values):
        """Puts other values in the place of the op's own."""
        inputs = zip(_ORDER_INPUTS[self._node.op], self.values, values)
        for position, old, value in inputs:
            if old != _COMPUTED:
                self._replace(position, value)
        if self._node.op.startswith("ParallelInterleave"):
            # An interleave that was free to choose is written as one that was
            # not, and that may not make more calls than it reads datasets.
            num_calls = self._value(self._input(self._node, -1))
            if num_calls > values[0] > 0:
                self._replace(-1, values[0])
        position = _GENERATOR_INPUTS.get(self._node.op)
        if position is not None and not self._in_function:
            # The generator in use has its seeds already. It is found by its
            # handle; an op with an unknown handle makes one of its own.
            self._add("DummySeedGenerator", position, "handle")

    def _replace(self, position, value):
        node = self._add("Const", position, "output")
        node.attr["dtype"].type = tf.int64.as_datatype_enum
        tensor = tf.make_tensor_proto(value, tf.int64)
        node.attr["value"].tensor.CopyFrom(tensor)

    def _add(self, op, position, output):
        """Adds a node that becomes an input of the op."""
        inputs = [name for name in self._node.input if name[0] != "^"]
        position %= len(inputs)
        node = self._scope.add()
        node.name = f"{self._node.name}/agreed_{position}"
        node.op = op
        suffix = f":{output}:0" if self._in_function else ""
        self._node.input[position] = node.name + suffix
        return node


def _deciders(graph):
    return [
        _Decider(node, scope, in_function=depth > 0)
        for depth, scope in enumerate(_scopes(graph))
        for node in scope
        if node.op in _ORDER_INPUTS
    ]


class _Reseeded(dataset_ops.UnaryUnchangedStructureDataset):
    """A dataset read back from a graph. Keeps what the graph refers to."""

    def __init__(self, input_dataset, graph):
        super().__init__(
            input_dataset,
            tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString()),
        )


def _with_agreed_seeds(dataset, agree):
    graph = _as_graph(dataset._variant_tensor)
    deciders = graph and _deciders(graph)
    counts = [c for (c,) in agree([len(deciders) if graph else -1])]
    if -1 in counts or len(set(counts)) > 1:
        raise ValueError(
            "The workers would read the rows in different orders, and shuffles "
            "can be given the same seeds only in a dataset that TensorFlow can "
            "write as a graph of less than 2 GB. Received: by worker, the "
            f"shuffles in the graph (-1 for no graph): {counts}. Pass the same "
            "`seed` to `shuffle` on all workers, use AutoShardPolicy.OFF or "
            "FILE, or shard by hand with `distribute_datasets_from_function`."
        )
    chosen = [value for decider in deciders for value in decider.chosen()]
    agreed = iter(agree(chosen)[0])
    for decider in deciders:
        decider.take([next(agreed) for _ in decider.values])
    for node in _sloppy_nodes(graph):
        node.attr["deterministic"].s = b"true"
    return _Reseeded(dataset, graph)


class _ShuffledArrays(NamedTuple):
    """The parts of the dataset that Keras makes of shuffled arrays."""

    permutation: tf.data.Dataset  # Of one element, the indices of all rows.
    slices: tf.data.Dataset  # Of the indices of each batch.
    grab: tf.data.Dataset  # Of the batches.
    seeds: tuple  # Two ints, those of the RandomShuffle operation.
    within_batches: bool  # Whether rows stay in the batch that they are in.


def _find_shuffled_arrays(dataset):
    """The `_ShuffledArrays` that a dataset is, or None."""
    grab = dataset
    while type(grab).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        (grab,) = grab._inputs()
    if not _runs(grab, "grab_batch"):
        return None
    (zipped,) = grab._inputs()
    indices = zipped._inputs()[0]
    within_batches = _runs(indices, "random_shuffle")
    slices = indices._inputs()[0] if within_batches else indices
    permutation = next((n for n in walk(slices) if _runs(n, "permutation")), 0)
    if not permutation or not _runs(slices, "slice_batch_indices"):
        return None
    shuffling = indices if within_batches else permutation
    graph = shuffling._functions()[0].function.graph
    for op in graph.get_operations():
        if op.type == "RandomShuffle":
            seeds = op.get_attr("seed"), op.get_attr("seed2")
            return _ShuffledArrays(
                permutation, slices, grab, seeds, within_batches
            )
    return None


def _runs(node, name):
    return any(
        name in tf.compat.as_str(wrapped.function.name)
        for wrapped in node._functions()
    )


def _reordered(arrays, seed):
    """The batches of the arrays, in an order that follows from the seed."""
    shuffle = tf.random.experimental.stateless_shuffle
    pairs = _random_pairs(seed)
    if arrays.within_batches:
        indices = tf.data.Dataset.zip((arrays.slices, pairs)).map(shuffle)
    else:
        (num_rows,) = arrays.permutation.element_spec.shape
        # As in Keras, `prefetch` shuffles an epoch while the last one runs.
        indices = (
            pairs.take(1)
            .map(lambda pair: shuffle(tf.range(num_rows, dtype=tf.int64), pair))
            .prefetch(1)
            .flat_map(arrays.slices._functions()[0]._func)
        )
    (zipped,) = arrays.grab._inputs()
    grab = arrays.grab._functions()[0]._func
    batches = tf.data.Dataset.zip((indices, zipped._inputs()[1]))
    return batches.map(grab, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _random_pairs(seed):
    """Endless pairs of int64, others in each epoch.

    `tf.data.Dataset.random` would mix in the worker's global seed.
    """
    variant = tf.raw_ops.RandomDatasetV2(
        seed=seed,
        seed2=1,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        rerandomize_each_iteration=True,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    spec = tf.TensorSpec([], tf.int64)
    return dataset_ops._VariantDataset(variant, spec).batch(2, True)
