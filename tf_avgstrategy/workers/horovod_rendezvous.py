"""How the processes of a Horovod job find each other, without ssh or MPI."""

import contextlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import subprocess
import sys
import threading
import time
from typing import NamedTuple

__all__ = [
    "Rendezvous",
    "check_all_reduce",
    "check_installed",
    "environment",
    "installed",
]

# How soon a server that is told to stop notices it.
_POLL_SECONDS = 0.05
# Each process of the check.
_PROGRAM = """
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
value = tf.fill([4], float(hvd.rank() + 1))
total = hvd.allreduce(value, op=hvd.Sum).numpy().tolist()
hvd.shutdown()
if total != [3.0] * 4:
    raise SystemExit(f"1 + 2 must be 3. Received: {total}.")
"""


class Rendezvous:
    """The server where the processes of one job tell each other who they are.

    A context manager: entering starts Horovod's own key-value server in a
    thread of this process, leaving stops it, joins its threads and closes its
    socket. One process of the job runs it, any number of jobs may follow each
    other, each with a server of its own. It must run until `horovod.init` has
    returned in every process, and as long as process sets are added.

    The server believes whoever reaches it. It listens on the loopback
    interface alone if every host is loopback, otherwise on all interfaces.

    Args:
        hosts: List of strings, for each rank the name or IP address of its
            host. Equal strings are one host, whatever their places.
        port: Int in `[0, 65535]`, the TCP port. 0: any free one.

    Raises:
        ValueError: If an argument is none of these.
        ImportError: On entering, if Horovod is not installed.
        OSError: On entering, if the port cannot be had.

    Example:
        >>> hosts = ["10.0.0.1", "10.0.0.2"]
        >>> with Rendezvous(hosts) as rendezvous:  # doctest: +SKIP
        ...     variables = environment(
        ...         0, hosts, address="10.0.0.1", port=rendezvous.port
        ...     )
    """

    def __init__(self, hosts, *, port=0):
        self._slots = _assign(hosts)
        self._address = ("127.0.0.1" if _is_loopback(hosts) else "", port)
        self._server = None
        self._thread = None
        _check_port(port, least=0)

    @property
    def port(self):
        """Int, the TCP port that the server listens on."""
        if self._server is None:
            raise RuntimeError(
                "A rendezvous has a port between entering and leaving it. "
                "Received: a rendezvous that is not running. Read `port` "
                "inside `with Rendezvous(hosts) as rendezvous:`."
            )
        return self._server.server_address[1]

    def __enter__(self):
        self._server = self._listen()
        # The server reads the sizes of the job from objects like ours.
        self._server.init(self._slots)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": _POLL_SECONDS},
            name="horovod_rendezvous",
            daemon=True,
        )
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._thread.join()
        # Also joins the threads that answer requests. One whose client has
        # gone silent ends by Horovod's limit of 3 seconds for a request.
        self._server.server_close()
        self._server = self._thread = None

    def _listen(self):
        check_installed()
        from horovod.runner.http import http_server

        # Not `RendezvousServer`: it takes a port of its own choice and its
        # `stop` leaves the socket open.
        try:
            return http_server.RendezvousHTTPServer(
                self._address, http_server.RendezvousHandler, verbose=0
            )
        except OSError as error:
            host, port = self._address
            raise OSError(
                error.errno,
                "The rendezvous server must listen on "
                f"{host or '0.0.0.0'}:{port}. Received: {error.strerror}. "
                "End the process that has the port (`ss -ltnp` lists them), "
                "or pass another port, 0 for any free one.",
            ) from error


def installed():
    """Returns the version of the installed Horovod, a string, None without."""
    if importlib.util.find_spec("horovod") is None:
        return None
    return importlib.metadata.version("horovod")


def check_installed():
    """Raises an ImportError, with the way to install it, without Horovod."""
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(
            "Training with Horovod needs the package horovod. Received: a "
            "Python environment without it. Run `tf-avgstrategy "
            "build-horovod`: `pip install horovod` fails with the supported "
            "releases of TensorFlow.",
            name="horovod",
        )


def environment(rank, hosts, *, address, port, interface=None):
    """Returns the environment variables that make a process one rank of a job.

    Args:
        rank: Int in `[0, len(hosts))`, the rank of the process.
        hosts: List of strings, as the `Rendezvous` got it, on every rank the
            same.
        address: String, the name or IPv4 address at which this rank reaches
            the host of the `Rendezvous`.
        port: Int in `[1, 65535]`, the port of the `Rendezvous`.
        interface: String, the network interface of this rank's host that the
            other hosts reach. None: loopback if every host is, otherwise
            Gloo's choice, the address of the machine's own host name. On a
            machine that maps its name to 127.0.1.1 that choice is wrong.

    Returns:
        Dict of strings, to be set before `horovod.init`.

    Raises:
        ValueError: If an argument is none of these.
    """
    slots = _assign(hosts)
    if not isinstance(rank, int) or not 0 <= rank < len(slots):
        raise ValueError(
            "`rank` must be an integer from 0 to the number of `hosts` - 1, "
            f"one host per rank. Received: rank={rank!r}, {len(hosts)} hosts. "
            "Pass the host of every rank."
        )
    _check_port(port, least=1)
    slot = slots[rank]
    variables = {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if interface is None and _is_loopback(hosts):
        interface = "lo"
    if interface is not None:
        variables["HOROVOD_GLOO_IFACE"] = interface
    return variables


def check_all_reduce(*, timeout_seconds=120):
    """Raises a RuntimeError unless two processes sum 1 and 2 to 3.

    They run on this machine without its GPUs, exchange over the loopback
    interface and import what this process' children import. What they print
    goes where this process prints. They end before this function does.

    Args:
        timeout_seconds: Float > 0, the limit for the whole check.
    """
    hosts = ["127.0.0.1"] * 2
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(Rendezvous(hosts)).port
        processes = [
            stack.enter_context(_process(rank, hosts, port, timeout_seconds))
            for rank in range(len(hosts))
        ]
        codes = [None] * len(hosts)
        # When one has failed, the other waits for it in vain.
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            codes = [process.poll() for process in processes]
    if any(code != 0 for code in codes):
        raise RuntimeError(
            "Two processes must sum 1 and 2 to 3 with Horovod. Received: the "
            f"exit statuses {codes}, where None is no end in time, of "
            f"{timeout_seconds} seconds. Their output says why. Build Horovod "
            "again for the TensorFlow that is installed."
        )


@contextlib.contextmanager
def _process(rank, hosts, port, timeout_seconds):
    outer = os.environ.items()
    variables = {k: v for k, v in outer if not k.startswith("HOROVOD_")}
    variables |= environment(rank, hosts, address=hosts[0], port=port)
    variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(timeout_seconds) + 1)
    variables["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.DEVNULL,
        env=variables,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Slot(NamedTuple):
    """The place of one rank. The names are those that Horovod's server reads.

    Attributes:
        hostname: String, the rank's host.
        size: Int, the number of ranks.
        local_rank: Int, the rank's index among those of its host.
        local_size: Int, the number of ranks of its host.
        cross_rank: Int, its host's index among those with this local rank.
        cross_size: Int, the number of hosts that have this local rank.
    """

    hostname: str
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def _assign(hosts):
    """Returns a list of the `_Slot` of each rank."""
    _check_hosts(hosts)
    sizes = {host: hosts.count(host) for host in hosts}
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        # In the order in which they appear first, as dicts keep it.
        across = [name for name, size in sizes.items() if size > local_rank]
        slots.append(
            _Slot(
                hostname=host,
                size=len(hosts),
                local_rank=local_rank,
                local_size=sizes[host],
                cross_rank=across.index(host),
                cross_size=len(across),
            )
        )
    return slots


def _check_hosts(hosts):
    # A host becomes part of a URL path, where it must stay one word.
    if (
        not isinstance(hosts, list)
        or not hosts
        or not all(isinstance(host, str) and host for host in hosts)
        or any(set(host) & set(" \t\r\n/?#%") for host in hosts)
    ):
        raise ValueError(
            "`hosts` must be a list with one host name or IP address for each "
            f"rank. Received: hosts={hosts!r}. For two ranks on this machine "
            'pass ["127.0.0.1", "127.0.0.1"].'
        )


def _check_port(port, *, least):
    if not isinstance(port, int) or not least <= port < 2**16:
        raise ValueError(
            f"`port` must be an integer from {least} to 65535. Received: "
            f"port={port!r}. Pass the port of the rendezvous server."
        )


def _is_loopback(hosts):
    return all(_is_loopback_host(host) for host in hosts)


def _is_loopback_host(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
