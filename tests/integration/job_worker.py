"""A worker of a job: runs a script as `python -u script` does, but forked."""

import atexit
import faulthandler
import gc
import os
import pathlib
import runpy
import sys
import threading

import pool_worker


def main(script, arguments, environment, folder, output):
    """Runs the script and ends this process with the script's exit code.

    Args:
        script: String, its path.
        arguments: List of strings.
        environment: Dict, this process' environment.
        folder: String, the directory to run it in, or None.
        output: String, the file that takes what is printed.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    pool_worker.print_to(output)
    faulthandler.enable()
    gc.freeze()
    sys.stdout.reconfigure(write_through=True)
    if folder is not None:
        os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    code = _exit_code_of(script)
    # What Python does at its end. `multiprocessing` leaves it out.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code_of(script):
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - it ends the process.
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
