"""Periodic parameter averaging with averaged optimizer slots, for Keras."""

import importlib
from typing import TYPE_CHECKING

from tf_avgstrategy._version import __version__

if TYPE_CHECKING:
    from tf_avgstrategy import outer_optimizers
    from tf_avgstrategy.averaging.averager import ParameterAverager
    from tf_avgstrategy.files.checkpoint_averaging import average_models
    from tf_avgstrategy.fit.averaged_model_checkpoint import (
        AveragedModelCheckpoint,
    )
    from tf_avgstrategy.fit.callbacks import PeriodicAveraging
    from tf_avgstrategy.fit.fit_callbacks import chief_only
    from tf_avgstrategy.schedules.adaptive_schedules import AdaComm
    from tf_avgstrategy.schedules.adaptive_schedules import DivergenceTriggered
    from tf_avgstrategy.schedules.adaptive_schedules import (
        QuadraticSynchronizationRule,
    )
    from tf_avgstrategy.schedules.adaptive_schedules import TimeBased
    from tf_avgstrategy.schedules.schedules import Periodic
    from tf_avgstrategy.schedules.schedules import Schedule
    from tf_avgstrategy.schedules.schedules import Stagewise
    from tf_avgstrategy.strategy.strategy import ParameterAveragingStrategy
    from tf_avgstrategy.workers.communicators import Communicator
    from tf_avgstrategy.workers.communicators import WorkerLostError

__all__ = [
    "AdaComm",
    "AveragedModelCheckpoint",
    "Communicator",
    "DivergenceTriggered",
    "ParameterAverager",
    "ParameterAveragingStrategy",
    "Periodic",
    "PeriodicAveraging",
    "QuadraticSynchronizationRule",
    "Schedule",
    "Stagewise",
    "TimeBased",
    "WorkerLostError",
    "__version__",
    "average_models",
    "chief_only",
    "outer_optimizers",
]

# What has each name. It is imported when the name is first used: the command
# that starts workers and waits for them need not load TensorFlow.
_HOMES = {
    "outer_optimizers": None,
    "AdaComm": "schedules.adaptive_schedules",
    "DivergenceTriggered": "schedules.adaptive_schedules",
    "QuadraticSynchronizationRule": "schedules.adaptive_schedules",
    "TimeBased": "schedules.adaptive_schedules",
    "AveragedModelCheckpoint": "fit.averaged_model_checkpoint",
    "ParameterAverager": "averaging.averager",
    "PeriodicAveraging": "fit.callbacks",
    "average_models": "files.checkpoint_averaging",
    "Communicator": "workers.communicators",
    "WorkerLostError": "workers.communicators",
    "chief_only": "fit.fit_callbacks",
    "Periodic": "schedules.schedules",
    "Schedule": "schedules.schedules",
    "Stagewise": "schedules.schedules",
    "ParameterAveragingStrategy": "strategy.strategy",
}


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name] or name}")
    value = getattr(home, name) if _HOMES[name] else home
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
