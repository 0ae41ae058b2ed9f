"""Start-up: which workers this process trains with, and through what."""

import importlib.util
import numbers
import os

import tensorflow as tf

from tf_avgstrategy.workers import cluster as clusters
from tf_avgstrategy.workers import collective_communicator
from tf_avgstrategy.workers import communicators
from tf_avgstrategy.workers import horovod_communicator
from tf_avgstrategy.workers import lost_exit

__all__ = [
    "CHOICES",
    "check_environment",
    "choice_of_environment",
    "make_communicator",
    "make_virtual_devices",
]

CHOICES = ("auto", "collective", "horovod", "none")
# Set by `tf-avgstrategy launch --devices_per_worker`.
_DEVICES_VARIABLE = "TF_AVGSTRATEGY_DEVICES"

# TensorFlow and Horovod join one job per process, once.
_started = {}


def make_communicator(choice, *, timeout_seconds, start_timeout_seconds):
    """Returns the communicator of this process, started.

    Args:
        choice: A `Communicator`, or one of `CHOICES`. "auto": Horovod under
            its launcher, TensorFlow's collectives if TF_CONFIG has several
            workers that train, else none.
        timeout_seconds: Float > 0, how long an exchange may take.
        start_timeout_seconds: Float > 0, how long all workers may take to come.

    Raises:
        ValueError: If an argument is none of these, or TF_CONFIG is malformed.
        ImportError: If Horovod is needed and not installed.
        RuntimeError: If TensorFlow's collectives are needed and TensorFlow was
            started before.
        WorkerLostError: If a worker does not come in time.
    """
    if isinstance(choice, communicators.Communicator):
        return choice
    _check_choice(choice)
    _check_seconds("timeout_seconds", timeout_seconds)
    _check_seconds("start_timeout_seconds", start_timeout_seconds)
    cluster = clusters.from_environment()
    if choice == "auto":
        choice = choice_of_environment(cluster)
    if choice == "collective" and cluster is None:
        raise ValueError(
            'communicator="collective" needs TF_CONFIG, which names the '
            "workers. Received: no TF_CONFIG. Start the script by "
            "`tf-avgstrategy launch`, or set TF_CONFIG on every worker."
        )
    is_alone = choice == "collective" and cluster.size == 1
    if choice == "none" or is_alone:
        return communicators.SingleWorkerCommunicator()
    limits = {
        "timeout_seconds": timeout_seconds,
        "start_timeout_seconds": start_timeout_seconds,
    }
    lost_exit.exit_with_lost_code()
    if choice not in _started:
        _started[choice] = (
            collective_communicator.CollectiveCommunicator(cluster, **limits)
            if choice == "collective"
            else horovod_communicator.HorovodCommunicator(
                cluster=cluster, **limits
            )
        )
    return _started[choice]


def make_virtual_devices():
    """Makes the virtual CPU devices that the launcher asked for.

    A script that has configured its devices or has started TensorFlow by
    itself keeps what it has.
    """
    text = os.environ.get(_DEVICES_VARIABLE, "")
    cpus = tf.config.list_physical_devices("CPU")
    if not text or tf.config.get_logical_device_configuration(cpus[0]):
        return
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{_DEVICES_VARIABLE} must be an integer >= 1, the number of "
            f"virtual CPU devices. Received: {text!r}. Remove it to use the "
            "devices that there are."
        )
    devices = [tf.config.LogicalDeviceConfiguration()] * int(text)
    try:
        tf.config.set_logical_device_configuration(cpus[0], devices)
    except RuntimeError as error:
        raise RuntimeError(
            f"The {text} virtual CPU devices that {_DEVICES_VARIABLE} asks for "
            f"must be made before TensorFlow starts. Received: {error}. Move "
            "`ParameterAveragingStrategy()` to the top of the script."
        ) from error


def check_environment(choice, size):
    """Raises a RuntimeError if workers were named too late to be heard.

    Args:
        choice: What the strategy was told.
        size: Int, the number of workers that it trains with.
    """
    if choice != "auto" or size > 1:
        return
    cluster = clusters.from_environment()
    if choice_of_environment(cluster) != "none":
        raise RuntimeError(
            "TF_CONFIG and launchers' variables are read when the strategy is "
            "made. Received: an environment of several workers that was not "
            "there then, so this worker would train alone. Set TF_CONFIG "
            "before `ParameterAveragingStrategy()`, best before the script "
            'starts, or pass communicator="none" to train alone.'
        )


def choice_of_environment(cluster):
    """Returns which of `CHOICES` "auto" stands for in this process.

    Args:
        cluster: The `Cluster` of TF_CONFIG, or None.
    """
    if _has_several("HOROVOD_SIZE"):
        return "horovod"
    if cluster is not None and cluster.size > 1:
        return "collective"
    # Open MPI starts other things than Horovod, too.
    if _has_several("OMPI_COMM_WORLD_SIZE") and (
        importlib.util.find_spec("horovod") is not None
    ):
        return "horovod"
    return "none"


def _has_several(variable):
    size = os.environ.get(variable, "")
    return size.isascii() and size.isdigit() and int(size) > 1


def _check_choice(choice):
    if not isinstance(choice, str) or choice not in CHOICES:
        raise ValueError(
            "`communicator` must be a `Communicator` or one of "
            f"{', '.join(map(repr, CHOICES))}. Received: communicator="
            f'{choice!r}. "auto" takes the one that the job was started with.'
        )


def _check_seconds(name, value):
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(
            f"`{name}` must be a number > 0, in seconds. Received: "
            f"{name}={value!r}. Without a limit a lost worker would make the "
            "others wait for ever."
        )
