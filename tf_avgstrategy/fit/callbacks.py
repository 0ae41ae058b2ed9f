"""Keras callbacks: rounds inside `model.fit`."""

import functools
import os

import keras

from tf_avgstrategy.averaging import agreement
from tf_avgstrategy.averaging import averager as averagers
from tf_avgstrategy.averaging import averaging_settings
from tf_avgstrategy.fit import backups
from tf_avgstrategy.fit import compilation
from tf_avgstrategy.fit import fit_callbacks
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.strategy import keras_hooks
from tf_avgstrategy.strategy import worker_metrics
from tf_avgstrategy.telemetry import telemetry as telemetries

__all__ = ["PeriodicAveraging"]


class PeriodicAveraging(keras_hooks.FitHooks):
    """Averages parameters and optimizer slots over replicas during `fit`.

    Rounds follow steps `period`, `2 * period`, ... of the training. One more,
    unless no step was made since the last one, comes before validation, the end
    of an epoch and of `fit`, and files of `ModelCheckpoint` and
    `BackupAndRestore` with `save_freq=n`. The order of callbacks does not
    matter. A step is a batch, or where the optimizer accumulates gradients, an
    update. Steps are counted from the optimizer's `iterations` on, over several
    calls of `fit` and in a model that was loaded from a file.

    With several workers, logs, histories and what `evaluate` returns are those
    over all rows of all workers, on each of them the same. Of callbacks that
    write to one place (`ModelCheckpoint`, `CSVLogger`, `TensorBoard`) that of
    the lowest rank runs, see also `chief_only`. `BackupAndRestore` is read and
    written by the chief, for all, and holds all that a training needs to go on
    as if it had not stopped.

    The model and its optimizer must be made inside the scope of a
    `ParameterAveragingStrategy`. With one replica a round changes no bit.

    With `compile(jit_compile=True)` the callback has XLA compile one program
    per replica, and `evaluate` and `predict` run without XLA from then on.

    Args:
        period: Int >= 1, local training steps between two rounds. With
            `steps_per_execution=k` a multiple of k. `None` if there is a
            `schedule`.
        warmup_steps: Int >= 0, opening steps that are each followed by a
            round (post-local SGD).
        slots: What a round does to optimizer slots (momentum, Adam's moments).
            "mean" averages them, "keep" leaves each replica its own, "reset"
            sets them to the value that they were created with.
        overrides: Dict from regular expression to rule, for variables whose
            path it is found in. `{"embedding": "keep"}` leaves each replica
            its own embeddings and their slots. `describe()` lists all paths.
        on_non_finite: What a round does if parameters or slots of a replica
            are not finite. "raise": a FloatingPointError on every worker.
            "exclude": the replica does not count and adopts the others' mean;
            the epoch's logs hold the number of these as `"excluded"`.
        schedule: `Schedule` in place of `period`, such as
            `QuadraticSynchronizationRule`.
        outer_optimizer: `keras.optimizers.Optimizer` that takes a step from
            what the last round left along the way to the mean, such as
            `tf_avgstrategy.outer_optimizers.diloco()`. Only its settings are
            used, and only weights take part. `None`: onto the mean.
        outer_device: String, the device that holds what the outer optimizer
            needs. By default the host.
        fragments: Int >= 1. Weights are cut into so many fragments of similar
            bytes, one of which travels every `period / fragments` steps.
        periods: Dict from regular expression to period in steps, for weights
            whose path it is found in, a multiple of `period / fragments`.
            `{"embedding": 64}` averages embeddings every 64 steps.
        local_period: Int >= 1, local steps between two averagings of the
            replicas of each worker, without the network. `None`: there are
            none.
        elastic_alpha: Float in (0, 1], how far replicas move towards the mean
            in a scheduled round, 1 is onto it. Before whoever looks they
            always move onto it.
        warmup: "averaging", or "gradients": replicas of all workers exchange
            gradients in the first `warmup_steps` steps, in place of rounds.
        telemetry: Bool, whether to measure rounds. Logs then hold `rounds`,
            `round_seconds` (mean), `megabytes_sent` (by this worker) and
            `divergence` (mean) of the epoch. Costs one more pass over the
            weights in a round.
        log_file: String or path of a file to which the chief adds a line of
            JSON for the start, each round and each epoch. Implies `telemetry`.
            `tf-avgstrategy plot` draws it.
        log_dir: String or path of a folder for the chief's TensorBoard
            scalars. Implies `telemetry`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range. At the start of `fit`:
            if the model or its optimizer was made outside the scope, if a
            pattern matches no variable, if there are two of these callbacks,
            or if `steps_per_execution` does not divide `period`.

    Example:

    ```python
    strategy = tf_avgstrategy.ParameterAveragingStrategy()
    with strategy.scope():
        model = build_model()
        model.compile("adamw", "sparse_categorical_crossentropy")
    model.fit(x, y, callbacks=[tf_avgstrategy.PeriodicAveraging(period=16)])
    ```

    References:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019,
        https://arxiv.org/abs/1805.09767. Averaged slots: Yu et al., On the
        Linear Speedup Analysis of Communication Efficient Momentum SGD, ICML
        2019, https://arxiv.org/abs/1905.03817.
    """

    def __init__(  # noqa: PLR0913 - one for each choice of the user.
        self,
        period=None,
        warmup_steps=0,
        slots="mean",
        overrides=None,
        on_non_finite="raise",
        schedule=None,
        outer_optimizer=None,
        outer_device="CPU:0",
        fragments=1,
        periods=None,
        local_period=None,
        elastic_alpha=1.0,
        warmup="averaging",
        telemetry=False,
        log_file=None,
        log_dir=None,
    ):
        super().__init__()
        self._arguments = {
            "period": period,
            "warmup_steps": warmup_steps,
            "slots": slots,
            "overrides": overrides,
            "on_non_finite": on_non_finite,
            "schedule": schedule,
            "outer_optimizer": outer_optimizer,
            "outer_device": outer_device,
            "fragments": fragments,
            "periods": periods,
            "local_period": local_period,
            "elastic_alpha": elastic_alpha,
            "warmup": warmup,
            "telemetry": bool(telemetry or log_file or log_dir),
        }
        self._settings = averaging_settings.make(**self._arguments)
        self.period = period
        self.warmup_steps = warmup_steps
        self.slots = slots
        self.overrides = overrides
        self.on_non_finite = on_non_finite
        self.log_file = log_file and os.fspath(log_file)
        self.log_dir = log_dir and os.fspath(log_dir)
        self.averager = None
        self.moments = fit_callbacks.SaveMoments(())
        self.batch_steps = 0
        self._steps_seen = 0
        self._excluded_before = 0
        self._is_arranged = False
        self._dataset = None
        self._is_epoch_open = False
        self._listeners = []
        self._last = None
        self._records = []
        self._log = None

    def get_config(self):
        """Returns the arguments as a dict, for `from_config`."""
        config = {
            **self._arguments,
            "log_file": self.log_file,
            "log_dir": self.log_dir,
        }
        schedule = config["schedule"]
        if schedule is not None:
            config["schedule"] = {
                "class_name": type(schedule).__name__,
                "config": schedule.get_config(),
            }
        if config["outer_optimizer"] is not None:
            config["outer_optimizer"] = keras.optimizers.serialize(
                config["outer_optimizer"]
            )
        return config

    @classmethod
    def from_config(cls, config):
        """Makes a callback of what `get_config` returned."""
        config = dict(config)
        if config.get("schedule") is not None:
            config["schedule"] = schedules.from_config(**config["schedule"])
        if config.get("outer_optimizer") is not None:
            config["outer_optimizer"] = keras.optimizers.deserialize(
                config["outer_optimizer"]
            )
        return cls(**config)

    @property
    def schedule(self):
        """`Schedule` of the rounds, those of single fragments where cut."""
        return self._settings.schedule

    def describe(self):
        """Returns a table, as a string, of what a round does to what.

        Raises:
            RuntimeError: Before the first `fit`, when there is no model yet.
        """
        if self.averager is None:
            raise RuntimeError(
                "`describe` needs the model's variables, which are known from "
                "the start of `fit` on. Received: a callback that was not in "
                "`fit` yet. Call it after or during `fit`, or use "
                "`ParameterAverager(...).describe()`."
            )
        return self.averager.describe()

    def set_model(self, model):
        averagers.check_strategy(model.distribute_strategy)
        if self.averager is not None and model is not self.model:
            self.averager = None
        super().set_model(model)

    def arrange(self, model, callbacks, arguments):
        """Prepares a `fit`, before it begins.

        Args:
            model: `keras.Model`.
            callbacks: List of the `keras.callbacks.Callback` of this `fit`.
            arguments: Dict, the arguments of `fit`.

        Returns:
            The list of callbacks that Keras is to call.

        Raises:
            ValueError: If the workers' arguments do not fit together, or
                another callback of this kind is among them.
        """
        self._check_alone(callbacks)
        communicator = model.distribute_strategy.communicator
        rank, gather = communicator.rank, communicator.all_gather_strings
        fit_callbacks.check_same_fit(arguments, gather)
        others, backup, save_freq = backups.take_out(
            [callback for callback in callbacks if callback is not self],
            rank=rank,
            gather_strings=gather,
        )
        others, counters = fit_callbacks.arrange_writers(
            others, rank=rank, gather_strings=gather
        )
        if isinstance(save_freq, int):
            counters.append((save_freq, 0))
        self.moments = fit_callbacks.SaveMoments(counters)
        self._is_arranged = True
        self._dataset = arguments.get("x")
        self._listeners = [
            callback
            for callback in others
            if hasattr(callback, "on_averaging_begin")
        ]
        self._last = backups.AfterOthers(self, others, backup, save_freq)
        return [self, *others, self._last]

    def on_train_begin(self, logs=None):
        self._is_epoch_open = False
        compilation.check_steps_per_execution(
            self.model, self.schedule, self._settings.local_period
        )
        self.model.distribute_strategy.check_environment()
        compilation.move_new_optimizer_into_scope(self.model)
        compilation.prepare_gradient_exchange(self.model, self.schedule)
        compilation.compile_per_replica(self.model)
        # A `fit` that failed may have left it on.
        self.model.distribute_strategy.count_all_runs(False)
        # Keras distributes validation data before it says that validation
        # begins, and workers exchange for that, too.
        self.model.distribute_strategy.extended.fit_in_progress = self
        if not self._is_arranged:
            # Hooks that a loop of the user's calls.
            self.begin()
            return
        self.model.distribute_strategy.extended.expect_step(
            self.model.train_step, self._dataset
        )

    def begin(self):
        """Gives all workers the chief's state, once nobody changes it more."""
        self._prepare_averager(optimizer_parts.find_optimizers(self.model))
        for listener in self._listeners:
            listener.on_averaging_begin(self.averager)
        self._steps_seen = self._num_steps_run()
        self._begin_log()

    def on_epoch_begin(self, epoch, logs=None):
        self._is_epoch_open = True
        self._excluded_before = self.averager.excluded
        self._records = []
        self.averager.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        self._is_epoch_open = True
        self.model.distribute_strategy.count_all_runs(True)

    def on_train_batch_end(self, batch, logs=None):
        self.batch_steps = self._count_steps()
        if self.moments.advance(self.batch_steps):
            self.averager.average_if_stepped()

    def on_epoch_end(self, epoch, logs=None):
        self.close_epoch()
        if self._settings.is_excluding and logs is not None:
            logs["excluded"] = self.averager.excluded - self._excluded_before
        if self._settings.telemetry and logs is not None:
            logs.update(telemetries.epoch_logs(self._records))
        if self._log is not None:
            self._log.write_epoch(epoch, self.averager.steps, logs or {})

    def on_test_begin(self, logs=None):
        if self.model.distribute_strategy.extended.is_observed:
            return
        # In `fit` validation comes before `on_epoch_end`.
        if self._is_epoch_open:
            self.close_epoch()
        else:
            self._average_if_stepped()

    def on_predict_begin(self, logs=None):
        if not self.model.distribute_strategy.extended.is_observed:
            self._average_if_stepped()

    def on_train_end(self, logs=None):
        # Before this hook Keras has overwritten each replica's weights with
        # its own moving average, if the optimizer keeps one.
        self._count_steps()
        rounds = self.averager.rounds
        self.averager.end_training()
        if self.averager.rounds > rounds:
            # Of workers that went on, after Keras was done here.
            optimizer_parts.finalize(self.model)
        if self.averager.keeps_local("ema"):
            self.averager.average()
        if self._log is not None:
            self._log.end()
        self.model.distribute_strategy.extended.fit_in_progress = None

    def leave(self):
        """Ends what `arrange` has begun, also if `fit` has failed."""
        self._is_epoch_open = False
        self._is_arranged = False
        self._dataset = None

    def _prepare_averager(self, optimizers):
        variables = self.model.variables
        last = self.averager
        if last is not None and last.is_for(variables, optimizers):
            last.start_counting_rows()
            last.start()
            return
        self.averager = averagers.ParameterAverager(
            self.model.distribute_strategy,
            variables,
            optimizers,
            **self._arguments,
        )
        self.averager.read_losses_from(
            functools.partial(worker_metrics.loss_sums, self.model)
        )
        if last is not None:
            self.averager.go_on_counting(last)
        self.averager.keep_also(self._metric_copies)
        if self._settings.telemetry:
            self.averager.on_record(self._note_record)

    def _note_record(self, record):
        self._records.append(record)
        if self._log is not None:
            self._log.write_round(record)

    def _begin_log(self):
        strategy = self.model.distribute_strategy
        if strategy.is_chief and (self.log_file or self.log_dir):
            self._log = telemetries.RoundLog(self.log_file, self.log_dir)
            self._log.write_start(
                workers=strategy.communicator.size,
                replicas=strategy.num_replicas_in_sync,
                schedule=str(self.schedule),
                step=self.averager.steps,
                bytes_per_round=self.averager.bytes_per_round,
            )

    def _metric_copies(self):
        copies = worker_metrics.metric_copies(self.model)
        return {f"metric{place}": of_one for place, of_one in enumerate(copies)}

    def close_epoch(self):
        """Waits until all workers are done with the epoch, and averages."""
        if self.averager is None:
            return
        if self._last is not None:
            self._last.end_skipping()
        # Keras 3.5 ends no batch if the data ends within an execution.
        self._count_steps()
        if self._is_epoch_open:
            self._is_epoch_open = False
            self.averager.end_epoch(self._take_part_in_step)
            self._steps_seen = self._num_steps_run()

    def _take_part_in_step(self):
        """Does what others do after a step, when the data here has ended."""
        self.batch_steps = 1
        self.averager.step()
        if self.moments.advance(self.batch_steps):
            self.averager.average_if_stepped()
        if self._last is not None:
            self._last.on_train_batch_end(None)

    def gather_metrics(self, data):
        """Gathers the bytes of all workers, b"" of who waits for others."""
        return self.averager.gather(data, agreement.METRICS)

    def gather_plans(self, data):
        """Gathers the bytes of all workers that read a dataset in an epoch."""
        return self.averager.gather(data, agreement.PLANS)

    def hold_losses(self):
        """Lets metrics be used for something else than this `fit`."""
        if self.averager is not None:
            self.averager.hold_losses()

    def resume_losses(self):
        """Goes on with the losses of this `fit`."""
        if self.averager is not None:
            self.averager.resume_losses()

    def _num_steps_run(self):
        return self.model.distribute_strategy.training_progress().steps

    def _count_steps(self):
        # Not from the batch's number: with steps_per_execution it is not the
        # same in all Keras releases, and counts steps that the data was too
        # short for.
        self.model.distribute_strategy.count_all_runs(False)
        steps = self._num_steps_run()
        new_steps, self._steps_seen = steps - self._steps_seen, steps
        self.averager.step(new_steps)
        return new_steps

    def _average_if_stepped(self):
        if self.averager is None:
            return False
        self._count_steps()
        return self.averager.average_if_stepped()

    def _check_alone(self, callbacks):
        ours = [c for c in callbacks if isinstance(c, PeriodicAveraging)]
        if len(ours) > 1:
            raise ValueError(
                "There must be one `PeriodicAveraging` in a `fit`, two would "
                "average twice. Received: one of "
                f"{ours[0].schedule} and one of {ours[1].schedule}. Remove one "
                "of them from `callbacks`."
            )
