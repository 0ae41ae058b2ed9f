"""The communicator over Horovod's operations: ring all-reduce."""

import contextlib
import os
import socket
import time

import tensorflow as tf

from tf_avgstrategy.workers import communicators
from tf_avgstrategy.workers import horovod_rendezvous
from tf_avgstrategy.workers import liveness

__all__ = ["HorovodCommunicator", "check_loads"]

_POLL_SECONDS = 0.1
# Buckets are fused already: fusing them again would only copy them. Horovod's
# processes talk at every cycle, also when there is nothing to send; with its
# own 1 ms that is 0.45 MB/s, and a round gains a few milliseconds.
_SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "0",
    "HOROVOD_CYCLE_TIME": "5",
}


class HorovodCommunicator(communicators.Communicator):
    """Exchanges tensors through Horovod: over Gloo, MPI or NCCL, as built.

    Only Horovod's raw operations are used. Its optimizer wrapper and its Keras
    callbacks do not work with Keras 3. There is one per process.

    Args:
        timeout_seconds: Float > 0, how long an exchange may take. It includes
            waiting for the slowest worker.
        start_timeout_seconds: Float > 0, how long all workers may take to come.
        cluster: `Cluster` or None. Without a launcher (`horovodrun`,
            `tf-avgstrategy launch`) it says which workers there are; the chief
            then serves Horovod's rendezvous at its own address.

    Raises:
        ImportError: If Horovod is not installed, or for another TensorFlow.
        RuntimeError: If launcher and `cluster` disagree, or the chief's port
            is taken.
        WorkerLostError: If a worker does not come in time.
    """

    name = "horovod"
    bucket_bytes = 64 * 2**20

    def __init__(self, *, timeout_seconds, start_timeout_seconds, cluster=None):
        check_loads()
        # Not at the top: Horovod is optional.
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._addresses = None
        silence_seconds = max(1, min(timeout_seconds, start_timeout_seconds))
        _limit_waiting(int(silence_seconds), timeout_seconds)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        with contextlib.ExitStack() as stack:
            if cluster is not None and "HOROVOD_RANK" not in os.environ:
                _join_rendezvous(cluster, start_timeout_seconds, stack)
            _init(hvd, start_timeout_seconds)
            super().__init__(rank=hvd.rank(), size=hvd.size())
            _check_cluster(cluster, self.rank, self.size)
            host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
            self._beacon = liveness.Beacon(host)
            self._addresses = self.all_gather_strings(self._beacon.address)

    def close(self):
        """See `Communicator.close`."""
        super().close()
        self._beacon.close()

    def all_reduce_sum_in_graph(self, tensors, *, keys, tokens):
        """See `Communicator.all_reduce_sum_in_graph`."""
        del tokens  # Names tell them apart, whatever their order.
        return self._hvd.grouped_allreduce(
            tensors,
            op=self._hvd.Sum,
            name=f"tf_avgstrategy.step.{keys[0]}",
            ignore_name_scope=True,
        )

    def _gather(self, array):
        with tf.device("CPU:0"):
            gathered = self._hvd.allgather(
                tf.constant(array[None]), name="tf_avgstrategy.gather"
            )
        return gathered.numpy()

    def _reduce(self, tensors):
        # Horovod cannot sum bfloat16.
        wide = [
            tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t
            for t in tensors
        ]
        sums = self._hvd.grouped_allreduce(
            wide, op=self._hvd.Sum, name="tf_avgstrategy.reduce"
        )
        return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors)]

    def _broadcast(self, tensors, root):
        return [
            self._hvd.broadcast(
                tensor, root, name=f"tf_avgstrategy.broadcast.{place}"
            )
            for place, tensor in enumerate(tensors)
        ]

    def _lost_workers(self):
        if self._addresses is None:
            return []
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = liveness.silent([self._addresses[rank] for rank in others])
        return [others[place] for place in silent]

    def _address(self, rank):
        return f" on {self._addresses[rank].rpartition(':')[0]}"


def check_loads():
    """Raises an ImportError, with the way to mend it, unless Horovod loads."""
    horovod_rendezvous.check_installed()
    try:
        import horovod.tensorflow  # noqa: F401
    except (ImportError, OSError, tf.errors.OpError) as error:
        first_line = str(error).partition("\n")[0]
        raise ImportError(
            "Horovod must be built for the TensorFlow that is installed, "
            f"{tf.__version__}. Received: one that does not load: "
            f"{first_line}. Run `tf-avgstrategy build-horovod --rebuild`.",
            name="horovod",
        ) from error


def _limit_waiting(silence_seconds, timeout_seconds):
    """Makes Horovod give up; by default it waits for ever.

    Gloo's limit ends waiting for a process that is gone or stopped, the stall
    limits end waiting for a live one that does not take part.
    """
    stall_seconds = max(2, int(timeout_seconds))
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(silence_seconds)
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(stall_seconds)
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(
        min(60, stall_seconds - 1)
    )


def _join_rendezvous(cluster, start_timeout_seconds, stack):
    """Lets the workers of TF_CONFIG find each other at the chief's address."""
    hosts = [address.rpartition(":")[0] for address in cluster.addresses]
    host, _, port = cluster.addresses[0].rpartition(":")
    if cluster.rank == 0:
        stack.enter_context(
            horovod_rendezvous.Rendezvous(hosts, port=int(port))
        )
    else:
        _wait_for_server(host, int(port), start_timeout_seconds)
    os.environ.update(
        horovod_rendezvous.environment(
            cluster.rank, hosts, address=host, port=int(port)
        )
    )


def _wait_for_server(host, port, timeout_seconds):
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise communicators.WorkerLostError(
                    f"The chief must be at {host}:{port} within "
                    f"{timeout_seconds:.0f} s. Received: {error}. Start all "
                    "workers of TF_CONFIG, and check its addresses.",
                    lost=[0],
                ) from error
            time.sleep(_POLL_SECONDS)


def _init(hvd, start_timeout_seconds):
    try:
        hvd.init()
    except (ValueError, RuntimeError) as error:
        raise communicators.WorkerLostError(
            f"All {os.environ.get('HOROVOD_SIZE', '')} workers of a Horovod "
            f"job must come within {start_timeout_seconds:.0f} s. Received: "
            f"{error} Look at the output of the workers that did not come, "
            "and start all of them again."
        ) from error


def _check_cluster(cluster, rank, size):
    if cluster is not None and (cluster.rank, cluster.size) != (rank, size):
        raise RuntimeError(
            "Where both are set, TF_CONFIG and Horovod's launcher must name "
            f"the same workers. Received: worker {cluster.rank} of "
            f"{cluster.size} by TF_CONFIG, {rank} of {size} by Horovod. Remove "
            "TF_CONFIG from the environment, or start without the launcher."
        )
