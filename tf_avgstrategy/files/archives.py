"""Archives: what one holds, proved against its own sizes and checksums."""

import contextlib
import copy
import io
import os
import stat
import struct
import tempfile
import zipfile

from tf_avgstrategy.files import file_errors

__all__ = ["Archive"]

# Deflate packs no tighter: https://zlib.net/zlib_tech.html.
_LARGEST_RATIO = 1032
# Of the local header: signature to time, then lengths of the name and the rest.
_HEADER_BYTES = 30
_LENGTHS_AT = 26


class Archive:
    """A zip archive that may be damaged, or made to do harm.

    Args:
        path: String.
        expected: String, the sentence that says what it must be.

    Attributes:
        names: List of strings.

    Raises:
        ValueError: If it is no archive, names in it are not those of files
            within a folder or occur twice, or if it declares more than it can
            hold.
    """

    def __init__(self, path, expected):
        self._path, self._expected = path, expected
        with contextlib.ExitStack() as stack:
            with file_errors.reading(path, expected):
                self._file = stack.enter_context(open(path, "rb"))
                self._zip = stack.enter_context(zipfile.ZipFile(self._file))
                self._members = {i.filename: i for i in self._zip.infolist()}
                self._check()
            self._stack = stack.pop_all()
        self.names = list(self._members)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _check(self):
        seen = set()
        for info in self._zip.infolist():
            _check_member(info)
            name = info.filename.rstrip("/")
            if name in seen:
                raise ValueError(f"{name!r} is there twice")
            seen.add(name)
        packed = sum(info.compress_size for info in self._zip.infolist())
        if packed > os.fstat(self._file.fileno()).st_size:
            raise ValueError("its parts are larger than the whole")

    def size(self, name):
        """Returns how many bytes there are under a name."""
        return self._members[name].file_size

    def read(self, name, limit):
        """Returns all bytes under a name.

        Raises:
            ValueError: If there are more than `limit`, or if they are damaged.
        """
        with file_errors.reading(self._path, self._expected):
            if self.size(name) > limit:
                raise ValueError(
                    f"{name!r} has {self.size(name)} bytes, more than {limit}"
                )
        return b"".join(self._pieces(name))

    def open(self, name):
        """Returns a file of what is under a name, to be read in any order.

        Raises:
            ValueError: If it is damaged.
            OSError: If it is packed and there is no room to unpack it.
        """
        info = self._members[name]
        if info.compress_type == zipfile.ZIP_STORED:
            for _ in self._pieces(name):
                pass
            return io.BufferedReader(_StoredFile(self._file, info))
        # Backwards, zipfile would unpack from the start again each time.
        with (
            contextlib.ExitStack() as stack,
            file_errors.writing(tempfile.gettempdir()),
        ):
            file_errors.check_room(tempfile.gettempdir(), info.file_size)
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            self._unpack(name, unpacked)
            unpacked.flush()
            stack.pop_all()
            return unpacked

    def extract(self, name, path):
        """Writes what is under a name to a file."""
        with open(path, "wb") as target:
            self._unpack(name, target)

    def copy(self, target, replacements):
        """Writes an archive of the same names, packed in the same way.

        Args:
            target: `zipfile.ZipFile` that is open for writing.
            replacements: Dict from name to `pathlib.Path` of what to write.
        """
        for name, info in self._members.items():
            if name in replacements:
                target.write(replacements[name], name, info.compress_type)
                continue
            # Neither its sizes, which are counted, nor what more it may say.
            fresh = zipfile.ZipInfo(name, info.date_time)
            fresh.compress_type = info.compress_type
            fresh.external_attr = info.external_attr
            fresh.file_size = info.file_size
            with target.open(fresh, "w") as file:
                self._unpack(name, file)

    def _unpack(self, name, target):
        for piece in self._pieces(name):
            target.write(piece)

    def _pieces(self, name):
        """Yields bytes, and raises at their end if they are not the ones."""
        # With one byte more, zipfile reads on when there is more than declared,
        # and compares the checksum when there is not.
        info = copy.copy(self._members[name])
        declared = info.file_size
        info.file_size += 1
        left = declared
        with contextlib.ExitStack() as stack:
            with file_errors.reading(self._path, self._expected):
                file = stack.enter_context(self._zip.open(info))
            for piece in file_errors.pieces(file, self._path, self._expected):
                left -= len(piece)
                yield piece
        with file_errors.reading(self._path, self._expected):
            if left:
                raise ValueError(
                    f"{name!r} has {'less' if left > 0 else 'more'} than the "
                    f"{declared} bytes that it should have"
                )


def _check_member(info):
    name = info.orig_filename
    parts = info.filename.removesuffix("/").split("/")
    if (
        name != info.filename
        or "\\" in name
        or ":" in parts[0]
        or {"", ".", ".."} & {*parts}
    ):
        raise ValueError(f"{name!r} is no name within a folder")
    if stat.S_IFMT(info.external_attr >> 16) not in (
        0,
        stat.S_IFREG,
        stat.S_IFDIR,
    ):
        raise ValueError(f"{name!r} is neither a file nor a folder")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name!r} is neither stored nor deflated")
    is_stored = info.compress_type == zipfile.ZIP_STORED
    ratio = 1 if is_stored else _LARGEST_RATIO
    if info.file_size > ratio * info.compress_size:
        raise ValueError(
            f"{name!r} cannot have {info.file_size} bytes, packed into "
            f"{info.compress_size}"
        )


class _StoredFile(io.RawIOBase):
    """What an archive holds without compression, where it lies in it."""

    def __init__(self, file, info):
        super().__init__()
        self._file = file
        file.seek(info.header_offset + _LENGTHS_AT)
        lengths = struct.unpack("<HH", file.read(4))
        self._start = info.header_offset + _HEADER_BYTES + sum(lengths)
        self._size = info.file_size
        self._place = 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        origin = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._place,
            os.SEEK_END: self._size,
        }[whence]
        self._place = origin + offset
        return self._place

    def tell(self):
        return self._place

    def readinto(self, buffer):
        left = max(0, self._size - self._place)
        # Others read from the same file.
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[:left])
        self._place += count
        return count
