"""Fragmented rounds: one round for each fragment, with what they share."""

import math

import tensorflow as tf

from tf_avgstrategy.averaging import outer_step
from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.state import state

__all__ = ["FragmentedRound"]


class FragmentedRound:
    """Rounds of the fragments of a model, of which some take place at a time.

    Args:
        fragments: List of `Fragment`.
        rules: List of `StateRule`, those of all fragments.
        exchange: `Exchange`. `None`: no other worker takes part.
        references: List of tensors, one for each of the rules that travel, bit
            for bit the same on every worker. Empty where none are kept.
        outer_optimizer: `keras.optimizers.Optimizer` or None.
        outer_device: String, the device of outer parameters and slots.
        elastic_alpha: Float in (0, 1], see `Round`.
        measures: Bool, see `Round`.

    Attributes:
        fragments: See above.
        whole: `Round` of all variables, which is only asked, not run.
    """

    def __init__(
        self,
        fragments,
        rules,
        exchange,
        *,
        references,
        outer_optimizer,
        outer_device,
        elastic_alpha,
        measures,
    ):
        self.fragments = fragments
        travelling = state.travelling_rules(rules)
        values = {id(r.copies[0]): v for r, v in zip(travelling, references)}
        places = {
            id(rule.copies[0]): place for place, rule in enumerate(travelling)
        }
        kept = {}
        self._outers = []
        for fragment in fragments:
            outer = None
            if outer_optimizer is not None:
                keys = [
                    id(rule.copies[0])
                    for rule in rounds.outer_rules(fragment.rules)
                ]
                outer = outer_step.OuterStep(
                    outer_optimizer,
                    {places[key]: values[key] for key in keys},
                    outer_device,
                )
                kept.update(zip(keys, outer.parameters))
            self._outers.append(outer)
        with tf.init_scope(), tf.device("CPU:0"):
            for key, value in values.items():
                if key not in kept:
                    kept[key] = tf.Variable(value, trainable=False)
        # By the id of the first copy.
        self._references = {key: kept[key] for key in values}

        def make(own, outer=None):
            return rounds.Round(
                own,
                exchange,
                [
                    kept[id(rule.copies[0])]
                    for rule in state.travelling_rules(own)
                    if kept
                ],
                outer,
                elastic_alpha,
                measures,
            )

        self.whole = make(rules)
        self._rounds = [
            make(fragment.rules, outer)
            for fragment, outer in zip(fragments, self._outers)
        ]

    @property
    def references(self):
        """List of tensors, what the last round left of what travels."""
        return [ref.read_value() for ref in self._references.values()]

    def knows(self, rule):
        """Returns whether there is a reference of a variable."""
        return id(rule.copies[0]) in self._references

    def left(self, rule):
        """Returns what the last round has made of a variable that travels."""
        first = rule.copies[0]
        return self._references.get(id(first), first).read_value()

    def divergence(self, places):
        """Returns how far local replicas were from the mean, a float.

        Args:
            places: List of ints, the fragments of the last round.
        """
        squares = [self._rounds[place].squares for place in places]
        apart, norm = (math.fsum(part) for part in zip(*squares))
        return math.sqrt(apart / norm) if norm else math.nan

    def run(self, places, shares, extremes, *, is_elastic, inner_rate, watch):
        """Runs the rounds of some fragments, all or nothing.

        Args:
            places: List of ints, which fragments.
            shares: List of the `Shares` of each of these.
            extremes: See `Round.run`.
            is_elastic: See `Round.run`.
            inner_rate: See `Round.run`.
            watch: `Stopwatch`.
        """
        chosen = [self._rounds[place] for place in places]
        with watch.exchange():
            handles = [one.begin(own) for one, own in zip(chosen, shares)]
            sums = [
                one.receive(handle, own)
                for one, handle, own in zip(chosen, handles, shares)
            ]
        for one, total, own in zip(chosen, sums, shares):
            one.write(total, own, extremes, is_elastic, inner_rate)

    def outer_tensors(self):
        """Returns what the outer optimizers hold, a dict from string."""
        return {key: v.read_value() for key, v in self._slots()}

    def restore_outer(self, tensors):
        """Takes back what `outer_tensors` returned, where it fits.

        Fragments may have been others. What a fragment's variables have in
        common is then that of its last one.
        """
        for key, variable in self._slots():
            if key in tensors and variable.shape == tensors[key].shape:
                variable.assign(tensors[key])

    def _slots(self):
        return [
            pair
            for outer in self._outers
            if outer is not None
            for pair in outer.slots().items()
        ]
