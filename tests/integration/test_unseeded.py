"""Workers whose script sets no seed read each row once, or say why not."""

import random
import struct
import zlib

import numpy as np
import pytest
import unseeded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """32 images and 32 texts, each of its number."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("images", "texts"):
        (folder / name).mkdir()
    for number in range(unseeded.NUM_ROWS):
        (folder / "images" / f"{number}.png").write_bytes(_gray(number))
        (folder / "texts" / f"{number}.txt").write_text(str(number))
    return str(folder)


def _gray(value):
    """A PNG of 4 x 4 pixels. TensorFlow must not start before workers do."""

    def chunk(kind, data):
        checksum = zlib.crc32(kind + data)
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", checksum)
        )

    pixels = bytes([0, *[value] * 4]) * 4
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [2, 3])
def test_every_row_is_trained_on_once(pools, communicator, size, folder):
    workers = pools(size, communicator).run("unseeded:rows_trained_on", folder)
    for kind in unseeded.WORKS:
        for epoch in range(unseeded.EPOCHS):
            rows = [row for worker in workers for row in worker[kind][epoch]]
            assert sorted(rows) == list(range(unseeded.NUM_ROWS)), kind
    # And they were shuffled, not alike in both epochs where that was asked for.
    for kind in ("a PyDataset that NumPy shuffles", "Dataset.shuffle"):
        first, second = workers[0][kind]
        assert first != second


@pytest.mark.parametrize("size", [2, 3])
def test_other_rows_on_each_worker_are_an_error(some_pools, size):
    workers = some_pools(size).run("unseeded:errors")
    expected = {
        "default_rng": "tensors with other values on worker 1",
        "a PyDataset with default_rng": "other rows on worker 1 than on",
        "a generator with default_rng": "other rows on worker 1 than on",
        "shard": "`Dataset.shard` with other arguments on worker 1",
        "skip and take": "other numbers in `take`, `skip` or `range`, on",
        "filter": "that was given other numbers on worker 1",
        "files": "other names of files, or another order of them, on worker 1",
        "other rows": "tensors with other values on worker 1",
    }
    assert set(expected) == set(unseeded.FAILS)
    for found in workers:
        for kind, text in expected.items():
            assert text in found[kind]
            assert (
                "set `auto_shard_policy` to AutoShardPolicy.OFF"
                in (found[kind])
            )


@pytest.mark.parametrize("kind", ["other rows", "shard", "default_rng"])
def test_each_worker_may_have_rows_of_its_own(some_pool, kind):
    workers = some_pool.run("unseeded:rows_of_own_data", kind)
    if kind == "other rows":
        expected = [list(range(32)), list(range(100, 132))]
    elif kind == "shard":
        expected = [list(range(0, 32, 2)), list(range(1, 32, 2))]
    else:
        expected = [list(range(32))] * 2
    for epochs, rows in zip(workers, expected):
        assert [sorted(epoch) for epoch in epochs] == [rows] * 2


def test_python_and_numpy_draw_the_same_until_the_script_seeds_them(pool):
    workers = pool.run("unseeded:draw_after_the_start")
    (first, *firsts_own), (second, *seconds_own) = workers
    assert first == second
    for rank, (own, later) in enumerate([firsts_own, seconds_own]):
        python = random.Random(rank)
        numpys = np.random.RandomState(rank)
        assert own == [python.random(), numpys.random_sample()]
        assert later == [python.random(), numpys.random_sample()]


def test_masks_of_replicas_stay_apart(some_pool):
    masks = sum(some_pool.run("unseeded:masks_after_the_start"), [])
    assert len(set(masks)) == 4
