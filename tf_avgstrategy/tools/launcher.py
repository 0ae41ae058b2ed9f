"""The launcher: which command, cluster and devices each local worker gets.

Nothing here needs TensorFlow.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys

from tf_avgstrategy.tools import worker_processes
from tf_avgstrategy.workers import horovod_rendezvous

__all__ = [
    "COMMUNICATORS",
    "LaunchError",
    "free_ports",
    "launch",
    "visible_gpus",
]

COMMUNICATORS = ("collective", "horovod")

_LOOPBACK = "127.0.0.1"


class LaunchError(ValueError):
    """What was asked for cannot be started. Nothing has been."""


def launch(
    script,
    *,
    num_workers,
    devices_per_worker=None,
    communicator="collective",
    quiet=False,
    max_restarts=0,
):
    """Runs a script on several workers of this machine until all have ended.

    Each line of a worker's output appears with its rank before it. SIGINT,
    SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the workers; after
    the first two they have 10 s to end. When a worker fails the others get
    SIGTERM, and SIGKILL 5 s later. At the end everything in the workers'
    process groups is killed. To be called from the main thread.

    Args:
        script: List of strings, what follows `python`: the path of a script,
            or "-m" and a module, then the arguments.
        num_workers: Integer >= 1.
        devices_per_worker: Integer >= 1, GPUs that each worker sees, or
            virtual CPU devices where there are no GPUs. None for an equal
            share of the GPUs, or one CPU device.
        communicator: "collective" or "horovod", see
            `ParameterAveragingStrategy`.
        quiet: Whether only the output of rank 0 is shown, and the last 20
            lines of a worker that fails.
        max_restarts: Integer >= 0, how often all workers are started again
            after one has failed. A script with `BackupAndRestore` then goes
            on from its last backup. Not after a signal to the launcher.

    Returns:
        Int, the exit code of the last start: 0, that of the worker that failed
        first (128 + n for signal n), or 128 + n after SIGINT or SIGTERM to the
        launcher.

    Raises:
        LaunchError: If an argument cannot be, or there are too few GPUs.
        ImportError: If Horovod is to be used and not installed.
    """
    _check_script(script)
    _check_count("num_workers", num_workers)
    if devices_per_worker is not None:
        _check_count("devices_per_worker", devices_per_worker)
    _check_communicator(communicator)
    _check_count("max_restarts", max_restarts, at_least=0)
    devices = _device_environments(num_workers, devices_per_worker)
    command = [sys.executable, "-u", *script]
    for restarts in range(max_restarts + 1):
        if restarts:
            print(
                f"tf-avgstrategy: starting all workers again, {restarts} of at "
                f"most {max_restarts} times",
                file=sys.stderr,
                flush=True,
            )
        # Ports and Horovod's rendezvous are those of one start.
        with _cluster_environments(num_workers, communicator) as environments:
            for environment, device in zip(environments, devices):
                environment.update(device)
            ended = worker_processes.run(command, environments, quiet)
        if not ended.has_failed:
            break
    return ended.exit_code


def _check_script(script):
    script = list(script)
    if script[:1] == ["-m"] and len(script) > 1:
        return
    if not script or not os.path.exists(script[0]):
        raise LaunchError(
            "`script` must begin with the path of a Python script, or with -m "
            f"and a module. Received: {script}. Correct the path, or go to "
            "the directory that it starts from."
        )


def _check_count(name, count, at_least=1):
    if not isinstance(count, int) or count < at_least:
        raise LaunchError(
            f"`{name}` must be an integer >= {at_least}. Received: "
            f"{name}={count!r}. Pass {at_least} for the least."
        )


def _check_communicator(communicator):
    if communicator not in COMMUNICATORS:
        raise LaunchError(
            f"`communicator` must be one of {COMMUNICATORS}. Received: "
            f'communicator={communicator!r}. Pass "collective" where Horovod '
            "is not installed."
        )


def _device_environments(num_workers, devices_per_worker):
    """Returns a dict of environment variables for each worker's devices."""
    gpus = visible_gpus()
    if not gpus:
        if devices_per_worker is None:
            return [{}] * num_workers
        return [{"TF_AVGSTRATEGY_DEVICES": str(devices_per_worker)}] * (
            num_workers
        )
    share = devices_per_worker or max(1, len(gpus) // num_workers)
    if num_workers * share > len(gpus):
        raise LaunchError(
            f"{num_workers} workers with a GPU for each device need "
            f"{num_workers * share} GPUs. Received: {len(gpus)} visible, "
            f"{','.join(gpus)}. Start fewer workers or fewer devices each, or "
            'set CUDA_VISIBLE_DEVICES="" to train on CPU devices.'
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])}
        for i in range(num_workers)
    ]


def visible_gpus():
    """Returns the names by which CUDA_VISIBLE_DEVICES may list GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The answer must not depend on a driver where none is to be used.
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    present = [str(i) for i in range(_num_gpus())]
    if visible is None or not present:
        return present
    gpus = []
    for name in visible.split(","):
        name = name.strip()
        is_index = name.lstrip("-").isdigit()
        # As CUDA does: the list ends at the first name that is none.
        if not name or (is_index and name not in present):
            break
        gpus.append(name)
    return gpus


def _num_gpus():
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    # Without a driver it fails, and prints nothing that begins with "GPU".
    listing = subprocess.run(
        [program, "-L"], capture_output=True, text=True, check=False
    )
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


@contextlib.contextmanager
def _cluster_environments(num_workers, communicator):
    """Yields each worker's whole environment but for its devices."""
    if communicator == "collective":
        yield _collective_environments(num_workers)
        return
    horovod_rendezvous.check_installed()
    hosts = [_LOOPBACK] * num_workers
    with horovod_rendezvous.Rendezvous(hosts) as server:
        environments = []
        for rank in range(num_workers):
            environment = {**os.environ}
            environment.pop("TF_CONFIG", None)
            environment.update(
                horovod_rendezvous.environment(
                    rank, hosts, address=_LOOPBACK, port=server.port
                )
            )
            environments.append(environment)
        yield environments


def _collective_environments(num_workers):
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_")
    }
    ports = free_ports(num_workers)
    cluster = {"worker": [f"{_LOOPBACK}:{port}" for port in ports]}
    environments = []
    for index in range(num_workers):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": cluster, "task": task})
        environments.append({**common, "TF_CONFIG": config})
    return environments


def free_ports(count):
    """Returns different ports that are free now on every address."""
    with contextlib.ExitStack() as stack:
        ports = []
        # All are held until the last is found, so that none comes twice.
        for _ in range(count):
            holder = stack.enter_context(socket.socket())
            # TensorFlow's server listens on all addresses.
            holder.bind(("", 0))
            ports.append(holder.getsockname()[1])
        return ports
