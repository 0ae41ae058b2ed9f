"""Whatever a file is damaged by, there is the right mean or one kind of error.

And a full disk, or an output in the way of a model, leaves all as it was.
"""

import contextlib
import errno
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.files import file_errors
from tf_avgstrategy.tensors import snapshots
from tf_avgstrategy.tools import cli

KINDS = ["keras", "packed", "weights", "checkpoint", "saved_model"]
SUFFIXES = {"keras": ".keras", "packed": ".keras", "weights": ".weights.h5"}
CASES = 60


def save(value, folder, name, kind):
    """Saves a model of equal slots and returns the path."""
    model = toys.slope_model("adam")
    model.optimizer.build(model.trainable_variables)
    for variable in (model.layers[0].kernel, *model.optimizer.variables[2:]):
        variable.assign(tf.fill(variable.shape, value))
    path = folder / f"{name}{SUFFIXES.get(kind, '')}"
    if kind in ("keras", "packed"):
        model.save(path)
    if kind == "packed":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    elif kind == "weights":
        model.save_weights(path)
    elif kind == "checkpoint":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.write(str(path))
    elif kind == "saved_model":
        model.export(path, verbose=False)
    return path


def contents(folder):
    return {
        path: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def values(path, kind):
    """Returns the bytes of all variables that a file holds."""
    if kind in ("checkpoint", "saved_model"):
        prefix = path / "variables/variables" if path.is_dir() else path
        reader = tf.train.load_checkpoint(str(prefix))
        return {
            key: reader.get_tensor(key).tobytes()
            for key in reader.get_variable_to_shape_map()
            if "GRAPH" not in key
        }
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()].tobytes()

    with contextlib.ExitStack() as stack:
        if kind != "weights":
            archive = stack.enter_context(zipfile.ZipFile(path))
            assert archive.testzip() is None
            path = stack.enter_context(archive.open("model.weights.h5"))
        stack.enter_context(h5py.File(path)).visititems(visit)
    return found


def damages(files, seed):
    """Yields files and what is in them after one damage each."""
    rng = random.Random(seed)
    for _ in range(CASES):
        path, data = rng.choice(files)
        place = rng.randrange(len(data))
        if rng.random() < 0.25:
            yield path, data[:place]
            continue
        data = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 8])):
            data[place] ^= rng.randrange(1, 256)
            place = rng.randrange(len(data))
        yield path, bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_damage(tmp_path, kind):
    models, outputs = tmp_path / "models", tmp_path / "outputs"
    models.mkdir()
    outputs.mkdir()
    paths = [save(v, models, f"m{v}", kind) for v in (1.0, 4.0)]
    output = outputs / f"mean{SUFFIXES.get(kind, '')}"
    avg.average_models(paths, output=output)
    right = values(output, kind)
    shutil.rmtree(outputs)
    before = contents(models)
    num_errors = 0
    for path, damaged in damages(list(before.items()), seed=KINDS.index(kind)):
        path.write_bytes(damaged)
        outputs.mkdir()
        try:
            avg.average_models(paths, output=output)
        except ValueError as error:
            num_errors += 1
            assert str(models) in str(error)
            assert "\n" not in str(error)
            assert not list(outputs.iterdir())
        else:
            # HDF5 has no checksum: what is finite may be another value.
            assert kind == "weights" or values(output, kind) == right
        assert contents(models) == {**before, path: damaged}
        path.write_bytes(before[path])
        shutil.rmtree(outputs)
    assert num_errors > CASES / 4
    if kind != "saved_model":
        # All of a file but for dates and the like is guarded there.
        assert kind == "weights" or num_errors > CASES * 3 / 4


def test_what_each_library_raises_is_one_kind():
    for error in (
        OSError("a\n b"),
        KeyError("a b"),
        RuntimeError("a b"),
        zipfile.BadZipFile("a b"),
        tf.errors.DataLossError(None, None, "a b"),
    ):
        with (
            pytest.raises(
                ValueError,
                match=r"^A file must be one, and whole\. Received: 'p' "
                r"\('?a b'?\)\. Copy or save it again, or leave it out\.$",
            ) as info,
            file_errors.reading("p", "A file must be one"),
        ):
            raise error
        assert info.value.__cause__ is error


@pytest.mark.parametrize(
    "error, number",
    [
        (OSError(errno.EROFS, "read only"), errno.EROFS),
        (
            tf.errors.ResourceExhaustedError(
                None, None, "a; No space left on device"
            ),
            errno.ENOSPC,
        ),
        (tf.errors.UnknownError(None, None, "something"), errno.EIO),
    ],
)
def test_what_cannot_be_written_keeps_its_number(error, number):
    with (
        pytest.raises(
            OSError, match="written whole. Received: 'p' .* write elsewhere"
        ) as info,
        file_errors.writing("p"),
    ):
        raise error
    assert info.value.errno == number


FULL_DISK = """
import json, resource, signal, sys
import tf_avgstrategy
# Beyond a limit a write fails, as on a disk that is full.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for paths, limits in json.loads(sys.argv[1]):
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            tf_avgstrategy.average_models(paths, output=paths[0])
        except OSError as error:
            print(json.dumps([paths[0], error.errno, str(error)]))
"""


def test_a_full_disk(tmp_path):
    jobs = []
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        paths = [save(v, folder, f"m{v}", kind) for v in (1.0, 4.0)]
        largest = max(len(data) for data in contents(folder).values())
        # The last of what is written, and what comes before.
        limits = [largest * 9 // 10, largest // 2, 100, 1]
        jobs.append(([str(path) for path in paths], limits))
    # Where the mean of packed values takes more than those of the first one:
    # HDF5 must not meet the error, or it ends the process.
    paths = [str(tmp_path / f"{name}.weights.h5") for name in "ab"]
    noise = np.random.default_rng(0).normal(size=10**5).astype("float32")
    for path, array in zip(paths, (np.zeros_like(noise), noise)):
        with h5py.File(path, "w") as file:
            file.create_dataset("vars/0", data=array, compression="gzip")
    jobs.append((paths, [50_000, 200_000, 300_000]))
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, json.dumps(jobs)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == sum(len(limits) for _, limits in jobs)
    for output, number, text in lines:
        assert number == errno.EFBIG
        # A packed archive is unpacked there.
        assert output in text or tempfile.gettempdir() in text
        assert "Nothing of it is left" in text
    assert contents(tmp_path) == before


class TestOutput:
    @pytest.fixture(params=KINDS)
    def kind(self, request):
        return request.param

    @pytest.fixture
    def models(self, tmp_path, kind):
        return [save(v, tmp_path, f"m{v}", kind) for v in (1.0, 4.0)]

    @pytest.mark.parametrize("make", [os.symlink, os.link])
    def test_a_link_is_replaced_and_not_what_it_leads_to(
        self, tmp_path, kind, models, make
    ):
        before = contents(tmp_path)
        output = tmp_path / f"link{SUFFIXES.get(kind, '')}"
        if kind == "saved_model" and make is os.symlink:
            output.symlink_to(models[0])
        else:
            for path in tmp_path.glob(f"{models[0].name}*"):
                rest = path.name.removeprefix(models[0].name)
                if path.is_dir():
                    shutil.copytree(path, output, copy_function=make)
                else:
                    make(path, output.with_name(output.name + rest))
        avg.average_models([output, models[1]], output=output)
        after = contents(tmp_path)
        assert {path: after[path] for path in before} == before
        mean = values(output, kind)
        assert not output.is_symlink()
        avg.average_models(models, output=output)
        assert values(output, kind) == mean
        assert mean not in [values(model, kind) for model in models]

    def test_what_fails_between_files_leaves_the_old_ones(
        self, tmp_path, kind, models, monkeypatch
    ):
        if kind == "checkpoint":
            # As a process leaves them that was killed.
            for place in range(2):
                name = f"{models[0].name}.data-0000{place}-of-00002"
                (tmp_path / name).write_bytes(b"half")
        before = contents(tmp_path)
        for fails_at in range(10):
            calls = []

            def replace(path, target, fails_at=fails_at, calls=calls):
                calls.append(target)
                if len(calls) == fails_at + 1:
                    raise OSError(errno.EIO, "on purpose")
                os.replace(path, target)

            monkeypatch.setattr(pathlib.Path, "replace", replace)
            try:
                avg.average_models(models, output=models[0])
            except OSError as error:
                assert error.errno == errno.EIO
                assert contents(tmp_path) == before
            else:
                break
        assert fails_at == {"checkpoint": 4, "saved_model": 2}.get(kind, 1)
        monkeypatch.undo()
        assert values(models[0], kind) != values(models[1], kind)
        assert not [p for p in contents(tmp_path) if p.read_bytes() == b"half"]

    def test_in_the_folder_that_is_removed(self, tmp_path, kind, models):
        folder = snapshots.path_of_unfinished(models[0])
        folder.mkdir()
        moved = folder / models[1].name
        for path in tmp_path.glob(f"{models[1].name}*"):
            path.rename(folder / path.name)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="apart from them.*is removed"):
            avg.average_models([models[0], moved], output=models[0])
        assert contents(tmp_path) == before


def test_an_output_within_or_around_a_saved_model(tmp_path):
    inner, outer = (
        save(v, tmp_path, f"m{v}", "saved_model") for v in (1.0, 4.0)
    )
    inner = inner.rename(outer / "inner")
    before = contents(tmp_path)
    for output in (outer, outer / "new", outer / "assets" / "new"):
        with pytest.raises(ValueError, match=r"apart from them.*/m4\.0"):
            avg.average_models([outer, inner], output=output)
    taken = tmp_path / "taken"
    taken.write_text("text")
    with pytest.raises(ValueError, match="a free name for a SavedModel"):
        avg.average_models([inner], output=taken)
    taken.unlink()
    assert contents(tmp_path) == before


def test_links_in_a_saved_model(tmp_path):
    path = save(1.0, tmp_path, "m", "saved_model")
    (tmp_path / "text").write_text("text")
    (path / "assets" / "text").symlink_to(tmp_path / "text")
    avg.average_models([path], output=tmp_path / "mean")
    assert (tmp_path / "mean" / "assets" / "text").read_text() == "text"
    (path / "assets" / "again").symlink_to(path)
    with pytest.raises(ValueError, match="again' is a link, and not to a file"):
        avg.average_models([path], output=tmp_path / "mean")


def test_a_checkpoint_that_says_more_than_it_has(tmp_path):
    path = save(1.0, tmp_path, "m", "checkpoint")
    data = pathlib.Path(f"{path}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(ValueError, match=r"tensors cannot have \d+ .* in 10"):
        avg.average_models([path], output=tmp_path / "mean")


def test_a_damaged_string_of_a_checkpoint(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        text = tf.Variable("some text")
        tf.train.Checkpoint(w=tf.Variable(1.0), text=text).write(path)
    data = pathlib.Path(f"{paths[1]}.data-00000-of-00001")
    data.write_bytes(data.read_bytes().replace(b"some text", b"same text"))
    with pytest.raises(ValueError, match=f"and whole. Received: '{paths[1]}'"):
        avg.average_models(paths, output=tmp_path / "mean")


def test_a_damaged_graph_of_a_saved_model(tmp_path):
    path = save(1.0, tmp_path, "m", "saved_model")
    graph = path / "saved_model.pb"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"and whole. Received: '{path}'"):
        avg.average_models([path], output=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    "config, reason",
    [
        ("[" * 10**5, "(recursion|overflow)"),
        (b"\xff\xfe\xff", "decode"),
        ("{", "Expecting"),
        (" " * (2**26 + 1), "more than 67108864"),
    ],
)
def test_configs(tmp_path, config, reason):
    path = tmp_path / "a.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", config)
        archive.writestr("model.weights.h5", "")
    with pytest.raises(ValueError, match=rf"a\.keras' \(.*{reason}.*\)\."):
        avg.average_models([path])


class TestCommand:
    def error(self, monkeypatch, capfd, *arguments):
        arguments = ["tf-avgstrategy", "average", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        assert exit_info.value.code == 1
        (line,) = capfd.readouterr().err.splitlines()
        return line

    @pytest.mark.parametrize("kind", KINDS)
    def test_damage(self, tmp_path, monkeypatch, capfd, kind):
        paths = [save(v, tmp_path, f"m{v}", kind) for v in (1.0, 4.0)]
        for damaged in tmp_path.rglob("m4.0*"):
            if damaged.is_dir():
                damaged = damaged / "variables" / "variables.index"
            damaged.write_bytes(damaged.read_bytes()[:-30])
        before = contents(tmp_path)
        output = tmp_path / f"mean{SUFFIXES.get(kind, '')}"
        line = self.error(monkeypatch, capfd, *paths, f"--output={output}")
        assert line.startswith("tf-avgstrategy average: A")
        assert f"and whole. Received: '{paths[1]}' (" in line
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_full_disk(self, tmp_path, monkeypatch, capfd, kind):
        paths = [save(v, tmp_path, f"m{v}", kind) for v in (1.0, 4.0)]
        before = contents(tmp_path)

        def full(number):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        output = tmp_path / f"mean{SUFFIXES.get(kind, '')}"
        line = self.error(monkeypatch, capfd, *paths, f"--output={output}")
        assert f"Received: '{output}' (No space left" in line
        assert contents(tmp_path) == before
