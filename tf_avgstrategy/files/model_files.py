"""Files of models: the variables that they hold, one at a time, and copies."""

import contextlib
import dataclasses
import io
import json
import zipfile

import h5py
import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_avgstrategy.files import archives
from tf_avgstrategy.files import file_errors
from tf_avgstrategy.files import hdf5_checks
from tf_avgstrategy.files import variable_rules
from tf_avgstrategy.tensors import snapshots

__all__ = [
    "HDF5File",
    "KerasFile",
    "ModelInMemory",
    "copy_of_hdf5",
    "copy_of_keras",
]

_WEIGHTS = "model.weights.h5"
_CONFIG = "config.json"
# Bytes. Configs of large models have a few millions.
_LARGEST_CONFIG = 2**26
_BFLOAT16_STORED = np.dtype("V2")
# Elements that are read at once, 4 MB of float32.
_PART_ELEMENTS = 2**20


class HDF5File:
    """Variables of a `.weights.h5` file that any backend of Keras wrote.

    Args:
        path: String.

    Attributes:
        path: String.
        expected: String, the sentence that says what the file must be.
        variables: Dict from name, the path in the file, to `SavedVariable`.
        makers: Dict from the path of an optimizer to its name without number.

    Raises:
        ValueError: If the file is damaged, which `read` may find as well.
    """

    expected = "A file of weights must be one in HDF5 format that Keras wrote"

    def __init__(self, path):
        self.path = path
        self._stack = contextlib.ExitStack()
        with self._stack as stack:
            source, batch_norms = self._open(stack)
            with file_errors.reading(path, self.expected):
                hdf5_checks.check_heaps(source)
                self._file = stack.enter_context(h5py.File(source, "r"))
                hdf5_checks.check(self._file)
                self._find(batch_norms)
            self._stack = stack.pop_all()

    def _open(self, stack):
        return self.path, set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _find(self, batch_norms):
        self.variables, self.makers = {}, {}
        groups = {}

        def visit(name, item):
            if isinstance(item, h5py.Dataset):
                folder, _, number = name.rpartition("/")
                found = (tuple(item.shape), _dtype(item))
                groups.setdefault(folder, {})[number] = found

        self._file.visititems(visit)
        for folder, found in groups.items():
            name = _text(self._file[folder or "/"], "name")
            path = folder.removesuffix("/vars")
            if "optimizer" in path:
                self.makers[path] = name.rstrip("0123456789").rstrip("_")
            for number, variable in variable_rules.of_group(
                path, name, found, batch_norms
            ).items():
                if variable.partner is not None:
                    partner = f"{folder}/{variable.partner}"
                    variable = dataclasses.replace(variable, partner=partner)
                self.variables[f"{folder}/{number}"] = variable

    def parts(self, name):
        """Yields what selects the parts of a variable, which are small."""
        shape = self.variables[name].shape
        if int(np.prod(shape)) <= _PART_ELEMENTS:
            yield ()
            return
        axis = int(np.argmax(shape))
        others = int(np.prod(shape)) // shape[axis]
        step = max(1, _PART_ELEMENTS // others)
        for start in range(0, shape[axis], step):
            yield (slice(None),) * axis + (slice(start, start + step),)

    def read(self, name, part=()):
        """Returns a part of a variable as an array."""
        with file_errors.reading(self.path, self.expected):
            value = self._file[name][part]
        return _as_array(value, self.variables[name].dtype)


def _text(item, name):
    """Returns a string that an HDF5 object has as attribute, or ""."""
    if name not in item.attrs:
        return ""
    if item.attrs.get_id(name).shape != ():
        raise ValueError(f"{item.name!r} has several for a {name}")
    return str(item.attrs[name])


def _dtype(dataset):
    if _text(dataset, "dtype") == "bfloat16":
        if dataset.dtype != _BFLOAT16_STORED:
            raise ValueError(
                f"{dataset.name!r} has {dataset.dtype} in bfloat16"
            )
        return np.dtype(ml_dtypes.bfloat16)
    return dataset.dtype


def _as_array(value, dtype):
    # HDF5 knows no bfloat16: two bytes without a meaning.
    return np.asarray(value).view(dtype) if dtype.kind == "V" else value


class KerasFile(HDF5File):
    """Variables of a `.keras` file, whose layers are in its config.

    Attributes:
        archive: `archives.Archive`, the file.
    """

    expected = "A `.keras` file must be the archive that `model.save` writes"

    def _open(self, stack):
        self.archive = stack.enter_context(
            archives.Archive(self.path, self.expected)
        )
        names = self.archive.names
        if _WEIGHTS not in names or _CONFIG not in names:
            raise ValueError(
                f"A `.keras` file must hold {_CONFIG!r} and {_WEIGHTS!r}. "
                f"Received: {self.path!r} with {names}. Save the model with "
                "`model.save`."
            )
        config = self.archive.read(_CONFIG, limit=_LARGEST_CONFIG)
        with file_errors.reading(self.path, self.expected):
            batch_norms = set(_batch_norms(json.loads(config)))
        return stack.enter_context(self.archive.open(_WEIGHTS)), batch_norms


def _batch_norms(config):
    """Yields the names of layers with a moving variance, at any depth."""
    if isinstance(config, dict):
        own = config.get("config")
        if isinstance(own, dict) and "moving_variance_initializer" in own:
            yield str(own.get("name"))
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _batch_norms(part)


class ModelInMemory:
    """A model as if it were a file: variables by name, one at a time.

    Args:
        model: `keras.Model`.
        name: String, what errors call it.
    """

    holds_first = False

    def __init__(self, model, name):
        self.path = f"{name} ({model.name})"
        if not model.built or not model.variables:
            raise ValueError(
                "Models must be built, or they have no variables that could "
                f"be averaged. Received: {self.path}, which is not built. Call "
                "it on a batch, or `model.build(input_shape)`, and load its "
                "weights."
            )
        self._found = _state_of(model)
        optimizer = getattr(model, "optimizer", None)
        self.makers = {"optimizer": type(optimizer).__name__}
        self.variables = variable_rules.by_name(
            {
                name: (
                    variable.path,
                    tuple(variable.shape),
                    np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype),
                )
                for name, variable in self._found.items()
            }
        )

    def parts(self, name):
        """Yields what selects all of a variable: there are no parts."""
        yield ()

    def read(self, name, part=()):
        """Returns a variable as an array."""
        return self._found[name].numpy()

    def write(self, name, part, value):
        """Assigns a value to a variable."""
        self._found[name].assign(value)


def _state_of(model):
    """Maps names that do not depend on numbers of layers to variables."""
    metrics = {id(variable) for variable in model.metrics_variables}
    own = [v for v in model.variables if id(v) not in metrics]
    found = {
        f"{variable.path.rpartition('/')[2]}:{place}": variable
        for place, variable in enumerate(own)
    }
    # There is none before `compile`.
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        for place, variable in enumerate(optimizer.variables):
            found[f"optimizer/{place}"] = variable
    return found


class _HDF5Copy:
    """A copy of an HDF5 file whose values are replaced.

    What keeps the first one's value is in it already.
    """

    holds_first = True

    def __init__(self, first, written):
        self._first, self._written = first, written
        # It has whatever damage its source has.
        with file_errors.reading(first.path, first.expected):
            self._file = h5py.File(written, "r+")

    def write(self, name, part, value):
        """Replaces a part of a variable."""
        with file_errors.reading(self._first.path, self._first.expected):
            dataset = self._file[name]
            dataset[part] = np.asarray(value).view(dataset.dtype)
        self._written.check()

    def close(self):
        """Completes the file."""
        with file_errors.reading(self._first.path, self._first.expected):
            self._file.close()
        self._written.check()


class _WrittenFile(io.FileIO):
    """A file whose first error waits for `check`.

    HDF5 1.14 ends the process when it closes a file that could not be written.
    """

    def __init__(self, path):
        super().__init__(path, "r+b")
        self._error = None

    def write(self, data):
        """Writes all, or nothing more once something could not be written."""
        left = memoryview(data).cast("B")
        try:
            while len(left) and self._error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self._error = error
        return memoryview(data).nbytes

    def truncate(self, size=None):
        """Gives the file its size, or keeps the error."""
        try:
            super().truncate(size)
        except OSError as error:
            self._error = self._error or error
        return size

    def check(self):
        """Raises the error, if there was one."""
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def _changeable(first, path):
    with _WrittenFile(path) as written:
        copy = _HDF5Copy(first, written)
        try:
            yield copy
        finally:
            copy.close()


@contextlib.contextmanager
def copy_of_hdf5(first, output):
    """Yields a copy of a file to write to, which then is at `output`."""
    with snapshots.whole_file(output) as unfinished:
        file_errors.copy(first.path, unfinished, first.expected)
        with _changeable(first, unfinished) as copy:
            yield copy


@contextlib.contextmanager
def copy_of_keras(first, output):
    """Yields a copy of an archive to write to, which then is at `output`."""
    with snapshots.whole_file(output) as unfinished:
        weights = unfinished.with_name(_WEIGHTS)
        file_errors.check_room(weights.parent, first.archive.size(_WEIGHTS))
        first.archive.extract(_WEIGHTS, weights)
        with _changeable(first, weights) as copy:
            yield copy
        with zipfile.ZipFile(unfinished, "w") as target:
            first.archive.copy(target, {_WEIGHTS: weights})
