"""The strategy: how a `tf.distribute` replica becomes a trainer of its own."""

import tensorflow as tf
from absl import logging
from tensorflow.python.ops import control_flow_util

from tf_avgstrategy.input import seeds
from tf_avgstrategy.strategy import gradient_exchange
from tf_avgstrategy.strategy import independent_replicas
from tf_avgstrategy.strategy import keras_hooks
from tf_avgstrategy.workers import startup

__all__ = ["ParameterAveragingStrategy"]


class ParameterAveragingStrategy(tf.distribute.MirroredStrategy):
    """Trains independent replicas that meet only to average parameters.

    Under `tf.distribute.MirroredStrategy` all replicas hold one model and
    exchange gradients at every step. Under this strategy every replica owns a
    copy of each variable and trains it alone, with its own optimizer, exactly
    as a single device with the same rows would. `PeriodicAveraging` (in `fit`)
    or `ParameterAverager` (in a custom loop) replaces the copies by their mean
    every few steps. This is Local SGD (Stich, ICLR 2019), also known as
    parameter averaging.

    Seen from outside a replica there is one model, the mean of the replicas:
    `save`, `get_weights`, checkpoints and `numpy()` give it at any moment.

    What else differs from `MirroredStrategy`:

    - Nothing is exchanged within a step, so `ReplicaContext.all_reduce` gives
      a replica its own value back, and `BatchNormalization(synchronized=True)`
      uses the replica's own rows.
    - `num_replicas_in_sync` is 1 inside a replica: losses, regularisers and
      clipping are those of one device. Outside it is the number of replicas,
      by which a global batch size is multiplied. A custom loop must therefore
      divide a loss by the replica's own rows, not by the global batch size.
    - A replica whose batch has no rows does not run the step: its weights,
      slots and metrics stay as they are, and zeros take the place of its
      outputs. With several replicas the rows are the size of axis 0 of the
      first tensor among the step's arguments.
    - Random masks (Dropout) differ between replicas.

    Args:
        devices: List of device strings such as `["GPU:0", "GPU:1"]`, one
            replica each. `None` takes all GPUs, or all CPUs if there are none.
        cross_device_ops: `tf.distribute.CrossDeviceOps` that reduces metrics
            and losses. `None` uses `tf.distribute.ReductionToOneDevice`.
        communicator: How workers (processes) exchange parameters: "auto",
            "collective" (TensorFlow's own collectives, between the workers of
            TF_CONFIG), "horovod", "none" (this worker trains alone), or a
            `Communicator`. "auto" is Horovod if its launcher started this
            process, collectives if TF_CONFIG names several workers, else none.
            The first strategy of a process starts it, later ones share it.
        timeout_seconds: Number > 0. How long an exchange may take, with the
            time by which workers come to it one after the other. Then a worker
            is lost, and all others raise a `WorkerLostError`.
        start_timeout_seconds: Number > 0. How long workers may take to start.
        gradient_sync: What replicas exchange at every step. "none": nothing.
            "worker": the replicas of each worker the mean of their gradients,
            weighted by rows, so that they stay equal and rounds average
            between workers. "global": all replicas of all workers, which is
            synchronous training. Steps must run in a `tf.function`, without
            XLA.

    Raises:
        ValueError: If an argument is none of these, or TF_CONFIG is malformed.
        ImportError: If Horovod is asked for and not installed.
        RuntimeError: If there are several workers in TF_CONFIG and TensorFlow
            was started before, or this worker's port is taken.
        WorkerLostError: If a worker does not start in time.

    Example:
        >>> strategy = ParameterAveragingStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     v = tf.Variable(2.0)
        >>> _ = strategy.run(lambda: v.assign_add(1.0))
        >>> float(v.numpy())
        3.0

    References:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019,
        https://arxiv.org/abs/1805.09767.
    """

    def __init__(
        self,
        devices=None,
        cross_device_ops=None,
        communicator="auto",
        timeout_seconds=600,
        start_timeout_seconds=300,
        gradient_sync="none",
    ):
        gradient_exchange.check(gradient_sync)
        startup.make_virtual_devices()
        self._communicator_choice = communicator
        # Before anything that starts TensorFlow.
        communicator = startup.make_communicator(
            communicator,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
        )
        extended = independent_replicas.IndependentReplicas(
            self,
            devices=devices,
            cross_device_ops=(
                cross_device_ops or tf.distribute.ReductionToOneDevice()
            ),
            communicator=communicator,
            gradient_sync=gradient_sync,
            timeout_seconds=timeout_seconds,
        )
        # Not MirroredStrategy.__init__, which makes a MirroredExtended.
        tf.distribute.Strategy.__init__(self, extended)
        seeds.agree_on_seeds(communicator)
        keras_hooks.install()
        gradient_exchange.install()
        logging.info("%s", self.describe())

    @property
    def communicator(self):
        """`Communicator`, through which this worker meets the others."""
        return self.extended.communicator

    @property
    def is_chief(self):
        """Bool, whether this is the worker with rank 0."""
        return self.communicator.rank == 0

    def describe(self):
        """Returns one line, as a string, of workers and replicas."""
        communicator = self.communicator
        devices = self.extended.worker_devices
        return (
            f"ParameterAveragingStrategy: communicator {communicator.name}, "
            f"worker {communicator.rank} of {communicator.size}, replicas "
            f"{len(devices)} here and {self.num_replicas_in_sync} in all, on "
            f"{', '.join(devices)}"
        )

    def check_environment(self):
        """Raises a RuntimeError where parameters cannot be averaged.

        That is if TF_CONFIG was set too late to be heard, or in a graph of
        TensorFlow 1.
        """
        independent_replicas.check_outside_of_graphs()
        startup.check_environment(
            self._communicator_choice, self.communicator.size
        )

    def scope(self):
        """Returns the scope in which model and optimizer are made.

        Raises:
            ValueError: From within, where something that was made outside the
                scope meets what belongs to the strategy.
        """
        return _Scope(super().scope())

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on every replica, see `tf.distribute.Strategy.run`.

        Raises:
            ValueError: Inside a function that XLA compiles.
        """
        if control_flow_util.GraphOrParentsInXlaContext(
            tf.compat.v1.get_default_graph()
        ):
            raise ValueError(
                "`ParameterAveragingStrategy.run` must not be called inside a "
                "function that XLA compiles: one XLA program cannot hold the "
                "variables of several devices. Received: a `tf.function` with "
                "`jit_compile=True` around it, which `compile(jit_compile="
                "True)` makes. Train with the `PeriodicAveraging` callback, "
                "which compiles each replica's `train_step` by itself, or "
                "pass `jit_compile=False` to `compile`."
            )
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def reduce(self, reduce_op, value, axis):
        """Reduces `value` across replicas, see `tf.distribute.Strategy.reduce`.

        One thing is added. Keras builds a model from the mean of its first
        batch over the replicas, of which it uses shape and dtype alone. That
        mean does not exist where the batch is ragged, sparse, of strings, or
        of a number of rows that the replicas do not divide; there, eagerly,
        replica 0's part is returned.
        """
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        if is_mean and axis is None and tf.executing_eagerly():
            value = tf.nest.map_structure(self._first_if_no_mean, value)
        return super().reduce(reduce_op, value, axis)

    def _first_if_no_mean(self, value):
        parts = self.experimental_local_results(value)
        if len(parts) == 1 or not all(tf.is_tensor(p) for p in parts):
            return value
        if isinstance(parts[0], (tf.RaggedTensor, tf.SparseTensor)):
            return parts[0]
        is_batch = all(p.shape.rank for p in parts)
        differs = any(p.shape != parts[0].shape for p in parts)
        no_mean = differs or parts[0].dtype in (tf.string, tf.bool)
        return parts[0] if is_batch and no_mean else value

    def training_progress(self):
        """Returns the `TrainingProgress` of the local replicas."""
        return self.extended.training_progress()

    def count_all_runs(self, is_counting):
        """Says whether each run is a training step, whatever it writes.

        `PeriodicAveraging` says so around the batches of `fit`. Otherwise a
        run is one if a trainable variable was written while its function ran
        eagerly or was traced.

        Args:
            is_counting: Bool.
        """
        self.extended.count_all_runs(is_counting)


class _Scope:
    """A strategy's scope that says what to do about a mixture of scopes."""

    def __init__(self, scope):
        self._scope = scope

    def __enter__(self):
        return self._scope.__enter__()

    def __exit__(self, exception_type, exception, traceback):
        self._scope.__exit__(exception_type, exception, traceback)
        is_mixture = isinstance(exception, RuntimeError) and (
            "Mixing different tf.distribute.Strategy" in str(exception)
        )
        if is_mixture:
            raise ValueError(
                "Model, optimizer and `compile` belong inside "
                "`strategy.scope()`, where every replica gets its own copy of "
                f"each variable. Received: {exception}. Move the line that "
                "makes the optimizer, or `compile` if it is given a string, "
                "under `with strategy.scope():`."
            ) from exception
