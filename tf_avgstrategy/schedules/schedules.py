"""Schedules: after which training steps a round takes place.

A schedule is plain Python and changes nothing: whoever asks it keeps what it
has to remember, its memory, a dict that JSON can hold. At a look all workers
tell each other what they have seen, so that all of them give it the same
`Facts` and get the same answer.
"""

import abc
import dataclasses
import math
import types
from typing import NamedTuple

__all__ = [
    "Facts",
    "Periodic",
    "Schedule",
    "Stagewise",
    "WARMUPS",
    "check_divides",
    "check_integer",
    "check_positive",
    "from_config",
    "next_multiple",
]


WARMUPS = ("averaging", "gradients")


class Facts(NamedTuple):
    """What a schedule is told at a look, on every worker the same.

    Attributes:
        step: Int, training steps so far.
        learning_rate: Float >= 0, the one in force on the chief. NaN: unknown.
        loss: Float, mean over the rows of all replicas since the last look.
            NaN: unknown.
        drift: Float >= 0, the distance of replicas from what the last round
            left, by its norm. Mean over all replicas. NaN: unknown.
        seconds: Float >= 0, time since the last round by the chief's clock.
    """

    step: int
    learning_rate: float = math.nan
    loss: float = math.nan
    drift: float = math.nan
    seconds: float = 0.0


class Schedule(abc.ABC):
    """When rounds take place.

    One that decides by more than the number of steps remembers something: a
    dict that JSON can hold, which is in every checkpoint.

    Attributes:
        needs_loss: Bool, whether it uses `Facts.loss`.
        needs_drift: Bool, whether it uses `Facts.drift`.
        needs_learning_rate: Bool, whether it uses `Facts.learning_rate`.
    """

    needs_loss = False
    needs_drift = False
    needs_learning_rate = False

    def begin(self, facts):
        """Returns the memory with which training begins after `facts.step`."""
        del facts
        return {}

    @abc.abstractmethod
    def next_look(self, step, memory):
        """Returns the first step after `step` at which workers meet."""

    def is_due(self, facts, memory):
        """Returns whether a look becomes a round."""
        del facts, memory
        return True

    def advance(self, facts, memory, is_round):
        """Returns the memory after a look, or after a round that came else."""
        del facts, is_round
        return memory

    def is_warming_up(self, step):
        """Returns whether all variables travel at every step up to `step`."""
        del step
        return False

    @property
    def periods(self):
        """Tuple of ints, the numbers of steps that are known beforehand."""
        return ()

    @property
    def gradient_steps(self):
        """Int, opening steps that exchange the gradients of all replicas."""
        return 0

    def split(self, num_parts):
        """Returns a schedule whose rounds come `num_parts` times as often."""
        raise ValueError(
            "`fragments` need a schedule with a period, which they divide. "
            f"Received: fragments={num_parts} with {self}. Pass `Periodic`, "
            "`Stagewise`, `QuadraticSynchronizationRule` or `AdaComm`, or "
            "fragments=1."
        )

    def get_config(self):
        """Returns the arguments as a dict, for `from_config`."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }


@dataclasses.dataclass(frozen=True)
class Periodic(Schedule):
    """A round every `period` steps, every step while warming up.

    Steps count from 1. Without a warm-up, rounds follow steps `period`,
    `2 * period`, ...: the first one comes after exactly `period` local steps.
    With one, a round follows each of the first `warmup_steps` steps, and the
    next one comes `period` local steps later. This is post-local SGD.

    Args:
        period: Int >= 1, local training steps between two rounds.
        warmup_steps: Int >= 0, opening steps in which replicas stay equal.
        warmup: How they do. "averaging": a round follows each of these steps.
            "gradients": replicas of all workers exchange gradients in them,
            as in synchronous training, and a round follows the last one.

    Raises:
        TypeError: If a number of steps is not an integer.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = Periodic(period=4, warmup_steps=2)
        >>> [schedule.next_look(step, {}) for step in (0, 1, 2, 6)]
        [1, 2, 6, 10]

    References:
        Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
        https://arxiv.org/abs/1808.07217.
    """

    period: int
    warmup_steps: int = 0
    warmup: str = "averaging"

    def __post_init__(self):
        check_integer("period", self.period, at_least=1)
        check_integer("warmup_steps", self.warmup_steps, at_least=0)
        if self.warmup not in WARMUPS:
            raise ValueError(
                f"`warmup` must be one of {', '.join(map(repr, WARMUPS))}, "
                "how replicas stay equal in the first steps. Received: warmup="
                f'{self.warmup!r}. Pass warmup="gradients" for synchronous '
                "training in these steps."
            )

    def next_look(self, step, memory):
        del memory
        if step < self.warmup_steps:
            is_each = self.warmup == "averaging"
            return step + 1 if is_each else self.warmup_steps
        return next_multiple(step, self.warmup_steps, self.period)

    def is_warming_up(self, step):
        return step <= self.warmup_steps

    @property
    def periods(self):
        if not self.warmup_steps:
            return (self.period,)
        is_each = self.warmup == "averaging"
        return (1 if is_each else self.warmup_steps, self.period)

    @property
    def gradient_steps(self):
        return self.warmup_steps if self.warmup == "gradients" else 0

    def split(self, num_parts):
        check_divides("period", self.period, num_parts)
        return dataclasses.replace(self, period=self.period // num_parts)


@dataclasses.dataclass(frozen=True)
class Stagewise(Schedule):
    """Another period in each stage of the training.

    Rounds follow every `period` steps of a stage, and its last step.

    Args:
        stages: Dict from the step after which a stage begins, an int >= 0, to
            its period, an int >= 1. One stage begins at 0.

    Raises:
        TypeError: If `stages` is not a dict of integers.
        ValueError: If one of them is out of range, or no stage begins at 0.

    Example:
        >>> schedule = Stagewise({0: 4, 10: 16})
        >>> [schedule.next_look(step, {}) for step in (0, 4, 8, 10, 26)]
        [4, 8, 10, 26, 42]

    References:
        Shen et al., STL-SGD: Speeding Up Local SGD with Stagewise
        Communication Period, AAAI 2021, https://arxiv.org/abs/2006.06377.
    """

    stages: dict

    def __post_init__(self):
        if not isinstance(self.stages, (dict, types.MappingProxyType)):
            raise TypeError(
                "`stages` must be a dict from step to period. Received: "
                f"stages={self.stages!r} of type {type(self.stages).__name__}. "
                "Pass for example {0: 4, 1000: 16}."
            )
        # JSON has made strings of the keys.
        stages = {
            int(start) if isinstance(start, str) else start: period
            for start, period in self.stages.items()
        }
        for start, period in stages.items():
            check_integer("step of a stage", start, at_least=0)
            check_integer("period of a stage", period, at_least=1)
        if 0 not in stages:
            raise ValueError(
                "The first of `stages` must begin at step 0. Received: stages="
                f"{stages}. Add 0 with the period of the first steps."
            )
        object.__setattr__(
            self, "stages", types.MappingProxyType(dict(sorted(stages.items())))
        )

    def __hash__(self):
        return hash(tuple(self.stages.items()))

    def __getstate__(self):
        # A mapping that cannot be changed cannot be copied either.
        return {**self.__dict__, "stages": dict(self.stages)}

    def __setstate__(self, state):
        stages = types.MappingProxyType(state["stages"])
        self.__dict__.update(state, stages=stages)

    def __repr__(self):
        return f"Stagewise(stages={dict(self.stages)})"

    def next_look(self, step, memory):
        del memory
        start = max(s for s in self.stages if s <= step)
        look = next_multiple(step, start, self.stages[start])
        return min([look, *(s for s in self.stages if s > step)])

    @property
    def periods(self):
        starts = [s for s in self.stages if s]
        return (*self.stages.values(), *starts)

    def split(self, num_parts):
        for period in self.stages.values():
            check_divides("period of a stage", period, num_parts)
        return Stagewise({s: p // num_parts for s, p in self.stages.items()})

    def get_config(self):
        return {"stages": {str(s): p for s, p in self.stages.items()}}


def from_config(class_name, config):
    """Makes a schedule of its class's name and of what `get_config` returned.

    Raises:
        ValueError: If there is no schedule of this name.
    """
    by_name = {cls.__name__: cls for cls in _subclasses(Schedule)}
    if class_name not in by_name:
        raise ValueError(
            "The class of a schedule must be known to be made of a config. "
            f"Received: {class_name!r}, not one of {sorted(by_name)}. Import "
            "the module that defines it before."
        )
    return by_name[class_name](**config)


def _subclasses(cls):
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


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


def check_positive(name, value, *, below=math.inf, at_most=math.inf):
    """Checks a number that a user has given.

    Args:
        name: String, the argument's name.
        value: What was given for it.
        below: Float, what it must be below.
        at_most: Float, what it may be at most.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of this range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"`{name}` must be a number. Received: {name}={value!r} of type "
            f"{type(value).__name__}. Pass a plain number such as {name}=0.5."
        )
    if not (0 < value < below and value <= at_most):
        limit = "" if math.isinf(below) else f" and < {below}"
        limit += "" if math.isinf(at_most) else f" and <= {at_most}"
        raise ValueError(
            f"`{name}` must be a number > 0{limit}. Received: {name}={value}. "
            f"Pass a number such as {name}=0.5."
        )


def check_divides(name, period, num_parts):
    """Raises a ValueError unless a period has that many equal parts."""
    if period % num_parts:
        fitting = -(-period // num_parts) * num_parts
        raise ValueError(
            f"`{name}` must be a multiple of `fragments`, of which one travels "
            f"in each part of it. Received: {name}={period} with fragments="
            f"{num_parts}. Pass {name}={fitting}."
        )


def next_multiple(step, start, period):
    """Returns the first step after `step` that is `n * period` from start."""
    return start + ((step - start) // period + 1) * period
