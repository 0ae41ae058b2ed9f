import os
import pathlib
import sys
import tarfile

import pytest

from tf_avgstrategy.tools import horovod_build

CMAKE_LISTS = """\
# TF SOURCES
list(APPEND TF_SOURCES "${SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
"""
WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"

# Does what this Python does in a build, except for the work.
FAKE_PYTHON = """\
#!/bin/sh
if [ "$1" = -c ]; then cat "$FAKE/check"; exit $(cat "$FAKE/check_status"); fi
case "$3" in
download) cp "$FAKE/horovod-0.28.1.tar.gz" . ;;
wheel)
    grep -q xla horovod-0.28.1/horovod/tensorflow/CMakeLists.txt && exit 9
    sleep 600 & echo $! > "$FAKE/pid"
    cat "$FAKE/compiler"
    test -s "$FAKE/compiler" && exit 1
    touch "$WHEEL" ;;
esac
exit 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder of the build for this environment."""
    monkeypatch.setenv("TF_AVGSTRATEGY_CACHE", str(tmp_path / "cache"))
    version, _ = horovod_build.find_tensorflow()
    key = horovod_build.Target(version).key
    return tmp_path / "cache" / "tf_avgstrategy" / "horovod" / key


@pytest.fixture
def fake(tmp_path, monkeypatch, folder):
    """A folder that says how a build ends."""
    fake, tools = tmp_path / "fake", tmp_path / "tools"
    source = fake / "horovod-0.28.1" / "horovod" / "tensorflow"
    source.mkdir(parents=True)
    (source / "CMakeLists.txt").write_text(CMAKE_LISTS)
    with tarfile.open(fake / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(fake / "horovod-0.28.1", "horovod-0.28.1")
    for name, text in [("compiler", ""), ("check", ""), ("check_status", "0")]:
        (fake / name).write_text(text)
    tools.mkdir()
    for name in ["python", "cmake", "make", "g++"]:
        (tools / name).write_text(FAKE_PYTHON)
        (tools / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("WHEEL", WHEEL)
    monkeypatch.delenv("CXX", raising=False)
    return fake


def is_running(pid):
    try:
        # A killed process that nobody has waited for yet is a zombie, "Z".
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class TestTarget:
    def test_key_names_everything(self):
        target = horovod_build.Target(
            "2.21.0",
            with_nccl=True,
            with_mpi=True,
            python="cpython-311",
            machine="x86_64",
        )
        assert target.key == (
            "horovod-0.28.1-tensorflow-2.21.0-cpython-311-x86_64-gloo-mpi-nccl"
        )

    def test_key_differs_in_everything(self):
        target = horovod_build.Target("2.21.0")
        others = [
            target._replace(tensorflow="2.20.0"),
            target._replace(with_nccl=True),
            target._replace(with_mpi=True),
            target._replace(python="cpython-39"),
            target._replace(machine="aarch64"),
            target._replace(horovod="0.29.0"),
        ]
        assert len({t.key for t in [target, *others]}) == 1 + len(others)


class TestPatch:
    def test_drops_one_line(self):
        lines = CMAKE_LISTS.splitlines(keepends=True)
        dropped = horovod_build.drop_xla_operations(CMAKE_LISTS)
        assert dropped == lines[0] + lines[1]

    @pytest.mark.parametrize(("text", "count"), [("", 0), (CMAKE_LISTS * 2, 2)])
    def test_refuses_another_file(self, text, count):
        with pytest.raises(
            horovod_build.HorovodBuildError,
            match=rf"xla_mpi_ops\.cc.*Received: {count} such lines",
        ):
            horovod_build.drop_xla_operations(text)


class TestExplainFailure:
    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (
                [
                    "a.cc:1:2: warning: unused",
                    "a.cc:9:10: fatal error: nccl.h: No such file",
                    "b.cc:3:4: error: 'x' was not declared",
                ],
                [
                    "a.cc:9:10: fatal error: nccl.h: No such file",
                    "apt-get install libnccl-dev.",
                ],
            ),
            (
                [
                    "-- Could NOT find NCCL",
                    "CMake Error at Find.cmake:1 (message):",
                    "",
                    "  Could NOT find MPI (missing: MPI_CXX_FOUND)",
                    "Call Stack (most recent call first):",
                    "  CMakeLists.txt:2",
                ],
                [
                    "CMake Error at Find.cmake:1 (message):",
                    "  Could NOT find MPI (missing: MPI_CXX_FOUND)",
                    "apt-get install libopenmpi-dev.",
                ],
            ),
            (
                ["c++: fatal error: Killed signal terminated program cc1plus"],
                [
                    "c++: fatal error: Killed signal terminated program "
                    "cc1plus",
                    "Memory ran out: set MAKEFLAGS=-j1.",
                ],
            ),
            (
                [f"line {i}" for i in range(30)],
                [f"line {i}" for i in range(10, 30)],
            ),
            ([], []),
        ],
    )
    def test_first_error_and_remedy(self, lines, expected):
        result = horovod_build.explain_failure("\n".join(lines))
        assert result.splitlines() == expected


class TestBuildEnvironment:
    def make(self, **flags):
        return horovod_build.build_environment(
            horovod_build.Target("2.21.0", **flags),
            include=pathlib.Path("/tf"),
            tools=pathlib.Path("/tools"),
        )

    def test_asks_for_gloo_alone(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
        monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
        variables = self.make()
        assert {k: v for k, v in variables.items() if k[:8] == "HOROVOD_"} == {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
        }

    def test_asks_for_nccl_where_it_is_and_mpi(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_NCCL_HOME", "/nccl")
        variables = self.make(with_nccl=True, with_mpi=True)
        assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert variables["HOROVOD_NCCL_HOME"] == "/nccl"
        assert variables["HOROVOD_WITH_MPI"] == "1"
        assert "HOROVOD_WITHOUT_MPI" not in variables

    def test_keeps_what_is_set(self, monkeypatch):
        for name, value in [
            ("CPLUS_INCLUDE_PATH", "/mine"),
            ("PYTHONPATH", "/python"),
            ("CXXFLAGS", "-O1"),
            ("MAKEFLAGS", "-j3"),
        ]:
            monkeypatch.setenv(name, value)
        variables = self.make()
        assert variables["CPLUS_INCLUDE_PATH"] == (
            "/tf/external/highwayhash:/tf/external/farmhash_archive/src:/mine"
        )
        assert variables["PYTHONPATH"] == "/tools:/python"
        assert variables["CXXFLAGS"] == "-include cstdint -O1"
        assert variables["MAKEFLAGS"] == "-j3"

    def test_adds_no_current_folder(self, monkeypatch):
        monkeypatch.delenv("CPLUS_INCLUDE_PATH", raising=False)
        monkeypatch.setenv("PYTHONPATH", "")
        variables = self.make()
        assert variables["CPLUS_INCLUDE_PATH"].endswith("farmhash_archive/src")
        assert variables["PYTHONPATH"] == "/tools"


class TestBuild:
    def test_builds_checks_and_keeps(self, fake, folder):
        steps = []
        wheel = horovod_build.build(install=False, log=steps.append)
        assert wheel == folder / WHEEL
        assert [step.split()[0] for step in steps] == [
            "Downloading",
            "Building",
            "Checking",
            "The",
        ]
        assert not is_running((fake / "pid").read_text().strip())

    def test_takes_the_kept_wheel(self, folder, monkeypatch):
        folder.mkdir(parents=True)
        (folder / WHEEL).touch()
        monkeypatch.setenv("PATH", "")
        steps = []
        wheel = horovod_build.build(install=False, log=steps.append)
        assert wheel == folder / WHEEL
        assert steps == [f"The wheel is {wheel}"]

    def test_builds_again_when_asked(self, fake, folder):
        folder.mkdir(parents=True)
        (folder / WHEEL).write_text("old")
        horovod_build.build(rebuild=True, install=False, log=print)
        assert (folder / WHEEL).read_text() == ""
        assert [p.name for p in folder.glob("*.whl*")] == [WHEEL]

    def test_shows_the_compilers_first_error(self, fake, folder):
        (fake / "compiler").write_text("a.cc:1:2: fatal error: no x.h\nmore\n")
        with pytest.raises(
            horovod_build.HorovodBuildError,
            match="(?s)exit status 1 of pip wheel.*\na.cc:1:2: fatal error: "
            f"no x.h\nThe full log is {folder / 'build.log'}",
        ):
            horovod_build.build(log=print)
        assert "more" in (folder / "build.log").read_text()
        assert not is_running((fake / "pid").read_text().strip())
        assert list(folder.glob("*.whl*")) == []

    def test_does_not_keep_what_does_not_work(self, fake, folder):
        (fake / "check").write_text("1 + 2 must be 3. Received: [1.0].\n")
        (fake / "check_status").write_text("1")
        with pytest.raises(
            horovod_build.HorovodBuildError,
            match=r"exit status 1 of the check.*\n1 \+ 2 must be 3",
        ):
            horovod_build.build(log=print)
        assert list(folder.glob("*.whl*")) == []

    def test_ends_its_processes_when_it_is_ended(self, fake):
        # As `timeout` or a batch system would.
        program = '#!/bin/sh\necho $$ > "$FAKE/pid"\nkill -TERM $PPID\n'
        pathlib.Path(sys.executable).write_text(program + "exec sleep 600\n")
        with pytest.raises(SystemExit, match="143"):
            horovod_build.build(log=print)
        assert not is_running((fake / "pid").read_text().strip())

    def test_lists_missing_tools(self, fake, monkeypatch):
        monkeypatch.setenv("PATH", "")
        for name in ["cmake", "make", "g++"]:
            os.remove(pathlib.Path(sys.executable).parent / name)
        with pytest.raises(
            horovod_build.HorovodBuildError,
            match="without cmake, make, g[+][+]. Run `apt-get install cmake",
        ):
            horovod_build.build(log=print)


def test_finds_tensorflow_and_its_headers():
    tf = pytest.importorskip("tensorflow")
    version, include = horovod_build.find_tensorflow()
    assert version == tf.__version__
    assert include.samefile(tf.sysconfig.get_include())
