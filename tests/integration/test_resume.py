"""Runs that are killed and resumed: CKPT-03, CKPT-05, FAIL-04, and at random.

KILL_RUNS=40 in the environment makes the random ones more than the four.
"""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import keras
import processes
import pytest

from tf_avgstrategy.workers import lost_exit

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = "resume_worker.py"
NO_NAMESPACES = 77
NUM_STEPS = 21
KILL_RUNS = int(os.environ.get("KILL_RUNS", "4"))
SEED = int(os.environ.get("KILL_SEED", "20261201"))


def run(folder, *flags, size=2, communicator="collective"):
    """Runs the job. Returns exit codes, last lines and all output, by rank."""
    with processes.Job(
        SCRIPT, str(folder), *flags, size=size, communicator=communicator
    ) as job:
        codes = job.wait(120)
        texts = [worker.text() for worker in job.workers]
    ends = [re.findall("^end: .*", text, re.M) for text in texts]
    return codes, ends, texts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function of flags that gives how such a run ends."""
    known = {}

    def get(*flags):
        if flags not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            codes, ends, texts = run(folder, *flags)
            assert codes == [0, 0], texts
            assert ends[0] == ends[1]
            (known[flags],) = ends[0]
        return known[flags]

    return get


def resumed_at(text):
    """Epoch, batch and step of the backup that a worker went on from."""
    found = re.findall("Resumed .* epoch (.*), batch (.*), step (.*)\\.", text)
    return [tuple(map(int, place)) for place in found]


@pytest.mark.parametrize("number", range(KILL_RUNS))
def test_a_killed_run_ends_bit_equal(number, undisturbed, tmp_path):
    choose = random.Random(SEED + number)
    communicator = ["collective", "horovod"][number % 2]
    if communicator == "horovod":
        pytest.importorskip("horovod")
    rank, step = choose.randrange(2), choose.randrange(1, NUM_STEPS + 1)
    delay = choose.uniform(0, 0.2)
    print(f"seed {SEED + number}: worker {rank}, step {step}, {delay:.3f} s")
    flags = ["--has_callbacks"]
    if number % 4 < 2:
        flags.append("--has_everything")
    codes, ends, texts = run(
        tmp_path,
        *flags,
        f"--kill_rank={rank}",
        f"--kill_step={step}",
        f"--kill_delay={delay}",
        communicator=communicator,
    )
    expected = undisturbed(*flags)
    # Unless it had come to its end before.
    if codes != [0, 0]:
        assert codes[rank] == -signal.SIGKILL, texts
        assert codes[1 - rank] in (lost_exit.LOST_EXIT_CODE, 0), texts
    codes, ends, texts = run(tmp_path, *flags, communicator=communicator)
    assert codes == [0, 0], texts
    assert ends == [[expected]] * 2
    for path in tmp_path.glob("*.keras"):
        assert keras.models.load_model(path).optimizer.iterations > 0
    assert not list(tmp_path.glob(".*.unfinished"))


def killed(folder, *flags):
    """A run of two workers that is killed in step 12, after a backup of 9."""
    codes, _, texts = run(folder, "--kill_rank=1", "--kill_step=12", *flags)
    assert codes == [lost_exit.LOST_EXIT_CODE, -signal.SIGKILL], texts


def test_ckpt_03_only_the_chief_has_the_file(undisturbed, tmp_path):
    killed(tmp_path, "--own_folders")
    assert (tmp_path / "worker0" / "backup").exists()
    assert not (tmp_path / "worker1" / "backup").exists()
    codes, ends, texts = run(tmp_path, "--own_folders")
    assert codes == [0, 0], texts
    assert ends == [[undisturbed()]] * 2
    places = [resumed_at(text) for text in texts]
    # 7 batches an epoch, a backup every 3.
    assert places[0] == places[1]
    assert places[0] in ([(1, 2, 9)], [(1, 5, 12)])


@pytest.mark.parametrize(
    ("size", "replicas", "flags"),
    [(1, 1, []), (1, 3, ["--has_everything"]), (3, 1, [])],
)
def test_another_number_of_replicas_goes_on(size, replicas, flags, tmp_path):
    killed(tmp_path, *flags)
    codes, ends, texts = run(
        tmp_path,
        f"--replicas={replicas}",
        *flags,
        size=size,
        communicator="collective" if size > 1 else "none",
    )
    assert codes == [0] * size, texts
    assert f"steps {NUM_STEPS} " in ends[0][0]
    assert [end == ends[0] for end in ends] == [True] * size
    for text in texts:
        assert resumed_at(text)[0][2] in (9, 12)


def test_fail_04_a_worker_that_starts_again_alone(undisturbed, tmp_path):
    flags = ["--kill_rank=1", "--kill_step=12"]
    with processes.Job(
        SCRIPT, str(tmp_path), *flags, size=2, communicator="collective"
    ) as job:
        assert job.wait(60, ranks=[1]) == [-signal.SIGKILL]
        again = processes.Worker(
            SCRIPT,
            [str(tmp_path), *flags, "--start_timeout=15"],
            job.environments[1],
        )
        job.workers.append(again)
        codes = job.wait(120, ranks=[0, 2])
        texts = [worker.text() for worker in job.workers]
    # All are to be started again, and no fresh weights have come in.
    assert codes == [lost_exit.LOST_EXIT_CODE] * 2, texts
    codes, ends, texts = run(tmp_path)
    assert codes == [0, 0], texts
    assert ends == [[undisturbed()]] * 2


def test_the_launcher_starts_all_again(undisturbed, tmp_path):
    done = subprocess.run(
        [
            pathlib.Path(sys.executable).parent / "tf-avgstrategy",
            "launch",
            "--workers=2",
            "--max_restarts=3",
            processes.HERE / SCRIPT,
            str(tmp_path),
            "--kill_rank=1",
            "--kill_step=12",
        ],
        env=processes.clean_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = re.findall("^\\[.\\] (end: .*)", done.stdout, re.M)
    assert ends == [undisturbed()] * 2
    assert "starting all workers again, 1 of at most 3" in done.stderr
    assert "2 of at most 3" not in done.stderr


def test_hosts_with_disks_of_their_own(undisturbed, tmp_path):
    """Only the chief's host has the backup, and the network is a slow one."""

    def on_hosts():
        return subprocess.run(
            [
                ROOT / "tests" / "hosts.sh",
                "run",
                "--hosts=2",
                "--rate=200mbit",
                "--limit=120",
                "--",
                processes.HERE / SCRIPT,
                str(tmp_path),
                "--own_folders",
                "--kill_rank=1",
                "--kill_step=12",
            ],
            env={**processes.clean_environment(), "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    first = on_hosts()
    if first.returncode == NO_NAMESPACES:
        pytest.skip("This machine has no network namespaces for us.")
    assert first.returncode == 128 + signal.SIGKILL, first.stderr
    second = on_hosts()
    assert second.returncode == 0, second.stderr
    ends = re.findall("^\\[host.\\] (end: .*)", second.stdout, re.M)
    assert ends == [undisturbed()] * 2
