"""The doctor: whether all is ready to train, and what the network costs."""

import json
import platform
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_avgstrategy import _version
from tf_avgstrategy.tools import launcher
from tf_avgstrategy.tools import network_probe
from tf_avgstrategy.workers import cluster as clusters
from tf_avgstrategy.workers import horovod_communicator
from tf_avgstrategy.workers import horovod_rendezvous
from tf_avgstrategy.workers import startup

__all__ = [
    "Finding",
    "check_cluster",
    "check_installation",
    "check_no_workers",
    "examine",
]

# As in setup.cfg: at least the first, below the second.
_SUPPORTED = {
    "Python": ((3, 10), (4, 0)),
    "tensorflow": ((2, 16), (2, 22)),
    "keras": ((3, 5), (4, 0)),
}
_TRANSPORTS = {
    "none": "none, scripts train alone",
    "collective": "TensorFlow's collectives",
    "horovod": "Horovod",
}
# Longer than any exchange of the network probe.
_TIMEOUT_SECONDS = 300
_SHARE = 0.05
# What travels in a round, by how many numbers there are for each parameter.
_ROUNDS = {1: "weights alone", 3: "weights and two slots, as Adam has"}

_OK, _WARNING, _ERROR = "OK", "warning", "error"
_MEASURED, _COMPUTED = "measured", "computed"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        level: String: "OK", "warning" or "error", and of figures "measured" or
            "computed".
        text: String, what was found and, unless all is well, what to do.
    """

    level: str
    text: str

    def __str__(self):
        return f"{self.level:<10}{self.text}"


def examine(
    communicator="auto",
    *,
    num_parameters,
    step_seconds=None,
    start_timeout_seconds=60,
    show=print,
):
    """Reports on this environment, and on the network to other workers.

    To be called before TensorFlow starts, on every worker of a job. The chief
    shows what all of them found. What a worker finds before it has met the
    others it shows itself if it does not meet them.

    Args:
        communicator: String, see `startup.make_communicator`.
        num_parameters: Int >= 1, of the model whose rounds are measured.
        step_seconds: Float > 0, what one of its training steps takes, for
            which a period is computed. None: no period is.
        start_timeout_seconds: Float > 0, how long all workers may take to come.
        show: Function of a `Finding`, called for each as soon as it is known.

    Returns:
        Int, the exit code: 1 if there is an error on any worker, else 0.
    """
    cluster = check_cluster(communicator)
    findings = check_installation() + cluster
    workers = None
    if not _has_error(cluster):
        try:
            workers = startup.make_communicator(
                communicator,
                timeout_seconds=_TIMEOUT_SECONDS,
                start_timeout_seconds=start_timeout_seconds,
            )
        except (ValueError, ImportError, RuntimeError) as error:
            findings.append(Finding(_ERROR, str(error)))
    if workers is None:
        return _show(findings, show)
    if workers.size == 1:
        return _show([*findings, _nothing_to_measure()], show)
    try:
        return _examine_together(
            workers, findings, num_parameters, step_seconds, show
        )
    except RuntimeError as error:
        return _show([Finding(_ERROR, str(error))], show)


def check_installation():
    """Returns a list of `Finding`: versions, backend, devices, Horovod."""
    return [
        *(_version_finding(*each) for each in _versions().items()),
        _backend_finding(),
        *_device_findings(),
        _horovod_finding(),
    ]


def check_cluster(communicator="auto"):
    """Returns a list of `Finding`: which workers the environment names.

    Args:
        communicator: String, see `startup.make_communicator`.
    """
    try:
        cluster = clusters.from_environment()
    except ValueError as error:
        return [Finding(_ERROR, str(error))]
    if cluster is None:
        text = "TF_CONFIG: names no workers"
    else:
        text = (
            f"TF_CONFIG: worker {cluster.rank} of {cluster.size}, which are "
            f"{', '.join(cluster.addresses)}"
        )
    if communicator == "auto":
        communicator = startup.choice_of_environment(cluster)
    return [
        Finding(_OK, text),
        Finding(_OK, f"communicator: {_TRANSPORTS[communicator]}"),
    ]


def check_no_workers():
    """Raises a ValueError if the environment names workers, or wrong ones."""
    choice = startup.choice_of_environment(clusters.from_environment())
    if choice != "none":
        raise ValueError(
            "--workers is for a process that belongs to no cluster. Received: "
            "an environment that names workers, for "
            f"{_TRANSPORTS[choice]}. Run `tf-avgstrategy doctor` without it on "
            "every one of them, or remove TF_CONFIG and launchers' variables."
        )


def _show(findings, show):
    for finding in findings:
        show(finding)
    return int(_has_error(findings))


def _has_error(findings):
    return any(finding.level == _ERROR for finding in findings)


def _nothing_to_measure():
    return Finding(
        _OK,
        "network: one worker, nothing to measure. --workers=2 measures between "
        "workers of this machine; in a cluster run this on every worker",
    )


def _versions():
    return {
        "tf_avgstrategy": _version.__version__,
        "Python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _version_finding(name, version):
    if name not in _SUPPORTED:
        return Finding(_OK, f"{name} {version}")
    oldest, beyond = _SUPPORTED[name]
    number = tuple(map(int, version.split(".")[:2]))
    if oldest <= number < beyond:
        return Finding(_OK, f"{name} {version}: supported")
    oldest, beyond = (".".join(map(str, bound)) for bound in (oldest, beyond))
    return Finding(
        _ERROR,
        f"{name} {version}: not supported, needs >= {oldest}, < {beyond}. "
        "Install such a version",
    )


def _backend_finding():
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return Finding(_OK, "Keras backend: tensorflow")
    return Finding(
        _ERROR,
        f"Keras backend: {backend}, needs tensorflow. Set "
        "KERAS_BACKEND=tensorflow before Python starts",
    )


def _device_findings():
    # Not the logical ones, whose list starts TensorFlow: then it would be too
    # late for its collectives, and GPUs would be taken from other processes.
    devices = tf.config.list_physical_devices()
    findings = [Finding(_OK, f"device {_description(d)}") for d in devices]
    gpus = launcher.visible_gpus()
    if gpus and not tf.config.list_physical_devices("GPU"):
        findings.append(
            Finding(
                _WARNING,
                f"GPUs: nvidia-smi lists {len(gpus)}, TensorFlow finds none. "
                'Run `pip install "tensorflow[and-cuda]"`; the log of '
                "`import tensorflow` names the library that it misses",
            )
        )
    return findings


def _description(device):
    name = device.name.partition("device:")[2]
    details = tf.config.experimental.get_device_details(device)
    if "device_name" not in details:
        return name
    return f"{name}: {details['device_name']}"


def _horovod_finding():
    version = horovod_rendezvous.installed()
    if version is None:
        return Finding(
            _OK,
            "Horovod: not installed, and optional. `tf-avgstrategy "
            "build-horovod` builds it for this TensorFlow",
        )
    try:
        horovod_communicator.check_loads()
    except ImportError as error:
        return Finding(_ERROR, str(error))
    return Finding(_OK, f"Horovod {version}: works with this TensorFlow")


def _examine_together(
    workers, findings, num_parameters, step_seconds, show_on_chief
):
    show = show_on_chief if workers.rank == 0 else _ignore
    code = _show(_gather(workers, findings), show)
    for finding in _figures(workers, num_parameters, step_seconds):
        show(finding)
    # Who ends early would be a lost worker to the others.
    workers.barrier()
    return code


def _ignore(_):
    pass


def _gather(workers, findings):
    """All that the chief has found, and what others have to complain of."""
    texts = workers.all_gather_strings(json.dumps([_versions(), findings]))
    (chief_versions, chief_findings), *others = map(json.loads, texts)
    gathered = [Finding(*finding) for finding in chief_findings]
    for rank, (versions, others_findings) in enumerate(others, start=1):
        gathered += [
            Finding(level, f"worker {rank}: {text}")
            for level, text in others_findings
            if level in (_WARNING, _ERROR)
        ]
        gathered += [
            Finding(
                _WARNING,
                f"worker {rank}: {name} {version}, the chief has "
                f"{chief_versions[name]}. Install the same on all workers",
            )
            for name, version in versions.items()
            if version != chief_versions[name]
        ]
    return gathered


def _figures(workers, num_parameters, step_seconds):
    """Measures, and yields a `Finding` for each figure."""
    network = network_probe.measure_network(workers)
    yield from _network_findings(network, workers.name)
    rounds = {}
    for numbers, what in _ROUNDS.items():
        rounds[what] = network_probe.measure_round(
            workers, network, numbers * num_parameters
        )
        yield _round_finding(rounds[what], num_parameters, what)
    if step_seconds is None:
        return
    for what, exchange in rounds.items():
        period = network_probe.period_for_share(
            exchange.seconds, step_seconds, _SHARE
        )
        yield Finding(
            _COMPUTED,
            f"period {period:,} for {what}: exchange then adds "
            f"{100 * _SHARE:g} % to steps of {_duration(step_seconds)}",
        )


def _network_findings(network, name):
    yield Finding(
        _MEASURED,
        f"latency {_duration(network.latency_seconds)}: an all-reduce of one "
        f"number over {network.size} workers, through {name}",
    )
    for payload in network.payloads:
        yield Finding(
            _MEASURED,
            f"{_duration(payload.seconds)} for an all-reduce of "
            f"{payload.num_bytes:,} bytes{_turns(payload)}",
        )
    yield Finding(
        _COMPUTED,
        "bandwidth, from how these times grow: each worker sends, and "
        f"receives, {_digits(network.bytes_per_second / 1e6)} MB/s",
    )


def _round_finding(exchange, num_parameters, what):
    is_measured = exchange.num_turns > 0
    return Finding(
        _MEASURED if is_measured else _COMPUTED,
        f"{_duration(exchange.seconds)} for the exchange of a round of "
        f"{num_parameters:,} parameters, {what}: {exchange.num_bytes:,} bytes"
        + (_turns(exchange) if is_measured else ", too many to be tried out"),
    )


def _turns(exchange):
    return f", median of {exchange.num_turns}"


def _duration(seconds):
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(1000 * seconds)} ms"


def _digits(number):
    """Three of them that count, and no exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
