"""Timetables: what a schedule remembers, on every worker the same."""

import json
import math

from absl import logging

from tf_avgstrategy.schedules import schedules

__all__ = ["Timetable", "facts"]


class Timetable:
    """A schedule, its memory, and the scheduled rounds so far.

    Args:
        schedule: `Schedule`.

    Attributes:
        schedule: See above.
        count: Int, the scheduled rounds so far, without those of a warm-up.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        self.count = 0
        self._memory = {}

    def begin(self, facts):
        """Forgets what was before the training that begins at these facts."""
        self._memory = self.schedule.begin(facts)

    def has_look(self, before, after):
        """Returns whether workers meet after one of the steps in between.

        Args:
            before: Int, training steps that were looked at already.
            after: Int, training steps so far.
        """
        return (
            after > before
            and self.schedule.next_look(before, self._memory) <= after
        )

    def is_due(self, facts):
        """Returns whether a look becomes a round."""
        return self.schedule.is_due(facts, self._memory)

    def advance(self, facts, is_round, is_scheduled):
        """Notes a look, or a round that was not scheduled."""
        self._memory = self.schedule.advance(facts, self._memory, is_round)
        is_warm = self.schedule.is_warming_up(facts.step)
        self.count += is_scheduled and not is_warm

    def state(self):
        """Returns all of it as a dict that JSON can hold."""
        return {
            "schedule": self._identity(),
            "memory": self._memory,
            "count": self.count,
        }

    def restore(self, state):
        """Takes back what `state` returned, if it is of the same schedule.

        Returns:
            Bool, whether it is. If not, nothing has changed.
        """
        if state["schedule"] != self._identity():
            logging.info(
                "%s begins anew: the state is of %s.",
                self.schedule,
                state["schedule"],
            )
            return False
        self._memory = dict(state["memory"])
        self.count = state["count"]
        return True

    def _identity(self):
        # As JSON gives it back.
        config = json.loads(json.dumps(self.schedule.get_config()))
        return [type(self.schedule).__name__, config]


def facts(statuses, steps_per_update):
    """Returns the `Facts` in what all workers have told each other.

    Args:
        statuses: List of `Status`, by rank.
        steps_per_update: Int, training steps for each that a schedule counts.
    """
    chief = statuses[0]
    return schedules.Facts(
        step=max(status.steps for status in statuses) // steps_per_update,
        learning_rate=chief.learning_rate,
        loss=_mean([(s.loss, s.loss_weight) for s in statuses]),
        drift=_mean([(s.drift, s.num_replicas) for s in statuses]),
        seconds=chief.seconds,
    )


def _mean(pairs):
    """The mean of numbers with weights, NaN of none."""
    counted = [(number, weight) for number, weight in pairs if weight]
    total = sum(weight for _, weight in counted)
    if not total:
        return math.nan
    # Numbers may be infinite or near it, which `math.fsum` refuses.
    return sum(n * w for n, w in counted) / total
