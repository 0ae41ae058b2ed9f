"""The averager: one recipe for every round, whoever asks for it."""

import contextlib
import math

import tensorflow as tf

from tf_avgstrategy.averaging import agreement
from tf_avgstrategy.averaging import averaging_settings
from tf_avgstrategy.averaging import kept_mean
from tf_avgstrategy.averaging import observations
from tf_avgstrategy.averaging import participants
from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.state import state
from tf_avgstrategy.strategy import strategy as strategies
from tf_avgstrategy.tensors import buckets

__all__ = ["ParameterAverager", "check_strategy"]


class ParameterAverager(tf.train.experimental.PythonState):
    """Averages the replicas of a model every few steps of a training loop.

    A round replaces parameters and optimizer slots of every replica by their
    mean over all replicas, weighted by the rows that each has seen since the
    last round. All new values are computed before the first variable is
    written: a round that fails changes nothing.

    With several workers each makes one, in the same order, and calls the same
    methods in the same order: `step` after each training step, `end_epoch`
    where its data ends. Making one compares the variables of all workers and
    gives every worker the state of the chief: variables (but for seeds, which
    stay different, metrics and arrays of integers), slots, `iterations`,
    learning rate, and the counters of this object.

    `fit` needs the `PeriodicAveraging` callback instead, which drives one of
    these.

    `tf.train.Checkpoint(model=model, averager=averager)` saves counters, and
    of the replicas of this worker what the mean does not tell. Restored on as
    many replicas, training goes on as if it had not stopped, also within a
    period; on any other number, from the mean. With several workers each saves
    a checkpoint of its own, in a folder of its own. Or all call `average` and
    the chief saves: then `start`, called after `restore` on every worker, gives
    all of them what the chief has restored.

    Args:
        strategy: `ParameterAveragingStrategy` in whose scope `variables` and
            `optimizers` were made.
        variables: List of the model's variables, `model.variables`.
        optimizers: A Keras optimizer or a list of them. A single one that is
            not built yet is built here on the trainable variables.
        period: Int >= 1, local steps between two rounds, see `Periodic`.
            `None` if there is a `schedule`.
        warmup_steps: Int >= 0, opening steps each followed by a round.
        slots: What a round does to optimizer slots. "mean" averages them,
            "keep" leaves each replica its own, "reset" sets them to the value
            that they were created with.
        overrides: Dict from regular expression to rule, for single variables.
            `{"embedding": "keep"}` leaves each replica its own embeddings and
            their slots. `describe()` lists the paths.
        on_non_finite: What a round does if parameters or slots of a replica
            are not finite. "raise": a FloatingPointError on every worker.
            "exclude": the replica does not count and adopts the others' mean.
        schedule: `Schedule`, in place of `period` and `warmup_steps`.
        outer_optimizer: `keras.optimizers.Optimizer` that takes a step from
            what the last round left along the way to the mean, with the
            weights alone. Only its settings are used. `None`: onto the mean.
        outer_device: String, the device that holds what the outer optimizer
            needs. By default the host.
        fragments: Int >= 1. Weights are cut into so many fragments of similar
            bytes, one of which travels every `period / fragments` steps.
        periods: Dict from regular expression to period in steps, for weights
            whose path it is found in, a multiple of `period / fragments`.
            `{"embedding": 64}` averages embeddings every 64 steps.
        local_period: Int >= 1, local steps between two averagings of the
            replicas of each worker, without the others. `None`: there are
            none.
        elastic_alpha: Float in (0, 1], how far replicas move towards the mean
            in a scheduled round, 1 is onto it. Before whoever looks they
            always move onto it.
        warmup: "averaging", or "gradients": replicas of all workers exchange
            gradients in the first `warmup_steps` steps, in place of rounds.
        telemetry: Bool, whether to measure rounds, see `on_record`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range, a variable was not made
            in the strategy's scope, or workers have other variables or
            arguments than the chief.
        WorkerLostError: If a worker does not take part in time.

    Example:

    ```python
    strategy = tf_avgstrategy.ParameterAveragingStrategy()
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam()
    averager = tf_avgstrategy.ParameterAverager(
        strategy, model.variables, optimizer, period=16
    )
    for batch in strategy.experimental_distribute_dataset(dataset):
        train_step(batch)  # a tf.function that calls strategy.run
        averager.step()
    averager.end_epoch()
    ```
    """

    def __init__(  # noqa: PLR0913 - one for each choice of the user.
        self,
        strategy,
        variables,
        optimizers,
        *,
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
    ):
        check_strategy(strategy)
        settings = averaging_settings.make(
            period=period,
            warmup_steps=warmup_steps,
            slots=slots,
            overrides=overrides,
            on_non_finite=on_non_finite,
            schedule=schedule,
            outer_optimizer=outer_optimizer,
            outer_device=outer_device,
            fragments=fragments,
            periods=periods,
            local_period=local_period,
            elastic_alpha=elastic_alpha,
            warmup=warmup,
            telemetry=telemetry,
        )
        strategy.check_environment()
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        self._strategy = strategy
        self._variables = list(variables)
        self._optimizers = list(optimizers)
        _check_variables(self._variables)
        state.check_scope(self._variables, self._optimizers, strategy)
        self._build_optimizer()
        if settings.schedule.gradient_steps:
            strategy.extended.prepare_gradient_exchange()
        self._participant = participants.Participant(
            strategy, self._variables, self._optimizers, settings
        )
        self._settings = settings
        self._schedule = settings.schedule
        self._is_pending = False
        self._more_copies = dict
        self._observations = observations.Observations(
            settings.schedule, self._learning_rate
        )
        self._kept_mean = kept_mean.KeptMean()
        self._num_exchanged = strategy.extended.steps_without_rows.num_steps
        self.steps = optimizer_parts.steps_made(self._optimizers)
        self._steps_before_epoch = self.steps
        self._participant.on_round(self._note_round)
        self._begin_schedule()
        self.start()
        self._participant.recorder.begin(self.steps)

    @property
    def rounds(self):
        """Int, the rounds that were run."""
        return self._participant.rounds

    @property
    def excluded(self):
        """Int, how often a round has excluded a replica of any worker."""
        return self._participant.excluded

    @property
    def bytes_per_round(self):
        """Int, the bytes of a replica that one round exchanges."""
        travelling = state.travelling_rules(self.rules)
        return sum(map(buckets.num_bytes, rounds.specs(travelling)))

    @property
    def steps_in_epoch(self):
        """Int, training steps since the last `end_epoch`."""
        return self.steps - self._steps_before_epoch

    @property
    def rules(self):
        """List of `StateRule`, what a round does to each variable."""
        return self._participant.rules

    def step(self, num_steps=1, loss=None):
        """Counts training steps and runs a round if one is due.

        Call it after each training step, outside of any `tf.function`. Where
        optimizers accumulate gradients, the schedule counts updates and a
        round waits for the next one.

        Args:
            num_steps: Int >= 0, training steps since the last call.
            loss: Float or scalar tensor, the mean loss of these steps, for a
                schedule that needs one.

        Returns:
            Bool, whether a round was run.

        Raises:
            TypeError: If `num_steps` is not an integer.
            ValueError: If it is negative.
            RuntimeError: In a `warmup="gradients"`, if steps were traced
                before this averager was made, or run eagerly.
        """
        _check_eager()
        schedules.check_integer("num_steps", num_steps, at_least=0)
        for rule in self.rules:
            if rule.copies:
                # What a checkpoint did not restore after all.
                rule.variable.restored_copies = None
        if loss is not None and self._schedule.needs_loss:
            self._observations.losses.add(float(loss), num_steps)
        self._check_gradients_travelled(num_steps)
        participant = self._participant
        before = self.steps // participant.steps_per_update
        self.steps += num_steps
        after = self.steps // participant.steps_per_update
        self._choose_gradients()
        self._is_pending |= participant.timetable.has_look(before, after)
        if optimizer_parts.holds_half_gradients(self._optimizers):
            return False
        rounds_before = self.rounds
        if self._is_pending:
            self._take_part(agreement.IN_EPOCH, looks=True)
        participant.average_locally(before, after)
        return self.rounds > rounds_before

    def average_if_stepped(self):
        """Runs a round if a worker made a training step since the last one.

        Returns:
            Bool, whether a round was run.
        """
        _check_eager()
        rounds_before = self.rounds
        self._take_part(agreement.IN_EPOCH)
        return self.rounds > rounds_before

    def average(self, weights=None):
        """Runs a round now. The schedule's phase does not change.

        Args:
            weights: Sequence of numbers >= 0, one per local replica. `None`
                takes the rows that each has seen since the last round, or
                equal weights if none of any worker has seen any.

        Raises:
            ValueError: If weights are negative, not finite, or all 0.
            FloatingPointError: On every worker, if a variable that counts is
                not finite on one of them.
            WorkerLostError: If a worker does not take part in time.
        """
        _check_eager()
        self._take_part(agreement.IN_EPOCH, weights=weights, is_forced=True)

    def end_epoch(self, take_part=None):
        """Waits until every worker has called it, then runs a round.

        Workers whose data ends earlier take part in the others' rounds, with
        what they have not contributed yet and then with weight 0. Afterwards
        all of them have counted the steps of the one that made most. If none
        has trained since the last round, that one is left out. Where steps
        exchange gradients of all workers, it takes part in the others' steps.

        Args:
            take_part: Function without arguments that is called after each of
                the others' steps, which it counts. `None` for `step`.

        Raises:
            FloatingPointError: See `average`.
            WorkerLostError: If a worker does not take part in time.
        """
        _check_eager()
        extended = self._strategy.extended
        while extended.take_part_in_step():
            (take_part or self.step)()
        self._wait_for_all(agreement.AFTER_EPOCH)

    def keep_running_mean(self, decay=None):
        """Keeps a mean over rounds of the averaged model, on the host.

        Every worker calls it. If one is kept already, it goes on.

        Args:
            decay: Float in (0, 1), an exponential moving average that keeps so
                much at a round. `None`: the mean of all rounds.

        Raises:
            ValueError: If it is out of its range, or another one than that of
                the mean that is kept.
        """
        self._kept_mean.keep(self.rules, decay)

    def count_rounds(self, is_counting):
        """Says whether rounds count for the running mean."""
        self._kept_mean.counts_rounds = bool(is_counting)

    @contextlib.contextmanager
    def averaged_weights(self):
        """Puts the running mean into the model for as long as it is open.

        Then every replica has what it had, bit for bit. Nothing that trains
        belongs within.

        Raises:
            RuntimeError: If there is no running mean.
        """
        with self._kept_mean.in_place():
            yield

    def end_training(self):
        """Like `end_epoch`, for a worker that has no more epochs to come.

        It takes part in the rounds of the epochs that others still have.

        Raises:
            FloatingPointError: See `average`.
            WorkerLostError: If a worker does not take part in time.
        """
        _check_eager()
        self._wait_for_all(agreement.AFTER_TRAINING)
        self._participant.recorder.flush()

    def describe(self):
        """Returns a table, as a string, of what a round does to what."""
        rows = [("variable", "kind", "rule", "dtype", "shape")]
        for rule in self.rules:
            dtype, shape = "", ""
            if rule.copies:
                dtype = rule.copies[0].dtype.name
                shape = str(tuple(rule.copies[0].shape))
            rows.append((rule.path, rule.kind, rule.rule, dtype, shape))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def is_for(self, variables, optimizers):
        """Returns whether it averages just these variables and optimizers."""
        ours = [*self._variables, *self._optimizers]
        theirs = [*variables, *optimizers]
        return [id(o) for o in ours] == [id(t) for t in theirs]

    def go_on_counting(self, other):
        """Takes over the counters of an averager that came before this one.

        And its running mean, as that of the same variables.
        """
        self._kept_mean.restore(other._kept_mean.tensors())
        self.steps = self._steps_before_epoch = other.steps
        self._choose_gradients()
        self._participant.rounds = other.rounds
        self._participant.excluded = other.excluded
        self._begin_schedule()

    def on_record(self, function):
        """Calls a function with the `RoundRecord` of each round.

        It is called with the next message that workers exchange, by which how
        far replicas were apart is known of all, or by `end_training`.
        """
        self._participant.recorder.tell(function)

    def read_losses_from(self, function):
        """Lets the schedule know the loss of a training.

        Args:
            function: Function without arguments that returns two floats, the
                sum of the losses of this worker's rows so far in this epoch
                and the number of these rows, or None if there are none.
        """
        self._observations.losses.read_from(function)

    def hold_losses(self):
        """Is told that `read_losses_from` reads something else for a time."""
        self._observations.losses.hold()

    def resume_losses(self):
        """Is told that it reads this training's losses again."""
        self._observations.losses.resume()

    def begin_epoch(self):
        """Is told that the sums of `read_losses_from` have begun anew."""
        self._observations.losses.begin_epoch()

    def start_counting_rows(self):
        """Forgets rows that were seen before, perhaps by another model."""
        self._participant.start_counting_rows()

    def keeps_local(self, kind):
        """Returns whether a variable of this kind stays local in rounds."""
        return any(r.rule == "keep" for r in self.rules if r.kind == kind)

    def gather(self, data, kind):
        """Gathers bytes of all workers, also of those that wait for others.

        Args:
            data: Bytes.
            kind: `agreement.METRICS`, `PLANS` or `STATES`. A worker that is
                ahead of the others gives b"", or its `replica_state`.

        Returns:
            List of bytes, by rank.
        """
        _check_eager()
        _, parts = self._take_part(
            agreement.IN_EPOCH, gathers=kind, give=lambda _: data
        )
        return parts

    def gather_replica_states(self):
        """Returns the `replica_state` of all workers, by rank.

        What all have in common is in that of the chief.
        """
        return self.gather(self._give(agreement.STATES), agreement.STATES)

    def keep_also(self, more_copies):
        """Adds variables to the state of replicas.

        Args:
            more_copies: Function without arguments that returns a dict from
                string to a tuple of `tf.Variable`, one per local replica.
        """
        self._more_copies = more_copies

    def replica_state(self, with_common=True):
        """Returns counters, and what local replicas hold alone, as bytes.

        Args:
            with_common: Bool, whether with what all workers have in common.
        """
        counters = {
            "steps": self.steps,
            "steps_in_epoch": self.steps_in_epoch,
            "pending": self._is_pending,
            **self._observations.state(),
        }
        return self._participant.replica_state(
            counters,
            self._more_copies(),
            with_common=with_common,
            more_common=self._kept_mean.tensors() if with_common else {},
        )

    def restore_replica_state(
        self, data, common=None, *, is_own, is_within_restore=False
    ):
        """Takes back what `replica_state` returned.

        Args:
            data: Bytes.
            common: Bytes with what all workers have in common. `None`: `data`.
            is_own: Bool, whether it is of as many replicas on this worker. If
                not, only counters, seeds and what is common are taken.
            is_within_restore: Bool, whether a checkpoint is about to restore
                the variables, which would give each replica the mean.

        Returns:
            Function without arguments that restores the variables of
            `keep_also`.
        """
        participant = self._participant
        counters, more, restore_more = participant.restore_replica_state(
            data, common, is_own=is_own, is_within_restore=is_within_restore
        )
        self._kept_mean.restore(more)
        self.steps = counters["steps"]
        self._steps_before_epoch = self.steps - counters["steps_in_epoch"]
        self._is_pending = counters["pending"] and is_own
        self._choose_gradients()
        self._observations.restore(counters)
        losses = self._observations.losses

        def restore_rest():
            restore_more(self._more_copies())
            # After what losses are read from.
            if is_own:
                losses.restore(counters["loss"])

        if is_own:
            losses.restore(counters["loss"])
        return restore_rest

    def serialize(self):
        """Returns counters and replicas' state, for `tf.train.Checkpoint`."""
        return self.replica_state()

    def deserialize(self, string_value):
        """Takes back what `serialize` returned.

        A checkpoint restores its variables after it. They get what each
        replica had, in place of the mean.
        """
        self.restore_replica_state(
            string_value,
            is_own=self._participant.can_own(string_value),
            is_within_restore=True,
        )

    def _build_optimizer(self):
        unbuilt = [o for o in self._optimizers if not o.built]
        if (
            len(self._optimizers) > 1
            and unbuilt
            and self._strategy.communicator.size > 1
        ):
            raise ValueError(
                "With several workers and several optimizers all optimizers "
                "must be built, so that the workers can start from the same "
                f"slots. Received: {len(unbuilt)} of {len(self._optimizers)} "
                "that are not. Call `optimizer.build(variables)` inside "
                "`strategy.scope()` for each of them."
            )
        if len(self._optimizers) == 1 and unbuilt:
            with self._strategy.scope():
                unbuilt[0].build([v for v in self._variables if v.trainable])

    def start(self):
        """Gives every worker the chief's state. `fit` begins with it."""
        self.steps, self._steps_before_epoch = self._participant.start(
            self.steps, self._steps_before_epoch
        )
        self._choose_gradients()
        self._kept_mean.take_chiefs(self._strategy.communicator)

    def _choose_gradients(self):
        """Lets steps exchange the gradients of all replicas, or not."""
        exchange = self._strategy.extended.exchange
        if exchange is not None:
            updates = self.steps // self._participant.steps_per_update
            exchange.set_global(updates < self._schedule.gradient_steps)

    def _check_gradients_travelled(self, num_steps):
        """Raises where steps were traced before they were to exchange any."""
        extended = self._strategy.extended
        exchange = extended.exchange
        if not self._schedule.gradient_steps or exchange is None:
            return
        if not exchange.is_in_force:
            return
        before = self._num_exchanged
        self._num_exchanged = extended.steps_without_rows.num_steps
        is_missing = num_steps and self._num_exchanged == before
        if is_missing and extended.fit_in_progress is None:
            raise RuntimeError(
                "A training step must be traced after the averager is made, to "
                'exchange gradients as `warmup="gradients"` says. Received: a '
                "step that exchanges none. Make the `ParameterAverager` first, "
                "then call the `tf.function` of the training step for the "
                "first time."
            )

    def _note_round(self, rules):
        self._kept_mean.note(rules, self._participant.left_by_round)

    def _begin_schedule(self):
        self._participant.begin_schedule(self.steps, self._learning_rate())

    def _learning_rate(self):
        if not self._settings.needs_learning_rate:
            return math.nan
        return optimizer_parts.learning_rate(self._optimizers)

    def _take_part(self, progress, give=None, **what):
        """Does what `Participant.take_part` does, which may be a round."""
        rounds_before = self.rounds
        met = self._participant.take_part(
            self.steps,
            progress,
            observed=self._observations.observe(self._is_pending),
            give=give or self._give,
            **what,
        )
        is_round = self.rounds > rounds_before
        is_asked = any(status.looks for status in met[0])
        self._observations.note(is_round=is_round, is_asked=is_asked)
        self._is_pending &= not (is_round or is_asked)
        return met

    def _give(self, kind):
        """What a worker that waits for the others gives them."""
        if kind != agreement.STATES:
            return b""
        return self.replica_state(
            with_common=self._strategy.communicator.rank == 0
        )

    def _wait_for_all(self, progress):
        while True:
            statuses, _ = self._take_part(progress)
            if all(status.progress >= progress for status in statuses):
                break
        self.steps = max(status.steps for status in statuses)
        self._steps_before_epoch = self.steps
        self._participant.is_new_epoch()


def check_strategy(strategy):
    """Raises a ValueError unless replicas of the strategy are independent."""
    if not isinstance(strategy, strategies.ParameterAveragingStrategy):
        raise ValueError(
            "Parameter averaging needs a `ParameterAveragingStrategy`: under "
            "any other strategy replicas are not independent, and averaging "
            "does nothing. Received: a model or averager under "
            f"{type(strategy).__name__}. Make model and optimizer inside "
            "`with tf_avgstrategy.ParameterAveragingStrategy().scope():`."
        )


def _check_variables(variables):
    if not variables:
        raise ValueError(
            "`variables` must hold the variables of a model that is built. "
            "Received: an empty list. Build the model before, by an `Input` "
            "layer or by calling it on data inside `strategy.scope()`."
        )


def _check_eager():
    if not tf.executing_eagerly():
        raise RuntimeError(
            "Rounds are decided in Python and must be called outside of any "
            "`tf.function`. Received: a call while a function was being "
            "traced. Call the averager after the traced training step."
        )
