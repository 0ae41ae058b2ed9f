"""Real workers that run small scripts, without TensorFlow.

Every test ends with a check that nothing of it is left: all processes of a
test carry a marker in their environments.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import processes
import pytest

import tf_avgstrategy
from tf_avgstrategy.tools import worker_processes

PACKAGE = pathlib.Path(tf_avgstrategy.__file__).parent
MARKER = "TF_AVGSTRATEGY_TEST_LAUNCH"
LIMIT_SECONDS = 60

# Runs `launch` without the package's __init__, which would load TensorFlow.
DRIVER = f"""
import json, signal, sys, types
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
package = types.ModuleType("tf_avgstrategy")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["tf_avgstrategy"] = package
from tf_avgstrategy.tools import launcher
from tf_avgstrategy.tools import worker_processes
assert not {{"tensorflow", "keras"}} & set(sys.modules)
options = json.loads(sys.argv[1])
for name in options.pop("ignored", []):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
worker_processes._GRACE_SECONDS_AFTER_SIGNAL = options.pop("grace", 10)
sys.exit(launcher.launch(sys.argv[2:], **options))
"""

# What the scripts below begin with.
PREAMBLE = """
import json, os, pathlib, signal, socket, subprocess, sys, time
here = pathlib.Path(__file__).parent
task = json.loads(os.environ["TF_CONFIG"])["task"]
rank = task["index"]
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


class Job:
    """A launcher in a directory of its own, and what it prints."""

    def __init__(self, directory):
        self.directory = directory
        self.marker = uuid.uuid4().hex
        self.process = None
        self.stdout = []
        self._stderr = []
        self._readers = []

    def script(self, text):
        path = self.directory / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(text))
        return str(path)

    def start(self, text, *arguments, num_workers, **options):
        options = json.dumps({"num_workers": num_workers, **options})
        command = ["-c", DRIVER, options, self.script(text), *arguments]
        return self.start_python(command)

    def start_python(self, command):
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, MARKER: self.marker},
        )
        for stream, lines in (
            (self.process.stdout, self.stdout),
            (self.process.stderr, self._stderr),
        ):
            reader = threading.Thread(target=lines.extend, args=(stream,))
            reader.start()
            self._readers.append(reader)
        return self

    @property
    def stderr(self):
        return "".join(self._stderr)

    def wait(self):
        """Returns the exit code, after all output has been read."""
        code = self.process.wait(LIMIT_SECONDS)
        for reader in self._readers:
            reader.join(LIMIT_SECONDS)
            assert not reader.is_alive(), "somebody still holds the output"
        return code

    def wait_for_line(self, line):
        wait_until(lambda: line + "\n" in self.stdout, f"no line {line!r}")

    def touch(self, name):
        (self.directory / name).touch()

    def strays(self):
        """Numbers of the processes that carry the marker."""
        return processes.marked(MARKER, self.marker)


def wait_until(is_true, otherwise):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    try:
        yield job
        # The kernel takes its time to end what has been killed.
        wait_until(lambda: not job.strays(), "processes are left behind")
    finally:
        for stray in job.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
        if job.process is not None:
            job.process.wait()


class TestOutput:
    def test_each_line_has_its_rank(self, job):
        job.start(
            """
            print("out", rank)
            print("", file=sys.stderr)
            print("error", rank, file=sys.stderr)
            sys.stdout.write("no end")
            """,
            num_workers=2,
        )
        assert job.wait() == 0
        assert sorted(job.stdout) == [
            "[0] no end\n",
            "[0] out 0\n",
            "[1] no end\n",
            "[1] out 1\n",
        ]
        lines = job.stderr.splitlines()
        assert [line for line in lines if line.startswith("[0]")] == [
            "[0] ",
            "[0] error 0",
        ]
        assert len(lines) == 4

    def test_bytes_that_are_no_text_and_long_lines_survive(self, job):
        job.start(
            r"""
            sys.stdout.buffer.write(b"\xff \xc3\xa4\n" + b"x" * 10**6)
            """,
            num_workers=1,
        )
        assert job.wait() == 0
        assert job.stdout == ["[0] \\xff ä\n", "[0] " + "x" * 10**6 + "\n"]

    def test_a_terminal_that_only_knows_ascii(self, job, monkeypatch):
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        job.start(
            r"sys.stdout.buffer.write(b'\xc3\xa4\n')",
            num_workers=1,
        )
        assert job.wait() == 0
        assert job.stdout == ["[0] \\xe4\n"]

    def test_progress_bars_come_live(self, job):
        job.start(
            r"""
            print("50%", end="\r")
            wait_for("seen")
            print("100%", end="\r\n")
            """,
            num_workers=2,
        )
        job.wait_for_line("[0] 50%")
        job.wait_for_line("[1] 50%")
        job.touch("seen")
        assert job.wait() == 0
        assert sorted(job.stdout[2:]) == ["[0] 100%\n", "[1] 100%\n"]

    def test_quiet_shows_rank_0_alone(self, job):
        job.start(
            """
            print("out", rank)
            print("error", rank, file=sys.stderr)
            """,
            num_workers=3,
            quiet=True,
        )
        assert job.wait() == 0
        assert job.stdout == ["[0] out 0\n"]
        assert job.stderr == "[0] error 0\n"

    def test_quiet_shows_the_last_lines_of_a_failure(self, job):
        job.start(
            """
            print("ready")
            wait_for("go")
            if rank == 1:
                for line in range(30):
                    print("line", line, file=sys.stderr)
                sys.exit("no more")
            time.sleep(600)
            """,
            num_workers=3,
            quiet=True,
        )
        job.wait_for_line("[0] ready")
        job.touch("go")
        assert job.wait() == 1
        assert job.stdout == ["[0] ready\n"]
        assert job.stderr.splitlines() == [
            *(f"[1] line {i}" for i in range(11, 30)),
            "[1] no more",
            "tf-avgstrategy: worker 1 failed first, with exit code 1",
        ]

    def test_a_reader_that_goes_away_ends_the_job(self, job):
        path = job.script("while True: print('more')")
        options = json.dumps({"num_workers": 2})
        launcher = subprocess.Popen(
            [sys.executable, "-c", DRIVER, options, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, MARKER: job.marker},
        )
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(LIMIT_SECONDS) != 0

    def test_a_process_that_left_the_group_is_not_waited_for(self, job):
        job.start(
            """
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"],
                start_new_session=True,
            )
            print(child.pid)
            """,
            num_workers=1,
        )
        assert job.process.wait(LIMIT_SECONDS) == 0
        wait_until(lambda: job.stdout, "no output")
        # It holds nothing of the launcher's own, and was asked to stay.
        os.kill(int(job.stdout[0].split()[1]), signal.SIGKILL)
        assert job.wait() == 0


class TestEnvironment:
    def test_workers_know_each_other(self, job, monkeypatch):
        monkeypatch.setenv("HOROVOD_RANK", "0")
        job.start(
            """
            print(os.environ["TF_CONFIG"])
            print(os.environ.get("HOROVOD_RANK"), os.getsid(0) == os.getpid())
            """,
            num_workers=3,
        )
        assert job.wait() == 0
        configs = {}
        for rank in range(3):
            lines = [x[4:] for x in job.stdout if x.startswith(f"[{rank}]")]
            configs[rank] = json.loads(lines[0])
            assert lines[1:] == ["None True\n"]
            assert configs[rank]["task"] == {"type": "worker", "index": rank}
        assert configs[0]["cluster"] == configs[1]["cluster"]
        assert configs[0]["cluster"] == configs[2]["cluster"]
        assert len(set(configs[0]["cluster"]["worker"])) == 3

    def test_the_command_leaves_the_scripts_flags_alone(self, job):
        flags = ["--workers=9", "--help", "--", "-m", "--quiet_workers", "a b"]
        path = job.script("print(json.dumps(sys.argv[1:]))")
        job.start_python(
            [
                "-c",
                "from tf_avgstrategy.tools import cli; cli.main()",
                *("launch", "--workers", "2", "--devices-per-worker=1"),
                *(path, *flags),
            ]
        )
        assert job.wait() == 0
        assert sorted(job.stdout) == [
            f"[{rank}] {json.dumps(flags)}\n" for rank in range(2)
        ]


# Prints that it runs and refuses to end.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
print("ready")
while True:
    time.sleep(600)
"""


class TestFailure:
    def test_a_worker_may_end_early(self, job):
        job.start(
            """
            if rank == 0:
                wait_for("go")
            print("done")
            """,
            num_workers=2,
        )
        job.wait_for_line("[1] done")
        job.touch("go")
        assert job.wait() == 0
        assert job.stderr == ""

    def test_the_others_are_stopped_within_10_seconds(self, job):
        job.start(
            f"""
            if rank == 2:
                wait_for("go")
                sys.exit(3)
            {textwrap.indent(STUBBORN, " " * 12).strip()}
            """,
            num_workers=3,
        )
        job.wait_for_line("[0] ready")
        job.wait_for_line("[1] ready")
        start = time.monotonic()
        job.touch("go")
        assert job.wait() == 3
        assert time.monotonic() - start < 10
        assert job.stderr == (
            "tf-avgstrategy: worker 2 failed first, with exit code 3\n"
            "tf-avgstrategy: did not end when told to, and were killed: 0, 1\n"
        )

    def test_the_first_is_named_though_others_fail_of_it(self, job):
        job.start(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if rank == 2:
                server = socket.create_server(("127.0.0.1", 0), backlog=9)
                (here / "new").write_text(str(server.getsockname()[1]))
                (here / "new").rename(here / "port")
                peers = [server.accept() for _ in range(3)]
                os._exit(3)
            wait_for("port")
            port = int((here / "port").read_text())
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.recv(1)
            # The launcher can tell apart what is 0.2 s apart.
            time.sleep(0.2)
            sys.exit("lost a peer")
            """,
            num_workers=4,
        )
        assert job.wait() == 3
        lines = sorted(job.stderr.splitlines())
        assert lines == [
            *(f"[{rank}] lost a peer" for rank in (0, 1, 3)),
            "tf-avgstrategy: worker 2 failed first, with exit code 3",
        ]

    def test_the_others_may_end_in_order(self, job):
        job.start(
            """
            if rank == 0:
                wait_for("go")
                os.kill(os.getpid(), signal.SIGKILL)
            def save(*_):
                print("saved")
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("ready")
            time.sleep(600)
            """,
            num_workers=2,
        )
        job.wait_for_line("[1] ready")
        job.touch("go")
        assert job.wait() == 128 + signal.SIGKILL
        assert job.stdout[-1] == "[1] saved\n"
        assert job.stderr == (
            "tf-avgstrategy: worker 0 failed first, killed by signal SIGKILL\n"
        )


class TestSignals:
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
    def test_it_ends_with_its_workers(self, job, name):
        job.start(
            f"""
            def save(*_):
                print("saved")
                sys.exit(5)
            signal.signal(signal.{name}, save)
            print("ready")
            time.sleep(600)
            """,
            num_workers=2,
        )
        job.wait_for_line("[0] ready")
        job.wait_for_line("[1] ready")
        number = getattr(signal, name)
        job.process.send_signal(number)
        assert job.wait() == 128 + number
        assert sorted(job.stdout[2:]) == ["[0] saved\n", "[1] saved\n"]
        assert job.stderr == ""

    def test_workers_that_do_not_end_are_killed(self, job):
        job.start(STUBBORN, num_workers=2, grace=1)
        job.wait_for_line("[0] ready")
        job.wait_for_line("[1] ready")
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM
        assert job.stderr == (
            "tf-avgstrategy: did not end when told to, and were killed: 0, 1\n"
        )

    def test_they_have_10_seconds(self):
        assert worker_processes._GRACE_SECONDS_AFTER_SIGNAL == 10

    def test_a_second_interrupt_kills_at_once(self, job):
        job.start(STUBBORN, num_workers=2, grace=LIMIT_SECONDS * 10)
        job.wait_for_line("[0] ready")
        job.wait_for_line("[1] ready")
        job.process.send_signal(signal.SIGINT)
        job.wait_for_line("[0] interrupted")
        job.wait_for_line("[1] interrupted")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT

    @pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
    def test_other_signals_are_passed_on(self, job, name):
        job.start(
            f"""
            def note(*_):
                (here / str(rank)).touch()
            signal.signal(signal.{name}, note)
            print("ready")
            wait_for(str(rank))
            print("done")
            """,
            num_workers=2,
        )
        job.wait_for_line("[0] ready")
        job.wait_for_line("[1] ready")
        job.process.send_signal(getattr(signal, name))
        assert job.wait() == 0
        assert sorted(job.stdout[2:]) == ["[0] done\n", "[1] done\n"]

    def test_under_nohup_it_goes_on(self, job):
        job.start(
            """
            print("ready")
            wait_for("go")
            print("done")
            """,
            num_workers=1,
            ignored=["SIGHUP"],
        )
        job.wait_for_line("[0] ready")
        job.process.send_signal(signal.SIGHUP)
        job.touch("go")
        assert job.wait() == 0
        assert job.stdout[-1] == "[0] done\n"


# A worker with a child that ignores every request to end.
PARENT = """
child = (
    "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "signal.signal(signal.SIGINT, signal.SIG_IGN);"
    "print('child', flush=True);"
    "time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", child])
wait_for("go")
"""


class TestNothingIsLeft:
    @pytest.fixture
    def parents(self, job):
        """Starts two workers with a child each, then what is given."""

        def start(end):
            job.start(PARENT + end, num_workers=2)
            job.wait_for_line("[0] child")
            job.wait_for_line("[1] child")
            # The launcher, its guard, two workers, two children.
            assert len(job.strays()) == 6
            return job

        return start

    @pytest.mark.parametrize("code", [0, 4])
    def test_when_the_workers_end(self, parents, code):
        job = parents(f"sys.exit({code})")
        job.touch("go")
        assert job.wait() == code

    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
    def test_when_the_launcher_is_told_to_end(self, parents, name):
        job = parents("")
        number = getattr(signal, name)
        job.process.send_signal(number)
        assert job.wait() == 128 + number

    def test_when_the_launcher_is_killed(self, parents):
        job = parents("")
        job.process.kill()
        # Not before all who hold its output are gone.
        assert job.wait() == -signal.SIGKILL

    def test_when_a_worker_cannot_be_started(self, job):
        driver = DRIVER.replace(
            "options = json",
            "popen = worker_processes.subprocess.Popen\n"
            "def fail(command, **options):\n"
            "    if '\"index\": 1' in options.get('env', {})"
            ".get('TF_CONFIG', ''):\n"
            "        raise BlockingIOError('no more processes')\n"
            "    return popen(command, **options)\n"
            "worker_processes.subprocess.Popen = fail\n"
            "options = json",
        )
        options = json.dumps({"num_workers": 2})
        job.start_python(["-c", driver, options, job.script(STUBBORN)])
        assert job.wait() == 1
        assert "no more processes" in job.stderr
