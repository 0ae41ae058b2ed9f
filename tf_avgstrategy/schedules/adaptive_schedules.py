"""Adaptive schedules: rounds by learning rate, loss, divergence or time."""

import dataclasses
import math

from tf_avgstrategy.schedules import schedules

__all__ = [
    "AdaComm",
    "DivergenceTriggered",
    "QuadraticSynchronizationRule",
    "TimeBased",
]

# More steps than a training makes.
_MANY_STEPS = 2**53


class _Remembering(schedules.Schedule):
    """A schedule that sets at each round how many steps the next one is off."""

    def next_look(self, step, memory):
        return max(step + 1, memory["next"])


@dataclasses.dataclass(frozen=True)
class QuadraticSynchronizationRule(_Remembering):
    """A period that grows as the learning rate falls, by its square (QSR).

    After each round, whoever asked for it, the next one is due in
    `max(base_period, floor((growth / learning_rate) ** 2))` steps, where the
    learning rate is the one in force then. With a decaying learning rate it
    exchanges less than a fixed period and ends at flatter minima. At learning
    rate 0 it is `base_period`, since a warm-up may follow. While the learning
    rate warms up, a small one gives long periods: the paper takes the
    peak's instead, for which `warmup_steps` is.

    Args:
        base_period: Int >= 1, the shortest period in steps.
        growth: Float > 0, in units of the learning rate, alpha in the paper:
            the period exceeds `base_period` once the learning rate is below
            `growth / sqrt(base_period)`.
        warmup_steps: Int >= 0, opening steps in which the period is
            `base_period`.
        parts: Int >= 1, into how many parts each period is cut. `fragments`
            sets it.

    Raises:
        TypeError: If a number of steps is not an integer.
        ValueError: If an argument is out of range.

    Example:
        >>> rule = QuadraticSynchronizationRule(base_period=4, growth=0.25)
        >>> [rule.period(rate) for rate in (0.125, 0.0625, 0.03125, 0.0)]
        [4, 16, 64, 4]

    References:
        Gu et al., A Quadratic Synchronization Rule for Distributed Deep
        Learning, ICLR 2024, https://arxiv.org/abs/2310.14423.
    """

    base_period: int
    growth: float
    warmup_steps: int = 0
    parts: int = 1

    needs_learning_rate = True

    def __post_init__(self):
        schedules.check_integer("base_period", self.base_period, at_least=1)
        schedules.check_integer("warmup_steps", self.warmup_steps, at_least=0)
        schedules.check_integer("parts", self.parts, at_least=1)
        schedules.check_positive("growth", self.growth)

    def period(self, learning_rate):
        """Returns the period in steps at a learning rate."""
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            return self.base_period
        ratio = self.growth / learning_rate
        # Its square may be beyond what a float holds.
        is_long = ratio > math.sqrt(_MANY_STEPS)
        longest = _MANY_STEPS if is_long else math.floor(ratio**2)
        return max(self.base_period, longest)

    def begin(self, facts):
        is_early = facts.step < self.warmup_steps
        period = (
            self.base_period if is_early else self.period(facts.learning_rate)
        )
        return {"next": facts.step + max(1, period // self.parts)}

    def advance(self, facts, memory, is_round):
        return self.begin(facts) if is_round else memory

    def split(self, num_parts):
        schedules.check_divides("base_period", self.base_period, num_parts)
        return dataclasses.replace(self, parts=num_parts)


@dataclasses.dataclass(frozen=True)
class AdaComm(_Remembering):
    """A period that shrinks as the loss falls.

    Few rounds make fast progress at first, frequent ones reach a lower loss
    in the end. Every `interval_steps` the period becomes

        ceil(sqrt(first rate / rate * loss / first loss) * initial_period)

    or, if that is not shorter and the learning rate is the same, `decay` times
    what it was. Losses are means over the steps since the last round, the
    first one that before the first round. Where a loss is unknown or the first
    one is not positive the period stays, at a loss <= 0 it becomes 1.

    The paper measures its intervals in seconds. Here they are in steps, which
    a resumed training has too.

    Args:
        initial_period: Int >= 1, the longest period, in steps.
        interval_steps: Int >= 1, training steps between two changes. One comes
            with the first round after that.
        decay: Float in (0, 1), gamma in the paper.
        parts: Int >= 1, into how many parts each period is cut. `fragments`
            sets it.

    Raises:
        TypeError: If a number of steps is not an integer.
        ValueError: If an argument is out of range.

    References:
        Wang and Joshi, Adaptive Communication Strategies to Achieve the Best
        Error-Runtime Trade-off in Local-Update SGD, SysML 2019,
        https://arxiv.org/abs/1810.08313.
    """

    initial_period: int
    interval_steps: int
    decay: float = 0.5
    parts: int = 1

    needs_loss = True
    needs_learning_rate = True

    def __post_init__(self):
        schedules.check_integer(
            "initial_period", self.initial_period, at_least=1
        )
        schedules.check_integer(
            "interval_steps", self.interval_steps, at_least=1
        )
        schedules.check_integer("parts", self.parts, at_least=1)
        schedules.check_positive("decay", self.decay, below=1)

    def begin(self, facts):
        return {
            "period": self.initial_period,
            "change": facts.step + self.interval_steps,
            "first_loss": None,
            "first_rate": None,
            "rate": None,
            "next": facts.step + max(1, self.initial_period // self.parts),
        }

    def advance(self, facts, memory, is_round):
        if not is_round:
            return memory
        memory = dict(memory)
        if memory["first_loss"] is None and math.isfinite(facts.loss):
            memory["first_loss"] = facts.loss
            memory["first_rate"] = memory["rate"] = facts.learning_rate
        if facts.step >= memory["change"]:
            memory["period"] = self._new_period(facts, memory)
            memory["rate"] = facts.learning_rate
            memory["change"] = facts.step + self.interval_steps
        memory["next"] = facts.step + max(1, memory["period"] // self.parts)
        return memory

    def split(self, num_parts):
        schedules.check_divides(
            "initial_period", self.initial_period, num_parts
        )
        return dataclasses.replace(self, parts=num_parts)

    def _new_period(self, facts, memory):
        first_loss = memory["first_loss"]
        if not first_loss or first_loss < 0 or not math.isfinite(facts.loss):
            return memory["period"]
        share = max(0.0, facts.loss) / first_loss
        share *= _ratio(memory["first_rate"], facts.learning_rate)
        longest = min(share, float(_MANY_STEPS))
        period = max(1, math.ceil(math.sqrt(longest) * self.initial_period))
        is_same_rate = facts.learning_rate == memory["rate"]
        if period >= memory["period"] and is_same_rate:
            period = max(1, math.floor(self.decay * memory["period"]))
        return period


@dataclasses.dataclass(frozen=True)
class DivergenceTriggered(schedules.Schedule):
    """A round when replicas have drifted apart.

    Every `check_every` steps workers tell each other, in one small message,
    how far their replicas are from what the last round left, by the norm of
    that. A round follows if the mean over all replicas is above `threshold`.
    That distance can be known without an exchange of parameters. It bounds the
    divergence, the distance from the replicas' mean, from above.

    Args:
        threshold: Float > 0, without a unit.
        check_every: Int >= 1, training steps between two looks.

    Raises:
        TypeError: If `check_every` is not an integer.
        ValueError: If an argument is out of range.

    References:
        Kamp et al., Efficient Decentralized Deep Learning by Dynamic Model
        Averaging, ECML PKDD 2018, https://arxiv.org/abs/1807.03210.
    """

    threshold: float
    check_every: int = 1

    needs_drift = True

    def __post_init__(self):
        schedules.check_positive("threshold", self.threshold)
        schedules.check_integer("check_every", self.check_every, at_least=1)

    def next_look(self, step, memory):
        del memory
        return schedules.next_multiple(step, 0, self.check_every)

    def is_due(self, facts, memory):
        del memory
        # What is not a number must come to a round, which says so.
        return not facts.drift <= self.threshold

    @property
    def periods(self):
        return (self.check_every,)


@dataclasses.dataclass(frozen=True)
class TimeBased(_Remembering):
    """A round every so many seconds, by the chief's clock.

    Workers meet for one small message when about half of the time has passed,
    and again until it has, but never after more than twice the steps that they
    have made since the last round.

    Args:
        seconds: Float > 0, time between two rounds.

    Raises:
        ValueError: If it is not > 0.
    """

    seconds: float

    def __post_init__(self):
        schedules.check_positive("seconds", self.seconds)

    def begin(self, facts):
        return {"last": facts.step, "next": facts.step + 1}

    def is_due(self, facts, memory):
        del memory
        return facts.seconds >= self.seconds

    def advance(self, facts, memory, is_round):
        if is_round:
            return self.begin(facts)
        made = facts.step - memory["last"]
        if made <= 0:
            return memory
        left = max(0.0, self.seconds - facts.seconds)
        # A short rest is waited for in one go: half of it would be no step.
        rest = made * _ratio(left, facts.seconds)
        wait = max(1, min(made, math.ceil(min(rest, _MANY_STEPS) / 2)))
        return {**memory, "next": facts.step + wait}


def _ratio(numerator, denominator):
    """A quotient, 1 where it would not be a positive number."""
    if not denominator or not numerator or numerator < 0 or denominator < 0:
        return 1.0
    ratio = numerator / denominator
    return ratio if math.isfinite(ratio) else 1.0
