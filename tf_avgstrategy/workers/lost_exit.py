"""The end of a process whose peers are lost: an exit code of its own."""

import atexit
import contextlib
import os
import sys

from tf_avgstrategy.workers import communicators

__all__ = ["LOST_EXIT_CODE", "exit_with_lost_code"]

# EX_TEMPFAIL of sysexits.h: "the user is invited to try again later".
LOST_EXIT_CODE = 75


def exit_with_lost_code():
    """Gives a process that a `WorkerLostError` ends an exit code of its own.

    So that whoever started the job sees that it can be started again.
    """
    if not isinstance(sys.excepthook, _LostExit):
        sys.excepthook = _LostExit(sys.excepthook)


class _LostExit:
    """An exception hook that ends a process which has lost its peers."""

    def __init__(self, hook):
        self._hook = hook

    def __call__(self, kind, error, traceback):
        self._hook(kind, error, traceback)
        if not isinstance(error, communicators.WorkerLostError):
            return
        print(
            "tf-avgstrategy: a worker of this job is lost. Start all workers "
            "of the job again; with BackupAndRestore it goes on from its last "
            f"backup. Exit code {LOST_EXIT_CODE}.",
            file=sys.stderr,
        )
        # What Python would do, but for the exit code, which it would make 1.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            # Nobody may read it any more.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(LOST_EXIT_CODE)
