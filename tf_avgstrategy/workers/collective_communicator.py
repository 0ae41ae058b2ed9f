"""The communicator over TensorFlow's own collectives, from TF_CONFIG."""

import copy
import itertools

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import collective_ops

from tf_avgstrategy.workers import communicators
from tf_avgstrategy.workers import liveness

__all__ = ["CollectiveCommunicator"]

_JOB = "worker"
# Far from the keys that strategies in this process use.
_GROUP_KEY = 770_000
# Beyond the keys of exchanges in a graph.
_FIRST_INSTANCE_KEY = 2**30 + 770_000


class CollectiveCommunicator(communicators.Communicator):
    """Exchanges tensors through TensorFlow's collectives, over gRPC.

    Making one starts TensorFlow and its gRPC server in this process, so it
    must come before everything that starts TensorFlow. There is one per
    process. TensorFlow's coordination service stays off: with it a worker that
    never comes makes the others wait without a limit.

    Args:
        cluster: `Cluster`, all workers' addresses and this one's rank.
        timeout_seconds: Float > 0, how long an exchange may take. It includes
            waiting for the slowest worker.
        start_timeout_seconds: Float > 0, how long all workers may take to come.

    Raises:
        RuntimeError: If TensorFlow was started before, or this worker's port
            is taken.
        WorkerLostError: If a worker does not come in time.
    """

    name = "collective"
    bucket_bytes = 32 * 2**20

    def __init__(self, cluster, *, timeout_seconds, start_timeout_seconds):
        super().__init__(rank=cluster.rank, size=cluster.size)
        self._addresses = cluster.addresses
        self._device = f"/job:{_JOB}/replica:0/task:{self.rank}/device:CPU:0"
        self._instance_keys = itertools.count(_FIRST_INSTANCE_KEY)
        self._timeout_seconds = start_timeout_seconds
        self._functions = {}
        _start_server(cluster)
        self.barrier()
        # From now on waiting has another limit, which is part of the ops.
        self._timeout_seconds = timeout_seconds
        self._functions = {}

    def all_reduce_sum_in_graph(self, tensors, *, keys, tokens):
        """See `Communicator.all_reduce_sum_in_graph`."""
        with tf.device(self._device):
            return [
                collective_ops.all_reduce_v2(
                    tensor,
                    self.size,
                    _GROUP_KEY,
                    key,
                    communication_hint="ring",
                    timeout=self._timeout_seconds,
                    ordering_token=token,
                )
                for tensor, key, token in zip(tensors, keys, tokens)
            ]

    def _gather(self, array):
        gathered = self._call(
            collective_ops.all_gather_v2, [tf.constant(array)]
        )[0]
        return gathered.numpy().reshape(self.size, -1)

    def _reduce(self, tensors):
        return self._call(collective_ops.all_reduce_v2, tensors)

    def _broadcast(self, tensors, root):
        # The sum of the root's numbers and of zeros.
        if self.rank != root:
            tensors = [tf.zeros_like(tensor) for tensor in tensors]
        return self._call(collective_ops.all_reduce_v2, tensors)

    def _call(self, collective, tensors):
        signature = (collective, *((t.dtype, t.shape[0]) for t in tensors))
        if signature not in self._functions:
            self._functions[signature] = self._traced(collective, tensors)
        with tf.device(self._device):
            return self._functions[signature](*tensors)

    def _traced(self, collective, tensors):
        """A function of these shapes whose collectives run side by side.

        Its keys are fixed here, in the order of the calls, which is the same
        on every worker.
        """
        pieces = [_num_pieces(t, self.bucket_bytes) for t in tensors]
        keys = [[next(self._instance_keys) for _ in range(n)] for n in pieces]

        def exchange(tensor, keys):
            parts = [
                collective(
                    part,
                    self.size,
                    _GROUP_KEY,
                    key,
                    communication_hint="ring",
                    timeout=self._timeout_seconds,
                )
                for part, key in zip(_split(tensor, len(keys)), keys)
            ]
            return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]

        def call(*tensors):
            with tf.device(self._device):
                return [exchange(t, k) for t, k in zip(tensors, keys)]

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        traced = tf.function(call, autograph=False)
        return traced.get_concrete_function(*specs)

    def _lost_workers(self):
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = liveness.silent(
            [self._addresses[rank] for rank in others],
            greeting=liveness.GRPC_GREETING,
        )
        return [others[place] for place in silent]

    def _address(self, rank):
        return f" at {self._addresses[rank]}"


def _num_pieces(tensor, piece_bytes):
    return -(-tensor.shape[0] * tensor.dtype.size // piece_bytes)


def _split(tensor, num_pieces):
    """Cuts a flat tensor: several collectives are faster than a large one."""
    if num_pieces == 1:
        return [tensor]
    size = -(-tensor.shape[0] // num_pieces)
    rest = tensor.shape[0] - size * (num_pieces - 1)
    return tf.split(tensor, [size] * (num_pieces - 1) + [rest])


def _start_server(cluster):
    runtime = context.context()
    if runtime._initialized:
        raise RuntimeError(
            "With several workers in TF_CONFIG the strategy must be made "
            "before TensorFlow starts. Received: a TensorFlow that a tensor, a "
            "variable, a model or a list of logical devices has started. Move "
            "`ParameterAveragingStrategy()` to the top of the script; only "
            "device settings such as `set_logical_device_configuration` or "
            "`set_memory_growth` may come before it."
        )
    leader = f"/job:{_JOB}/replica:0/task:0"
    runtime.configure_collective_ops(
        collective_leader=leader,
        device_filters=(f"/job:{_JOB}/task:{cluster.rank}",),
    )
    config = copy.deepcopy(runtime.config)
    config.experimental.collective_group_leader = leader
    server = tf.train.ServerDef(
        default_session_config=config,
        job_name=_JOB,
        task_index=cluster.rank,
        protocol="grpc",
    )
    job = server.cluster.job.add(name=_JOB)
    for rank, address in enumerate(cluster.addresses):
        job.tasks[rank] = address
    runtime.enable_collective_ops(server)
    address = cluster.addresses[cluster.rank]
    try:
        runtime.ensure_initialized()
    except tf.errors.OpError as error:
        raise RuntimeError(
            "Each worker needs the port of its own address in TF_CONFIG. "
            f"Received: {address}, where no server could be started: "
            f"{error.message}. Stop whatever uses the port, perhaps a worker "
            "of an earlier run, or choose another one."
        ) from error
