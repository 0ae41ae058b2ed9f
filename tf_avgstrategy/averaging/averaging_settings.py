"""Averaging settings: what a user has chosen for rounds, checked."""

from typing import NamedTuple

import tensorflow as tf

from tf_avgstrategy.averaging import exchanges
from tf_avgstrategy.averaging import fragments as fragment_cuts
from tf_avgstrategy.averaging import outer_step
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.state import state

__all__ = ["NON_FINITE_RULES", "Settings", "make"]

NON_FINITE_RULES = ("raise", "exclude")


class Settings(NamedTuple):
    """What all workers of a training must have in common.

    Attributes:
        schedule: `Schedule` of the rounds of single fragments.
        slots: See `ParameterAverager`.
        overrides: Dict, see `ParameterAverager`.
        is_excluding: Bool, whether replicas that are not finite do not count,
            or are an error.
        outer_optimizer: `keras.optimizers.Optimizer`, `None`: onto the mean.
        outer_device: String.
        num_fragments: Int >= 1.
        periods: Dict from regular expression to period, or None.
        elastic_alpha: Float in (0, 1].
        local_period: Int >= 1 or None.
        telemetry: Bool, whether rounds are measured.
        exchange: Function of a `Communicator` that returns an `Exchange`.
    """

    schedule: object
    slots: str
    overrides: dict
    is_excluding: bool
    outer_optimizer: object = None
    outer_device: str = "CPU:0"
    num_fragments: int = 1
    periods: object = None
    elastic_alpha: float = 1.0
    local_period: object = None
    telemetry: bool = False
    exchange: object = None

    @property
    def keeps_references(self):
        """Bool, whether also a single worker remembers the last round."""
        return (
            self.outer_optimizer is not None
            or self.schedule.needs_drift
            or self.elastic_alpha < 1
        )

    @property
    def needs_learning_rate(self):
        """Bool, whether rounds use the learning rate of the replicas."""
        return (
            self.outer_optimizer is not None
            or self.schedule.needs_learning_rate
        )

    def describe(self):
        """Returns one line."""
        outer = self.outer_optimizer
        settings = {
            "schedule": self.schedule,
            "slots": self.slots,
            "excluding": self.is_excluding,
            "outer_optimizer": outer and optimizer_parts.describe(outer),
            "fragments": self.num_fragments,
            "periods": self.periods,
            "elastic_alpha": self.elastic_alpha,
            "local_period": self.local_period,
            "telemetry": self.telemetry,
            "exchange": self.exchange.__name__,
        }
        return ", ".join(f"{name}={value}" for name, value in settings.items())


def make(  # noqa: PLR0913 - one for each choice of the user.
    *,
    period,
    warmup_steps,
    warmup,
    slots,
    overrides,
    on_non_finite,
    schedule,
    outer_optimizer,
    outer_device,
    fragments,
    periods,
    local_period,
    elastic_alpha,
    telemetry,
):
    """Checks the arguments of `ParameterAverager`.

    Returns:
        `Settings`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range.
    """
    schedule = _schedule(period, warmup_steps, warmup, schedule)
    state.check_slots(slots)
    _check_non_finite(on_non_finite)
    outer_step.check(outer_optimizer)
    _check_device(outer_device)
    schedules.check_positive("elastic_alpha", elastic_alpha, at_most=1)
    if outer_step.is_onto_mean(outer_optimizer):
        outer_optimizer = None
    if local_period is not None:
        _check_local_period(local_period, schedule)
    return Settings(
        schedule=fragment_cuts.check(fragments, periods, schedule),
        slots=slots,
        overrides=dict(overrides or {}),
        is_excluding=on_non_finite == "exclude",
        outer_optimizer=outer_optimizer,
        outer_device=outer_device,
        num_fragments=fragments,
        periods=periods,
        elastic_alpha=elastic_alpha,
        local_period=local_period,
        telemetry=bool(telemetry),
        exchange=exchanges.AllReduce,
    )


def _schedule(period, warmup_steps, warmup, schedule):
    if schedule is None:
        return schedules.Periodic(period, warmup_steps, warmup)
    if not isinstance(schedule, schedules.Schedule):
        raise TypeError(
            "`schedule` must be a `Schedule`. Received: schedule="
            f"{schedule!r} of type {type(schedule).__name__}. Pass for example "
            "`tf_avgstrategy.Periodic(16)`, or an int as `period`."
        )
    if period is not None or warmup_steps or warmup != "averaging":
        raise ValueError(
            "There must be one schedule. Received: "
            f"period={period}, warmup_steps={warmup_steps}, warmup={warmup!r} "
            f"and schedule={schedule}. Leave out `period`, `warmup_steps` and "
            "`warmup`, which are arguments of `Periodic`."
        )
    return schedule


def _check_device(outer_device):
    try:
        is_device = bool(outer_device)
        tf.DeviceSpec.from_string(outer_device)
    except (AttributeError, TypeError, ValueError):
        is_device = False
    if not is_device:
        raise ValueError(
            "`outer_device` must be the string of a device. Received: "
            f"outer_device={outer_device!r}. Pass for example "
            'outer_device="CPU:0", the host.'
        )


def _check_local_period(local_period, schedule):
    schedules.check_integer("local_period", local_period, at_least=1)
    for period in schedule.periods:
        if period > 1 and period % local_period:
            fitting = -(-period // local_period) * local_period
            raise ValueError(
                "`local_period` must divide the period of rounds between "
                f"workers. Received: local_period={local_period} with a period "
                f"of {period} steps. Pass for example period={fitting}."
            )


def _check_non_finite(on_non_finite):
    """Raises a ValueError unless it is a rule for what is not finite."""
    if on_non_finite not in NON_FINITE_RULES:
        raise ValueError(
            "`on_non_finite` must be one of "
            f"{', '.join(map(repr, NON_FINITE_RULES))}, what a round does with "
            "replicas that are not finite. Received: "
            f'on_non_finite={on_non_finite!r}. Pass on_non_finite="raise" to '
            "stop every worker."
        )
