"""Fingerprints: whether all workers have made their dataset of the same."""

import hashlib
import os
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_avgstrategy.input import row_order

__all__ = [
    "FirstBatch",
    "Fingerprint",
    "NO_FIRST_BATCH",
    "check_first_batches",
    "check_same",
    "of_dataset",
]

_BITS = 62
# Of a larger tensor so many bytes are looked at, in rows that lie evenly.
_SAMPLE_BYTES = 2**20
_MIN_ROWS = 16
# What datasets count: rows, files, steps.
_NUMBERS = ("_count", "_start", "_stop", "_step")
_PYTHON_OPS = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
# Components of a batch whose fingerprints are kept apart. More are folded.
_COMPONENTS = 8


class Fingerprint(NamedTuple):
    """What a dataset is made of, as ints below 2**62 that can be compared.

    Attributes:
        pipeline: The kinds of datasets, and the numbers that they count to.
        shards: The arguments of `Dataset.shard`.
        rows: Tensors in memory, of large ones a sample.
        files: Names of files, less the folder that all are in.
        constants: What functions of the dataset have been given.
        is_known: 1 if that is all, 0 if some rows come from Python or from
            what cannot be read.
    """

    pipeline: int
    shards: int
    rows: int
    files: int
    constants: int
    is_known: int


def of_dataset(dataset):
    """Returns the `Fingerprint` of a `tf.data.Dataset`."""
    pipeline, shards, rows, files, constants = [], [], [], [], []
    is_known = True
    for node in row_order.walk(dataset):
        kind = type(node).__name__
        numbers = [
            int(number)
            for name in _NUMBERS
            if (number := getattr(node, name, None)) is not None
        ]
        pipeline.append((kind, numbers))
        if kind == "_ShardDataset":
            shards.append((int(node._num_shards), int(node._index)))
        for tensor in _tensors_of(node):
            if tensor.dtype == tf.variant:
                is_known = False
            elif tensor.dtype == tf.string:
                files.append(_of_names(tensor))
            else:
                rows.append(_of_numbers(tensor))
        for wrapped in node._functions():
            function = wrapped.function
            types = _types_within(function.graph.as_graph_def())
            is_known &= not types & _PYTHON_OPS
            constants += _of_function(function, types)
    parts = (pipeline, shards, rows, files, constants)
    return Fingerprint(*map(_hash, parts), int(is_known))


def _tensors_of(node):
    tensors = list(getattr(node, "_tensors", ()))
    names = getattr(node, "_filenames", None)
    return tensors + ([names] if tf.is_tensor(names) else [])


def _types_within(graph):
    """The types of a graph's operations, and of those of its functions."""
    nodes = [*graph.node]
    for function in graph.library.function:
        nodes += function.node_def
    return {node.op for node in nodes}


def _of_function(function, types):
    """Fingerprints of the numbers that a function was given from outside."""
    found = [
        _of_numbers(tensor)
        for tensor in function.captured_inputs
        if tensor.dtype.is_numpy_compatible and tensor.dtype != tf.string
    ]
    if row_order.ORDER_OPS & types:
        # Constants may be seeds, which workers agree on.
        return found
    for operation in function.graph.get_operations():
        if (
            operation.type == "Const"
            and operation.outputs[0].dtype != tf.string
        ):
            value = operation.get_attr("value")
            found.append(_hash(value.SerializeToString(deterministic=True)))
    return found


def _of_numbers(tensor):
    num_rows = tensor.shape[0] if tensor.shape.rank else 1
    num_bytes = tensor.dtype.size * int(np.prod(tensor.shape))
    if num_bytes > _SAMPLE_BYTES:
        wanted = max(_SAMPLE_BYTES * num_rows // num_bytes, _MIN_ROWS)
        places = np.linspace(0, num_rows - 1, min(wanted, num_rows))
        sample = tf.gather(tensor, places.astype("int64")).numpy()
    else:
        sample = tensor.numpy()
    about = (tensor.dtype.name, tensor.shape.as_list())
    return _hash((about, hashlib.blake2b(sample.tobytes()).hexdigest()))


def _of_names(tensor):
    names = tf.reshape(tensor, [-1]).numpy().tolist()
    # The smallest and the largest name have no longer prefix than all have.
    prefix = os.path.commonprefix([min(names), max(names)]) if names else b""
    folder = prefix[: prefix.rfind(b"/") + 1]
    return _hash([name[len(folder) :] for name in names])


def _hash(value):
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)


# By what of a `Fingerprint` differs: what that means, and what to do.
_DIFFERENCES = {
    "shards": (
        "`Dataset.shard` with other arguments on worker {rank} than on worker "
        "0. Leave it out, the strategy shards the dataset."
    ),
    "files": (
        "other names of files, or another order of them, on worker {rank} than "
        "on worker 0. Sort them, or shuffle them with a seed."
    ),
    "rows": (
        "tensors with other values on worker {rank} than on worker 0. Shuffle "
        "after `ParameterAveragingStrategy()`, from which on NumPy and Python "
        "draw the same random numbers on all workers, or with a seed, which "
        "`numpy.random.default_rng` always needs."
    ),
    "pipeline": (
        "other steps of the input pipeline, or other numbers in `take`, `skip` "
        "or `range`, on worker {rank} than on worker 0. Run the same code on "
        "every worker and leave it to the strategy to shard the dataset."
    ),
    "constants": (
        "a function of the input pipeline that was given other numbers on "
        "worker {rank} than on worker 0, such as its index. Run the same code "
        "on every worker and leave it to the strategy to shard the dataset."
    ),
}


def check_same(prints):
    """Raises a ValueError unless all workers have the same fingerprint.

    Args:
        prints: List of `Fingerprint`, by rank.
    """
    for name, difference in _DIFFERENCES.items():
        for rank, other in enumerate(prints):
            if getattr(other, name) != getattr(prints[0], name):
                raise ValueError(_message(difference.format(rank=rank)))


def _message(received):
    return (
        "All workers must make the same dataset, with its rows in one order, "
        "of which each keeps its part: otherwise some rows are trained on "
        f"twice and others never. Received: {received} If each worker has rows "
        "of its own, set `auto_shard_policy` to AutoShardPolicy.OFF: then it "
        "trains on all that its dataset yields."
    )


def check_first_batches(batches):
    """Raises a ValueError if workers have read other rows from Python.

    Rows that were changed at random differ, and may be the same rows. They are,
    as far as can be seen, if another component, such as the labels, is equal on
    all workers though its rows differ among themselves.

    Args:
        batches: List of what `FirstBatch.of_last_iterator` returned, by rank.
    """
    first, *others = batches
    mask = first[1]
    for rank, other in enumerate(others, 1):
        if other[0] != first[0] or (other == first).all():
            continue
        is_equal = first[2:] == other[2:]
        varies = (mask >> np.arange(_COMPONENTS)) & 1
        if not (is_equal & (varies == 1)).any():
            raise ValueError(
                _message(
                    f"other rows on worker {rank} than on worker 0 in the "
                    "first batch of an epoch, from a generator or a "
                    "`PyDataset`. Shuffle with a seed, or with the global "
                    "generators of NumPy or Python, and draw from these "
                    "equally often on all workers."
                )
            )


# What a worker tells of the first batch if none has been read.
NO_FIRST_BATCH = np.zeros(2 + _COMPONENTS, np.int64)


class FirstBatch:
    """The fingerprint of the first batch of what is read, for each iterator.

    Of rows that come from Python nothing is known before they are read.
    """

    def __init__(self):
        with tf.device("CPU:0"):
            self._record = tf.Variable(NO_FIRST_BATCH, trainable=False)

    def of_last_iterator(self):
        """Returns an int64 vector that can be compared with other workers'.

        How many first batches were read, then a mask of the components whose
        rows differ among themselves, then a fingerprint of each component.
        """
        return self._record.numpy()

    def watch(self, dataset):
        """Returns the dataset, whose first batches are recorded.

        Args:
            dataset: `tf.data.Dataset` of batches.
        """

        def note(place, batch):
            is_noted = tf.cond(
                place == 0, lambda: self._note(batch), lambda: False
            )
            with tf.control_dependencies([is_noted]):
                return tf.nest.map_structure(
                    lambda v: v if v is None else tf.identity(v), batch
                )

        # One after the other, and not ahead of time.
        return dataset.enumerate().map(note)

    def _note(self, batch):
        prints = [tf.zeros([], tf.int64)] * _COMPONENTS
        mask = tf.zeros([], tf.int64)
        values = [v for v in tf.nest.flatten(batch) if v is not None]
        for place, value in enumerate(values):
            slot = place % _COMPONENTS
            own, varies = _of_component(value)
            prints[slot] = 31 * prints[slot] + own
            bit = tf.constant(1 << slot, tf.int64)
            mask = tf.bitwise.bitwise_or(mask, bit * tf.cast(varies, tf.int64))
        count = self._record[0] + 1
        self._record.assign(tf.stack([count, mask, *prints]))
        return True


def _of_component(value):
    """The fingerprint of a tensor in a graph, and whether its rows differ."""
    if isinstance(value, tf.RaggedTensor):
        parts, varies = [value.flat_values, *value.nested_row_splits], True
    elif isinstance(value, tf.SparseTensor):
        parts, varies = [value.indices, value.values], True
    else:
        parts, varies = [value], tf.reduce_any(value != value[:1])
    text = tf.strings.join([tf.io.serialize_tensor(part) for part in parts])
    return tf.strings.to_hash_bucket_fast(text, 2**_BITS), varies
