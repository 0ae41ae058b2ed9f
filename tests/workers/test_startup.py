import json

import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.workers import communicators
from tf_avgstrategy.workers import startup

TWO = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    for name in ("TF_CONFIG", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def make(choice="auto", **limits):
    limits = {"timeout_seconds": 5, "start_timeout_seconds": 5, **limits}
    return startup.make_communicator(choice, **limits)


def set_workers(monkeypatch, jobs):
    task = {"type": next(iter(jobs)), "index": 0}
    config = json.dumps({"cluster": jobs, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)


class TestChoice:
    def test_without_a_cluster_there_is_one_worker(self):
        assert make().name == "none"
        assert make("none").size == 1

    def test_a_cluster_of_one_worker_needs_no_network(self, monkeypatch):
        set_workers(monkeypatch, {"worker": ["127.0.0.1:1"]})
        assert make().name == "none"
        assert make("collective").name == "none"
        monkeypatch.setenv("HOROVOD_SIZE", "1")
        assert make().name == "none"

    def test_none_overrides_the_cluster(self, monkeypatch):
        set_workers(monkeypatch, TWO)
        assert make("none").size == 1

    def test_an_object_is_taken_as_it_is(self):
        communicator = toys.TwinCommunicator()
        assert make(communicator) is communicator

    def test_a_cluster_must_come_before_tensorflow(self, monkeypatch):
        tf.constant(1.0)
        set_workers(monkeypatch, TWO)
        with pytest.raises(RuntimeError, match="before TensorFlow starts"):
            avg.ParameterAveragingStrategy(["CPU:0"])

    @pytest.mark.parametrize("choice", ["gloo", None, 3])
    def test_refuses_another_word(self, choice):
        with pytest.raises(ValueError, match='"auto" takes the one'):
            make(choice)

    def test_collectives_need_a_cluster(self):
        with pytest.raises(ValueError, match="no TF_CONFIG"):
            make("collective")

    @pytest.mark.parametrize("seconds", [0, -1, "5", True, float("inf")])
    @pytest.mark.parametrize(
        "name", ["timeout_seconds", "start_timeout_seconds"]
    )
    def test_refuses_no_limit(self, name, seconds):
        with pytest.raises(ValueError, match=f"`{name}` must be a number > 0"):
            make(**{name: seconds})

    def test_open_mpi_alone_says_nothing_of_horovod(self, monkeypatch):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert make().name == "none"

    def test_without_horovod_the_command_is_named(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(ImportError, match="tf-avgstrategy build-horovod"):
            make()


class TestCheckEnvironment:
    def test_a_late_cluster_is_an_error_unless_it_is_not_wanted(
        self, monkeypatch
    ):
        startup.check_environment("auto", 1)
        set_workers(monkeypatch, TWO)
        startup.check_environment("none", 1)
        startup.check_environment("auto", 2)
        with pytest.raises(RuntimeError, match="before `ParameterAveraging"):
            startup.check_environment("auto", 1)


class TestVirtualDevices:
    def test_a_script_that_has_its_own_keeps_them(self, monkeypatch):
        # conftest.py has made four.
        monkeypatch.setenv("TF_AVGSTRATEGY_DEVICES", "2")
        strategy = avg.ParameterAveragingStrategy(
            [f"CPU:{index}" for index in range(4)]
        )
        assert strategy.num_replicas_in_sync == 4


class TestDescribe:
    def test_tells_communicator_workers_and_replicas(self):
        strategy = toys.make_strategy(2)
        assert strategy.describe().startswith(
            "ParameterAveragingStrategy: communicator none, worker 0 of 1, "
            "replicas 2 here and 2 in all, on /"
        )
        assert strategy.is_chief
        strategy = toys.make_strategy(
            2, communicator=toys.TwinCommunicator(), timeout_seconds=1
        )
        assert "twin, worker 0 of 2, replicas 2 here and 4 in all" in (
            strategy.describe()
        )
        assert isinstance(strategy.communicator, communicators.Communicator)
