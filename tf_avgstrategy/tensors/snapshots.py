"""Snapshots: tensors and settings as bytes, and in a file that is whole."""

import contextlib
import io
import json
import os
import pathlib
import shutil

import numpy as np
import tensorflow as tf

__all__ = [
    "move",
    "move_all",
    "pack",
    "path_of_unfinished",
    "read",
    "unfinished_folder",
    "unpack",
    "whole_file",
    "with_prefix",
    "write",
]

_FORMAT = 1


def pack(header, tensors):
    """Returns tensors and what belongs to them as bytes.

    Args:
        header: Dict that JSON can hold.
        tensors: Dict from string to tensor or NumPy array, of any dtype.
    """
    arrays = {
        name: np.frombuffer(tf.io.serialize_tensor(tensor).numpy(), np.uint8)
        for name, tensor in tensors.items()
    }
    about = {
        "format": _FORMAT,
        "header": header,
        "dtypes": {
            name: tf.convert_to_tensor(tensor).dtype.name
            for name, tensor in tensors.items()
        },
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack(data):
    """Returns the header and the dict of tensors that were packed.

    Raises:
        ValueError: If the bytes are none of `pack`.
    """
    try:
        with np.load(io.BytesIO(data)) as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']}")
            tensors = {
                name: tf.io.parse_tensor(arrays[name].tobytes(), dtype)
                for name, dtype in about["dtypes"].items()
            }
    # NumPy, zipfile and TensorFlow raise a dozen kinds for damaged bytes.
    except Exception as error:
        raise ValueError(
            "A snapshot must be one that this library wrote, in format "
            f"{_FORMAT}. Received: {len(data)} bytes that are not "
            f"({error}). Remove the file, or resume with the release that "
            "wrote it."
        ) from error
    return about["header"], tensors


def with_prefix(tensors, prefix):
    """Returns the tensors whose names begin so, by what follows."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def write(path, header, tensors):
    """Writes a snapshot to a file, of which there is the old or the new one.

    Also if the process is killed or the machine fails in the meantime.

    Args:
        path: String.
        header: See `pack`.
        tensors: See `pack`.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        unfinished.write_bytes(pack(header, tensors))


@contextlib.contextmanager
def whole_file(path):
    """Lets a file be written so that there is the old or the new one.

    Args:
        path: String or `pathlib.Path` of a file. Its folder exists.

    Yields:
        A path of the same name in a folder beside it, to be written to. The
        file takes its place if nothing was raised.
    """
    path = pathlib.Path(path)
    with unfinished_folder(path) as folder:
        yield folder / path.name
        move(folder / path.name, path)


@contextlib.contextmanager
def unfinished_folder(path):
    """Yields an empty folder beside a path, which is removed at the end."""
    path = pathlib.Path(path)
    folder = path_of_unfinished(path)
    # A process that was killed may have left it.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # The name is safe once its folder is.
    with contextlib.suppress(OSError):
        _to_disk(path.parent)


def path_of_unfinished(path):
    """Returns the path of the folder that `unfinished_folder` would make."""
    path = pathlib.Path(path)
    return path.with_name(f".{path.name}.unfinished")


def move(source, target):
    """Gives a file, or a folder, its place once it is on the disk.

    Args:
        source: `pathlib.Path`.
        target: `pathlib.Path` on the same disk. What is a folder must be free.
    """
    _all_to_disk(source)
    source.replace(target)


def move_all(sources, targets, aside):
    """Gives several files, or a folder, their places, or none of them.

    Until the last file has its place, there is the old one in it.

    Args:
        sources: List of `pathlib.Path`, all files, or one folder.
        targets: List of as many, on the same disk.
        aside: `pathlib.Path`, free, for what has the places now.
    """
    for source in sources:
        _all_to_disk(source)
    aside.mkdir()
    begun = []
    try:
        for source, target in zip(sources, targets):
            if target != targets[-1] or target.is_dir():
                begun.append((target, os.path.lexists(target)))
                if os.path.lexists(target):
                    target.replace(aside / target.name)
            source.replace(target)
    except BaseException:
        for target, was_there in reversed(begun):
            if os.path.lexists(aside / target.name):
                (aside / target.name).replace(target)
            elif not was_there:
                target.unlink(missing_ok=True)
        raise


def _all_to_disk(source):
    inside = [path for path in source.rglob("*") if path.is_file()]
    for path in [*inside, source]:
        _to_disk(path)


def _to_disk(path):
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read(path):
    """Returns what `write` wrote, or None if there is no such file."""
    path = pathlib.Path(path)
    return unpack(path.read_bytes()) if path.exists() else None
