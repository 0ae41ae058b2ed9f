"""FAIL-01: a lost worker is an error with its name on every other one."""

import re
import time

import keras
import processes
import pytest

from tf_avgstrategy.workers import lost_exit

# The limit of an exchange; 3 s for who does not answer; and what a busy machine
# takes longer.
LIMIT_SECONDS = 10 + 15


@pytest.mark.parametrize("how", ["first", "between", "inside", "stop", "raise"])
def test_fail_01_a_lost_worker_is_named_in_time(communicator, how, tmp_path):
    path = tmp_path / "model.keras"
    with processes.Job(
        "lose_worker.py", how, str(path), size=2, communicator=communicator
    ) as job:
        first, last = job.workers
        last.wait_for("step 1" if how == "first" else "step 3")
        start = time.monotonic()
        first.wait_for("as before the round")
        assert time.monotonic() - start < LIMIT_SECONDS
        (code,) = job.wait(60, ranks=[0])
        assert code == lost_exit.LOST_EXIT_CODE
        text = first.text()
        assert "WorkerLostError" in text
        (advice,) = re.findall("^tf-avgstrategy: .*", text, re.M)
        assert "Start all workers of the job again" in advice
        assert "worker 1" in text.partition("did not answer")[0], text
        assert "as before the round; lost: (1,)" in text
    # The last file is whole.
    weight = keras.models.load_model(path).get_weights()[0]
    assert weight.shape == (1, 1)


def test_fail_01_within_a_step_that_exchanges_gradients(communicator, tmp_path):
    with processes.Job(
        "lose_worker.py",
        "between",
        str(tmp_path / "model.keras"),
        "global",
        size=2,
        communicator=communicator,
    ) as job:
        first, last = job.workers
        last.wait_for("step 3")
        start = time.monotonic()
        first.wait_for("as before the round; lost: (1,)")
        assert time.monotonic() - start < LIMIT_SECONDS
        assert job.wait(60, ranks=[0]) == [lost_exit.LOST_EXIT_CODE]
        assert "worker 1" in first.text().partition("did not answer")[0]


def test_fail_01_every_other_worker_names_it(communicator, tmp_path):
    with processes.Job(
        "lose_worker.py",
        "between",
        str(tmp_path / "model.keras"),
        size=3,
        communicator=communicator,
    ) as job:
        codes = job.wait(90)
        assert codes[:2] == [lost_exit.LOST_EXIT_CODE] * 2
        for worker in job.workers[:2]:
            # The other survivor may have left already.
            assert "as before the round; lost: (" in worker.text()
            assert "worker 2" in worker.text()


def test_fail_01_a_clean_early_exit_disturbs_nobody(communicator, tmp_path):
    with processes.Job(
        "lose_worker.py",
        "early",
        str(tmp_path / "model.keras"),
        size=2,
        communicator=communicator,
    ) as job:
        assert job.wait(90) == [0, 0]
        for worker in job.workers:
            assert "done" in worker.text()
            for word in ("rror", "xception", "abort", "refused", "closed"):
                assert word not in _without_start(worker.text())


def _without_start(text):
    """What was printed from the first step on."""
    return text.partition("step 1")[2]
