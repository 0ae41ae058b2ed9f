"""Worker processes: started together, heard together, ended together.

On Linux. Nothing here needs TensorFlow.
"""

import collections
import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

__all__ = ["Ended", "run"]

_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_STOPPING = (signal.SIGINT, signal.SIGTERM)
# From the first signal to a worker until SIGKILL.
_GRACE_SECONDS_AFTER_SIGNAL = 10
_GRACE_SECONDS_AFTER_FAILURE = 5
_CHUNK_BYTES = 2**16
_NUM_LAST_LINES = 20

# Waits for the launcher's end, whatever it is, and kills what it left: nothing
# else outlives a SIGKILL of the launcher and reaches the workers' children.
_GUARD = """
import os, signal, sys
for group in [int(line) for line in sys.stdin]:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Ended(NamedTuple):
    """How all workers have ended.

    Attributes:
        exit_code: Int, see `launcher.launch`.
        has_failed: Bool, whether a worker failed by itself.
    """

    exit_code: int
    has_failed: bool


def run(command, environments, quiet):
    """Runs a command once for each environment until all have ended.

    To be called from the main thread: it handles signals meanwhile.

    Args:
        command: List of strings, the program and its arguments.
        environments: List of dicts, one for each rank.
        quiet: Whether to show only the output of rank 0.

    Returns:
        `Ended`.
    """
    events = queue.SimpleQueue()
    output = _Output(sys.stdout, sys.stderr, quiet)
    with _signals_put_into(events), _Crew(events, output) as crew:
        for environment in environments:
            crew.start(command, environment)
        outcome = _supervise(crew, events)
    # Only now: the last words of the worker that failed have been read.
    output.report(outcome)
    return Ended(outcome.exit_code, outcome.failure is not None)


class _Exit(NamedTuple):
    """A worker's end; `code` is -n for signal n, as in subprocess."""

    rank: int
    code: int


class _Signal(NamedTuple):
    """A signal that the launcher was sent."""

    number: int


class _Outcome(NamedTuple):
    """How it ended; `failure` is the first worker's `_Exit` that failed."""

    exit_code: int
    failure: _Exit | None = None
    killed: tuple = ()


@contextlib.contextmanager
def _signals_put_into(events):
    """Turns signals into events; one that is ignored (nohup) stays ignored."""

    def put(number, _):
        events.put(_Signal(number))

    # Where SIGCHLD is ignored, processes end without leaving an exit code.
    handlers = {signal.SIGCHLD: signal.SIG_DFL}
    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = put
    before = {n: signal.signal(n, h) for n, h in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install.
            signal.signal(number, handler or signal.SIG_DFL)


def _supervise(crew, events):
    """Follows the workers until all have ended. Returns the `_Outcome`."""
    outcome = None
    deadline = None
    while crew.running:
        try:
            wait = None if deadline is None else deadline - time.monotonic()
            event = events.get(timeout=wait and max(0, wait))
        except queue.Empty:
            killed = tuple(sorted(crew.running))
            outcome = _Outcome(outcome.exit_code, outcome.failure, killed)
            deadline = None
            crew.kill()
            continue
        if isinstance(event, _Exit):
            crew.running.discard(event.rank)
            if event.code and outcome is None:
                outcome = _Outcome(_exit_code(event.code), failure=event)
                deadline = time.monotonic() + _GRACE_SECONDS_AFTER_FAILURE
                crew.send(signal.SIGTERM)
        elif event.number == signal.SIGINT and outcome is not None:
            crew.kill()
        else:
            crew.send(event.number)
            if event.number in _STOPPING and outcome is None:
                outcome = _Outcome(128 + event.number)
                deadline = time.monotonic() + _GRACE_SECONDS_AFTER_SIGNAL
    return outcome or _Outcome(0)


def _exit_code(code):
    return code if code > 0 else 128 - code


class _Crew:
    """The workers' processes, each the leader of a process group of its own.

    As a context manager it leaves none of them behind, and nothing in their
    groups. A worker that has ended stays unreaped until then: its number,
    which is also its group's, cannot become that of a stranger.
    """

    def __init__(self, events, output):
        self.running = set()
        self._events = events
        self._output = output
        self._processes = []
        self._watchers = []

    def __enter__(self):
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_):
        self.kill()
        # Before the numbers become free for others.
        self._guard.kill()
        self._guard.wait()
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        for process, watcher in zip(self._processes, self._watchers):
            watcher.join()
            process.wait()
        self._output.finish()

    def start(self, command, environment):
        """Starts the next rank."""
        rank = len(self._processes)
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        self._guard.stdin.write(b"%d\n" % process.pid)
        self._guard.stdin.flush()
        self.running.add(rank)
        self._output.follow(rank, process)
        watcher = threading.Thread(target=self._watch, args=(rank,))
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, rank):
        end = os.waitid(
            os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT
        )
        is_exit = end.si_code == os.CLD_EXITED
        code = end.si_status if is_exit else -end.si_status
        self._events.put(_Exit(rank, code))

    def send(self, number):
        """Sends a signal to the workers that have not ended."""
        for rank in self.running:
            os.kill(self._processes[rank].pid, number)

    def kill(self):
        """Kills all processes in the workers' groups."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)


class _Output:
    """Shows the workers' output, line by line with the rank before it."""

    def __init__(self, stdout, stderr, quiet):
        self._stdout = stdout
        self._stderr = stderr
        self._quiet = quiet
        self._lock = threading.Lock()
        self._readers = []
        self._last_lines = collections.defaultdict(
            lambda: collections.deque(maxlen=_NUM_LAST_LINES)
        )
        self._finished, self._finish = os.pipe()

    def follow(self, rank, process):
        """Begins to read what a process prints."""
        for source, target in (
            (process.stdout, self._stdout),
            (process.stderr, self._stderr),
        ):
            reader = threading.Thread(
                target=self._read, args=(rank, source, target), daemon=True
            )
            self._readers.append(reader)
            reader.start()

    def finish(self):
        """Waits until all that has been printed is shown."""
        os.close(self._finish)
        for reader in self._readers:
            reader.join()
        os.close(self._finished)

    def report(self, outcome):
        """Says which worker failed first, and which had to be killed."""
        failure = outcome.failure
        if failure is not None:
            for line in self._last_lines.pop(failure.rank, ()):
                self._show(self._stderr, f"[{failure.rank}] {line}")
            self._say(f"worker {failure.rank} failed first, {_how(failure)}")
        if outcome.killed:
            ranks = ", ".join(map(str, outcome.killed))
            self._say(f"did not end when told to, and were killed: {ranks}")

    def _say(self, text):
        with contextlib.suppress(OSError):
            self._show(self._stderr, f"tf-avgstrategy: {text}")

    def _read(self, rank, source, target):
        # A closed pipe or terminal: let the worker meet the same.
        with source, contextlib.suppress(OSError):
            for line in _lines(_chunks(source.fileno(), self._finished)):
                text = line.decode("utf-8", errors="backslashreplace")
                if self._quiet and rank > 0:
                    self._last_lines[rank].append(text)
                else:
                    self._show(target, f"[{rank}] {text}")

    def _show(self, target, line):
        encoding = getattr(target, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        with self._lock:
            target.write(f"{line}\n")
            target.flush()


def _how(failure):
    if failure.code > 0:
        return f"with exit code {failure.code}"
    number = -failure.code
    known = {int(each): each.name for each in signal.Signals}
    return f"killed by signal {known.get(number, number)}"


def _chunks(source, finished):
    """Yields bytes as they come, to the end of the file.

    Once `finished` is closed, only what is there: a process that has left its
    group may hold the file open.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(finished, select.POLLIN)
    while source in dict(poll.poll()):
        chunk = os.read(source, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


def _lines(chunks):
    r"""Yields lines without their ends as soon as each is complete.

    A "\r" ends a line too: progress bars are shown while they move.
    """
    pending = []
    was_return = False
    for chunk in chunks:
        for piece in chunk.splitlines(keepends=True):
            # "\r\n" is one end, and nothing between two "\r" is no line.
            is_rest = was_return and piece == b"\n"
            was_return = piece.endswith(b"\r")
            pending.append(piece)
            if piece.endswith((b"\r", b"\n")):
                line = b"".join(pending)
                pending = []
                if not is_rest and line != b"\r":
                    yield line.rstrip(b"\r\n")
    if pending:
        yield b"".join(pending)
