"""Periodic parameter averaging with averaged optimizer slots, for Keras."""

from tf_avgstrategy import outer_optimizers
from tf_avgstrategy._version import __version__
from tf_avgstrategy.adaptive_schedules import AdaComm
from tf_avgstrategy.adaptive_schedules import DivergenceTriggered
from tf_avgstrategy.adaptive_schedules import QuadraticSynchronizationRule
from tf_avgstrategy.adaptive_schedules import TimeBased
from tf_avgstrategy.averaged_model_checkpoint import AveragedModelCheckpoint
from tf_avgstrategy.averager import ParameterAverager
from tf_avgstrategy.callbacks import PeriodicAveraging
from tf_avgstrategy.checkpoint_averaging import average_models
from tf_avgstrategy.communicators import Communicator
from tf_avgstrategy.communicators import WorkerLostError
from tf_avgstrategy.fit_callbacks import chief_only
from tf_avgstrategy.schedules import Periodic
from tf_avgstrategy.schedules import Schedule
from tf_avgstrategy.schedules import Stagewise
from tf_avgstrategy.strategy import ParameterAveragingStrategy

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
