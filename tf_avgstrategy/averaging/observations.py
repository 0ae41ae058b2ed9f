"""Observations: what a worker tells the schedule of its training."""

import time

from absl import logging

from tf_avgstrategy.schedules import losses

__all__ = ["Observations"]


class Observations:
    """The learning rate, loss and clock of one worker.

    Args:
        schedule: `Schedule`.
        learning_rate: Function without arguments that returns a float, that of
            the replicas. NaN: nobody needs it.

    Attributes:
        losses: `LossMeter`.
    """

    def __init__(self, schedule, learning_rate):
        self._schedule = schedule
        self._learning_rate = learning_rate
        self.losses = losses.LossMeter()
        self._clock = time.monotonic
        self._last_round_time = self._clock()
        self._has_warned = False

    @property
    def seconds(self):
        """Float, time since the last round by this worker's clock."""
        return self._clock() - self._last_round_time

    def observe(self, is_asking):
        """Returns what the schedule is to know, a dict of fields of `Status`.

        Args:
            is_asking: Bool, whether the schedule is asked.
        """
        loss, weight = 0.0, 0.0
        if self._schedule.needs_loss:
            loss, weight = self.losses.since_last_look()
            if is_asking and not weight:
                self._warn_without_loss()
        return {
            "learning_rate": self._learning_rate(),
            "loss": loss,
            "loss_weight": weight,
            "seconds": self.seconds,
        }

    def note(self, *, is_round, is_asked):
        """Begins anew what is since the last round, or the last question."""
        if is_round:
            self._last_round_time = self._clock()
        if is_round or is_asked:
            self.losses.look()

    def state(self):
        """Returns what `restore` takes, a dict that JSON can hold."""
        return {"seconds": self.seconds, "loss": self.losses.since_last_look()}

    def restore(self, state):
        """Takes back the time that `state` returned."""
        self._last_round_time = self._clock() - state["seconds"]

    def _warn_without_loss(self):
        if self._has_warned:
            return
        self._has_warned = True
        logging.warning(
            "%s needs the loss, and there is none: its period stays as it "
            "is. Let `train_step` update a `keras.metrics.Mean` called "
            '"loss", or pass `loss` to `ParameterAverager.step`.',
            type(self._schedule).__name__,
        )
