"""Checkpoints of TensorFlow, also in SavedModels: variables, and copies."""

import contextlib
import dataclasses
import math
import pathlib
import re

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_avgstrategy.files import file_errors
from tf_avgstrategy.files import variable_rules
from tf_avgstrategy.tensors import snapshots

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
_SAVED_MODEL = "saved_model.pb"
# That of the values, which the mean has not; it may be missing.
_FINGERPRINT = "fingerprint.pb"
# Bytes of variables that are held until they are written.
_BYTES_HELD = 2**24


class CheckpointFile:
    """Variables of a checkpoint of `tf.train.Checkpoint`.

    Args:
        path: String, a prefix, or a folder whose latest checkpoint is meant.

    Attributes:
        path: String.
        expected: String, the sentence that says what it must be.
        prefix: String.
        variables: Dict from name, without what all keys end with, to
            `SavedVariable`.
        makers: Empty dict: a checkpoint does not say which optimizer it is of.

    Raises:
        ValueError: If it is damaged, which `read` may find as well.
    """

    expected = "A checkpoint must be one that TensorFlow wrote"

    def __init__(self, path):
        self.path = path
        self.makers = {}
        self.prefix = self._prefix()
        with file_errors.reading(path, self.expected):
            self._reader = tf.train.load_checkpoint(self.prefix)
        self._keys = {}
        self._find()

    def _prefix(self):
        if not pathlib.Path(self.path).is_dir():
            return self.path
        with file_errors.reading(self.path, self.expected):
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
        found = {}
        with file_errors.reading(self.path, self.expected):
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
            self._check_size(shapes, dtypes)
            paths = self._paths(shapes)
            for key in sorted(shapes.keys() - {_GRAPH}):
                name = key.removesuffix(_SUFFIX)
                self._keys[name] = key
                shape = tuple(shapes[key])
                dtype = np.dtype(dtypes[key].as_numpy_dtype)
                found[name] = (paths.get(key, name), shape, dtype)
        for name, (_, shape, _) in found.items():
            if dtypes[self._keys[name]] == tf.string and shape == ():
                self._check_is_no_half_period(name)
        self.variables = variable_rules.by_name(found)
        self._unordered = {
            name: path
            for name, (path, *_) in found.items()
            if name.startswith(_UNORDERED)
        }

    def _check_size(self, shapes, dtypes):
        """Refuses what is said to be but is not there."""
        # A string takes a byte at least, which is its length.
        declared = sum(
            math.prod(shape)
            * (1 if dtypes[key] == tf.string else dtypes[key].size)
            for key, shape in shapes.items()
        )
        files = _data_files(pathlib.Path(self.prefix))
        stored = sum(path.stat().st_size for path in files)
        if declared > stored:
            raise ValueError(
                f"its tensors cannot have {declared} bytes, stored in {stored}"
            )

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

    def _check_is_no_half_period(self, name):
        """Refuses an averager's state that would replace the mean."""
        value = self.read(name)
        try:
            header, _ = snapshots.unpack(value)
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
        with file_errors.reading(self.path, self.expected):
            return self._reader.get_tensor(self._keys[name])

    def tensors_of_first(self):
        """Returns what a copy holds beside variables, by key."""
        with file_errors.reading(self.path, self.expected):
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

    expected = "A SavedModel must be one that TensorFlow wrote"

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

    def finish(self, numbers_not=frozenset()):
        """Merges the shards, if possible into none of these numbers of them."""
        rest = {**self._held, **self._first.tensors_of_first()}
        while len(self._shards) + 1 in numbers_not and len(rest) > 1:
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
        # One that was killed may have left some as well.
        copy.finish({int(path.name.rpartition("-")[2]) for path in old})
        new = _data_files(folder / output.name)
        new.append(folder / f"{output.name}.index")
        targets = [output.with_name(path.name) for path in new]
        snapshots.move_all(new, targets, folder / "old")
        for path in {*old} - {*targets}:
            # It is in nobody's way.
            with contextlib.suppress(OSError):
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
        _copy_all_but_variables(first, new)
        copy = _CheckpointCopy(first, str(new / "variables" / "variables"))
        yield copy
        copy.finish()
        for shard in (new / "variables").glob("variables.shard*"):
            shard.unlink()
        snapshots.move_all([new], [output], folder / "old")


def _copy_all_but_variables(first, target):
    source = pathlib.Path(first.path)
    with file_errors.reading(first.path, first.expected):
        data = (source / _SAVED_MODEL).read_bytes()
        saved_model_pb2.SavedModel().ParseFromString(data)
        paths = _files_below(source)
    (target / "variables").mkdir(parents=True)
    for path in paths:
        copied = target / path.relative_to(source)
        if path.is_dir():
            copied.mkdir(exist_ok=True)
        elif path.parent != source / "variables" and path.name != _FINGERPRINT:
            file_errors.copy(path, copied, first.expected)


def _files_below(folder):
    """Returns files and folders, each after the one that it is in."""
    paths = sorted(folder.rglob("*"))
    for path in paths:
        if path.is_symlink() and not path.is_file():
            raise ValueError(f"{str(path)!r} is a link, and not to a file")
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{str(path)!r} is neither a file nor a folder")
    return paths
