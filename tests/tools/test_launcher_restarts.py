"""The launcher starts all workers again after one has failed."""

import json
import pathlib
import subprocess
import sys

import pytest

from tf_avgstrategy.tools import launcher
from tf_avgstrategy.tools import worker_processes

COUNT = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
count = int(path.read_text())
if count < 2 and __import__("json").loads(
    __import__("os").environ["TF_CONFIG"]
)["task"]["index"] == 0:
    path.write_text(str(count + 1))
    sys.exit(9)
print("done")
"""


@pytest.fixture
def runs(monkeypatch):
    """How the workers' runs end, to be filled in, and their environments."""
    ends, environments = [], []

    def run(command, started, quiet):
        environments.append(started)
        return ends.pop(0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(worker_processes, "run", run)
    return ends, environments


def launch(max_restarts):
    return launcher.launch([__file__], num_workers=2, max_restarts=max_restarts)


def failure(code):
    return worker_processes.Ended(code, has_failed=True)


def test_until_one_run_is_well(runs, capsys):
    ends, environments = runs
    ends += [failure(75), failure(9), worker_processes.Ended(0, False)]
    assert launch(5) == 0
    assert len(environments) == 3
    configs = [json.loads(each[0]["TF_CONFIG"]) for each in environments]
    assert configs[0]["cluster"] != configs[1]["cluster"]
    text = capsys.readouterr().err
    assert "again, 1 of at most 5 times" in text
    assert "again, 2 of at most 5 times" in text


def test_not_more_often_than_asked(runs):
    ends, environments = runs
    ends += [failure(9), failure(8), failure(7)]
    assert launch(1) == 8
    assert len(environments) == 2


def test_not_by_default(runs):
    ends, environments = runs
    ends += [failure(9)]
    assert launcher.launch([__file__], num_workers=2) == 9
    assert len(environments) == 1


def test_not_after_a_signal_to_the_launcher(runs):
    ends, environments = runs
    ends += [worker_processes.Ended(130, has_failed=False)]
    assert launch(3) == 130
    assert len(environments) == 1


@pytest.mark.parametrize("count", [-1, 1.5, "3"])
def test_other_counts_are_refused(runs, count):
    with pytest.raises(launcher.LaunchError, match="max_restarts"):
        launch(count)


def test_by_the_command(tmp_path):
    script, count = tmp_path / "script.py", tmp_path / "count"
    script.write_text(COUNT)
    count.write_text("0")
    done = subprocess.run(
        [
            pathlib.Path(sys.executable).parent / "tf-avgstrategy",
            "launch",
            "--workers=2",
            "--max-restarts=2",
            script,
            count,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert count.read_text() == "2"
    assert done.stdout.count("done") >= 2
