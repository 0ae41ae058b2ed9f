"""Participants: what a worker does for a round, and what it says before."""

import json
import math

import numpy as np
import tensorflow as tf
from absl import logging

from tf_avgstrategy.averaging import agreement
from tf_avgstrategy.averaging import decisions
from tf_avgstrategy.averaging import fragmented_rounds
from tf_avgstrategy.averaging import fragments
from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.averaging import training_counts
from tf_avgstrategy.input import fingerprints
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.schedules import timetables
from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.state import replica_state
from tf_avgstrategy.state import state
from tf_avgstrategy.state import variables as replica_variables
from tf_avgstrategy.telemetry import telemetry
from tf_avgstrategy.tensors import buckets
from tf_avgstrategy.tensors import mean
from tf_avgstrategy.tensors import snapshots

__all__ = ["Participant"]


class Participant:
    """A worker among others that start equal and average when one wants to.

    All workers call the same methods in the same order.

    Args:
        strategy: `ParameterAveragingStrategy`.
        variables: List of the model's variables.
        optimizers: List of built Keras optimizers.
        settings: `averaging_settings.Settings`, on every worker the same.

    Attributes:
        rounds: Int, the rounds that were run.
        excluded: Int, how often a round has excluded a replica.
        timetable: `Timetable`.
        recorder: `Recorder`, which knows rounds if settings ask for it.
        steps_per_update: Int, training steps for each that it counts.
    """

    def __init__(self, strategy, variables, optimizers, settings):
        self._strategy = strategy
        self._communicator = strategy.communicator
        self._variables = variables
        self._optimizers = optimizers
        self._settings = settings
        self._num_optimizer_variables = None
        self._has_new_rules = True
        # Since rounds, and since the replicas of this worker were averaged.
        self._counts = training_counts.TrainingCounts(strategy, 1)
        self._local_counts = training_counts.TrainingCounts(strategy, 1)
        self._round = None
        self._has_warned = False
        self._on_round = []
        self.recorder = telemetry.Recorder()
        self.rounds = 0
        self.excluded = 0
        self.timetable = timetables.Timetable(settings.schedule)
        self.steps_per_update = optimizer_parts.gradient_accumulation_steps(
            optimizers
        )
        self._refresh_rules()

    @property
    def rules(self):
        """List of `StateRule`, of all variables that there are now."""
        self._refresh_rules()
        return self._rules

    def start_counting_rows(self):
        """Forgets what was seen since the last round."""
        self._counts.begin()
        self._local_counts.begin()

    def on_round(self, function):
        """Calls a function after each round with the list of what travelled.

        Args:
            function: Function of a list of `StateRule`.
        """
        self._on_round.append(function)

    def left_by_round(self, rule):
        """Returns what the last round has made of a variable that travels."""
        return self._round.left(rule)

    def replica_state(self, counters, more_copies, *, with_common, more_common):
        """Returns what a resumed training needs of this worker, as bytes.

        Args:
            counters: Dict that JSON can hold, of the caller's.
            more_copies: Dict from string to tuple of `tf.Variable`, one per
                local replica.
            with_common: Bool, whether with what all workers have in common.
            more_common: Dict from string to tensor, of the caller's, which
                all workers have in common.
        """
        rules = self.rules
        stepped, rows = self._counts.since()
        copies = replica_state.own_copies(rules, any(stepped))
        tensors = {
            f"copies/{key}": replica_state.stacked(of_one)
            for key, of_one in {**copies, **more_copies}.items()
        }
        # Checkpoints of Keras models do not hold them.
        seeds = replica_state.shared_values(rules, kinds=("other",))
        tensors.update({f"shared/{key}": v for key, v in seeds.items()})
        if with_common and self._round is not None:
            if any(stepped) or self._settings.keeps_references:
                for place, value in enumerate(self._round.references):
                    tensors[f"reference/{place}"] = value
            for key, value in self._round.outer_tensors().items():
                tensors[f"outer/{key}"] = value
        tensors.update({f"more/{k}": v for k, v in more_common.items()})
        header = {
            "counters": counters,
            "rounds": self.rounds,
            "excluded": self.excluded,
            "stepped": stepped,
            "rows": rows,
            "local": self._local_counts.since(),
            "layout": replica_state.layout(rules),
            "timetable": self.timetable.state(),
        }
        return snapshots.pack(header, tensors)

    def can_own(self, data):
        """Returns whether a state is of as many replicas as are here."""
        header, _ = snapshots.unpack(data)
        return len(header["rows"][0]) == self._counts.num_replicas

    def restore_replica_state(
        self, data, common=None, *, is_own, is_within_restore
    ):
        """Takes back what `replica_state` returned.

        Args:
            data: Bytes.
            common: Bytes with what all workers have in common. `None`: `data`.
            is_own: See `ParameterAverager.restore_replica_state`.
            is_within_restore: See there.

        Returns:
            The caller's counters, its `more_common`, and a function that gives
            `more_copies` what they held.
        """
        header, tensors = snapshots.unpack(data)
        common = snapshots.unpack(common)[1] if common else tensors
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
            return header["counters"], {}, lambda _: None
        more_common = snapshots.with_prefix(common, "more/")
        if not self.timetable.restore(header["timetable"]):
            rate = math.nan
            if self._settings.needs_learning_rate:
                rate = optimizer_parts.learning_rate(self._optimizers)
            self.begin_schedule(header["counters"]["steps"], rate)
        self._restore_references(common, is_own)
        if not is_own:
            seeds = snapshots.with_prefix(tensors, "shared/")
            replica_state.assign_shared(rules, seeds)
            return header["counters"], more_common, lambda _: None
        self._counts.restore(header["stepped"], header["rows"])
        self._local_counts.restore(*header["local"])
        values = snapshots.with_prefix(tensors, "copies/")
        copies = replica_state.own_copies(
            rules, bool(np.any(header["stepped"]))
        )
        replica_state.assign_copies(copies, values)
        if is_within_restore:
            for key, of_one in copies.items():
                rules[int(key)].variable.restored_copies = tf.unstack(
                    values[key], len(of_one)
                )
        return (
            header["counters"],
            more_common,
            lambda more: replica_state.assign_copies(more, values),
        )

    def _restore_references(self, tensors, is_own):
        references = snapshots.with_prefix(tensors, "reference/")
        outer = snapshots.with_prefix(tensors, "outer/")
        # On other replicas, which begin at the mean, only an outer optimizer
        # has use for what the last round left.
        if references and (is_own or outer) and self._keeps_references:
            self._make_round(
                [references[str(p)] for p in range(len(references))]
            )
        if outer and self._round is not None:
            self._round.restore_outer(outer)

    def is_new_epoch(self):
        """Lets workers that run out of data be named again."""
        self._has_warned = False

    @property
    def _keeps_references(self):
        return self._communicator.size > 1 or self._settings.keeps_references

    def begin_schedule(self, steps, learning_rate):
        """Lets the schedule begin anew.

        Args:
            steps: Int, training steps so far.
            learning_rate: Float, that of the replicas.
        """
        self.timetable.begin(
            schedules.Facts(steps // self.steps_per_update, learning_rate)
        )

    def start(self, *counters):
        """Gives every worker the chief's state.

        Args:
            *counters: Ints of the caller's.

        Returns:
            List of the chief's counters.
        """
        rules = self.rules
        travelling = state.travelling_rules(rules)
        if self._communicator.size == 1:
            if self._keeps_references:
                # The references of the last `fit` may not be what is there.
                self._make_round(map(replica_state.as_read, travelling))
            return counters
        agreement.check_same(
            self._communicator, self._description(), "settings and variables"
        )
        is_first = self._round is None
        given = [
            rule
            for rule in rules
            if replica_state.is_given_by_chief(rule, is_first)
        ]
        sent = {id(r.copies[0]): r for r in [*travelling, *given]}
        own = tf.constant([self.rounds, self.excluded, *counters], tf.int64)
        chiefs, *values = self._communicator.broadcast(
            [own, *map(replica_state.as_read, sent.values())]
        )
        given_values = dict(zip(sent, values))
        for rule in given:
            value = given_values[id(rule.copies[0])]
            replica_variables.assign_copies(
                rule.copies, [value] * len(rule.copies)
            )
        self._make_round([given_values[id(r.copies[0])] for r in travelling])
        self._start_from_chiefs_schedule()
        self.rounds, self.excluded, *counters = chiefs.numpy().tolist()
        return counters

    def _start_from_chiefs_schedule(self):
        texts = self._communicator.all_gather_strings(
            json.dumps(self.timetable.state())
        )
        self.timetable.restore(json.loads(texts[0]))
        outer = self._round.outer_tensors()
        values = self._communicator.broadcast(list(outer.values()))
        self._round.restore_outer(dict(zip(outer, values)))

    def take_part(
        self,
        steps,
        progress,
        *,
        observed,
        give,
        weights=None,
        is_forced=False,
        looks=False,
        gathers=agreement.NOTHING,
    ):
        """Tells all workers how far this one is, and averages if one wants to.

        Args:
            steps: Int, this worker's training steps.
            progress: `agreement.IN_EPOCH`, `AFTER_EPOCH` or `AFTER_TRAINING`.
            observed: Dict of what the schedule is to know of this worker:
                `learning_rate`, `loss`, `loss_weight`, `seconds` of `Status`.
            give: Function of what a worker gathers, see `agreement`. Returns
                this worker's bytes.
            weights: See `ParameterAverager.average`.
            is_forced: Bool, whether to average though there was no step.
            looks: Bool, whether to average if the schedule says so, and only
                then.
            gathers: What this worker gathers, without a round, or
                `agreement.NOTHING`.

        Returns:
            List of the `Status` of each worker before the round, and list of
            the bytes that one of them wanted to gather.
        """
        watch = telemetry.Stopwatch()
        now = self._counts.now()
        stepped, rows = self._counts.since()
        if weights is not None:
            rows = [self._check_weights(weights)] * len(rows)
        self._prepare_round()
        status, is_healthy = self._status(
            rows,
            stepped,
            steps=steps,
            progress=progress,
            wants_round=is_forced
            or (any(stepped) and not looks and gathers == agreement.NOTHING),
            looks=looks,
            gathers=gathers,
            **observed,
        )
        with watch.exchange():
            statuses = status.exchange(self._communicator)
        fingerprints.check_first_batches([s.first_batch for s in statuses])
        self.recorder.meet(statuses)
        if not self._has_warned:
            self._has_warned = agreement.warn_of_idle_workers(statuses)
        facts = timetables.facts(statuses, self.steps_per_update)
        kind = max(status.gathers for status in statuses)
        if kind != agreement.NOTHING:
            agreement.check_gathers(statuses)
            return statuses, self._communicator.all_gather_bytes(
                give(kind), f"{kind}: "
            )
        decision = self._decide(statuses, facts)
        if decision.is_round:
            self._run_round(
                statuses,
                decision,
                decisions.weigh(
                    statuses, rows, is_healthy, are_given=weights is not None
                ),
                inner_rate=facts.learning_rate,
                watch=watch,
            )
            if not decision.is_elastic:
                self._counts.note(decision.places, now)
            self._local_counts.note(decision.places, now)
        if decision.is_round or decision.is_asked:
            self.timetable.advance(
                facts, decision.is_round, decision.is_scheduled
            )
        return statuses, []

    def _decide(self, statuses, facts):
        timetable = self.timetable
        return decisions.decide(
            statuses,
            is_due=lambda: timetable.is_due(facts),
            is_warming_up=timetable.schedule.is_warming_up(facts.step),
            travelling=[
                fragment.travels_in(timetable.count + 1)
                for fragment in self._fragments
            ],
            elastic_alpha=self._settings.elastic_alpha,
        )

    def average_locally(self, before, after):
        """Averages the replicas of this worker alone, if it is time for that.

        Replicas that are not finite are left out, or, where they are an error,
        are left to the next round of all workers.

        Args:
            before: Int, steps that the schedule had counted at the last call.
            after: Int, steps that it has counted now.
        """
        period = self._settings.local_period
        if period is None or before // period == after // period:
            return
        self._prepare_round()
        now = self._local_counts.now()
        steps, rows = self._local_counts.since()
        # A round may just have moved some of them, or all.
        places = np.flatnonzero(steps).tolist()
        if self._counts.num_replicas == 1 or not places:
            return
        is_finite, extremes = self._round.whole.replica_state()
        is_healthy = is_finite.all(axis=1)
        is_excluding = self._settings.is_excluding and is_healthy.any()
        if not is_healthy.all() and not is_excluding:
            return
        for place in places:
            own = np.multiply(rows[place], is_healthy)
            weights = own if own.any() else is_healthy
            self._local_rounds[place].run(mean.shares(weights), extremes)
        self._local_counts.note(places, now)

    def _make_round(self, references):
        outer = {} if self._round is None else self._round.outer_tensors()
        settings = self._settings
        exchange = None
        if self._communicator.size > 1:
            exchange = settings.exchange(self._communicator)
        self._round = fragmented_rounds.FragmentedRound(
            self._fragments,
            self._rules,
            exchange,
            references=list(references),
            outer_optimizer=settings.outer_optimizer,
            outer_device=settings.outer_device,
            elastic_alpha=settings.elastic_alpha,
            measures=settings.telemetry,
        )
        self._round.restore_outer(outer)
        self._local_rounds = [
            rounds.Round(fragment.rules) for fragment in self._fragments
        ]
        self._has_new_rules = False

    def _status(self, rows, stepped, **what):
        """This worker's `Status`, and which of its replicas may count."""
        whole = self._round.whole
        is_finite, extremes = whole.replica_state()
        is_sick = agreement.find_sick(is_finite, np.max(rows, axis=0))
        places = np.argwhere(is_sick)
        replica, variable = places[0].tolist() if len(places) else (-1, -1)
        # What is kept local can adopt no mean.
        can_adopt = not is_sick[:, len(whole.travelling) :].any()
        is_excluded = is_sick.any(axis=1) & can_adopt
        is_excluded &= self._settings.is_excluding
        weights = np.multiply(rows, ~is_excluded).sum(axis=1)
        status = agreement.Status(
            num_replicas=int(np.sum(~is_excluded)),
            sick_replica=replica,
            sick_variable=variable,
            num_excluded=int(np.sum(is_excluded)),
            divergence=self.recorder.divergence,
            drift=whole.drift() if self._settings.schedule.needs_drift else 0.0,
            fragments=np.stack([weights, stepped], axis=1).astype(np.float64),
            first_batch=self._strategy.extended.first_batch.of_last_iterator(),
            extremes=extremes,
            **what,
        )
        return status, ~is_excluded

    def _run_round(self, statuses, decision, shares, *, inner_rate, watch):
        places = decision.places
        if not places:
            return
        whole = self._round.whole
        paths = [rule.path for rule in whole.checked]
        agreement.check_health(statuses, paths)
        self.excluded += agreement.warn_of_excluded(statuses, paths)
        self._round.run(
            places,
            [shares(place) for place in places],
            agreement.extremes(statuses, whole.agrees_on_floats),
            is_elastic=decision.is_elastic,
            inner_rate=inner_rate,
            watch=watch,
        )
        self.rounds += 1
        moved = [
            rule
            for place in places
            for rule in state.travelling_rules(self._fragments[place].rules)
        ]
        for function in self._on_round:
            function(moved)
        if self._settings.telemetry:
            self.recorder.note(
                watch,
                statuses,
                rank=self._communicator.rank,
                divergence=self._round.divergence(places),
                round=self.rounds,
                is_scheduled=decision.is_scheduled,
                fragments=places,
                payload_bytes=sum(map(buckets.num_bytes, rounds.specs(moved))),
            )

    def _check_weights(self, weights):
        num_replicas = self._counts.num_replicas
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
        settings = self._settings
        self._rules = state.state_rules(
            self._variables,
            self._optimizers,
            slots=settings.slots,
            overrides=settings.overrides,
        )
        self._fragments = fragments.cut(
            self._rules,
            settings.num_fragments,
            settings.periods,
            settings.schedule,
        )
        self._num_optimizer_variables = num_variables
        self._has_new_rules = True
        for counts in (self._counts, self._local_counts):
            counts.fit_to(len(self._fragments))

    def _prepare_round(self):
        """Makes the computation of rounds for the rules that there are now."""
        self._refresh_rules()
        if not self._has_new_rules:
            return
        references = []
        if self._keeps_references:
            # Replicas have trained since: what the last round left is known
            # of all but new slots.
            references = [
                replica_state.as_read(rule)
                if self._round is None or not self._round.knows(rule)
                else self._round.left(rule)
                for rule in state.travelling_rules(self._rules)
            ]
        if self._communicator.size > 1:
            agreement.check_same(
                self._communicator, self._description(), "variables"
            )
            references = self._communicator.broadcast(references)
        self._make_round(references)

    def _description(self):
        """One line for each thing that must be the same on every worker."""
        return [
            self._settings.describe(),
            *map(optimizer_parts.describe, self._optimizers),
            *(
                f"{rule.path} {rule.rule} {rule.copies[0].dtype.name} "
                f"{tuple(rule.copies[0].shape)}"
                for rule in self._rules
                if rule.copies
            ),
        ]
