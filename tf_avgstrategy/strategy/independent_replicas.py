"""Independent replicas: what `tf.distribute` asks of the strategy."""

import contextlib
import threading
import weakref
from concurrent import futures
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import input_util
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import def_function

from tf_avgstrategy.input import fingerprints
from tf_avgstrategy.input import sharding
from tf_avgstrategy.state import variables
from tf_avgstrategy.strategy import gradient_exchange
from tf_avgstrategy.strategy import mean_reads
from tf_avgstrategy.strategy import replica_step
from tf_avgstrategy.strategy import steps_without_rows

__all__ = [
    "IndependentReplicas",
    "TrainingProgress",
    "check_outside_of_graphs",
]


class TrainingProgress(NamedTuple):
    """What the local replicas of a strategy have done so far.

    Attributes:
        steps: Int. Training steps: runs of a function (one per batch in
            `fit`) that writes a trainable variable.
        rows: Tuple of ints, one per local replica. The rows (examples) that
            the replica received in those steps.
    """

    steps: int
    rows: tuple


def check_outside_of_graphs():
    """Raises a RuntimeError in a graph of TensorFlow 1.

    Replicas run there, each for itself. What needs numbers does not.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "Steps are counted, gradients exchanged and parameters averaged "
            "where TensorFlow executes eagerly, and in a `tf.function`. "
            "Received: a graph of TensorFlow 1. Train outside of "
            "`tf.Graph().as_default()`, and do not call "
            "`tf.compat.v1.disable_eager_execution`."
        )


class _Noted(threading.local):
    """What this thread's step was seen to do. Each replica has a thread."""

    # Written a trainable variable.
    trained = False
    # Read one of which a gradient may be taken.
    differentiated = False


class IndependentReplicas(mirrored_strategy.MirroredExtended):
    """The extended half of the strategy: replicas that never meet.

    Args:
        container_strategy: The strategy.
        devices: List of device strings, one replica each, or None.
        cross_device_ops: `tf.distribute.CrossDeviceOps`.
        communicator: `Communicator`, started.
        gradient_sync: What steps exchange, see the strategy.
        timeout_seconds: Float > 0, how long an exchange may take.
    """

    def __init__(
        self,
        container_strategy,
        devices,
        cross_device_ops,
        communicator,
        *,
        gradient_sync,
        timeout_seconds,
    ):
        self.communicator = communicator
        self._timeout_seconds = timeout_seconds
        # `GradientExchange`, where steps exchange gradients.
        self.exchange = None
        self._replicas_of_workers = [1]
        self._last_element_spec = None
        # The `PeriodicAveraging` of a `fit` that goes on.
        self.fit_in_progress = None
        self.has_warned_of_no_averaging = False
        self.has_said_who_saves = False
        # Whether the user's `evaluate` or `predict` runs, perhaps on this
        # worker alone.
        self.is_observed = False
        self._is_observed_alone = False
        super().__init__(
            container_strategy,
            devices=devices,
            cross_device_ops=cross_device_ops,
        )
        counts = communicator.all_gather(np.int64(len(self._devices)))
        self._replicas_of_workers = counts.tolist()
        self._traced_functions = weakref.WeakKeyDictionary()
        self._training_functions = weakref.WeakKeyDictionary()
        self._differentiating_functions = weakref.WeakKeyDictionary()
        self._noted = _Noted()
        # In a thread of its own, which knows no graph and no scope that the
        # user has opened: these variables are not the user's.
        with futures.ThreadPoolExecutor(max_workers=1) as executor:
            executor.submit(self._make_counters).result()
        if gradient_sync != "none":
            self.prepare_gradient_exchange(gradient_sync)

    def _make_counters(self):
        # Of what this worker reads.
        self.first_batch = fingerprints.FirstBatch()
        self.mean_reads = mean_reads.MeanReads(
            len(self._devices), self._host_device
        )
        owner = weakref.proxy(self)
        self.steps_without_rows = steps_without_rows.StepsWithoutRows(
            lambda *what: owner._container_strategy().run(*what),
            self._host_device,
        )
        with tf.device(self._host_device):
            # Steps and rows of each replica.
            self._progress = tf.Variable(
                tf.zeros([len(self._devices), 2], tf.int64), trainable=False
            )
            self._counts_all_runs = tf.Variable(0, False, dtype=tf.int64)

    @property
    def _host_device(self):
        return self._input_workers_devices[0][0]

    def training_progress(self):
        """Returns the `TrainingProgress` of the local replicas."""
        check_outside_of_graphs()
        steps, rows = self._progress.numpy().T.tolist()
        return TrainingProgress(steps=max(steps), rows=tuple(rows))

    def prepare_gradient_exchange(self, sync="none"):
        """Lets steps that are traced from now on exchange gradients.

        Args:
            sync: "worker", "global", or "none": only while it is said.
        """
        check_outside_of_graphs()
        is_alone = sync == "worker" and len(self._devices) == 1
        if self.exchange is None and self.num_replicas > 1 and not is_alone:
            gradient_exchange.check_devices(self._devices)
            self.exchange = gradient_exchange.GradientExchange(
                self._devices,
                self.communicator,
                sync,
                self._timeout_seconds,
            )

    def expect_step(self, step, dataset=None):
        """Begins a training in which each batch is given to a function.

        A worker whose data has ended before it began, as in an epoch that is
        resumed, takes part in the steps of others nevertheless.

        Args:
            step: Function of a batch, or None to expect none.
            dataset: What gives the batches. What has no `element_spec` stands
                for the dataset that was distributed last.
        """
        if self.exchange is None:
            return
        spec = self._last_element_spec
        if isinstance(dataset, tf.distribute.DistributedDataset):
            spec = dataset.element_spec
        if step is None or spec is None:
            self.steps_without_rows.expect(None, None)
            return
        specs = steps_without_rows.specs_of_element(spec)
        self.steps_without_rows.expect(step, ((specs,), {}))

    def end_fit(self):
        """Ends what a `fit` has begun, which may have failed."""
        self.fit_in_progress = None
        self.expect_step(None)
        if self.exchange is not None:
            # A warm-up that was not over.
            self.exchange.set_global(False)

    @contextlib.contextmanager
    def observed(self, is_alone=False):
        """Lets a `fit` that goes on take no notice of what runs within.

        Args:
            is_alone: Bool, whether other workers may do something else.
        """
        # Whatever has written to copies without saying so.
        self.mean_reads.note_writes()
        before = self.is_observed, self._is_observed_alone
        counts_all_runs = bool(self._counts_all_runs.numpy())
        self.is_observed, self._is_observed_alone = True, is_alone
        self.count_all_runs(False)
        in_fit = self.fit_in_progress
        if in_fit is not None:
            in_fit.hold_losses()
        try:
            yield
        finally:
            self.is_observed, self._is_observed_alone = before
            self.count_all_runs(counts_all_runs)
            if in_fit is not None:
                in_fit.resume_losses()

    def split_rows(self, batch):
        """Returns a batch as each local replica's part of it.

        Args:
            batch: Nested structure of arrays or tensors with the rows on axis
                0, or None.
        """
        if len(self._devices) == 1:
            return batch
        return distribute_utils.regroup(
            sharding.split(batch, len(self._devices)), always_wrap=True
        )

    def take_part_in_step(self):
        """Takes part in a step of other workers, where data has ended here.

        Returns:
            Bool, whether there was a step: one that has rows on some worker.
            Not where steps do not exchange gradients of all workers.
        """
        if self.exchange is None or not self.exchange.spans_workers:
            return False
        before = self._progress.numpy()
        if not self.steps_without_rows.run():
            raise RuntimeError(
                "Each worker needs a batch to take part in the others' steps, "
                f"which exchange gradients. Received: worker "
                f"{self.communicator.rank} without any. Give every worker "
                'rows, or train with `gradient_sync="none"`.'
            )
        if self.exchange.rows:
            return True
        self._progress.assign(before)
        return False

    @property
    def all_replicas(self):
        """List of ints, the number of replicas of each worker."""
        return list(self._replicas_of_workers)

    @property
    def num_replicas(self):
        """Int, the replicas of all workers."""
        return sum(self._replicas_of_workers)

    def count_all_runs(self, is_counting):
        """Says whether each run is a training step, whatever it writes."""
        self._counts_all_runs.assign(int(is_counting))

    def global_replica_id(self, local_replica_id):
        """The replica's number among the replicas of all workers."""
        return self._first_replica + local_replica_id

    def note_write(self, variable):
        """Is told that this replica's step writes a variable."""
        self.mean_reads.note_write(variable)
        self._noted.trained |= variable.trainable

    def read(self, variable, replica_id):
        """Returns the `tf.Variable` that a replica reads of a variable."""
        self._noted.differentiated |= mean_reads.is_recorded(variable)
        return self.mean_reads.read(variable, replica_id)

    @property
    def _first_replica(self):
        """The replicas of all workers before this one."""
        return sum(self._replicas_of_workers[: self.communicator.rank])

    def _get_replica_id_in_sync_group(self, replica_id):
        return self.global_replica_id(replica_id)

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group - self._first_replica

    def _in_own_replica(self):
        # Outside any scope there is the default strategy's replica context.
        replica = tf.distribute.get_replica_context()
        return (
            replica is not None
            and replica.strategy is self._container_strategy()
        )

    def _use_merge_call(self):
        return not self._in_own_replica() and super()._use_merge_call()

    @property
    def _num_replicas_in_sync(self):
        return 1 if self._in_own_replica() else sum(self._replicas_of_workers)

    def _experimental_distribute_dataset(self, dataset, options):
        distributed = self._distribute_dataset(dataset, options)
        if self.fit_in_progress is None:
            self._last_element_spec = distributed.element_spec
        return distributed

    def _distribute_dataset(self, dataset, options):
        if self.communicator.size == 1:
            return super()._experimental_distribute_dataset(dataset, options)
        if self.fit_in_progress is not None and not self.is_observed:
            # Workers must be at the same place to agree on a dataset.
            self.fit_in_progress.close_epoch()
        sharded = sharding.shard(
            dataset,
            replicas=self._replicas_of_workers,
            rank=self.communicator.rank,
            agree=None if self._is_observed_alone else self._agree,
            watch=self.first_batch.watch,
        )
        return self._distribute_datasets_from_function(
            lambda _: sharded, options
        )

    def _agree(self, values):
        """Returns the ints that each worker gave, by rank."""
        values = np.array(values, np.int64)
        if self.fit_in_progress is None or not self.is_observed:
            return self.communicator.all_gather(
                values, "a dataset's plan: "
            ).tolist()
        # Within an epoch others may have no data left, and wait for this one.
        parts = self.fit_in_progress.gather_plans(values.tobytes())
        given = next(part for part in parts if part)
        return [
            np.frombuffer(part or given, np.int64).tolist() for part in parts
        ]

    def _distribute_datasets_from_function(self, dataset_fn, options):
        if self.communicator.size == 1:
            return super()._distribute_datasets_from_function(
                dataset_fn, options
            )
        return input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [
                tf.distribute.InputContext(
                    num_input_pipelines=self.communicator.size,
                    input_pipeline_id=self.communicator.rank,
                    num_replicas_in_sync=self._num_replicas_in_sync,
                )
            ],
            self._container_strategy(),
            options,
        )

    def _experimental_distribute_values_from_function(self, value_fn):
        total = self._num_replicas_in_sync
        return distribute_utils.regroup(
            [
                value_fn(
                    tf.distribute.experimental.ValueContext(
                        self.global_replica_id(replica_id), total
                    )
                )
                for replica_id in range(len(self._devices))
            ],
            always_wrap=True,
        )

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        del reduce_op, options  # The gradient of one replica is the gradient.
        return tf.nest.map_structure(
            lambda v: v if isinstance(v, tf.IndexedSlices) else tf.identity(v),
            value,
        )

    def _update(self, var, fn, args, kwargs, group):
        self.mean_reads.note_writes()
        return super()._update(var, fn, args, kwargs, group)

    def _replica_ctx_update(self, var, fn, args, kwargs, group):
        self.note_write(var)
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _get_cross_device_ops(self, value):
        # Never `CollectiveAllReduce`: its keys clash between strategies of one
        # process, and with a cluster between workers.
        del value
        return self._cross_device_ops

    def _create_variable(self, next_creator, **kwargs):
        asked = kwargs.get("aggregation")
        is_local = (
            kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ
        )
        if is_local and asked in tuple(tf.VariableAggregation):
            # In a replica, NONE means: write your own copy, ask nobody.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        variable = super()._create_variable(next_creator, **kwargs)
        return variables.as_replica_local(
            variable, name=kwargs.get("name"), aggregation=asked
        )

    def _get_variable_creator_initial_value(
        self, replica_id, device, primary_var, **kwargs
    ):
        initial_value = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        if not variables.is_seed_name(kwargs.get("name")):
            return initial_value
        # Copies are made from the first one, which has its own offset already.
        offset = variables.seed_offset(self.global_replica_id(replica_id))
        if replica_id > 0:
            offset -= variables.seed_offset(self.global_replica_id(0))

        def folded():
            seed = initial_value() if callable(initial_value) else initial_value
            seed = tf.convert_to_tensor(seed, kwargs.get("dtype"))
            return seed + tf.constant([offset, 0], seed.dtype)

        return folded

    def _call_for_each_replica(self, fn, args, kwargs):
        if not isinstance(fn, def_function.Function):
            return self._run_replicas(fn, False, args, kwargs)
        if fn not in self._traced_functions:
            self._traced_functions[fn] = self._traced_on_all_replicas(fn)
        return self._traced_functions[fn](*args, **kwargs)

    def _traced_on_all_replicas(self, function):
        """Turns a `tf.function` of one replica into one of all replicas.

        All replicas belong to one graph, so that they run side by side. XLA is
        the exception: it compiles one program for each replica within it.
        """
        fn = function.python_function
        status = ag_ctx.Status
        convert = status.ENABLED if function._autograph else status.DISABLED
        fn = autograph.tf_convert(fn, ag_ctx.ControlStatusCtx(convert))
        owner = weakref.proxy(self)
        compiled = function._jit_compile

        @tf.autograph.experimental.do_not_convert
        def run_replicas(*args, **kwargs):
            return owner._run_replicas(fn, compiled, args, kwargs)

        traced = function._clone(run_replicas)
        traced._jit_compile = None
        return traced

    def _run_replicas(self, fn, compiled, args, kwargs):
        step = replica_step.ReplicaStep(
            fn,
            compiled=compiled,
            skips_empty=self._skips_empty_replicas,
            seed_offset=lambda replica_id: variables.seed_offset(
                self.global_replica_id(replica_id)
            ),
        )

        training_specs = []
        does_train = []

        @tf.autograph.experimental.do_not_convert
        def run_replica(*args, **kwargs):
            replica_id = tf.distribute.get_replica_context()._replica_id
            outputs = self._run_and_count(step, replica_id, args, kwargs)
            does_train.append(self._noted.trained or self._noted.differentiated)
            if self._noted.trained and replica_id == 0:
                training_specs.append(
                    replica_step.specs_without_rows((args, kwargs))
                )
            return outputs

        def run_all():
            return mirrored_run.call_for_each_replica(
                self._container_strategy(), run_replica, args, kwargs
            )

        if tf.executing_eagerly():
            return self.mean_reads.run_eagerly(
                step.function,
                replica_step.static_arguments((args, kwargs)),
                run_all,
            )

        if not tf.compat.v1.executing_eagerly_outside_functions():
            return run_all()

        def trace_all():
            return self.mean_reads.trace(run_all, lambda: any(does_train))

        if self.exchange is None:
            return trace_all()
        # In a function of their own, replicas may run side by side.
        outputs = tf.function(trace_all, autograph=False)()
        if training_specs:
            self.steps_without_rows.note(step.given_function, training_specs[0])
        return outputs

    @property
    def _skips_empty_replicas(self):
        # A graph of TensorFlow 1 runs what `MirroredStrategy` would.
        is_tensorflow_2 = tf.compat.v1.executing_eagerly_outside_functions()
        return is_tensorflow_2 and self.num_replicas > 1

    def _run_and_count(self, step, replica_id, args, kwargs):
        rows = replica_step.num_rows((args, kwargs))
        static = replica_step.static_arguments((args, kwargs))
        # What a function does is not seen again where it calls a
        # `tf.function` that has been traced.
        trained = self._training_functions.setdefault(step.function, set())
        differentiated = self._differentiating_functions.setdefault(
            step.function, set()
        )
        self._noted.trained = static in trained
        self._noted.differentiated = static in differentiated
        if self.exchange is None:
            outputs = step(replica_id, rows, args, kwargs)
        else:
            with self.exchange.step(replica_id, rows) as exchanging:
                outputs = step(replica_id, rows, args, kwargs, exchanging)
        if self._noted.trained:
            trained.add(static)
        if self._noted.differentiated:
            differentiated.add(static)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return outputs  # In a graph of TensorFlow 1 nothing is averaged.
        with tf.device(self._progress.device):
            counted = 1 if self._noted.trained else self._counts_all_runs
            update = counted * tf.cast([[1, rows]], tf.int64)
            self._progress.scatter_nd_add([[replica_id]], update)
        return outputs
