"""The averager: one recipe for every round, whoever asks for it."""

import json

import numpy as np
import tensorflow as tf

from tf_avgstrategy import agreement
from tf_avgstrategy import buckets
from tf_avgstrategy import mean
from tf_avgstrategy import optimizer_parts
from tf_avgstrategy import replica_state
from tf_avgstrategy import rounds
from tf_avgstrategy import schedules
from tf_avgstrategy import snapshots
from tf_avgstrategy import state
from tf_avgstrategy import strategy as strategies

__all__ = ["NON_FINITE_RULES", "ParameterAverager", "check_non_finite"]

NON_FINITE_RULES = ("raise", "exclude")


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
        on_non_finite="raise",
    ):
        check_strategy(strategy)
        state.check_slots(slots)
        check_non_finite(on_non_finite)
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
        self._on_non_finite = on_non_finite
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
        self._more_copies = dict
        self.steps = optimizer_parts.steps_made(self._optimizers)
        self.rounds = 0
        self.excluded = 0
        self._steps_before_epoch = self.steps
        self.start()

    @property
    def bytes_per_round(self):
        """Int, the bytes of a replica that one round exchanges."""
        self._refresh_rules()
        travelling = state.travelling_rules(self._rules)
        return sum(map(buckets.num_bytes, rounds.specs(travelling)))

    @property
    def steps_in_epoch(self):
        """Int, training steps since the last `end_epoch`."""
        return self.steps - self._steps_before_epoch

    @property
    def layout(self):
        """List of strings, one for each variable, without names of models.

        Keras gives these numbers: two equal models have different ones.
        """
        self._refresh_rules()
        return [replica_state.describe(rule) for rule in self._rules]

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
        for rule in self._rules:
            if rule.copies:
                # What a checkpoint did not restore after all.
                rule.variable.restored_copies = None
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

    def go_on_counting(self, other):
        """Takes over the counters of an averager that came before this one."""
        self.steps, self.rounds = other.steps, other.rounds
        self.excluded = other.excluded
        self._steps_before_epoch = self.steps

    def start_counting_rows(self):
        """Forgets rows that were seen before, perhaps by another model."""
        self._seen = self._strategy.training_progress()

    def keeps_local(self, kind):
        """Returns whether a variable of this kind stays local in rounds."""
        return any(r.rule == "keep" for r in self._rules if r.kind == kind)

    def gather(self, data, kind):
        """Gathers bytes of all workers, also of those that wait for others.

        Args:
            data: Bytes.
            kind: `agreement.METRICS` or `agreement.STATES`. A worker that is
                ahead of the others gives b"" or its `replica_state`.

        Returns:
            List of bytes, by rank.
        """
        _check_eager()
        _, parts = self._take_part(
            agreement.IN_EPOCH, gathers=kind, give=lambda: data
        )
        return parts

    def gather_replica_states(self):
        """Returns the `replica_state` of all workers, by rank."""
        return self.gather(self.replica_state(), agreement.STATES)

    def keep_also(self, more_copies):
        """Adds variables to the state of replicas.

        Args:
            more_copies: Function without arguments that returns a dict from
                string to a tuple of `tf.Variable`, one per local replica.
        """
        self._more_copies = more_copies

    def replica_state(self):
        """Returns counters, and what local replicas hold alone, as bytes."""
        self._refresh_rules()
        progress = self._strategy.training_progress()
        stepped = progress.steps - self._seen.steps
        copies = replica_state.own_copies(self._rules, bool(stepped))
        tensors = {
            f"copies/{key}": replica_state.stacked(of_one)
            for key, of_one in {**copies, **self._more_copies()}.items()
        }
        seeds = replica_state.shared_values(self._rules, kinds=("other",))
        tensors.update({f"shared/{key}": v for key, v in seeds.items()})
        if stepped and self._communicator.size > 1:
            for place, value in enumerate(self._round.references):
                tensors[f"reference/{place}"] = value
        header = {
            "steps": self.steps,
            "rounds": self.rounds,
            "excluded": self.excluded,
            "steps_in_epoch": self.steps_in_epoch,
            "stepped": stepped,
            "rows": np.subtract(progress.rows, self._seen.rows).tolist(),
            "pending": self._is_pending,
            "layout": self.layout,
        }
        return snapshots.pack(header, tensors)

    def restore_replica_state(self, data, *, is_own, is_within_restore=False):
        """Takes back what `replica_state` returned.

        Args:
            data: Bytes.
            is_own: Bool, whether it is of as many replicas on this worker. If
                not, only the counters are taken.
            is_within_restore: Bool, whether a checkpoint is about to restore
                the variables, which would give each replica the mean.

        Returns:
            Function without arguments that restores the variables of
            `keep_also`.
        """
        header, tensors = snapshots.unpack(data)
        self.steps = header["steps"]
        self.rounds = header["rounds"]
        self.excluded = header["excluded"]
        self._steps_before_epoch = self.steps - header["steps_in_epoch"]
        progress = self._strategy.training_progress()
        self._seen = progress
        self._refresh_rules()
        if header["layout"] != self.layout:
            return lambda: None
        if not is_own:
            # Seeds, which checkpoints of Keras models do not hold.
            self.assign_shared(
                {
                    name.removeprefix("shared/"): tensor
                    for name, tensor in tensors.items()
                    if name.startswith("shared/")
                }
            )
            return lambda: None
        self._is_pending = header["pending"]
        rows = np.subtract(progress.rows, header["rows"]).tolist()
        self._seen = type(progress)(
            steps=progress.steps - header["stepped"], rows=tuple(rows)
        )
        copies = replica_state.own_copies(self._rules, bool(header["stepped"]))
        for key, of_one in copies.items():
            values = tensors[f"copies/{key}"]
            replica_state.assign_copies(of_one, values)
            if is_within_restore:
                self._rules[int(key)].variable.restored_copies = tf.unstack(
                    values, len(of_one)
                )
        if "reference/0" in tensors:
            places = range(len(self._round.references))
            self._make_round([tensors[f"reference/{p}"] for p in places])

        def restore_more():
            for key, of_one in self._more_copies().items():
                if f"copies/{key}" in tensors:
                    replica_state.assign_copies(
                        of_one, tensors[f"copies/{key}"]
                    )

        return restore_more

    def shared_values(self):
        """Returns what a file holds of each variable, a dict of tensors."""
        self._refresh_rules()
        return replica_state.shared_values(self._rules)

    def assign_shared(self, values):
        """Gives every replica of this worker what `shared_values` returned."""
        self._refresh_rules()
        replica_state.assign_shared(self._rules, values)

    def local_keys(self):
        """Returns the keys of `shared_values` that `start` does not send."""
        self._refresh_rules()
        return {
            str(place)
            for place, rule in enumerate(self._rules)
            if not replica_state.is_given_by_chief(rule, is_first=False)
        }

    def serialize(self):
        """Returns counters and replicas' state, for `tf.train.Checkpoint`."""
        return self.replica_state()

    def deserialize(self, string_value):
        """Takes back what `serialize` returned.

        A checkpoint restores its variables after it. They get what each
        replica had, in place of the mean.
        """
        if string_value[:1] == b"{":
            # Of a release that kept the counters alone.
            counters = json.loads(string_value)
            self.steps, self.rounds = counters["steps"], counters["rounds"]
            self.start_counting_rows()
            return
        header, _ = snapshots.unpack(string_value)
        self.restore_replica_state(
            string_value,
            is_own=len(header["rows"]) == len(self._seen.rows),
            is_within_restore=True,
        )

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
        given = [
            rule
            for rule in self._rules
            if replica_state.is_given_by_chief(rule, is_first)
        ]
        travelling = state.travelling_rules(self._rules)
        sent = {id(r.copies[0]): r for r in [*travelling, *given]}
        counters = tf.constant(
            [self.steps, self.rounds, self.excluded, self._steps_before_epoch],
            tf.int64,
        )
        counters, *values = self._communicator.broadcast(
            [counters, *map(replica_state.as_read, sent.values())]
        )
        chiefs = dict(zip(sent, values))
        for rule in given:
            for copy in rule.copies:
                copy.assign(chiefs[id(rule.copies[0])])
        self.steps, self.rounds, self.excluded, self._steps_before_epoch = (
            counters.numpy().tolist()
        )
        # The references of the last `fit` may not be what is there now.
        self._make_round([chiefs[id(r.copies[0])] for r in travelling])

    def _wait_for_all(self, progress):
        while True:
            statuses, _ = self._take_part(progress)
            if all(status.progress >= progress for status in statuses):
                break
        self.steps = max(status.steps for status in statuses)
        self._steps_before_epoch = self.steps
        self._has_warned = False

    def _take_part(
        self,
        progress,
        *,
        weights=None,
        is_forced=False,
        gathers=agreement.NOTHING,
        give=None,
    ):
        """Tells all workers how far this one is, and averages if one wants to.

        Returns:
            List of the `Status` of each worker before the round, and list of
            the bytes that one of them wanted to gather.
        """
        seen = self._strategy.training_progress()
        if weights is None:
            rows = zip(seen.rows, self._seen.rows)
            counted = [now - before for now, before in rows]
        else:
            counted = self._check_weights(weights)
        self._prepare_round()
        status, is_healthy = self._status(
            counted,
            progress=progress,
            wants_round=is_forced or seen.steps != self._seen.steps,
            gathers=gathers,
        )
        statuses = status.exchange(self._communicator)
        if not self._has_warned:
            self._has_warned = agreement.warn_of_idle_workers(statuses)
        if any(s.wants_round for s in statuses):
            counted = np.multiply(counted, is_healthy).tolist()
            total = sum(s.weight for s in statuses)
            if not total and weights is None:
                counted = [int(healthy) for healthy in is_healthy]
                total = sum(s.num_replicas for s in statuses)
            self._run_round(statuses, counted, total)
            self._seen = seen
        return statuses, self._give(statuses, give)

    def _status(self, counted, **what):
        """This worker's `Status`, and which of its replicas may count."""
        is_finite, extremes = self._round.replica_state()
        is_sick = agreement.find_sick(is_finite, counted)
        places = np.argwhere(is_sick)
        replica, variable = places[0].tolist() if len(places) else (-1, -1)
        # What is kept local can adopt no mean.
        can_adopt = not is_sick[:, len(self._round.travelling) :].any()
        is_excluded = is_sick.any(axis=1) & can_adopt
        is_excluded &= self._on_non_finite == "exclude"
        status = agreement.Status(
            steps=self.steps,
            num_replicas=int(np.sum(~is_excluded)),
            weight=float(np.sum(np.multiply(counted, ~is_excluded))),
            sick_replica=replica,
            sick_variable=variable,
            num_excluded=int(np.sum(is_excluded)),
            extremes=extremes,
            **what,
        )
        return status, ~is_excluded

    def _run_round(self, statuses, counted, total):
        paths = [rule.path for rule in self._round.checked]
        agreement.check_health(statuses, paths)
        self.excluded += agreement.warn_of_excluded(statuses, paths)
        extremes = agreement.extremes(statuses, self._round.agrees_on_floats)
        self._round.run(mean.shares(counted, total), extremes)
        self._is_pending = False
        self.rounds += 1

    def _give(self, statuses, give):
        """Gathers what another worker or this one wanted to."""
        kind = max(status.gathers for status in statuses)
        if kind == agreement.NOTHING:
            return []
        if give is None:
            is_of_states = kind == agreement.STATES
            give = self.replica_state if is_of_states else bytes
        return self._communicator.all_gather_bytes(give(), f"{kind}: ")

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
                [replica_state.as_read(rule) for rule in travelling]
            )
        self._make_round(references)

    def _make_round(self, references):
        self._round = rounds.Round(self._rules, self._communicator, references)
        self._has_new_rules = False

    def _description(self):
        """One line for each thing that must be the same on every worker."""
        return [
            f"{self._schedule}, slots={self._slots!r}, "
            f"on_non_finite={self._on_non_finite!r}",
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


def check_non_finite(on_non_finite):
    """Raises a ValueError unless it is a rule for what is not finite."""
    if on_non_finite not in NON_FINITE_RULES:
        raise ValueError(
            "`on_non_finite` must be one of "
            f"{', '.join(map(repr, NON_FINITE_RULES))}, what a round does with "
            "replicas that are not finite. Received: "
            f'on_non_finite={on_non_finite!r}. Pass on_non_finite="raise" to '
            "stop every worker."
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
