"""HDF5 files that would hang or crash HDF5, or lead elsewhere, are errors."""

import struct
import zipfile

import h5py
import numpy as np
import pytest

from tf_avgstrategy.files import model_files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.weights.h5"


def refused(path, reason):
    message = rf"in HDF5 format.*, and whole\. .*'{path}' \({reason}.*\)\."
    return pytest.raises(ValueError, match=message)


def patch(path, place, data):
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    path.write_bytes(content)


def test_what_keras_writes_is_taken(path):
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "dense"
        group["0"] = np.ones((3, 4), "float32")
        group["1"] = np.float64(2)
        group["2"] = np.array([True])
        group["3"] = np.zeros((0, 2), "float32")
        group["4"] = ["text", ""]
        group["5"] = np.zeros(2, "V2")
        group["5"].attrs["dtype"] = "bfloat16"
        packed = {"chunks": (100,), "compression": "gzip", "shuffle": True}
        group.create_dataset("6", data=np.zeros(10**6), **packed)
        group.create_dataset("7", data=np.arange(5), chunks=(3,))
    with model_files.HDF5File(str(path)) as file:
        assert len(file.variables) == 8
        assert file.read("layers/dense/vars/5").dtype == "bfloat16"
        assert file.read("layers/dense/vars/7").tolist() == [0, 1, 2, 3, 4]


def test_values_in_other_files(path, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8))
    with h5py.File(path, "w") as file:
        external = [(str(secret), 0, 8)]
        file.create_dataset("vars/0", (2,), "float32", external=external)
    with refused(path, "'vars/0' has its values in another file"):
        model_files.HDF5File(str(path))
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((2,), "float32")
        layout[:] = h5py.VirtualSource(tmp_path / "b.h5", "x", (2,))
        file.create_virtual_dataset("vars/0", layout)
    with refused(path, "'vars/0' has its values in another file"):
        model_files.HDF5File(str(path))
    with h5py.File(path, "w") as file:
        file["vars/0"] = np.float32([1])
        file["vars/1"] = h5py.ExternalLink("b.h5", "x")
    with refused(path, "'vars/1' is a link to another file"):
        model_files.HDF5File(str(path))


@pytest.mark.parametrize("options", [{}, {"chunks": (2**20,)}])
def test_values_that_were_never_written(path, options):
    with h5py.File(path, "w") as file:
        file.create_dataset("vars/0", (10**12,), "float32", **options)
    with refused(path, "'vars/0' cannot have 4000000000000 bytes, stored in 0"):
        model_files.HDF5File(str(path))


def test_more_values_than_the_file_has_bytes(path):
    # As many as its layout says, which is said in two places.
    count = 10**4
    with h5py.File(path, "w") as file:
        file["vars/0"] = np.zeros(count, "uint8")
    data = path.read_bytes()
    assert data.count(struct.pack("<Q", count)) >= 2
    larger = struct.pack("<Q", 2**40)
    path.write_bytes(data.replace(struct.pack("<Q", count), larger))
    # HDF5 1.14 says so itself.
    with refused(path, ".*(invalid dataset size|larger than the file).*"):
        model_files.HDF5File(str(path))


def test_a_type_that_would_be_converted(path):
    with h5py.File(path, "w") as file:
        odd = h5py.h5t.IEEE_F32LE.copy()
        odd.set_fields(31, 22, 9, 0, 22)
        space = h5py.h5s.create_simple((1,))
        h5py.h5d.create(file.id, b"0", odd, space).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.float32([1])
        )
    with refused(path, "'0' has a type that is none of NumPy's"):
        model_files.HDF5File(str(path))


def test_a_dtype_that_does_not_fit(path):
    with h5py.File(path, "w") as file:
        file["vars/0"] = np.float32([1])
        file["vars/0"].attrs["dtype"] = "bfloat16"
    with refused(path, "'/vars/0' has float32 in bfloat16"):
        model_files.HDF5File(str(path))


def test_many_names(path):
    with h5py.File(path, "w") as file:
        file["vars/0"] = np.float32([1])
        file["vars"].attrs["name"] = ["a", "b"]
    with refused(path, "'/vars' has several for a name"):
        model_files.HDF5File(str(path))


@pytest.mark.parametrize("is_packed", [False, True])
def test_strings_that_never_end(path, tmp_path, is_packed):
    with h5py.File(path, "w") as file:
        file["vars/0"] = np.float32([1])
        file["vars"].attrs["name"] = "dense"
    heap = path.read_bytes().index(b"GCOL")
    # An object that is free, and of no size: HDF5 would stay there.
    patch(path, heap + 16, bytes(16))
    if is_packed:
        packed = tmp_path / "a.keras"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", "{}")
            archive.write(path, "model.weights.h5")
        with pytest.raises(ValueError, match=r"'.*a\.keras' \(its strings"):
            model_files.KerasFile(str(packed))
    else:
        with refused(path, "its strings overlap"):
            model_files.HDF5File(str(path))


def test_heaps_at_the_edge_of_what_is_read_at_once(path):
    signature = b"GCOL"
    for place in range(2**20 - 25, 2**20 + 2):
        heap = struct.pack("<4sIQ", signature, 1, 4096) + bytes(4080)
        path.write_bytes(bytes(place) + heap)
        with refused(path, "its strings overlap"):
            model_files.HDF5File(str(path))
