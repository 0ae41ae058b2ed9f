"""The averager: one recipe for every round, whoever asks for it."""

import json

import tensorflow as tf

from tf_avgstrategy import agreement
from tf_avgstrategy import buckets
from tf_avgstrategy import mean
from tf_avgstrategy import optimizer_parts
from tf_avgstrategy import rounds
from tf_avgstrategy import schedules
from tf_avgstrategy import state
from tf_avgstrategy import strategy as strategies

__all__ = ["ParameterAverager"]


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
    these. `tf.train.Checkpoint(averager=averager)` saves its counters.

    Args:
        strategy: `ParameterAveragingStrategy` in whose scope `variables` and
            `optimizers` were made.
        variables: List of the model's variables, `model.variables`.
        optimizers: A Keras optimizer or a list of them. A single one that is
            not built yet is built here on the trainable variables.
        period: Int >= 1, local steps between two rounds, see `Periodic`.
        warmup_steps: Int >= 0, opening steps each followed by a round.
        slots: What a round does to optimizer slots. "mean" averages them,
            "keep" leaves each replica its own, "reset" sets them to the value
            that they were created with.
        overrides: Dict from regular expression to rule, for single variables.
            `{"embedding": "keep"}` leaves each replica its own embeddings and
            their slots. `describe()` lists the paths.

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

    def __init__(
        self,
        strategy,
        variables,
        optimizers,
        *,
        period,
        warmup_steps=0,
        slots="mean",
        overrides=None,
    ):
        check_strategy(strategy)
        state.check_slots(slots)
        strategy.check_environment()
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        self._schedule = schedules.Periodic(period, warmup_steps)
        self._strategy = strategy
        self._communicator = strategy.communicator
        self._variables = list(variables)
        self._optimizers = list(optimizers)
        self._slots = slots
        self._overrides = dict(overrides or {})
        _check_variables(self._variables)
        state.check_scope(self._variables, self._optimizers, strategy)
        self._build_optimizer()
        self._steps_per_update = optimizer_parts.gradient_accumulation_steps(
            self._optimizers
        )
        self._num_optimizer_variables = None
        self._has_new_rules = True
        self._round = None
        self._refresh_rules()
        self._is_pending = False
        self._has_warned = False
        self._seen = strategy.training_progress()
        self.steps = 0
        self.rounds = 0
        self.start()

    @property
    def bytes_per_round(self):
        """Int, the bytes of a replica that one round exchanges."""
        self._refresh_rules()
        travelling = state.travelling_rules(self._rules)
        return sum(map(buckets.num_bytes, rounds.specs(travelling)))

    def step(self, num_steps=1):
        """Counts training steps and runs a round if one is due.

        Call it after each training step, outside of any `tf.function`. Where
        optimizers accumulate gradients, the schedule counts updates and a
        round waits for the next one.

        Args:
            num_steps: Int >= 0, training steps since the last call.

        Returns:
            Bool, whether a round was run.

        Raises:
            TypeError: If `num_steps` is not an integer.
            ValueError: If it is negative.
        """
        _check_eager()
        schedules.check_integer("num_steps", num_steps, at_least=0)
        before = self.steps // self._steps_per_update
        self.steps += num_steps
        after = self.steps // self._steps_per_update
        self._is_pending |= any(
            map(self._schedule.is_due, range(before + 1, after + 1))
        )
        if not self._is_pending or optimizer_parts.holds_half_gradients(
            self._optimizers
        ):
            return False
        self.average()
        return True

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

    def end_epoch(self):
        """Waits until every worker has called it, then runs a round.

        Workers whose data ends earlier take part in the others' rounds, with
        what they have not contributed yet and then with weight 0. Afterwards
        all of them have counted the steps of the one that made most. If none
        has trained since the last round, that one is left out.

        Raises:
            FloatingPointError: See `average`.
            WorkerLostError: If a worker does not take part in time.
        """
        _check_eager()
        self._wait_for_all(agreement.AFTER_EPOCH)

    def end_training(self):
        """Like `end_epoch`, for a worker that has no more epochs to come.

        It takes part in the rounds of the epochs that others still have.

        Raises:
            FloatingPointError: See `average`.
            WorkerLostError: If a worker does not take part in time.
        """
        _check_eager()
        self._wait_for_all(agreement.AFTER_TRAINING)

    def describe(self):
        """Returns a table, as a string, of what a round does to what."""
        self._refresh_rules()
        rows = [("variable", "kind", "rule", "dtype", "shape")]
        for rule in self._rules:
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

    def start_counting_rows(self):
        """Forgets rows that were seen before, perhaps by another model."""
        self._seen = self._strategy.training_progress()

    def keeps_local(self, kind):
        """Returns whether a variable of this kind stays local in rounds."""
        return any(r.rule == "keep" for r in self._rules if r.kind == kind)

    def serialize(self):
        """Returns the counters as a string, for `tf.train.Checkpoint`."""
        return json.dumps({"steps": self.steps, "rounds": self.rounds})

    def deserialize(self, string_value):
        """Takes the counters back from `serialize`."""
        counters = json.loads(string_value)
        self.steps = counters["steps"]
        self.rounds = counters["rounds"]
        self.start_counting_rows()

    def _build_optimizer(self):
        unbuilt = [o for o in self._optimizers if not o.built]
        if (
            len(self._optimizers) > 1
            and unbuilt
            and self._communicator.size > 1
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
        if self._communicator.size == 1:
            return
        agreement.check_same(
            self._communicator, self._description(), "settings and variables"
        )
        is_first = self._round is None
        given = [r for r in self._rules if _is_given_by_chief(r, is_first)]
        travelling = state.travelling_rules(self._rules)
        sent = {id(r.copies[0]): r for r in [*travelling, *given]}
        counters = tf.constant([self.steps, self.rounds], tf.int64)
        counters, *values = self._communicator.broadcast(
            [counters, *map(_as_read, sent.values())]
        )
        chiefs = dict(zip(sent, values))
        for rule in given:
            for copy in rule.copies:
                copy.assign(chiefs[id(rule.copies[0])])
        self.steps, self.rounds = counters.numpy().tolist()
        # The references of the last `fit` may not be what is there now.
        self._make_round([chiefs[id(r.copies[0])] for r in travelling])

    def _wait_for_all(self, progress):
        while True:
            statuses = self._take_part(progress)
            if all(status.progress >= progress for status in statuses):
                break
        self.steps = max(status.steps for status in statuses)
        self._has_warned = False

    def _take_part(self, progress, *, weights=None, is_forced=False):
        """Tells all workers how far this one is, and averages if one wants to.

        Returns:
            List of the `Status` of each worker before the round.
        """
        seen = self._strategy.training_progress()
        if weights is None:
            rows = zip(seen.rows, self._seen.rows)
            counted = [now - before for now, before in rows]
        else:
            counted = self._check_weights(weights)
        self._prepare_round()
        is_finite, extremes = self._round.replica_state()
        sick_replica, sick_variable = agreement.first_sick(is_finite, counted)
        status = agreement.Status(
            progress=progress,
            steps=self.steps,
            num_replicas=len(counted),
            weight=float(sum(counted)),
            wants_round=is_forced or seen.steps != self._seen.steps,
            sick_replica=sick_replica,
            sick_variable=sick_variable,
            extremes=extremes,
        )
        statuses = status.exchange(self._communicator)
        if not self._has_warned:
            self._has_warned = agreement.warn_of_idle_workers(statuses)
        if any(s.wants_round for s in statuses):
            total = sum(s.weight for s in statuses)
            if not total and weights is None:
                counted = [1] * len(counted)
                total = sum(s.num_replicas for s in statuses)
            shares = mean.shares(counted, total)
            agreement.check_health(
                statuses, [rule.path for rule in self._round.travelling]
            )
            extremes = agreement.extremes(
                statuses, self._round.agrees_on_floats
            )
            self._round.run(shares, extremes)
            self._seen = seen
            self._is_pending = False
            self.rounds += 1
        return statuses

    def _check_weights(self, weights):
        num_replicas = len(self._seen.rows)
        if len(weights) != num_replicas:
            raise ValueError(
                "`weights` must hold one number per local replica, here "
                f"{num_replicas}. Received: weights={list(weights)}. Pass "
                "None to weigh replicas by the rows that they have seen."
            )
        return mean.check_weights(weights)

    def _refresh_rules(self):
        """Takes in slots that optimizers built since the last time."""
        num_variables = [len(o.variables) for o in self._optimizers]
        if num_variables == self._num_optimizer_variables:
            return
        self._rules = state.state_rules(
            self._variables,
            self._optimizers,
            slots=self._slots,
            overrides=self._overrides,
        )
        self._num_optimizer_variables = num_variables
        self._has_new_rules = True

    def _prepare_round(self):
        """Makes the computation of rounds for the rules that there are now."""
        self._refresh_rules()
        if not self._has_new_rules:
            return
        references = ()
        if self._communicator.size > 1:
            agreement.check_same(
                self._communicator, self._description(), "variables"
            )
            travelling = state.travelling_rules(self._rules)
            references = self._communicator.broadcast(
                [_as_read(rule) for rule in travelling]
            )
        self._make_round(references)

    def _make_round(self, references):
        self._round = rounds.Round(self._rules, self._communicator, references)
        self._has_new_rules = False

    def _description(self):
        """One line for each thing that must be the same on every worker."""
        return [
            f"{self._schedule}, slots={self._slots!r}",
            *map(optimizer_parts.describe, self._optimizers),
            *(
                f"{rule.path} {rule.rule} {rule.copies[0].dtype.name} "
                f"{tuple(rule.copies[0].shape)}"
                for rule in self._rules
                if rule.copies
            ),
        ]


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


def _is_given_by_chief(rule, is_first):
    """Whether a start replaces a variable by the chief's."""
    if not rule.copies or rule.kind == "other":
        return False
    # What stays local in rounds is made equal once, not in a second `fit`.
    return is_first or rule.rule != "keep" or rule.kind == "learning rate"


def _as_read(rule):
    """A variable's value as seen from outside a replica."""
    if not rule.travels:
        return rule.copies[0].read_value()
    first, *others = [copy.read_value() for copy in rule.copies]
    share = 1 / len(rule.copies)
    offset = mean.weighted_offset(others, first, [share] * len(others))
    return tf.cast(tf.cast(first, offset.dtype) + offset, first.dtype)
