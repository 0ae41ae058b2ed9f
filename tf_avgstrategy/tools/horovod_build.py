"""Building Horovod for the TensorFlow that is installed here."""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

__all__ = [
    "HorovodBuildError",
    "Target",
    "build",
    "build_environment",
    "check_tools",
    "drop_xla_operations",
    "explain_failure",
    "find_tensorflow",
]

_VERSION = "0.28.1"
_REQUIREMENTS = ("cloudpickle", "packaging", "psutil", "pyyaml")
# Horovod's setup.py needs pkg_resources, which setuptools 81 dropped, and
# would otherwise fetch Horovod's requirements itself.
_BUILD_TOOLS = ("setuptools<81", "wheel", *_REQUIREMENTS)
_XLA_SOURCE = "horovod/tensorflow/xla_mpi_ops.cc"
# These say where things are, the others what is built.
_KEPT = ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_", "HOROVOD_BUILD_CUDA_CC_LIST")
_CHECK_SECONDS = 120
_POLL_SECONDS = 0.05
# The compiler needs up to 1.3 GB for one of Horovod's files.
_BYTES_PER_JOB = 2 * 2**30

_FIRST_ERROR = re.compile(r" error: |fatal error|CMake Error|undefined refer")
# What a log can hold, and the remedy.
_REMEDIES = (
    (r"mpi\.h|Could NOT find MPI", "apt-get install libopenmpi-dev"),
    (r"nccl\.h|Could NOT find NCCL", "apt-get install libnccl-dev"),
    (r"Python\.h", "apt-get install python3-dev"),
    (r"Could NOT find CUDAToolkit", "Install the CUDA toolkit"),
    (r"Killed signal", "Memory ran out: set MAKEFLAGS=-j1"),
    (r"externally-managed", "Use a virtual environment"),
)


class HorovodBuildError(RuntimeError):
    """Horovod could not be built, or what was built does not work."""


class Target(NamedTuple):
    """What a wheel of Horovod is built for.

    Attributes:
        tensorflow: String, TensorFlow's version.
        with_nccl: Boolean, whether GPUs exchange through NCCL.
        with_mpi: Boolean, whether MPI is built in beside Gloo.
        python: String, the interpreter, as in "cpython-311".
        machine: String, the processor, as in "x86_64".
        horovod: String, Horovod's version.
    """

    tensorflow: str
    with_nccl: bool = False
    with_mpi: bool = False
    python: str = sys.implementation.cache_tag
    machine: str = platform.machine()
    horovod: str = _VERSION

    @property
    def key(self):
        """String, a file name that no other target has."""
        options = "-mpi" * self.with_mpi + "-nccl" * self.with_nccl
        return (
            f"horovod-{self.horovod}-tensorflow-{self.tensorflow}-"
            f"{self.python}-{self.machine}-gloo{options}"
        )


def build(
    *, with_nccl=False, with_mpi=False, rebuild=False, install=True, log=print
):
    """Builds Horovod from its source, checks it and installs it.

    It takes 2 to 5 minutes and 300 MB in the folder for temporary files. The
    wheel is kept in a folder of TF_AVGSTRATEGY_CACHE, XDG_CACHE_HOME or
    `~/.cache`, the first that is set, and taken from there the next time. It
    gets there after two processes have exchanged numbers with it.

    Args:
        with_nccl: Boolean, whether GPUs exchange through NCCL. Needs the CUDA
            toolkit and NCCL's headers. The check does not use a GPU.
        with_mpi: Boolean, whether MPI is built in beside Gloo.
        rebuild: Boolean, whether to build although a wheel is kept.
        install: Boolean, whether to install the wheel, and the packages it
            requires, into this Python environment.
        log: Function of a string, called once for each step.

    Returns:
        `pathlib.Path` of the wheel.

    Raises:
        HorovodBuildError: If a step fails. The message has the first error
            and the path of the full log.
    """
    tensorflow_version, include = find_tensorflow()
    target = Target(tensorflow_version, bool(with_nccl), bool(with_mpi))
    folder = _cache_folder() / target.key
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [] if rebuild else sorted(folder.glob("horovod-*.whl"))
    if wheels:
        wheel = wheels[0]
    else:
        check_tools()
        wheel = _build_checked(target, include, folder=folder, log=log)
    log(f"The wheel is {wheel}")
    if install:
        _install(wheel, log)
    return wheel


def find_tensorflow():
    """Returns TensorFlow's version and the `pathlib.Path` of its headers."""
    # Importing it takes seconds, and fails where the wheel can be built.
    spec = importlib.util.find_spec("tensorflow")
    for name in ("tensorflow", "tensorflow-cpu") if spec else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return version, pathlib.Path(spec.origin).parent / "include"
    raise HorovodBuildError(
        "Horovod is built for the TensorFlow of this environment. Received: "
        f"{sys.executable} without TensorFlow. Install it by pip first."
    )


def check_tools():
    """Raises a HorovodBuildError that lists the missing build tools."""
    if sys.platform != "linux":
        raise HorovodBuildError(
            "Building Horovod is supported on Linux. Received: the platform "
            f"{sys.platform}. Build in a Linux container."
        )
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    tools, path = ("cmake", "make", compiler), _search_path()
    missing = [t for t in tools if shutil.which(t, path=path) is None]
    if importlib.util.find_spec("pip") is None:
        missing.append("pip")
    if missing:
        raise HorovodBuildError(
            f"Building Horovod needs {', '.join(tools)} and pip. Received: an "
            f"environment without {', '.join(missing)}. Run `apt-get install "
            "cmake g++ make` and `python -m ensurepip` (`pip install cmake` "
            "will do, too)."
        )


def drop_xla_operations(text):
    """Returns Horovod's CMakeLists.txt for TensorFlow without XLA operations.

    Their source needs headers that TensorFlow has no more since release 2.16.

    Args:
        text: String, the contents of `horovod/tensorflow/CMakeLists.txt`.
    """
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if _XLA_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise HorovodBuildError(
            "horovod/tensorflow/CMakeLists.txt must name the source "
            f"{_XLA_SOURCE} in one line, to be dropped. Received: "
            f"{len(lines) - len(kept)} such lines. This can build Horovod "
            f"{_VERSION} only: check that the package index has the original."
        )
    return "".join(kept)


def build_environment(target, *, include, tools):
    """Returns the environment variables, a dict of strings, for the build.

    Args:
        target: `Target`.
        include: `pathlib.Path` of TensorFlow's headers.
        tools: `pathlib.Path` of a folder with Python packages.
    """
    variables = {
        **_other_environment(tools),
        "CPLUS_INCLUDE_PATH": _prepend(
            "CPLUS_INCLUDE_PATH",
            include / "external" / "highwayhash",
            include / "external" / "farmhash_archive" / "src",
        ),
        # Gloo has forgotten to include it, which fails from GCC 13 on.
        "CXXFLAGS": f"-include cstdint {os.environ.get('CXXFLAGS', '')}",
        # Gloo asks for a CMake so old that CMake 4 refuses.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_{'WITH' if target.with_mpi else 'WITHOUT'}_MPI": "1",
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{_num_jobs()}",
        "PATH": _search_path(),
    }
    if target.with_nccl:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return variables


def explain_failure(text):
    """Returns the first error, a string, in a log, and what to do about it.

    Args:
        text: String, the output of pip, CMake, make and the compiler.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    found = [i for i, line in enumerate(lines) if _FIRST_ERROR.search(line)]
    first = found[0] if found else max(0, len(lines) - 20)
    # The compiler's error is one line, CMake's goes on to its call stack.
    # What stands before are tests for what Horovod can do without.
    is_line = found and "CMake" not in lines[first]
    text = "\n".join(lines[first : first + (1 if is_line else 20)])
    error = text.partition("Call Stack")[0].rstrip()
    remedies = [fix for seen, fix in _REMEDIES if re.search(seen, error)]
    return "\n".join([error, *(f"{fix}." for fix in remedies)])


def _build_checked(target, include, *, folder, log):
    log_path = folder / "build.log"
    log_path.write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        work = pathlib.Path(name)
        tools, unpacked = work / "tools", work / f"horovod-{_VERSION}"
        shell = _Shell(
            build_environment(target, include=include, tools=tools),
            folder=work,
            log_path=log_path,
        )
        log(f"Downloading Horovod {_VERSION}. The log is {log_path}")
        shell.pip("install", "--target", str(tools), *_BUILD_TOOLS)
        _download(shell, work)
        cmake_lists = unpacked / "horovod" / "tensorflow" / "CMakeLists.txt"
        cmake_lists.write_text(drop_xla_operations(cmake_lists.read_text()))
        log(f"Building {target.key}. This takes minutes")
        options = ["--no-build-isolation", "--no-deps", "--wheel-dir", name]
        shell.pip("wheel", "--verbose", *options, str(unpacked))
        wheel = next(work.glob("horovod-*.whl"))
        log("Checking that two processes can exchange numbers")
        _check_wheel(shell, wheel, tools)
        # Nobody sees half a file: it is moved within one file system.
        partial = folder / f"{wheel.name}.{os.getpid()}"
        shutil.copy(wheel, partial)
        return partial.replace(folder / wheel.name)


def _download(shell, work):
    # `:all:` would make pip build the build tools from their sources, too.
    source = ["--no-binary", "horovod", f"horovod=={_VERSION}"]
    shell.pip("download", "--no-deps", "--no-build-isolation", *source)
    # Not checked for paths out of the folder: pip has run its code by now.
    shutil.unpack_archive(work / f"horovod-{_VERSION}.tar.gz", work)


def _check_wheel(shell, wheel, tools):
    installed = wheel.parent / "installed"
    shell.pip("install", "--no-deps", "--target", str(installed), str(wheel))
    # In a process that sees this package and, first, the new Horovod.
    package = pathlib.Path(__file__).resolve().parent.parent
    program = (
        f"import sys; sys.path.append({str(package)!r})\n"
        "from tf_avgstrategy.workers import horovod_rendezvous as horovod\n"
        f"horovod.check_all_reduce(timeout_seconds={_CHECK_SECONDS})\n"
    )
    checking = _Shell(
        _other_environment(installed, tools),
        folder=wheel.parent,
        log_path=shell.log_path,
    )
    checking.run("the check", "-c", program)


def _install(wheel, log):
    log(f"Installing {wheel.name} and what it requires")
    folder = wheel.parent
    shell = _Shell(os.environ, folder=folder, log_path=folder / "install.log")
    shell.pip("install", *_REQUIREMENTS)
    # Unforced, pip keeps what was built for another TensorFlow.
    shell.pip("install", "--no-deps", "--force-reinstall", str(wheel))


class _Shell:
    """Runs this Python with one environment, its output in one log file."""

    def __init__(self, variables, *, folder, log_path):
        self._variables = variables
        self._folder = folder
        self.log_path = log_path

    def pip(self, *arguments):
        self.run(f"pip {arguments[0]}", "-m", "pip", *arguments)

    def run(self, name, *arguments):
        with self.log_path.open("ab") as output:
            start, command = output.tell(), [sys.executable, *arguments]
            status = self._status(command, output)
        if status != 0:
            text = self.log_path.read_bytes()[start:].decode(errors="replace")
            raise HorovodBuildError(
                f"Horovod {_VERSION} must be built and work. Received: the "
                f"exit status {status} of {name}, where the first error is:\n"
                f"{explain_failure(text)}\nThe full log is {self.log_path}"
            )

    def _status(self, command, output):
        with _noting_signals() as signals:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                cwd=self._folder,
                start_new_session=True,
            )
            try:
                while process.poll() is None and not signals:
                    time.sleep(_POLL_SECONDS)
                status = process.poll()
            finally:
                # The whole session: pip leaves its compilers when it is killed.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if signals:
            raise SystemExit(128 + signals[0])
        return status


@contextlib.contextmanager
def _noting_signals():
    """Yields a list that gets the signals which would end this process.

    An exception out of the signal handler could leave a process behind that
    has just been started and has no name yet.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    noted = []
    before = {
        n: signal.signal(n, lambda n, _: noted.append(n)) for n in numbers
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cache_folder():
    names = ("TF_AVGSTRATEGY_CACHE", "XDG_CACHE_HOME")
    root = next(filter(None, map(os.environ.get, names)), "~/.cache")
    return pathlib.Path(root, "tf_avgstrategy/horovod").expanduser().resolve()


def _other_environment(*folders):
    """This process' variables without its job's, Python seeing `folders`."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_") or name.startswith(_KEPT)
    }
    # TensorFlow's own messages look like errors of the build.
    variables["TF_CPP_MIN_LOG_LEVEL"] = "3"
    variables["PYTHONPATH"] = _prepend("PYTHONPATH", *folders)
    return variables


def _search_path():
    # Where pip puts cmake, whether the environment is activated or not.
    return _prepend("PATH", pathlib.Path(sys.executable).parent)


def _prepend(name, *folders):
    # An empty part would mean the current folder.
    old = os.environ.get(name)
    return os.pathsep.join([*map(str, folders), *([old] if old else [])])


def _num_jobs():
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(num_cores, memory_bytes // _BYTES_PER_JOB))
