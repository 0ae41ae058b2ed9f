"""Decisions: what comes of what all workers have said before a round."""

from typing import NamedTuple

import numpy as np

from tf_avgstrategy.tensors import mean

__all__ = ["Decision", "decide", "weigh"]


class Decision(NamedTuple):
    """What all workers do now, on each of them the same.

    Attributes:
        is_asked: Bool, whether a worker has asked the schedule.
        is_scheduled: Bool, whether the schedule has said yes.
        is_forced: Bool, whether a round takes place whatever it says.
        is_elastic: Bool, whether the round leaves replicas apart.
        places: List of ints, which fragments travel.
    """

    is_asked: bool
    is_scheduled: bool
    is_forced: bool
    is_elastic: bool
    places: list

    @property
    def is_round(self):
        """Bool, whether a round takes place."""
        return self.is_forced or self.is_scheduled


def decide(statuses, *, is_due, is_warming_up, travelling, elastic_alpha):
    """Returns what comes of what all workers have said.

    Args:
        statuses: List of `Status`, by rank.
        is_due: Function without arguments that asks the schedule.
        is_warming_up: Bool, whether the schedule is in its warm-up.
        travelling: List of bools, which fragments a scheduled round moves.
        elastic_alpha: Float in (0, 1], how far a scheduled round moves
            replicas towards the mean.
    """
    is_asked = any(status.looks for status in statuses)
    is_scheduled = is_asked and is_due()
    # Who waits for others leaves it to their schedule.
    is_forced = not is_asked and any(status.wants_round for status in statuses)
    every = list(range(len(travelling)))
    places = []
    # A replica that adopts the mean adopts all of it, and in a warm-up all
    # replicas are to be equal.
    is_excluding = any(status.num_excluded for status in statuses)
    is_whole = is_warming_up or is_excluding
    if is_forced:
        places = _stale(statuses, every) or every
    elif is_scheduled:
        places = [p for p in every if is_whole or travelling[p]]
    return Decision(
        is_asked=is_asked,
        is_scheduled=is_scheduled,
        is_forced=is_forced,
        # A replica that is not finite moves nowhere.
        is_elastic=is_scheduled and elastic_alpha < 1 and not is_whole,
        places=places,
    )


def weigh(statuses, rows, is_healthy, *, are_given):
    """Returns what gives the shares that this worker's replicas have.

    Args:
        statuses: List of `Status`, by rank.
        rows: List of F lists of R numbers, what each of the R local replicas
            weighs in each of the F fragments.
        is_healthy: Bool array of shape `[R]`, which of them count.
        are_given: Bool, whether the user gave the numbers. If not, and nobody
            has any in a fragment, all replicas weigh the same in it.

    Returns:
        Function of a fragment's place that returns its `Shares`.
    """
    counted = np.multiply(rows, is_healthy)
    totals = sum(status.fragments[:, 0] for status in statuses)
    if not are_given:
        counted = np.where(totals[:, None] > 0, counted, is_healthy)
        healthy = sum(status.num_replicas for status in statuses)
        totals = np.where(totals > 0, totals, healthy)
    return lambda place: mean.shares(counted[place], totals[place])


def _stale(statuses, every):
    """The fragments in which a worker has made a step since they travelled."""
    return [
        place
        for place in every
        if any(status.fragments[place, 1] for status in statuses)
    ]
