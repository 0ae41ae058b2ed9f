"""Files of models: the variables that they hold, one at a time, and copies."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import struct
import tempfile
import zipfile

import h5py
import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_avgstrategy import snapshots
from tf_avgstrategy import variable_rules

__all__ = [
    "HDF5File",
    "KerasFile",
    "ModelInMemory",
    "copy_of_hdf5",
    "copy_of_keras",
]

_WEIGHTS = "model.weights.h5"
_CONFIG = "config.json"
# Elements that are read at once, 4 MB of float32.
_PART_ELEMENTS = 2**20


class HDF5File:
    """Variables of a `.weights.h5` file that any backend of Keras wrote.

    Args:
        path: String.

    Attributes:
        path: String.
        variables: Dict from name, the path in the file, to `SavedVariable`.
        makers: Dict from the path of an optimizer to its name without number.
    """

    def __init__(self, path):
        self.path = path
        self._stack = contextlib.ExitStack()
        with self._stack as stack:
            source, batch_norms = self._open(stack)
            try:
                self._file = stack.enter_context(h5py.File(source, "r"))
            except OSError as error:
                raise ValueError(
                    "A file of weights must be one in HDF5 format that Keras "
                    f"wrote. Received: {path!r} ({error}). Save the model "
                    "again."
                ) from error
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
            name = str(self._file[folder or "/"].attrs.get("name", ""))
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
        return _as_array(self._file[name][part], self.variables[name].dtype)


def _dtype(dataset):
    if dataset.attrs.get("dtype") == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return dataset.dtype


def _as_array(value, dtype):
    # HDF5 knows no bfloat16: two bytes without a meaning.
    return np.asarray(value).view(dtype) if dtype.kind == "V" else value


class KerasFile(HDF5File):
    """Variables of a `.keras` file, whose layers are in its config."""

    def _open(self, stack):
        try:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(
                "A `.keras` file must be the archive that `model.save` "
                f"writes. Received: {self.path!r} ({error}). Save the model "
                "again."
            ) from error
        names = archive.namelist()
        if _WEIGHTS not in names or _CONFIG not in names:
            raise ValueError(
                f"A `.keras` file must hold {_CONFIG!r} and {_WEIGHTS!r}. "
                f"Received: {self.path!r} with {names}. Save the model with "
                "`model.save`."
            )
        config = json.loads(archive.read(_CONFIG))
        return (
            stack.enter_context(_weights_of(self.path, archive)),
            set(_batch_norms(config)),
        )


def _weights_of(path, archive):
    """Opens the weights in an archive, to be read in any order."""
    info = archive.getinfo(_WEIGHTS)
    if info.compress_type == zipfile.ZIP_STORED:
        return io.BufferedReader(_StoredFile(path, info))
    # Backwards, zipfile would unpack from the start again each time.
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115
    with archive.open(info) as packed:
        shutil.copyfileobj(packed, unpacked)
    return unpacked


class _StoredFile(io.RawIOBase):
    """What an archive holds without compression, where it lies in it."""

    def __init__(self, path, info):
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(info.header_offset + 26)
        # Of the local header: 30 bytes, the name, and what else there is.
        name_length, extra_length = struct.unpack("<HH", self._file.read(4))
        self._start = info.header_offset + 30 + name_length + extra_length
        self._size = info.file_size
        self.seek(0)

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        origin = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self.tell(),
            os.SEEK_END: self._size,
        }[whence]
        return self._file.seek(self._start + origin + offset) - self._start

    def tell(self):
        return self._file.tell() - self._start

    def readinto(self, buffer):
        left = max(0, self._size - self.tell())
        return self._file.readinto(memoryview(buffer)[:left])

    def close(self):
        self._file.close()
        super().close()


def _batch_norms(config):
    """Yields the names of layers with a moving variance, at any depth."""
    if isinstance(config, dict):
        own = config.get("config")
        if isinstance(own, dict) and "moving_variance_initializer" in own:
            yield own.get("name")
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

    def __init__(self, file):
        self._file = file

    def write(self, name, part, value):
        """Replaces a part of a variable."""
        dataset = self._file[name]
        dataset[part] = np.asarray(value).view(dataset.dtype)


@contextlib.contextmanager
def copy_of_hdf5(first, output):
    """Yields a copy of a file to write to, which then is at `output`."""
    with snapshots.whole_file(output) as unfinished:
        shutil.copyfile(first.path, unfinished)
        with h5py.File(unfinished, "r+") as file:
            yield _HDF5Copy(file)


@contextlib.contextmanager
def copy_of_keras(first, output):
    """Yields a copy of an archive to write to, which then is at `output`."""
    with snapshots.whole_file(output) as unfinished:
        weights = unfinished.with_name(_WEIGHTS)
        with zipfile.ZipFile(first.path) as archive:
            with archive.open(_WEIGHTS) as source, weights.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            with h5py.File(weights, "r+") as file:
                yield _HDF5Copy(file)
            with zipfile.ZipFile(unfinished, "w") as copy:
                for info in archive.infolist():
                    if info.filename == _WEIGHTS:
                        copy.write(weights, _WEIGHTS, info.compress_type)
                    else:
                        with (
                            archive.open(info) as source,
                            copy.open(info, "w") as target,
                        ):
                            shutil.copyfileobj(source, target)
