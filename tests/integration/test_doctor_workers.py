"""The doctor on real workers: started by it, by a cluster, or not at all."""

import re
import subprocess
import sys

import processes
import pytest

# What the installed command does.
COMMAND = "from tf_avgstrategy.tools import cli; cli.main()"
OPTIONS = ["--parameters=1e5", "--step_ms=10"]

TIME = r"([\d.]+ m?s)"
# Lines in their order, others may stand between. 1e5 float32 have 4e5 bytes.
FIGURES = [
    rf"measured  latency {TIME}: an all-reduce of one number over 2 workers, "
    r"through \w+",
    rf"measured  {TIME} for an all-reduce of 65,536 bytes, median of \d+",
    r"computed  bandwidth, from how these times grow: each worker sends, and "
    r"receives, [\d.,]+ MB/s",
    rf"measured  {TIME} for the exchange of a round of 100,000 parameters, "
    r"weights alone: 400,000 bytes, median of \d+",
    rf"measured  {TIME} for the exchange of a round of 100,000 parameters, "
    r"weights and two slots, as Adam has: 1,200,000 bytes, median of \d+",
    r"computed  period ([\d,]+) for weights alone: exchange then adds 5 % to "
    r"steps of 10 ms",
    r"computed  period ([\d,]+) for weights and two slots, as Adam has: "
    r"exchange then adds 5 % to steps of 10 ms",
]


def run(*arguments, **variables):
    """The command, in a process that belongs to no test's cluster."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "doctor", *arguments],
        env={**processes.clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_figures(text, prefix):
    """Finds all figures in their order, and compares periods with rounds."""
    pattern = ".*?".join(f"^{re.escape(prefix)}{line}$" for line in FIGURES)
    found = re.search(pattern, text, re.M | re.S)
    assert found, text
    *_, weights, with_slots, period, slow_period = found.groups()
    for exchange, shown in ((weights, period), (with_slots, slow_period)):
        expected = in_ms(exchange) / (0.05 * 10)
        # Three digits are shown, and steps are whole.
        assert float(shown.replace(",", "")) == pytest.approx(
            expected, rel=0.01, abs=1
        )


def in_ms(text):
    number, unit = text.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def test_measures_between_workers_that_it_starts():
    # The test below has the other.
    communicator = "horovod" if processes.HAS_HOROVOD else "collective"
    done = run("--workers=2", f"--communicator={communicator}", *OPTIONS)
    assert done.returncode == 0, done.stderr
    check_figures(done.stdout, "[0] ")
    assert f"workers, through {communicator}\n" in done.stdout
    assert "[1]" not in done.stdout


def test_measures_in_a_cluster_and_the_chief_prints(tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text(COMMAND)
    with processes.Job(
        str(script), "doctor", *OPTIONS, size=2, communicator="collective"
    ) as job:
        assert job.wait() == [0, 0]
        chief, other = (worker.text() for worker in job.workers)
    assert "OK        TF_CONFIG: worker 0 of 2, which are 127.0.0.1:" in chief
    check_figures(chief, "")
    assert "OK " not in other
    assert "measured" not in other


def test_a_worker_that_does_not_come_is_an_error():
    addresses = processes.free_addresses(2)
    done = run(
        "--start_timeout_seconds=2",
        TF_CONFIG=processes.tf_config(addresses, 1),
    )
    assert done.returncode == 1
    assert "error     Worker 1 lost the others in" in done.stdout
    assert f"worker 0 at {addresses[0]} did not answer" in done.stdout
    # What can be told without the others is told.
    assert "OK        TF_CONFIG: worker 1 of 2" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_broken_tf_config_is_an_error():
    done = run(TF_CONFIG='{"cluster": {"worker": ["somewhere"]}}')
    assert done.returncode == 1
    assert (
        'error     TF_CONFIG: "cluster": an address must be "host:port". '
        "Received: 'somewhere'. Write it like "
    ) in done.stdout
    assert "Traceback" not in done.stderr
