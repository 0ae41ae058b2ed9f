"""Participants: what a worker does for a round, and what it says before."""

import numpy as np
import tensorflow as tf
from absl import logging

from tf_avgstrategy import agreement
from tf_avgstrategy import mean
from tf_avgstrategy import optimizer_parts
from tf_avgstrategy import replica_state
from tf_avgstrategy import rounds
from tf_avgstrategy import snapshots
from tf_avgstrategy import state

__all__ = ["Participant"]


class Participant:
    """A worker among others that start equal and average when one wants to.

    All workers call the same methods in the same order.

    Args:
        strategy: `ParameterAveragingStrategy`.
        variables: List of the model's variables.
        optimizers: List of built Keras optimizers.
        settings: String, on every worker the same.
        slots: See `ParameterAverager`.
        overrides: Dict, see `ParameterAverager`.
        is_excluding: Bool, whether replicas that are not finite do not count,
            or are an error.

    Attributes:
        rounds: Int, the rounds that were run.
        excluded: Int, how often a round has excluded a replica.
    """

    def __init__(
        self,
        strategy,
        variables,
        optimizers,
        *,
        settings,
        slots,
        overrides,
        is_excluding,
    ):
        self._strategy = strategy
        self._communicator = strategy.communicator
        self._variables = variables
        self._optimizers = optimizers
        self._settings = settings
        self._slots = slots
        self._overrides = overrides
        self._is_excluding = is_excluding
        self._num_optimizer_variables = None
        self._has_new_rules = True
        self._round = None
        self._has_warned = False
        self._seen = strategy.training_progress()
        self.rounds = 0
        self.excluded = 0
        self._refresh_rules()

    @property
    def rules(self):
        """List of `StateRule`, of all variables that there are now."""
        self._refresh_rules()
        return self._rules

    def start_counting_rows(self):
        """Forgets what was seen since the last round."""
        self._seen = self._strategy.training_progress()

    def replica_state(self, counters, more_copies):
        """Returns what a resumed training needs of this worker, as bytes.

        Args:
            counters: Dict that JSON can hold, of the caller's.
            more_copies: Dict from string to tuple of `tf.Variable`, one per
                local replica.
        """
        rules = self.rules
        stepped, rows = self._since_last_round()
        copies = replica_state.own_copies(rules, bool(stepped))
        tensors = {
            f"copies/{key}": replica_state.stacked(of_one)
            for key, of_one in {**copies, **more_copies}.items()
        }
        # Checkpoints of Keras models do not hold them.
        seeds = replica_state.shared_values(rules, kinds=("other",))
        tensors.update({f"shared/{key}": v for key, v in seeds.items()})
        if stepped and self._communicator.size > 1:
            for place, value in enumerate(self._round.references):
                tensors[f"reference/{place}"] = value
        header = {
            "counters": counters,
            "rounds": self.rounds,
            "excluded": self.excluded,
            "stepped": stepped,
            "rows": rows,
            "layout": replica_state.layout(rules),
        }
        return snapshots.pack(header, tensors)

    def can_own(self, data):
        """Returns whether a state is of as many replicas as are here."""
        header, _ = snapshots.unpack(data)
        return len(header["rows"]) == len(self._seen.rows)

    def restore_replica_state(self, data, *, is_own, is_within_restore):
        """Takes back what `replica_state` returned.

        Args:
            data: Bytes.
            is_own: See `ParameterAverager.restore_replica_state`.
            is_within_restore: See there.

        Returns:
            The caller's counters, and a function that gives `more_copies`
            what they held.
        """
        header, tensors = snapshots.unpack(data)
        self.rounds = header["rounds"]
        self.excluded = header["excluded"]
        self.start_counting_rows()
        rules = self.rules
        is_of_this = header["layout"] == replica_state.layout(rules)
        if not is_of_this:
            logging.warning(
                "The state of replicas is of another model or optimizer: only "
                "its counters are restored."
            )
        if not is_of_this or not is_own:
            if is_of_this:
                seeds = snapshots.with_prefix(tensors, "shared/")
                replica_state.assign_shared(rules, seeds)
            return header["counters"], lambda _: None
        self._count_rows_from(header["stepped"], header["rows"])
        values = snapshots.with_prefix(tensors, "copies/")
        copies = replica_state.own_copies(rules, bool(header["stepped"]))
        replica_state.assign_copies(copies, values)
        if is_within_restore:
            for key, of_one in copies.items():
                rules[int(key)].variable.restored_copies = tf.unstack(
                    values[key], len(of_one)
                )
        references = snapshots.with_prefix(tensors, "reference/")
        if references:
            self._make_round(
                [references[str(p)] for p in range(len(references))]
            )
        return header["counters"], lambda more: replica_state.assign_copies(
            more, values
        )

    def is_new_epoch(self):
        """Lets workers that run out of data be named again."""
        self._has_warned = False

    def start(self, *counters):
        """Gives every worker the chief's state.

        Args:
            *counters: Ints of the caller's.

        Returns:
            List of the chief's counters.
        """
        if self._communicator.size == 1:
            return counters
        agreement.check_same(
            self._communicator, self._description(), "settings and variables"
        )
        is_first = self._round is None
        given = [
            rule
            for rule in self.rules
            if replica_state.is_given_by_chief(rule, is_first)
        ]
        travelling = state.travelling_rules(self.rules)
        sent = {id(r.copies[0]): r for r in [*travelling, *given]}
        own = tf.constant([self.rounds, self.excluded, *counters], tf.int64)
        chiefs, *values = self._communicator.broadcast(
            [own, *map(replica_state.as_read, sent.values())]
        )
        given_values = dict(zip(sent, values))
        for rule in given:
            for copy in rule.copies:
                copy.assign(given_values[id(rule.copies[0])])
        # The references of the last `fit` may not be what is there now.
        self._make_round([given_values[id(r.copies[0])] for r in travelling])
        self.rounds, self.excluded, *counters = chiefs.numpy().tolist()
        return counters

    def _since_last_round(self):
        """Training steps, and a list of the rows of each replica."""
        progress = self._strategy.training_progress()
        rows = np.subtract(progress.rows, self._seen.rows).tolist()
        return progress.steps - self._seen.steps, rows

    def _count_rows_from(self, stepped, rows):
        progress = self._strategy.training_progress()
        self._seen = type(progress)(
            steps=progress.steps - stepped,
            rows=tuple(np.subtract(progress.rows, rows).tolist()),
        )

    def take_part(
        self,
        steps,
        progress,
        *,
        give,
        weights=None,
        is_forced=False,
        gathers=agreement.NOTHING,
    ):
        """Tells all workers how far this one is, and averages if one wants to.

        Args:
            steps: Int, this worker's training steps.
            progress: `agreement.IN_EPOCH`, `AFTER_EPOCH` or `AFTER_TRAINING`.
            give: Function of `agreement.METRICS` or `STATES`, whichever a
                worker gathers. Returns this worker's bytes.
            weights: See `ParameterAverager.average`.
            is_forced: Bool, whether to average though there was no step.
            gathers: What this worker gathers, `agreement.NOTHING` or see
                `give`.

        Returns:
            List of the `Status` of each worker before the round, and list of
            the bytes that one of them wanted to gather.
        """
        seen = self._strategy.training_progress()
        if weights is None:
            counted = np.subtract(seen.rows, self._seen.rows).tolist()
        else:
            counted = self._check_weights(weights)
        self._prepare_round()
        status, is_healthy = self._status(
            counted,
            steps=steps,
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
        kind = max(status.gathers for status in statuses)
        if kind == agreement.NOTHING:
            return statuses, []
        return statuses, self._communicator.all_gather_bytes(
            give(kind), f"{kind}: "
        )

    def _make_round(self, references):
        self._round = rounds.Round(self._rules, self._communicator, references)
        self._has_new_rules = False

    def _status(self, counted, **what):
        """This worker's `Status`, and which of its replicas may count."""
        is_finite, extremes = self._round.replica_state()
        is_sick = agreement.find_sick(is_finite, counted)
        places = np.argwhere(is_sick)
        replica, variable = places[0].tolist() if len(places) else (-1, -1)
        # What is kept local can adopt no mean.
        can_adopt = not is_sick[:, len(self._round.travelling) :].any()
        is_excluded = is_sick.any(axis=1) & can_adopt
        is_excluded &= self._is_excluding
        status = agreement.Status(
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
        self.rounds += 1

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

    def _description(self):
        """One line for each thing that must be the same on every worker."""
        return [
            f"{self._settings}, slots={self._slots!r}, "
            f"excluding={self._is_excluding}",
            *map(optimizer_parts.describe, self._optimizers),
            *(
                f"{rule.path} {rule.rule} {rule.copies[0].dtype.name} "
                f"{tuple(rule.copies[0].shape)}"
                for rule in self._rules
                if rule.copies
            ),
        ]
