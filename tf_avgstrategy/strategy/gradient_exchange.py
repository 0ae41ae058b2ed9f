"""Gradient exchange: replicas that take each step with the mean gradient.

The exchange is part of the traced step. A replica without rows takes part in
it with weight 0, and in the update that follows, though it skips its own step:
in its branch of the graph it repeats the optimizer's calls that the other
branch makes. So replicas cannot hand each other tensors, as they are in
branches of their own, and meet in collective operations at run time.
"""

import functools
import itertools
import threading
import weakref
import zlib

import keras
import tensorflow as tf
from tensorflow.python.ops import collective_ops

from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.tensors import buckets
from tf_avgstrategy.tensors import mean

__all__ = [
    "GRADIENT_SYNCS",
    "GradientExchange",
    "check",
    "check_devices",
    "install",
]

GRADIENT_SYNCS = ("none", "worker", "global")

# Large enough that latency does not count, small enough that buckets follow
# each other through the levels.
_BUCKET_BYTES = 4 * 2**20
# Of one token's operations each waits for the last one to be sent.
_NUM_TOKENS = 4
# Far from the keys of other collectives. One for each strategy and worker.
_FIRST_GROUP_KEY = 880_000
_MAX_WORKERS = 10_000
_KEY_MASK = 2**30 - 1

_numbers = itertools.count()
_thread = threading.local()


class GradientExchange:
    """How the replicas of a strategy exchange gradients.

    Args:
        devices: Tuple of device strings, one for each local replica.
        communicator: `Communicator`.
        sync: "worker" or "global", what a step exchanges by itself. "none":
            nothing.
        timeout_seconds: Float > 0, how long an exchange may take.

    Attributes:
        models: Set of `keras.Model`, whose steps are traced with it.
    """

    def __init__(self, devices, communicator, sync, timeout_seconds):
        self.models = weakref.WeakSet()
        self._devices = devices
        self._communicator = communicator
        self._sync = sync
        self._timeout_seconds = timeout_seconds
        # A cluster knows the groups of all workers.
        number = next(_numbers) * _MAX_WORKERS + communicator.rank
        self._group_key = _FIRST_GROUP_KEY + number
        self._replicas = []
        with tf.init_scope():
            for device in devices:
                with tf.device(device):
                    self._replicas.append(
                        _Replica(
                            tokens=[_variable(0.0) for _ in range(_NUM_TOKENS)],
                            is_global=_variable(sync == "global"),
                            total=_variable(0.0),
                        )
                    )

    @property
    def spans_workers(self):
        """Bool, whether other workers take part in the exchange just now."""
        is_global = self._replicas[0].is_global.numpy()
        return bool(is_global) and self._communicator.size > 1

    @property
    def is_in_force(self):
        """Bool, whether steps exchange gradients just now."""
        is_global = self._replicas[0].is_global.numpy()
        return self._sync != "none" or bool(is_global)

    @property
    def rows(self):
        """Float, the rows of all replicas in a step that had none here."""
        return float(self._replicas[0].total.numpy())

    def set_global(self, is_global):
        """Says whether steps exchange the gradients of all workers.

        Args:
            is_global: Bool. If not, those that the strategy was made for.
        """
        for replica in self._replicas:
            replica.is_global.assign(is_global or self._sync == "global")

    def step(self, replica_id, rows):
        """Returns a context for one replica's trace of a step.

        Args:
            replica_id: Int, the local replica.
            rows: Int or int32 scalar, what its gradients weigh.
        """
        return _StepOfReplica(self, replica_id, rows)

    def mean(self, replica_id, gradients, rows, call):
        """Returns the mean of gradients over the replicas that take part.

        Args:
            replica_id: Int, the local replica.
            gradients: List of tensors.
            rows: Int32 scalar, what they weigh.
            call: Int, the how-manieth exchange of the step this is.

        Returns:
            List of tensors, and the float32 scalar of all replicas' rows.
        """
        if self._sync != "none":
            return self._mean(replica_id, gradients, rows, call)
        return tf.cond(
            self._replicas[replica_id].is_global,
            lambda: self._mean(replica_id, gradients, rows, call),
            # As if there were no exchange, also of what has no rows.
            lambda: ([tf.identity(g) for g in gradients], tf.constant(0.0)),
        )

    def _mean(self, replica_id, gradients, rows, call):
        replica = self._replicas[replica_id]
        # Never a constant: Horovod's operations have no state, so that of
        # constants they would run when the graph is made simpler.
        weight = tf.cast(rows, tf.float32) + 0 * replica.total.read_value()
        specs = [
            tf.TensorSpec(g.shape, mean.accumulation_dtype(g.dtype))
            for g in gradients
        ]
        plan = buckets.plan_buckets(specs, _BUCKET_BYTES)
        weighted = [
            tf.cast(g, spec.dtype) * tf.cast(weight, spec.dtype)
            for g, spec in zip(gradients, specs)
        ]
        flat = [
            # With the weight, and with a number that no other bucket has: equal
            # operations would become one.
            tf.concat(
                [buffer, tf.cast([weight, call * 1000 + place], buffer.dtype)],
                0,
            )
            for place, buffer in enumerate(buckets.pack(plan, weighted))
        ]
        sums = self._all_reduce_sum(replica_id, flat, call)
        total = tf.cast(sums[0][-2], tf.float32)
        means = [total_[:-2] / tf.maximum(total_[-2], 1) for total_ in sums]
        return [
            tf.cast(value, gradient.dtype)
            for value, gradient in zip(buckets.unpack(plan, means), gradients)
        ], total

    def note_total(self, replica_id, total):
        """Remembers the rows of all replicas in a step without any here."""
        self._replicas[replica_id].total.assign(total)

    def _all_reduce_sum(self, replica_id, tensors, call):
        sums = self._within_worker(replica_id, tensors, call)
        if self._communicator.size == 1:
            return sums
        if self._sync != "worker":
            return self._over_workers(replica_id, sums, call)
        return tf.cond(
            self._replicas[replica_id].is_global,
            lambda: self._over_workers(replica_id, sums, call),
            lambda: [tf.identity(total) for total in sums],
        )

    def _within_worker(self, replica_id, tensors, call):
        size = len(self._devices)
        if size == 1:
            return tensors
        replica = self._replicas[replica_id]
        with tf.device(self._devices[replica_id]):
            return [
                collective_ops.all_reduce_v2(
                    tensor,
                    size,
                    self._group_key,
                    _key("sum", call, place, tensor),
                    communication_hint="ring",
                    timeout=self._timeout_seconds,
                    ordering_token=replica.token(place),
                )
                for place, tensor in enumerate(tensors)
            ]

    def _over_workers(self, replica_id, tensors, call):
        """The first replica of each worker exchanges, and tells the others."""
        size = len(self._devices)
        replica = self._replicas[replica_id]
        if replica_id == 0:
            tensors = self._communicator.all_reduce_sum_in_graph(
                tensors,
                keys=[
                    _key("workers", call, place, tensor)
                    for place, tensor in enumerate(tensors)
                ],
                tokens=[replica.token(p) for p in range(len(tensors))],
            )
        if size == 1:
            return tensors
        options = {
            "group_size": size,
            "group_key": self._group_key,
            "communication_hint": "ring",
            "timeout": self._timeout_seconds,
        }
        received = []
        with tf.device(self._devices[replica_id]):
            for place, tensor in enumerate(tensors):
                key = _key("tell", call, place, tensor)
                if replica_id == 0:
                    told = collective_ops.broadcast_send_v2(
                        tensor, instance_key=key, **options
                    )
                else:
                    # Not before its own part of the sum is sent.
                    with tf.control_dependencies([tensor]):
                        told = collective_ops.broadcast_recv_v2(
                            tensor.shape,
                            tensor.dtype,
                            instance_key=key,
                            **options,
                        )
                received.append(tf.reshape(told, tensor.shape))
        return received


class _Replica:
    """Variables of one replica on its device.

    Operations of different replicas must not wait for each other, which tokens
    of their own see to.
    """

    def __init__(self, tokens, is_global, total):
        self._tokens = tokens
        self.is_global = is_global
        self.total = total

    def token(self, place):
        return self._tokens[place % _NUM_TOKENS].handle


class _StepOfReplica:
    """One replica's trace of a step: which updates it makes.

    Args:
        exchange: `GradientExchange`.
        replica_id: Int.
        rows: Int or int32 scalar.
    """

    def __init__(self, exchange, replica_id, rows):
        self._exchange = exchange
        self._replica_id = replica_id
        self._rows = rows
        self._updates = []
        self._is_updating = False

    def __enter__(self):
        self._before = getattr(_thread, "step", None)
        _thread.step = self
        return self

    def __exit__(self, *_):
        _thread.step = self._before

    def exchanges(self, gradients):
        """Returns whether there is something to exchange, a bool.

        Args:
            gradients: List of tensors, `tf.IndexedSlices` or None.
        """
        if all(gradient is None for gradient in gradients):
            return False
        is_eager = tf.executing_eagerly()
        if is_eager and self._exchange.is_in_force:
            raise ValueError(
                "With `gradient_sync` a training step must run in a "
                "`tf.function`, where replicas run side by side. Received: a "
                "step that runs eagerly. Compile with run_eagerly=False, or "
                "call `strategy.run` within a `tf.function`."
            )
        return not is_eager and not self._is_updating

    def update(self, apply, gradients, variables, shapes):
        """Calls an optimizer's `apply` with the mean of the gradients.

        Args:
            apply: Function of gradients and variables.
            gradients: List of tensors, `tf.IndexedSlices` or None.
            variables: List of variables, or None.
            shapes: List of as many shapes.
        """
        dense = [
            # Its own shape may not be known here.
            g if g is None else tf.ensure_shape(tf.convert_to_tensor(g), shape)
            for g, shape in zip(gradients, shapes)
        ]
        specs = [
            g if g is None else tf.TensorSpec(g.shape, g.dtype) for g in dense
        ]
        call = len(self._updates)
        self._updates.append((apply, specs, variables))
        means, _ = self._means(dense, self._rows, call)
        return self._apply(apply, means, variables)

    def repeat_updates(self):
        """Takes part in the updates of others, without rows."""
        for call, (apply, specs, variables) in enumerate(self._updates):
            zeros = [
                s if s is None else tf.zeros(s.shape, s.dtype) for s in specs
            ]
            means, total = self._means(zeros, 0, call)
            self._exchange.note_total(self._replica_id, total)

            def update(apply=apply, means=means, variables=variables):
                self._apply(apply, means, variables)
                return tf.constant(True)

            # Unless nobody has rows, which ends an epoch and is no step.
            tf.cond(total > 0, update, lambda: tf.constant(False))

    def _means(self, gradients, rows, call):
        there = [g for g in gradients if g is not None]
        means, total = self._exchange.mean(self._replica_id, there, rows, call)
        means = iter(means)
        return [g if g is None else next(means) for g in gradients], total

    def _apply(self, apply, means, variables):
        self._is_updating = True
        try:
            return apply(means, variables)
        finally:
            self._is_updating = False


def check(gradient_sync):
    """Raises a ValueError unless it says what steps exchange."""
    if gradient_sync not in GRADIENT_SYNCS:
        raise ValueError(
            "`gradient_sync` must be one of "
            f"{', '.join(map(repr, GRADIENT_SYNCS))}, what replicas exchange "
            f"at every step. Received: gradient_sync={gradient_sync!r}. Pass "
            '"none" to exchange parameters alone.'
        )


def check_devices(devices):
    """Raises a ValueError unless each replica has a device of its own.

    TensorFlow puts what belongs to a device that is not there elsewhere, and
    replicas of one device wait for each other for ever.

    Args:
        devices: Tuple of canonical device strings.
    """
    existing = {
        tf.DeviceSpec.from_string(device.name).to_string().lower()
        for device in tf.config.list_logical_devices()
    }

    def exists(device):
        spec = tf.DeviceSpec.from_string(device)
        local = tf.DeviceSpec(
            device_type=spec.device_type, device_index=spec.device_index
        )
        names = {spec.to_string().lower(), local.to_string().lower()}
        return not names.isdisjoint(existing)

    missing = [device for device in devices if not exists(device)]
    if missing:
        raise ValueError(
            "To exchange gradients each replica needs a device of its own. "
            f"Received: devices={list(devices)}, of which there is no "
            f"{missing[0]}. Pass devices of tf.config.list_logical_devices(), "
            "or make virtual ones before TensorFlow starts."
        )


def install():
    """Lets Keras' optimizers ask for the mean gradient, once.

    It comes before clipping, loss scales and weight decay, as on one device.
    """
    names = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    for name in names:
        optimizer = getattr(keras.optimizers, name, None)
        if optimizer is not None:
            _wrap_apply(optimizer)


def _wrap_apply(optimizer_class):
    original = optimizer_class.apply
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def apply(self, grads, trainable_variables=None):
        step = getattr(_thread, "step", None)
        grads = list(grads)
        in_replica = tf.distribute.get_replica_context() is not None
        if step is None or not in_replica or not step.exchanges(grads):
            if in_replica and not self.built and trainable_variables:
                trainable_variables = list(trainable_variables)
                optimizer_parts.build_on_all_replicas(self, trainable_variables)
            return original(self, grads, trainable_variables)
        if not self.built:
            raise ValueError(
                "With `gradient_sync` an optimizer must be built before the "
                f"first step. Received: {type(self).__name__} that is not. "
                "Call `optimizer.build(model.trainable_variables)` inside "
                "`strategy.scope()`."
            )
        variables = trainable_variables
        if variables is None:
            variables = optimizer_parts.trainable_variables(self)
        return step.update(
            functools.partial(original, self),
            grads,
            trainable_variables,
            [variable.shape for variable in variables],
        )

    setattr(apply, _WRAPPED, True)
    optimizer_class.apply = apply


_WRAPPED = "_tf_avgstrategy_exchanges"


def _variable(value):
    return tf.Variable(value, trainable=False)


def _key(kind, call, place, tensor):
    """A collective's key: in each trace and on each worker the same.

    Another shape must have another key.
    """
    text = f"{kind} {call} {place} {tensor.shape} {tensor.dtype.name}"
    return zlib.crc32(text.encode()) & _KEY_MASK
