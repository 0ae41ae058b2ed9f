"""Schedules: after which training steps a round takes place."""

import dataclasses

__all__ = ["Periodic", "check_integer"]


@dataclasses.dataclass(frozen=True)
class Periodic:
    """A round every `period` steps, every step while warming up.

    Steps count from 1. Without a warm-up, rounds follow steps `period`,
    `2 * period`, ...: the first one comes after exactly `period` local steps.
    With one, a round follows each of the first `warmup_steps` steps, and the
    next one comes `period` local steps later. This is post-local SGD.

    Args:
        period: Int >= 1, local training steps between two rounds.
        warmup_steps: Int >= 0, opening steps that are each followed by a round.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = Periodic(period=4, warmup_steps=2)
        >>> [step for step in range(1, 12) if schedule.is_due(step)]
        [1, 2, 6, 10]

    References:
        Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
        https://arxiv.org/abs/1808.07217.
    """

    period: int
    warmup_steps: int = 0

    def __post_init__(self):
        check_integer("period", self.period, at_least=1)
        check_integer("warmup_steps", self.warmup_steps, at_least=0)

    def is_due(self, step):
        """Returns whether a round follows training step `step` (from 1)."""
        local_steps = step - self.warmup_steps
        return local_steps <= 0 or local_steps % self.period == 0


def check_integer(name, value, *, at_least):
    """Checks a number of training steps that a user has given.

    Args:
        name: String, the argument's name.
        value: What was given for it.
        at_least: Int, the smallest value that is allowed.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is too small.
    """
    # A bool is an int in Python; `period=True` is a slip, not period 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`{name}` must be an integer, a number of training steps. "
            f"Received: {name}={value!r} of type {type(value).__name__}. "
            f"Pass a plain number such as {name}=16."
        )
    if value < at_least:
        raise ValueError(
            f"`{name}` must be an integer >= {at_least}, a number of training "
            f"steps. Received: {name}={value}. The smallest one to pass is "
            f"{name}={at_least}."
        )
