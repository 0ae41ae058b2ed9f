"""A process that has lost its peers ends with a code of its own."""

import subprocess
import sys

import pytest

from tf_avgstrategy.workers import lost_exit

SCRIPT = """
import atexit
from tf_avgstrategy.workers import communicators, lost_exit
lost_exit.exit_with_lost_code()
lost_exit.exit_with_lost_code()
atexit.register(lambda: print("at exit"))
print("before", end=" ")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "advices"),
    [
        ("communicators.WorkerLostError('gone', [1])", 75, 1),
        ("ValueError('gone')", 1, 0),
    ],
)
def test_the_exit_code_says_whether_to_start_again(error, code, advices):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout == "before at exit\n"
    assert "Traceback" in done.stderr and "gone" in done.stderr
    advice = f"Exit code {lost_exit.LOST_EXIT_CODE}."
    assert done.stderr.count(advice) == advices
