"""Sharding: which rows of a dataset each worker and each replica gets."""

import contextlib
from typing import Any
from typing import NamedTuple

import tensorflow as tf
from absl import logging
from tensorflow.python.data.experimental.ops import distribute

from tf_avgstrategy.input import fingerprints
from tf_avgstrategy.input import row_order

__all__ = ["shard", "split"]

_Policy = tf.data.experimental.AutoShardPolicy
_READER_OPS = {
    "CSVDataset",
    "CSVDatasetV2",
    "FixedLengthRecordDataset",
    "FixedLengthRecordDatasetV2",
    "TFRecordDataset",
    "TFRecordDatasetV2",
    "TextLineDataset",
}
# In place of a number of files.
_UNKNOWN = -1


def shard(dataset, *, replicas, rank, agree, watch=None):
    """Returns the batches of this worker's replicas.

    The dataset's own batches are global: each is meant for all replicas of all
    workers. What a worker gets of them is decided by the dataset's option
    `experimental_distribute.auto_shard_policy`:

    - DATA: Every worker reads all rows and keeps those of its replicas. The
      parts of a batch over all replicas, by rank, are the batch; a part can be
      empty, so all workers make the same number of steps.
    - FILE: The files are dealt out, and each worker's batches are split into
      as many parts as there are replicas on all workers.
    - AUTO: FILE if there is a file for each worker, otherwise DATA.
    - OFF: Every worker trains on all rows. A batch is split over its own
      replicas alone, as if there were no other worker.
    - HINT: As FILE, but `Dataset.shard` with
      `tf.data.experimental.SHARD_HINT` says what is dealt out.

    Under DATA and HINT all workers read in the same order, see
    `row_order.agree_on_order`. Under HINT that counts up to the hint. Under all
    but OFF they compare what their datasets are made of, see
    `fingerprints.of_dataset`.

    Args:
        dataset: `tf.data.Dataset` of global batches: a nested structure of
            dense, ragged or sparse tensors with the rows on axis 0, or None.
            Built by the same code on every worker.
        replicas: List of ints, the number of replicas of each worker by rank.
        rank: Int, this worker.
        agree: Function that takes a list of ints (int64) and returns the lists
            of all workers by rank. It is called equally often on each worker,
            and not at all if there is one worker. `None`: this worker reads the
            dataset alone, for the part that it would get among all.
        watch: Function that takes a dataset and returns it so that what is read
            can be compared later. It is called where rows come from Python.

    Returns:
        `tf.data.Dataset` of per-replica batches with the structure and dtypes
        of `dataset`, for replica 0, 1, ... of this worker and again from 0.
        Axis 0 has a static size if all parts have the same one.

    Raises:
        ValueError: If the dataset is not batched, if workers differ in what
            they are asked to shard or what that is made of, if there are too
            few files under FILE, if a function after `batch` shuffles a batch
            in a way that differs between workers, or from
            `row_order.agree_on_order`.
    """
    _check_batched(dataset.element_spec)
    dataset, by_rows = _read_by(
        dataset,
        num_workers=len(replicas),
        rank=rank,
        agree=agree,
        watch=watch,
    )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _Policy.OFF:
        # All of it is this worker's, who makes one step of each batch: Keras
        # counts batches before a dataset is distributed, and stops there.
        by_rows, replicas, rank = True, [replicas[rank]], 0
    splitter = _Splitter(
        dataset, num_parts=sum(replicas), num_local=replicas[rank]
    )
    if by_rows:
        parts = splitter.parts(sum(replicas[:rank]), replicas[rank])
    else:
        parts = splitter.all_parts()
    return parts.prefetch(replicas[rank])


def split(batch, num_parts):
    """Returns the parts of a batch, by the rule that `shard` follows.

    Args:
        batch: Nested structure of arrays or tensors (dense, ragged or sparse)
            with the rows on axis 0, or None.
        num_parts: Int >= 1.

    Returns:
        List of `num_parts` such structures of tensors. Some may have no rows.
    """
    composites = (tf.RaggedTensor, tf.SparseTensor)
    tensors = [
        v if v is None or isinstance(v, composites) else tf.convert_to_tensor(v)
        for v in tf.nest.flatten(batch)
    ]
    num_rows = _num_rows(tensors)
    starts = [
        _start(num_rows, num_rows, part, num_parts)
        for part in range(num_parts + 1)
    ]
    return [
        tf.nest.pack_sequence_as(
            batch, [_rows(v, start, stop) for v in tensors]
        )
        for start, stop in zip(starts, starts[1:])
    ]


def _check_batched(element_spec):
    specs = tf.nest.flatten(element_spec)
    tensors = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    # The spec of None has no public name.
    batched = [s for s in specs if isinstance(s, tensors) and s.shape.rank != 0]
    if batched and all(
        s in batched or type(s).__name__ == "NoneTensorSpec" for s in specs
    ):
        return
    raise ValueError(
        "A distributed dataset must consist of batches, tensors whose axis 0 "
        "counts rows, so that they can be split over replicas. Received: "
        f"element_spec={element_spec}. Add `.batch(...)` with the global batch "
        "size to the dataset."
    )


def _read_by(dataset, *, num_workers, rank, agree, watch):
    """Returns what a worker reads, and whether it keeps its rows alone.

    Returns:
        Pair of a dataset of global batches, and of a bool: True if all workers
        read the same batches, each for its part of them.
    """
    is_alone = agree is None
    if is_alone:

        def agree(values):
            return [list(values)] * num_workers

    plan = _plan(dataset, num_workers=num_workers, rank=rank)
    by_rows = True
    if num_workers > 1:
        found = _agreed_fingerprints(dataset, plan, agree)
        by_rows = _is_by_rows(plan, num_workers)
        if by_rows or plan.policy == _Policy.HINT:
            options = tf.data.Options()
            options.deterministic = True
            if is_alone:
                row_order.check_is_fixed(dataset)
            dataset = row_order.agree_on_order(dataset, agree=agree)
            dataset = dataset.with_options(options)
            _refuse_shuffled_batches(dataset)
        is_known = all(fingerprint.is_known for fingerprint in found)
        if by_rows and not is_known and watch is not None and not is_alone:
            dataset = watch(dataset)
    if plan.policy == _Policy.HINT:
        dataset = distribute._AutoShardDataset(dataset, num_workers, rank)
    return (dataset if by_rows else plan.own_files or dataset), by_rows


def _refuse_shuffled_batches(dataset):
    for node in row_order.walk(dataset, into_batches=False):
        for wrapped in node._functions():
            graph = wrapped.function.graph
            if any(_is_shuffled(output) for output in graph.outputs):
                raise ValueError(
                    "Each row must have the same place in a batch on all "
                    "workers, or rows get lost. Received: the function "
                    f"{tf.compat.as_str(wrapped.function.name)}, which returns "
                    "what `tf.random.shuffle` gave it. Shuffle with "
                    "`Dataset.shuffle` before `batch`, or with "
                    "`tf.random.experimental.stateless_shuffle`."
                )


def _is_shuffled(tensor):
    """Whether the rows of a graph's tensor are those of a random shuffle."""
    op = tensor.op
    if op.type in ("Identity", "GatherV2"):
        return any(_is_shuffled(t) for t in op.inputs[:2])
    return op.type == "RandomShuffle"


class _Plan(NamedTuple):
    """What a worker can do to its dataset.

    Attributes:
        policy: AutoShardPolicy.
        num_files: Int, the smallest number of files that a reader of the
            dataset is given, or `_UNKNOWN`.
        own_files: Dataset that reads this worker's files alone, or None if it
            is not needed or TensorFlow cannot make it.
    """

    policy: Any
    num_files: int
    own_files: Any


def _plan(dataset, *, num_workers, rank):
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if num_workers == 1 or policy not in (_Policy.AUTO, _Policy.FILE):
        return _Plan(policy, _UNKNOWN, None)
    num_files = _num_files(dataset)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _Policy.FILE
    own_files = None
    if policy == _Policy.FILE or num_files >= num_workers:
        with contextlib.suppress(tf.errors.NotFoundError):
            own_files = distribute._AutoShardDataset(
                dataset.with_options(options), num_workers, rank
            )
    return _Plan(policy, num_files, own_files)


def _agreed_fingerprints(dataset, plan, agree):
    """Returns the `Fingerprint` of each worker's dataset, by rank."""
    own = fingerprints.of_dataset(dataset)
    found = agree(
        [plan.policy.value, plan.num_files, plan.own_files is not None, *own]
    )
    _check_same([f[:3] for f in found])
    prints = [fingerprints.Fingerprint(*f[3:]) for f in found]
    if plan.policy != _Policy.OFF:
        fingerprints.check_same(prints)
    return prints


def _is_by_rows(plan, num_workers):
    """Whether rows are kept rather than files dealt out, on all workers."""
    policy, num_files, own_files = plan
    if policy in (_Policy.AUTO, _Policy.DATA) and num_files == _UNKNOWN:
        return True
    if policy in (_Policy.OFF, _Policy.HINT):
        return False
    is_short = 0 <= num_files < num_workers
    if policy == _Policy.FILE and (is_short or own_files is None):
        raise ValueError(
            "AutoShardPolicy.FILE needs a file for each worker, in a reader "
            "that TensorFlow can deal out to workers. Received: "
            f"{_files(num_files)} for {num_workers} workers. Use "
            "AutoShardPolicy.DATA, by which every worker reads all files and "
            "keeps its rows, or split the data into more files."
        )
    by_rows = policy == _Policy.DATA or (
        policy == _Policy.AUTO and own_files is None
    )
    if by_rows and num_files != _UNKNOWN:
        logging.info(
            "The dataset reads %s, which cannot be dealt out to %d workers: "
            "every worker reads all of it and keeps its rows.",
            _files(num_files),
            num_workers,
        )
    return by_rows


def _check_same(found):
    if len({tuple(f) for f in found}) > 1:
        raise ValueError(
            "All workers must shard the same dataset in the same way. "
            "Received: "
            + "; ".join(
                f"worker {rank} has policy {_Policy(policy).name} and "
                f"{_files(num_files)}"
                for rank, (policy, num_files, _) in enumerate(found)
            )
            + ". Give every worker the same list of files, or set "
            "`auto_shard_policy` to AutoShardPolicy.OFF."
        )


def _files(num_files):
    if num_files == _UNKNOWN:
        return "an unknown number of files"
    return f"{num_files} file" + "s" * (num_files != 1)


def _num_files(dataset):
    """The smallest number of files that a reader of the dataset is given."""
    counts = [
        _num_names(names)
        for node in row_order.walk(dataset)
        if (names := _names_to_read(node)) is not None
    ]
    return min(counts, default=_UNKNOWN)


def _names_to_read(node):
    """The names of the files that a dataset opens, or None if it opens none."""
    if hasattr(node, "_filenames"):
        return node._filenames
    for wrapped in node._functions():
        graph = wrapped.function.graph.as_graph_def()
        nodes = [*graph.node]
        for function in graph.library.function:
            nodes += function.node_def
        if _READER_OPS.intersection(n.op for n in nodes):
            return node._inputs()[0]
    return None


def _num_names(names):
    if not isinstance(names, tf.data.Dataset):
        return int(tf.size(names))
    count = int(names.cardinality())
    if count == tf.data.INFINITE_CARDINALITY and names._inputs():
        return _num_names(names._inputs()[0])
    return max(count, _UNKNOWN)


class _Splitter:
    """Splits each batch of a dataset into parts by `tf.distribute`'s rule.

    Of a batch size B and P parts, the first B % P parts have B // P + 1 rows
    and the others B // P. A last batch of fewer rows fills the first parts. A
    batch size that cannot be known before reading is each batch's own size.

    Args:
        dataset: `tf.data.Dataset` of batches.
        num_parts: Int >= 1, P.
        num_local: Int >= 1, how many parts a step takes. Only if it divides P
            can parts have a static size: a step that is short of parts, which
            must not get lost, has smaller ones instead.
    """

    def __init__(self, dataset, *, num_parts, num_local):
        self._dataset = dataset
        self._num_parts = num_parts
        self._batch_size = int(distribute.compute_batch_size(dataset))
        sizes = {
            spec.shape[0] if spec.shape.rank else None
            for spec in tf.nest.flatten(dataset.element_spec)
            if hasattr(spec, "shape")
        }
        is_static = sizes == {self._batch_size} and num_parts % num_local == 0
        self._part_size = None
        if is_static and self._batch_size % num_parts == 0:
            self._part_size = self._batch_size // num_parts

    def parts(self, first, count):
        """Returns `count` parts of each batch from number `first` on."""
        if count == 1:
            return self._dataset.map(
                lambda *batch: self._part(batch, tf.constant(first, tf.int64))
            )
        parts = self._dataset.flat_map(
            lambda *batch: tf.data.Dataset.range(first, first + count).map(
                lambda part: self._part(batch, part)
            )
        )
        num_batches = int(self._dataset.cardinality())
        if num_batches == tf.data.UNKNOWN_CARDINALITY:
            return parts
        num_elements = num_batches * (count if num_batches > 0 else 1)
        return parts.apply(
            tf.data.experimental.assert_cardinality(num_elements)
        )

    def all_parts(self):
        """Returns all parts of each batch that have rows."""

        def parts(*batch):
            num_rows = _num_rows(batch)
            starts = self._start(
                num_rows, tf.range(self._num_parts, dtype=tf.int64)
            )
            count = tf.reduce_sum(tf.cast(starts < num_rows, tf.int64))
            return tf.data.Dataset.range(count).map(
                lambda part: self._part(batch, part)
            )

        return self._dataset.flat_map(parts)

    def _start(self, num_rows, part):
        # A batch that is larger than announced loses no row.
        batch_size = tf.maximum(num_rows, self._batch_size)
        return _start(num_rows, batch_size, part, self._num_parts)

    def _part(self, batch, part):
        num_rows = _num_rows(batch)
        start = self._start(num_rows, part)
        stop = self._start(num_rows, part + 1)
        # A single tensor comes as a tuple, a named tuple as its fields.
        return tf.nest.pack_sequence_as(
            self._dataset.element_spec,
            [self._rows(v, start, stop) for v in tf.nest.flatten(batch)],
        )

    def _rows(self, value, start, stop):
        rows = _rows(value, start, stop)
        if value is None or isinstance(value, tf.RaggedTensor):
            return rows
        shape = tf.TensorShape([self._part_size]).concatenate(value.shape[1:])
        rows.set_shape(shape)
        return rows


def _start(num_rows, batch_size, part, num_parts):
    """The row of a batch at which a part starts, int64, at most its end."""
    start = batch_size // num_parts * part
    start += tf.minimum(tf.cast(part, tf.int64), batch_size % num_parts)
    return tf.minimum(start, num_rows)


def _rows(value, start, stop):
    if value is None:
        return None
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    inner = value.dense_shape[1:]
    return tf.sparse.slice(
        value,
        tf.concat([[start], tf.zeros_like(inner)], axis=0),
        tf.concat([[stop - start], inner], axis=0),
    )


def _num_rows(batch):
    """The rows of a batch, an int64 scalar."""
    value = next(v for v in tf.nest.flatten(batch) if v is not None)
    if isinstance(value, tf.RaggedTensor):
        return value.nrows(out_type=tf.int64)
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    return tf.shape(value, out_type=tf.int64)[0]
