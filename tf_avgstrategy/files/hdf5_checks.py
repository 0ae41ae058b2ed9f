"""HDF5 files: whether one can be read safely, damaged or made to do harm."""

import contextlib
import io
import struct

import h5py

__all__ = ["check", "check_heaps"]

# Of HDF5's filters deflate packs most tightly: https://zlib.net/zlib_tech.html.
_LARGEST_RATIO = 1032
# A collection of strings: signature, version, reserved bytes, size of it all;
# in it objects of index, references, reserved bytes, size, and the bytes.
_HEAP = struct.Struct("<4sB3sQ")
_OBJECT = struct.Struct("<HHIQ")
_SIGNATURE = b"GCOL"
_SMALLEST_HEAP = 4096
_PIECE_BYTES = 2**20


def check(file):
    """Refuses what is elsewhere, and what is said to be but is not there.

    Args:
        file: `h5py.File`.

    Raises:
        ValueError: If a link leads to another file, if a dataset is elsewhere,
            larger than what is stored of it, or of a type that would have to be
            converted, or if addresses have other lengths than h5py gives them.
    """
    if file.id.get_create_plist().get_sizes() != (8, 8):
        raise ValueError("its addresses and sizes do not have 8 bytes")
    # h5py does not let errors out of this one.
    link = file.id.links.visit(_elsewhere, info=True)
    if link is not None:
        raise ValueError(f"{link!r} is a link to another file")
    left = file.id.get_filesize()

    def check_item(name, item):
        nonlocal left
        if isinstance(item, h5py.Dataset):
            _check_dataset(name, item)
            left -= item.id.get_storage_size()
            if left < 0:
                raise ValueError("its datasets are larger than the file")

    file.visititems(check_item)


def _elsewhere(name, link):
    is_here = link.type in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT)
    return None if is_here else name.decode()


def _check_dataset(name, dataset):
    # HDF5 1.14 overruns its stack when it converts from a damaged type.
    plain = h5py.h5t.py_create(dataset.dtype, logical=True)
    if not dataset.id.get_type().equal(plain):
        raise ValueError(f"{name!r} has a type that is none of NumPy's")
    layout = dataset.id.get_create_plist()
    if dataset.is_virtual or layout.get_external_count():
        raise ValueError(f"{name!r} has its values in another file")
    ratio = _LARGEST_RATIO if layout.get_nfilters() else 1
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > ratio * stored:
        raise ValueError(
            f"{name!r} cannot have {dataset.nbytes} bytes, stored in {stored}"
        )


def check_heaps(source):
    """Refuses strings at which HDF5 1.14 would read for ever.

    Args:
        source: Path, or a binary file that can be read in any order, which is
            left at its begin.
    """
    with contextlib.ExitStack() as stack:
        if not isinstance(source, io.IOBase):
            source = stack.enter_context(open(source, "rb"))
        end = source.seek(0, io.SEEK_END)
        source.seek(0)
        for place in _places_of_heaps(source):
            _check_heap(source, place, end)
        source.seek(0)


def _places_of_heaps(source):
    start, end = 0, b""
    while piece := source.read(_PIECE_BYTES):
        piece = end + piece
        place = piece.find(_SIGNATURE)
        while place >= 0:
            back = source.tell()
            yield start + place
            source.seek(back)
            place = piece.find(_SIGNATURE, place + 1)
        end = piece[1 - len(_SIGNATURE) :]
        start += len(piece) - len(end)


def _check_heap(source, place, end):
    source.seek(place)
    header = source.read(_HEAP.size)
    if len(header) < _HEAP.size:
        return
    _, version, _, size = _HEAP.unpack(header)
    if version != 1 or not _SMALLEST_HEAP <= size <= end - place:
        # By chance among values, or HDF5 refuses it.
        return
    left = size - _HEAP.size
    while left >= _OBJECT.size:
        header = source.read(_OBJECT.size)
        if len(header) < _OBJECT.size:
            return
        index, _, _, size = _OBJECT.unpack(header)
        # What is free has index 0, and counts its header.
        whole = size if index == 0 else _OBJECT.size + -(-size // 8) * 8
        if not _OBJECT.size <= whole <= left:
            raise ValueError("its strings overlap")
        source.seek(whole - _OBJECT.size, io.SEEK_CUR)
        left -= whole
