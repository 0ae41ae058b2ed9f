"""Checkpoints of TensorFlow, also in SavedModels: variables, and copies."""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_avgstrategy import snapshots
from tf_avgstrategy import variable_rules

__all__ = [
    "CheckpointFile",
    "SavedModelFile",
    "copy_of_checkpoint",
    "copy_of_saved_model",
]

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Keras makes this list of a set: its order means nothing.
_UNORDERED = "_all_variables/"
# Bytes of variables that are held until they are written.
_BYTES_HELD = 2**24


class CheckpointFile:
    """Variables of a checkpoint of `tf.train.Checkpoint`.

    Args:
        path: String, a prefix, or a folder whose latest checkpoint is meant.

    Attributes:
        path: String.
        prefix: String.
        variables: Dict from name, without what all keys end with, to
            `SavedVariable`.
        makers: Empty dict: a checkpoint does not say which optimizer it is of.
    """

    def __init__(self, path):
        self.path = path
        self.makers = {}
        self.prefix = self._prefix()
        try:
            self._reader = tf.train.load_checkpoint(self.prefix)
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(
                "A checkpoint must be one that TensorFlow wrote. Received: "
                f"{path!r} ({error}). Save the model again."
            ) from error
        self._keys = {}
        self._find()

    def _prefix(self):
        if not pathlib.Path(self.path).is_dir():
            return self.path
        latest = tf.train.latest_checkpoint(self.path)
        if latest is None:
            raise ValueError(
                "A folder must hold checkpoints, and the file 'checkpoint' "
                f"that names the latest, or be a SavedModel. Received: "
                f"{self.path!r}. Pass the prefix of a checkpoint."
            )
        return latest

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Its files are closed with it.
        self._reader = None

    def _find(self):
        reader = self._reader
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
        paths = self._paths(shapes)
        found = {}
        for key in sorted(shapes):
            if key == _GRAPH:
                continue
            name = key.removesuffix(_SUFFIX)
            self._keys[name] = key
            shape = tuple(shapes[key])
            dtype = np.dtype(dtypes[key].as_numpy_dtype)
            found[name] = (paths.get(key, name), shape, dtype)
            if dtypes[key] == tf.string and shape == ():
                self._check_is_no_half_period(key)
        self.variables = variable_rules.by_name(found)
        self._unordered = {
            name: path
            for name, (path, *_) in found.items()
            if name.startswith(_UNORDERED)
        }

    def _paths(self, keys):
        """Maps keys to the full names that variables had."""
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if _GRAPH in keys:
            graph.ParseFromString(self._reader.get_tensor(_GRAPH))
        return {
            attribute.checkpoint_key: attribute.full_name.partition(":")[0]
            for node in graph.nodes
            for attribute in node.attributes
        }

    def _check_is_no_half_period(self, key):
        """Refuses an averager's state that would replace the mean."""
        try:
            header, _ = snapshots.unpack(self._reader.get_tensor(key))
        except ValueError:
            return
        if np.any(header.get("stepped")):
            raise ValueError(
                "A checkpoint with an averager must not be of the middle of a "
                "period: it would give each replica its own values back, in "
                f"place of the mean. Received: {self.path!r}. Call "
                "`averager.average()` before saving, or save without it."
            )

    def match(self, first):
        """Takes the names of `first` for variables whose order means nothing.

        Raises:
            ValueError: If the names that the variables had do not say which is
                which.
        """
        ours, theirs = (_by_path(file._unordered) for file in (self, first))
        if self._unordered == first._unordered:
            return
        if ours.keys() != theirs.keys() or len(ours) < len(self._unordered):
            raise ValueError(
                "Variables of SavedModels must have the same names, but for "
                "the numbers that Keras gives, or nothing says which belongs "
                f"to which. Received: {sorted(theirs)} in {first.path!r} and "
                f"{sorted(ours)} in {self.path!r}. Average the `.keras` files "
                "of the models and export the mean."
            )
        names = {ours[path]: theirs[path] for path in ours}
        self._keys = {names.get(n, n): key for n, key in self._keys.items()}
        self.variables = {
            names.get(name, name): dataclasses.replace(
                variable, partner=names.get(variable.partner, variable.partner)
            )
            for name, variable in self.variables.items()
        }

    def parts(self, name):
        """Yields what selects all of a variable: there are no parts."""
        yield ()

    def read(self, name, part=()):
        """Returns a variable as an array, or bytes."""
        return self._reader.get_tensor(self._keys[name])

    def tensors_of_first(self):
        """Returns what a copy holds beside variables, by key."""
        if not self._reader.has_tensor(_GRAPH):
            return {}
        return {_GRAPH: self._reader.get_tensor(_GRAPH)}

    def key(self, name):
        """Returns the key under which a checkpoint holds a variable."""
        return self._keys[name]


def _by_path(unordered):
    """Maps paths, with their numbers counted from 0, to names."""
    numbers = {}
    parts = {part for path in unordered.values() for part in path.split("/")}
    for part in parts:
        base, number = _split(part)
        numbers.setdefault(base, set()).add(number)

    def counted(part):
        base, number = _split(part)
        return f"{base}:{sorted(numbers[base]).index(number)}"

    return {
        "/".join(map(counted, path.split("/"))): name
        for name, path in unordered.items()
    }


def _split(part):
    match = re.fullmatch(r"(.*?)(?:_(\d+))?", part)
    return match[1], int(match[2] or 0)


class SavedModelFile(CheckpointFile):
    """Variables of a SavedModel, a folder."""

    def _prefix(self):
        return str(pathlib.Path(self.path) / "variables" / "variables")


class _CheckpointCopy:
    """A checkpoint that is written in shards as its variables come."""

    holds_first = False

    def __init__(self, first, prefix):
        self._first = first
        self._prefix = prefix
        self._held = {}
        self._shards = []

    def write(self, name, part, value):
        """Takes a variable's whole value."""
        if sum(np.asarray(v).nbytes for v in self._held.values()) > _BYTES_HELD:
            self._write_shard(self._held)
            self._held = {}
        self._held[self._first.key(name)] = value

    def _write_shard(self, values):
        shard = f"{self._prefix}.shard{len(self._shards)}"
        tf.raw_ops.SaveV2(
            prefix=shard,
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=[tf.convert_to_tensor(v) for v in values.values()],
        )
        self._shards.append(shard)

    def finish(self, number_not=0):
        """Merges the shards, into any number of them but this one."""
        rest = {**self._held, **self._first.tensors_of_first()}
        if len(self._shards) + 1 == number_not and len(rest) > 1:
            self._write_shard(dict([rest.popitem()]))
        self._write_shard(rest)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=self._shards,
            destination_prefix=self._prefix,
            delete_old_dirs=False,
        )


@contextlib.contextmanager
def copy_of_checkpoint(first, output):
    """Yields what writes a checkpoint, of which there is the old or the new.

    Also while it replaces one: the files of the two have different names, but
    for the index, which is moved last.
    """
    output = pathlib.Path(output)
    old = _data_files(output)
    with snapshots.unfinished_folder(output) as folder:
        copy = _CheckpointCopy(first, str(folder / output.name))
        yield copy
        copy.finish(number_not=len(old))
        new = _data_files(folder / output.name)
        for path in new:
            snapshots.move(path, output.with_name(path.name))
        index = f"{output.name}.index"
        snapshots.move(folder / index, output.with_name(index))
        for path in {*old} - {output.with_name(path.name) for path in new}:
            path.unlink()


def _data_files(prefix):
    name = re.escape(prefix.name)
    return [
        path
        for path in prefix.parent.iterdir()
        if re.fullmatch(rf"{name}\.data-\d+-of-\d+", path.name)
    ]


@contextlib.contextmanager
def copy_of_saved_model(first, output):
    """Yields what writes a copy of a SavedModel with other values.

    A folder that it replaces is moved aside just before.
    """
    output = pathlib.Path(output)
    with snapshots.unfinished_folder(output) as folder:
        new = folder / "new"
        source = pathlib.Path(first.path)
        # The fingerprint is that of the other values; it may be missing.
        left_out = {source: ["fingerprint.pb"]}
        left_out[source / "variables"] = os.listdir(source / "variables")
        shutil.copytree(
            source, new, ignore=lambda at, _: left_out.get(pathlib.Path(at), [])
        )
        copy = _CheckpointCopy(first, str(new / "variables" / "variables"))
        yield copy
        copy.finish()
        for shard in (new / "variables").glob("variables.shard*"):
            shard.unlink()
        if output.exists():
            output.replace(folder / "old")
        snapshots.move(new, output)
