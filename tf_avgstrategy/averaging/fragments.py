"""Fragments: which variables travel together, and in which rounds."""

import re
from typing import NamedTuple

from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.tensors import buckets

__all__ = ["Fragment", "check", "cut"]


class Fragment(NamedTuple):
    """Variables that travel together.

    Attributes:
        rules: List of `StateRule`, its own and those that belong to every
            round, such as counters.
        every: Int >= 1, it travels in one of so many scheduled rounds.
        phase: Int in `[0, every)`, in which one of them. Rounds count from 1.
    """

    rules: list
    every: int = 1
    phase: int = 0

    def travels_in(self, count):
        """Returns whether it travels in scheduled round `count`, from 1."""
        return count % self.every == self.phase


def check(fragments, periods, schedule):
    """Checks what a user has asked for.

    Args:
        fragments: Int >= 1, the number of fragments.
        periods: Dict from regular expression to period in steps, or None.
        schedule: `Schedule` of the training.

    Returns:
        The `Schedule` of the rounds of single fragments.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If one is out of range or does not fit to the schedule.
    """
    schedules.check_integer("fragments", fragments, at_least=1)
    split = schedule.split(fragments) if fragments > 1 else schedule
    if not isinstance(periods, (dict, type(None))):
        raise TypeError(
            "`periods` must be a dict from regular expression to period. "
            f"Received: periods={periods!r} of type {type(periods).__name__}. "
            'Pass for example {"embedding": 64}.'
        )
    for pattern, period in (periods or {}).items():
        schedules.check_integer(f"period of {pattern!r}", period, at_least=1)
        if not isinstance(split, schedules.Periodic):
            raise ValueError(
                "`periods` of single variables need a fixed period, of which "
                f"they are multiples. Received: periods={periods} with "
                f"{schedule}. Pass `period=...` or leave out `periods`."
            )
        if period % split.period:
            fitting = -(-period // split.period) * split.period
            raise ValueError(
                "The period of single variables must be a multiple of the "
                f"steps between two rounds, here {split.period}. Received: "
                f"{period} for {pattern!r}. Pass {fitting}."
            )
    return split


def cut(rules, num_fragments, periods, schedule):
    """Cuts variables into fragments.

    Those with a period of their own are one fragment for each period. The
    others are cut in their order, which is that of the layers, into fragments
    of similar bytes. A layer's statistics stay together, and slots with the
    variable that they belong to.

    Args:
        rules: List of `StateRule`.
        num_fragments: Int >= 1.
        periods: Dict from regular expression to period in steps, or None.
        schedule: `Schedule` of the rounds, as `check` returned it.

    Returns:
        List of `Fragment`, none of them without variables of its own. One if
        there is nothing to cut.

    Raises:
        ValueError: If a pattern matches no variable, or two disagree.
    """
    if num_fragments == 1 and not periods:
        return [Fragment(rules)]
    units = _units(rules)
    period_of = _asked_periods(units, periods or {})
    shared = [rule for rule in rules if not _moves(rule)]
    parts = [
        (
            [unit for key, unit in units.items() if period_of.get(key) == own],
            own // schedule.period,
            0,
        )
        for own in sorted(set(period_of.values()))
    ]
    others = [unit for key, unit in units.items() if key not in period_of]
    parts += [
        (piece, num_fragments, (place + 1) % num_fragments)
        for place, piece in enumerate(_similar_pieces(others, num_fragments))
    ]
    return [
        Fragment([*sum(own, []), *shared], every, phase)
        for own, every, phase in parts
        if own
    ]


def _moves(rule):
    return rule.travels or rule.rule == "reset"


def _units(rules):
    """What must travel together, in order: lists of rules by some key."""
    units = {}
    for rule in rules:
        if not _moves(rule):
            continue
        if rule.owner is not None:
            key = id(rule.owner)
        elif rule.rule == "pooled":
            # It is taken around the moving mean that travels with it.
            key = id(rule.partner[0])
        else:
            key = id(rule.copies[0])
        units.setdefault(key, []).append(rule)
    return units


def _asked_periods(units, periods):
    """The periods of single variables, by the key of their unit."""
    asked = {}
    for pattern, period in periods.items():
        matches = [
            key
            for key, unit in units.items()
            if re.search(pattern, unit[0].path)
        ]
        if not matches:
            raise ValueError(
                "Each pattern of `periods` must match the path of a variable "
                f"that is averaged. Received: pattern {pattern!r}. Paths: "
                f"{[unit[0].path for unit in units.values()]}."
            )
        for key in matches:
            if asked.setdefault(key, period) != period:
                raise ValueError(
                    "A variable must have one period. Received: "
                    f"{asked[key]} and {period} for {units[key][0].path!r}. "
                    f"Make pattern {pattern!r} or the one before narrower."
                )
    return asked


def _similar_pieces(units, num_pieces):
    """Cuts a list of units into pieces in order, of similar bytes."""
    sizes = [
        sum(map(buckets.num_bytes, rounds.specs(filter(_moves, unit))))
        for unit in units
    ]
    total = sum(sizes) or 1
    pieces = [[] for _ in range(num_pieces)]
    before = 0
    for unit, size in zip(units, sizes):
        # Where its middle is.
        place = int(num_pieces * (before + size / 2) / total)
        pieces[min(place, num_pieces - 1)].append(unit)
        before += size
    return pieces
