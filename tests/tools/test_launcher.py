import contextlib
import json
import os
import socket
import sys

import pytest

from tf_avgstrategy.tools import launcher
from tf_avgstrategy.tools import worker_processes
from tf_avgstrategy.workers import horovod_rendezvous


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def started(monkeypatch):
    """What would have been started: commands, environments, quiet."""
    calls = []

    def run(command, environments, quiet):
        calls.append((command, environments, quiet))
        return worker_processes.Ended(7, has_failed=True)

    monkeypatch.setattr(worker_processes, "run", run)
    return calls


def install_gpus(tmp_path, listing, code=0):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = "".join(f'echo "{line}"\n' for line in listing)
    program.write_text(f"#!/bin/sh\n{lines}exit {code}\n")
    program.chmod(0o755)


FOUR_GPUS = [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(4)]


def launch(num_workers, **options):
    return launcher.launch([__file__], num_workers=num_workers, **options)


def environments_of(started, variable):
    return [each.get(variable) for each in started[-1][1]]


class TestArguments:
    def test_python_runs_the_script_unbuffered(self, started):
        script = [__file__, "--workers=9", "--", "-m"]
        assert launcher.launch(script, num_workers=1, quiet=True) == 7
        command, _, quiet = started[0]
        assert command == [sys.executable, "-u", *script]
        assert quiet

    def test_python_runs_a_module(self, started):
        launcher.launch(["-m", "package.module", "--a"], num_workers=1)
        assert started[0][0][1:] == ["-u", "-m", "package.module", "--a"]

    @pytest.mark.parametrize(
        "script", [[], ["-m"], ["no_such_file.py", "--flag"]]
    )
    def test_refuses_what_is_no_script(self, started, script):
        with pytest.raises(launcher.LaunchError, match="`script` must begin"):
            launcher.launch(script, num_workers=1)
        assert not started

    @pytest.mark.parametrize("count", [0, -1, 1.5])
    def test_refuses_counts_below_one(self, started, count):
        message = f"`num_workers` must be an integer >= 1.*={count}. Pass"
        with pytest.raises(launcher.LaunchError, match=message):
            launch(count)
        message = f"`devices_per_worker` must be an integer >= 1.*={count}"
        with pytest.raises(launcher.LaunchError, match=message):
            launch(1, devices_per_worker=count)
        assert not started

    def test_refuses_an_unknown_communicator(self, started):
        with pytest.raises(
            launcher.LaunchError, match="`communicator` must .*='mpi'"
        ):
            launch(1, communicator="mpi")
        assert not started


class TestClusterEnvironments:
    def test_each_worker_has_its_place_in_tf_config(self, started):
        launch(3)
        configs = list(map(json.loads, environments_of(started, "TF_CONFIG")))
        assert [config["task"] for config in configs] == [
            {"type": "worker", "index": index} for index in range(3)
        ]
        addresses = configs[0]["cluster"]["worker"]
        assert len(set(addresses)) == 3
        for config in configs:
            assert config["cluster"] == {"worker": addresses}
        for address in addresses:
            host, port = address.split(":")
            with socket.socket() as free:
                free.bind((host, int(port)))

    def test_the_rest_of_the_environment_is_handed_on(
        self, started, monkeypatch
    ):
        monkeypatch.setenv("HOROVOD_RANK", "5")
        monkeypatch.setenv("OF_THE_USER", "kept")
        launch(2)
        assert environments_of(started, "HOROVOD_RANK") == [None, None]
        assert environments_of(started, "OF_THE_USER") == ["kept", "kept"]
        assert os.environ["HOROVOD_RANK"] == "5"

    def test_horovod_gets_its_ranks_and_no_tf_config(
        self, started, monkeypatch
    ):
        @contextlib.contextmanager
        def rendezvous(hosts):
            assert hosts == ["127.0.0.1"] * 2
            yield type("Server", (), {"port": 4321})
            assert started

        monkeypatch.setattr(horovod_rendezvous, "Rendezvous", rendezvous)
        monkeypatch.setattr(horovod_rendezvous, "check_installed", lambda: None)
        monkeypatch.setenv("TF_CONFIG", "{}")
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
        launch(2, communicator="horovod")
        for variable, values in {
            "TF_CONFIG": [None, None],
            "HOROVOD_RANK": ["0", "1"],
            "HOROVOD_SIZE": ["2", "2"],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": ["4321", "4321"],
            "HOROVOD_CYCLE_TIME": ["1", "1"],
        }.items():
            assert environments_of(started, variable) == values

    def test_without_horovod_nothing_is_started(self, started, monkeypatch):
        def missing():
            raise ImportError("Run `tf-avgstrategy build-horovod`")

        monkeypatch.setattr(horovod_rendezvous, "check_installed", missing)
        with pytest.raises(ImportError, match="build-horovod"):
            launch(2, communicator="horovod")
        assert not started


class TestDevices:
    def test_without_gpus_the_strategy_is_told(self, started):
        launch(2, devices_per_worker=3)
        assert environments_of(started, "TF_AVGSTRATEGY_DEVICES") == ["3"] * 2
        assert environments_of(started, "CUDA_VISIBLE_DEVICES") == [None] * 2

    def test_without_gpus_and_flag_nothing_is_set(self, started):
        launch(2)
        assert environments_of(started, "TF_AVGSTRATEGY_DEVICES") == [None] * 2
        assert environments_of(started, "CUDA_VISIBLE_DEVICES") == [None] * 2

    @pytest.mark.parametrize(
        "visible, num_workers, devices_per_worker, expected",
        [
            (None, 2, 1, ["0", "1"]),
            (None, 2, 2, ["0,1", "2,3"]),
            (None, 2, None, ["0,1", "2,3"]),
            (None, 3, None, ["0", "1", "2"]),
            (None, 1, None, ["0,1,2,3"]),
            ("3,1", 2, 1, ["3", "1"]),
            (" 2 , 0 ", 1, None, ["2,0"]),
            ("GPU-a,GPU-b", 2, None, ["GPU-a", "GPU-b"]),
            # CUDA itself stops at the first that is none.
            ("2,9,1", 1, 1, ["2"]),
            ("2,-1,1", 1, 1, ["2"]),
        ],
    )
    def test_each_worker_gets_a_slice(
        self,
        started,
        tmp_path,
        monkeypatch,
        visible,
        num_workers,
        devices_per_worker,
        expected,
    ):
        install_gpus(tmp_path, FOUR_GPUS)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launch(num_workers, devices_per_worker=devices_per_worker)
        assert environments_of(started, "CUDA_VISIBLE_DEVICES") == expected
        assert set(environments_of(started, "TF_AVGSTRATEGY_DEVICES")) == {None}

    @pytest.mark.parametrize("visible", ["", "-1"])
    def test_gpus_that_are_hidden_are_not_used(
        self, started, tmp_path, monkeypatch, visible
    ):
        install_gpus(tmp_path, FOUR_GPUS)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launch(2, devices_per_worker=2)
        assert environments_of(started, "TF_AVGSTRATEGY_DEVICES") == ["2"] * 2
        assert environments_of(started, "CUDA_VISIBLE_DEVICES") == [visible] * 2

    @pytest.mark.parametrize(
        "num_workers, devices_per_worker", [(5, None), (3, 2), (1, 5)]
    )
    def test_refuses_to_share_gpus(
        self, started, tmp_path, num_workers, devices_per_worker
    ):
        install_gpus(tmp_path, FOUR_GPUS)
        needed = num_workers * (devices_per_worker or 1)
        with pytest.raises(
            launcher.LaunchError,
            match=f"need {needed} GPUs. Received: 4 visible, 0,1,2,3. Start",
        ):
            launch(num_workers, devices_per_worker=devices_per_worker)
        assert not started

    def test_a_driver_that_fails_means_no_gpus(self, started, tmp_path):
        install_gpus(tmp_path, ["NVIDIA-SMI has failed"], code=9)
        launch(2, devices_per_worker=2)
        assert environments_of(started, "TF_AVGSTRATEGY_DEVICES") == ["2"] * 2
