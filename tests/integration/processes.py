"""Real worker processes: jobs that run a script once, and pools that stay."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
import uuid

import job_worker
import pool_worker
import pytest

from tf_avgstrategy.tools import launcher
from tf_avgstrategy.workers import horovod_rendezvous

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
COMMUNICATORS = [
    "collective",
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(
            not HAS_HOROVOD,
            reason="Horovod is not installed: tf-avgstrategy build-horovod",
        ),
    ),
]

# Forks workers from a process that has imported TensorFlow, which
# takes seconds, but has not started it.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["keras", "tensorflow", "tf_avgstrategy"])

HERE = pathlib.Path(__file__).parent
# Marks every process that a test starts, and what these start.
_MARK = "TF_AVGSTRATEGY_TEST"


class _Forked:
    """A forked process with its output in a file."""

    def __init__(self, main, arguments):
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - see kill.
        self._process = _FORKS.Process(
            target=main, args=(*arguments, self._output.name)
        )
        self._process.start()
        self.number = self._process.pid

    def text(self):
        return pathlib.Path(self._output.name).read_text(errors="replace")

    def kill(self):
        self._process.kill()
        self._process.join()
        self._output.close()


class Worker(_Forked):
    """A process that runs a script, and leads a session of its own."""

    def __init__(self, script, arguments, environment, cwd=None):
        path = str(HERE / script)
        super().__init__(
            job_worker.main, (path, list(arguments), environment, cwd)
        )

    def wait(self, seconds):
        """Returns the exit code, or None if it takes longer."""
        self._process.join(seconds)
        return self._process.exitcode

    def wait_for(self, text, seconds=90):
        """Returns when the process has printed something."""
        end = time.monotonic() + seconds
        while text not in self.text():
            is_done = self._process.exitcode is not None
            if (is_done and text not in self.text()) or time.monotonic() > end:
                raise AssertionError(
                    f"no {text!r}, exit code {self._process.exitcode}, in:\n"
                    f"{self.text()}"
                )
            time.sleep(0.02)

    def kill(self):
        # With what it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.number, signal.SIGKILL)
        super().kill()


class PoolWorker(_Forked):
    """A process that runs functions until its connection is closed."""

    def __init__(self, connection, environment):
        super().__init__(pool_worker.main, (connection, environment))

    def kill(self):
        # Asked to end by its closed connection, it has a moment to do so.
        self._process.join(10)
        super().kill()


class Workers:
    """The workers of one job. A context manager."""

    def __init__(self, size, communicator):
        self.size = size
        self.workers = []
        self._stack = contextlib.ExitStack()
        mark = uuid.uuid4().hex
        self._stack.callback(self._check_no_strays, mark)
        self._stack.callback(self._kill)
        self.environments = [
            {**clean_environment(), **environment, _MARK: mark}
            for environment in self._stack.enter_context(
                cluster_environments(size, communicator)
            )
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        self._stack.close()

    def _kill(self):
        for worker in self.workers:
            worker.kill()

    def _check_no_strays(self, mark):
        """Raises an AssertionError if something that was started still runs."""
        # A forked worker does not carry the mark, but leads a session.
        sessions = {worker.number for worker in self.workers}

        def strays():
            return marked(_MARK, mark) + in_sessions(sessions)

        end = time.monotonic() + 5
        while found := strays():
            assert time.monotonic() < end, f"left behind: {found}"
            time.sleep(0.05)


class Job(Workers):
    """A script that runs once on every worker."""

    def __init__(self, script, *arguments, size, communicator, cwd=None):
        super().__init__(size, communicator)
        self.workers = [
            Worker(script, arguments, environment, cwd=cwd)
            for environment in self.environments
        ]

    def wait(self, seconds=120, ranks=None):
        """Returns exit codes, of all workers or of some."""
        end = time.monotonic() + seconds
        ranks = range(len(self.workers)) if ranks is None else ranks
        codes = []
        for rank in ranks:
            worker = self.workers[rank]
            code = worker.wait(max(0.1, end - time.monotonic()))
            assert code is not None, f"worker {rank} hangs:\n{worker.text()}"
            codes.append(code)
        return codes


def _excerpt(text):
    """What a crash begins with, or how the text ends."""
    place = text.find("Fatal Python error")
    return text[-3000:] if place < 0 else text[place : place + 3000]


class Pool(Workers):
    """Workers that stay and run one function of `scenarios` after another."""

    def __init__(self, size, communicator, seconds=120):
        super().__init__(size, communicator)
        self._seconds = seconds
        self.is_broken = False
        self._connections = []
        for environment in self.environments:
            ours, theirs = _FORKS.Pipe()
            self.workers.append(PoolWorker(theirs, environment))
            self._connections.append(ours)
            theirs.close()

    def _kill(self):
        for connection in self._connections:
            connection.close()
        super()._kill()

    def run(self, function, *arguments, **keywords):
        """Calls a function of `scenarios` on every worker.

        Returns:
            List of what it returned, by rank. An exception on any worker is
            an error here, with the text of all that failed.
        """
        for connection in self._connections:
            connection.send((function, arguments, keywords))
        # Until all have answered well: the next test gets another pool.
        self.is_broken = True
        answers = [self._answer(rank) for rank in range(self.size)]
        failed = [text for text, _ in answers if text is not None]
        self.is_broken = bool(failed)
        if failed:
            raise AssertionError("\n\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank):
        # What hangs is killed when the test's pool is closed.
        try:
            if self._connections[rank].poll(self._seconds):
                return self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            pass
        texts = "\n\n".join(_excerpt(w.text()) for w in self.workers)
        raise AssertionError(f"worker {rank} is gone or hangs:\n{texts}")


@contextlib.contextmanager
def cluster_environments(size, communicator):
    """What each worker's environment says of the others, by rank."""
    if communicator == "none":
        yield [{}] * size
    elif communicator == "collective":
        yield [
            {"TF_CONFIG": tf_config(addresses, rank)}
            for addresses in [free_addresses(size)]
            for rank in range(size)
        ]
    else:
        hosts = ["127.0.0.1"] * size
        with horovod_rendezvous.Rendezvous(hosts) as rendezvous:
            yield [
                horovod_rendezvous.environment(
                    rank, hosts, address="127.0.0.1", port=rendezvous.port
                )
                for rank in range(size)
            ]


def tf_config(addresses, rank):
    return json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
        }
    )


def free_addresses(count):
    return [f"127.0.0.1:{port}" for port in launcher.free_ports(count)]


def marked(variable, mark):
    """Numbers of the processes that were started with a mark."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        # Gone in the meantime, or somebody else's.
        with contextlib.suppress(OSError):
            if f"{variable}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def in_sessions(sessions):
    """Numbers of the processes in the sessions that these ones lead."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) in sessions:
                found.append(int(path.name))
    return found


def clean_environment():
    ours = ("TF_CONFIG", "HOROVOD_", "TF_AVGSTRATEGY_", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
