"""The check for strays, on which all tests with processes rely, can fail."""

import os
import signal

import processes
import pytest


def test_a_process_that_a_forked_worker_left_is_found():
    pool = processes.Pool(1, "none")
    (stray,) = pool.run("leave_a_process")
    with pytest.raises(AssertionError, match=f"left behind: .*{stray}"):
        pool.close()
    os.kill(stray, signal.SIGKILL)
