import json
import sys

import keras
import pytest
import tensorflow as tf

import tf_avgstrategy as avg
from tf_avgstrategy.tools import doctor
from tf_avgstrategy.tools import launcher
from tf_avgstrategy.tools import network_probe
from tf_avgstrategy.workers import communicators
from tf_avgstrategy.workers import horovod_communicator
from tf_avgstrategy.workers import horovod_rendezvous
from tf_avgstrategy.workers import startup

TWO = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("TF_CONFIG", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # Its library takes a while, and is not here everywhere.
    monkeypatch.setattr(horovod_rendezvous, "installed", lambda: None)


def set_tf_config(monkeypatch, cluster, index=0):
    task = {"type": "worker", "index": index}
    config = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)


def lines(findings):
    return [str(finding) for finding in findings]


def examine(**options):
    """Exit code and lines."""
    shown = []
    options = {"num_parameters": 1000, "show": shown.append, **options}
    return doctor.examine(**options), lines(shown)


class TestInstallation:
    def test_all_is_well(self):
        found = lines(doctor.check_installation())
        for line in (
            f"OK        tf_avgstrategy {avg.__version__}",
            f"OK        tensorflow {tf.__version__}: supported",
            f"OK        keras {keras.__version__}: supported",
            "OK        Keras backend: tensorflow",
            "OK        device CPU:0",
        ):
            assert line in found
        assert all(line.startswith("OK ") for line in found)

    @pytest.mark.parametrize("version", ["2.14.1", "3.4", "4.0", "4.0.0rc1"])
    def test_says_what_a_version_should_be(self, monkeypatch, version):
        monkeypatch.setattr(keras, "__version__", version)
        assert (
            f"error     keras {version}: not supported, needs >= 3.5, < 4.0. "
            "Install such a version"
        ) in lines(doctor.check_installation())

    def test_another_backend_is_an_error(self, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        assert (
            "error     Keras backend: jax, needs tensorflow. Set "
            "KERAS_BACKEND=tensorflow before Python starts"
        ) in lines(doctor.check_installation())

    def test_gpus_that_tensorflow_does_not_find(self, monkeypatch):
        monkeypatch.setattr(launcher, "visible_gpus", lambda: ["0", "1"])
        (line,) = (x for x in lines(doctor.check_installation()) if "GPU" in x)
        assert line.startswith(
            "warning   GPUs: nvidia-smi lists 2, TensorFlow finds none. Run "
            '`pip install "tensorflow[and-cuda]"`'
        )

    def test_gpus_have_names(self, monkeypatch):
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda *_: [gpu]
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda _: {"device_name": "NVIDIA H200"},
        )
        monkeypatch.setattr(launcher, "visible_gpus", lambda: ["0"])
        found = lines(doctor.check_installation())
        assert "OK        device GPU:0: NVIDIA H200" in found


class TestHorovod:
    def find(self):
        (line,) = (x for x in lines(doctor.check_installation()) if "oro" in x)
        return line

    def test_missing_is_well_and_says_how_to_get_it(self):
        assert self.find() == (
            "OK        Horovod: not installed, and optional. `tf-avgstrategy "
            "build-horovod` builds it for this TensorFlow"
        )

    def test_that_loads(self, monkeypatch):
        monkeypatch.setattr(horovod_rendezvous, "installed", lambda: "0.28.1")
        monkeypatch.setattr(horovod_communicator, "check_loads", lambda: None)
        expected = "OK        Horovod 0.28.1: works with this TensorFlow"
        assert self.find() == expected

    def test_for_another_tensorflow_is_an_error(self, monkeypatch):
        monkeypatch.setattr(horovod_rendezvous, "installed", lambda: "0.28.1")
        monkeypatch.setattr(horovod_rendezvous, "check_installed", lambda: None)
        # What an import of it meets.
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
        line = self.find()
        assert line.startswith(
            "error     Horovod must be built for the TensorFlow that is "
            f"installed, {tf.__version__}. Received: one that does not load: "
        )
        assert line.endswith("Run `tf-avgstrategy build-horovod --rebuild`.")


class TestCluster:
    def test_none(self):
        assert lines(doctor.check_cluster()) == [
            "OK        TF_CONFIG: names no workers",
            "OK        communicator: none, scripts train alone",
        ]

    def test_of_tf_config(self, monkeypatch):
        set_tf_config(monkeypatch, TWO, index=1)
        found = lines(doctor.check_cluster())
        assert found == [
            "OK        TF_CONFIG: worker 1 of 2, which are 127.0.0.1:1, "
            "127.0.0.1:2",
            "OK        communicator: TensorFlow's collectives",
        ]
        found = lines(doctor.check_cluster("horovod"))
        assert found[1] == "OK        communicator: Horovod"

    def test_of_a_launcher(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        found = lines(doctor.check_cluster())
        assert found[1] == "OK        communicator: Horovod"

    def test_broken_is_the_error_that_the_strategy_gives(self, monkeypatch):
        set_tf_config(monkeypatch, {"worker": ["somewhere"]})
        with pytest.raises(ValueError) as error:
            avg.ParameterAveragingStrategy()
        assert lines(doctor.check_cluster()) == [f"error     {error.value}"]

    def test_must_not_be_there_for_local_workers(self, monkeypatch):
        doctor.check_no_workers()
        set_tf_config(monkeypatch, TWO)
        with pytest.raises(
            ValueError, match="Received: .* for TensorFlow's collectives. Run"
        ):
            doctor.check_no_workers()
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(ValueError, match="for Horovod. Run"):
            doctor.check_no_workers()


class TestAlone:
    def test_there_is_nothing_to_measure(self):
        code, shown = examine(step_seconds=0.1)
        assert code == 0
        assert shown[-1].startswith(
            "OK        network: one worker, nothing to measure. --workers=2 "
        )

    def test_an_error_is_the_exit_code(self, monkeypatch):
        monkeypatch.setattr(keras, "__version__", "2.15.0")
        code, shown = examine()
        assert code == 1
        # All else is said, too.
        assert "OK        device CPU:0" in shown

    def test_a_broken_tf_config_starts_nothing(self, monkeypatch):
        def make(*_, **__):
            raise AssertionError("not to be called")

        monkeypatch.setattr(startup, "make_communicator", make)
        monkeypatch.setenv("TF_CONFIG", "{")
        code, shown = examine()
        assert code == 1
        assert shown[-1].startswith("error     TF_CONFIG: must be JSON. Recei")

    def test_needs_horovod_that_is_missing(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        code, shown = examine()
        assert code == 1
        assert shown[-1].startswith("error     Training with Horovod needs")
        assert "Run `tf-avgstrategy build-horovod`" in shown[-1]

    def test_says_what_cannot_be_started(self, monkeypatch):
        tf.constant(1.0)  # Starts TensorFlow, too early.
        set_tf_config(monkeypatch, TWO)
        code, shown = examine()
        assert code == 1
        assert shown[-1].startswith("error     With several workers in TF_CO")


class Pair(communicators.Communicator):
    """Two workers, of which the other one says what it is told to.

    Args:
        rank: Int, this worker's.
        other: String or None, what the other one found. None: the same.
    """

    name = "pair"

    def __init__(self, rank=0, other=None):
        super().__init__(rank=rank, size=2)
        self.num_barriers = 0
        self._other = other

    def all_gather_strings(self, text):
        texts = [text, self._other or text]
        return texts[:: -1 if self.rank else 1]

    def barrier(self):
        self.num_barriers += 1

    def _gather(self, array):
        raise NotImplementedError

    _reduce = _broadcast = _gather


class TestTogether:
    @pytest.fixture
    def meet(self, monkeypatch):
        """Returns a function that gives this process a communicator."""
        # 1 ms, and 0.5 us for a byte: 2 MB/s.
        payloads = (network_probe.Exchange(65536, 0.0338, 30),)
        network = network_probe.Network(2, 0.001, 5e-7, payloads)
        monkeypatch.setattr(network_probe, "measure_network", lambda _: network)

        def measure_round(_, network, num_elements):
            num_bytes = 4 * num_elements
            is_measured = num_bytes <= 4000
            seconds = 0.002 if is_measured else 120.0
            return network_probe.Exchange(num_bytes, seconds, 3 * is_measured)

        monkeypatch.setattr(network_probe, "measure_round", measure_round)

        def meet(workers):
            def make(choice, *, timeout_seconds, start_timeout_seconds):
                assert (choice, start_timeout_seconds) == ("auto", 60)
                return workers

            monkeypatch.setattr(startup, "make_communicator", make)
            return workers

        return meet

    def test_figures(self, meet):
        workers = meet(Pair())
        code, shown = examine(step_seconds=0.01)
        assert code == 0
        figures = [x for x in shown if not x.startswith("OK ")]
        assert figures == [
            "measured  latency 1 ms: an all-reduce of one number over 2 "
            "workers, through pair",
            "measured  33.8 ms for an all-reduce of 65,536 bytes, median of 30",
            "computed  bandwidth, from how these times grow: each worker "
            "sends, and receives, 2 MB/s",
            "measured  2 ms for the exchange of a round of 1,000 parameters, "
            "weights alone: 4,000 bytes, median of 3",
            "computed  120 s for the exchange of a round of 1,000 parameters, "
            "weights and two slots, as Adam has: 12,000 bytes, too many to be "
            "tried out",
            # 0.002 / (0.05 * 0.01), and 120 / (0.05 * 0.01).
            "computed  period 4 for weights alone: exchange then adds 5 % to "
            "steps of 10 ms",
            "computed  period 240,000 for weights and two slots, as Adam has: "
            "exchange then adds 5 % to steps of 10 ms",
        ]
        # Nobody ends before all have what they need.
        assert workers.num_barriers == 1

    def test_without_a_step_there_is_no_period(self, meet):
        meet(Pair())
        _, shown = examine()
        assert not [line for line in shown if "period" in line]

    def test_the_chief_says_what_is_wrong_with_others(self, meet):
        versions = {
            "tf_avgstrategy": avg.__version__,
            "Python": sys.version.split()[0],
            "tensorflow": "2.1.0",
            "keras": keras.__version__,
        }
        findings = [
            ["OK", "device CPU:0"],
            ["error", "tensorflow 2.1.0: old"],
            ["warning", "GPUs: none"],
        ]
        meet(Pair(other=json.dumps([versions, findings])))
        code, shown = examine()
        assert code == 1
        assert [line for line in shown if "worker 1" in line] == [
            "error     worker 1: tensorflow 2.1.0: old",
            "warning   worker 1: GPUs: none",
            "warning   worker 1: tensorflow 2.1.0, the chief has "
            f"{tf.__version__}. Install the same on all workers",
        ]

    def test_others_show_nothing_and_end_alike(self, meet):
        meet(Pair(rank=1))
        assert examine() == (0, [])
        chiefs = [doctor._versions(), [["error", "Keras backend: jax"]]]
        meet(Pair(rank=1, other=json.dumps(chiefs)))
        assert examine() == (1, [])

    def test_a_lost_worker_is_an_error_on_every_other(self, meet, monkeypatch):
        meet(Pair(rank=1))

        def measure_network(_):
            raise communicators.WorkerLostError("worker 0 did not answer", [0])

        monkeypatch.setattr(network_probe, "measure_network", measure_network)
        assert examine() == (1, ["error     worker 0 did not answer"])
