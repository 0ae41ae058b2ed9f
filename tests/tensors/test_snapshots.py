"""Snapshots are whole or an error, whatever they hold."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tf_avgstrategy.tensors import snapshots

TENSORS = {
    "float16": tf.constant([1.5, -0.0], tf.float16),
    "bfloat16": tf.constant([[3.25]], tf.bfloat16),
    "float32": tf.constant([np.nan, np.inf, 1e-45], tf.float32),
    "float64": tf.constant(1 + 2**-40, tf.float64),
    "int64": tf.constant([2**53 + 1, -1], tf.int64),
    "bool": tf.constant([True, False]),
    "string": tf.constant(["\u00fc", ""]),
    "empty": tf.zeros([0, 3]),
    "a/b": np.arange(3, dtype="uint8"),
}
HEADER = {"a": [1, None, "text"], "inf": float("inf")}


def test_everything_comes_back_bit_for_bit():
    header, tensors = snapshots.unpack(snapshots.pack(HEADER, TENSORS))
    assert header == HEADER
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        expected = tf.convert_to_tensor(tensor)
        assert tensors[name].dtype == expected.dtype
        assert tensors[name].shape == expected.shape
        ours, theirs = tensors[name].numpy(), expected.numpy()
        if expected.dtype == tf.string:
            assert ours.tolist() == theirs.tolist()
        else:
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_what_is_cut_off_is_an_error(length):
    data = snapshots.pack(HEADER, TENSORS)
    with pytest.raises(ValueError, match="A snapshot must be one"):
        snapshots.unpack(data[:length])


def test_other_files_are_an_error():
    with pytest.raises(ValueError, match="9 bytes that are not"):
        snapshots.unpack(b"{'a': 1}\n")


def test_with_prefix():
    tensors = {"a/x": 1, "a/y/z": 2, "b/x": 3}
    assert snapshots.with_prefix(tensors, "a/") == {"x": 1, "y/z": 2}


class TestFile:
    def test_is_read_as_it_was_written(self, tmp_path):
        path = tmp_path / "new" / "file.npz"
        assert snapshots.read(path) is None
        snapshots.write(path, {"n": 1}, {})
        snapshots.write(path, {"n": 2}, TENSORS)
        header, tensors = snapshots.read(path)
        assert header == {"n": 2}
        assert len(tensors) == len(TENSORS)
        assert [p.name for p in path.parent.iterdir()] == ["file.npz"]

    def test_a_failed_write_leaves_the_old_one(self, tmp_path, monkeypatch):
        path = tmp_path / "file.npz"
        snapshots.write(path, {"n": 1}, {})
        before = path.read_bytes()

        def fail(number):
            raise OSError("on purpose")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="on purpose"):
            snapshots.write(path, {"n": 2}, TENSORS)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["file.npz"]

    def test_what_a_killed_process_left_disturbs_nobody(self, tmp_path):
        path = tmp_path / "file.npz"
        left = tmp_path / ".file.npz.unfinished"
        left.mkdir()
        (left / "file.npz").write_bytes(b"half")
        snapshots.write(path, {"n": 1}, {})
        assert snapshots.read(path)[0] == {"n": 1}
        assert not left.exists()
