"""Errors of files: one that is damaged, one that cannot be written."""

import contextlib
import errno
import os
import shutil
import struct
import zipfile
import zlib

import tensorflow as tf
from google.protobuf import message

__all__ = ["check_room", "copy", "pieces", "reading", "writing"]

# What Python, HDF5, TensorFlow and protocol buffers raise for bytes that make
# no sense. Kinds of Python's own come from h5py and zipfile as well.
_DAMAGE = (
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
    message.DecodeError,
    struct.error,
    tf.errors.OpError,
    zipfile.BadZipFile,
    zlib.error,
)
_PIECE_BYTES = 2**20


@contextlib.contextmanager
def reading(path, expected):
    """Makes one kind of error of all that reading a damaged file raises.

    Only calls that read the file belong inside, or it is blamed for others.

    Args:
        path: String.
        expected: String, the sentence that says what the file must be.

    Raises:
        ValueError: If anything is raised that damage can cause.
    """
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(
            f"{expected}, and whole. Received: {path!r} "
            f"({_on_one_line(error)}). Copy or save it again, or leave it out."
        ) from error


@contextlib.contextmanager
def writing(path):
    """Makes one kind of error of all that stops a file from being written.

    Args:
        path: String or `pathlib.Path`.

    Raises:
        OSError: With the `errno` of what the system said: a full disk, a
            quota, missing permission.
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        # What Python says begins with the number, which is said already.
        reason = getattr(error, "strerror", None) or _on_one_line(error)
        raise OSError(
            _number(error),
            "Files must be written whole. Received: "
            f"{str(path)!r} ({reason}). Nothing of it is left, "
            "and what was there before is. Make room or get permission there, "
            "or write elsewhere.",
        ) from error


def _on_one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


def _number(error):
    """Returns the number of a system's error, which TensorFlow has as text."""
    if getattr(error, "errno", None) is not None:
        return error.errno
    numbers = [n for n in errno.errorcode if os.strerror(n) in str(error)]
    return numbers[0] if numbers else errno.EIO


def check_room(folder, num_bytes):
    """Refuses what a disk cannot hold, before others notice.

    Args:
        folder: String or `pathlib.Path`.
        num_bytes: Int, what is to be written.

    Raises:
        OSError: If there is less room.
    """
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {num_bytes} bytes"
        )


def pieces(file, path, expected):
    """Yields all bytes of an open file. See `reading` for the others."""
    while True:
        with reading(path, expected):
            piece = file.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece


def copy(source, target, expected):
    """Copies a file, so that errors are known to be of the one or the other.

    Args:
        source: String or `pathlib.Path`.
        target: String or `pathlib.Path`.
        expected: See `reading`.
    """
    with contextlib.ExitStack() as stack:
        with reading(str(source), expected):
            file = stack.enter_context(open(source, "rb"))
        written = stack.enter_context(open(target, "wb"))
        for piece in pieces(file, str(source), expected):
            written.write(piece)
