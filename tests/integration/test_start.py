"""LAUN-01 to LAUN-03: workers that start too late, too early or not at all."""

import contextlib
import pathlib
import re
import socket
import subprocess
import sys
import time

import processes
import pytest

from tf_avgstrategy.workers import lost_exit


def start(how, environment):
    return processes.Worker("start_worker.py", [how], environment)


@contextlib.contextmanager
def workers_at(addresses, ranks, how="plain"):
    """Workers of a TF_CONFIG cluster, of which only some are started."""
    with processes.Workers(1, "none") as job:
        (environment,) = job.environments
        for rank in ranks:
            config = processes.tf_config(addresses, rank)
            job.workers.append(start(how, {**environment, "TF_CONFIG": config}))
        yield job.workers


def code_of(worker, seconds=60):
    return worker.wait(seconds)


def test_laun_01_a_late_tf_config_is_an_error(monkeypatch):
    import toys

    strategy = toys.make_strategy(1)
    with strategy.scope():
        model = toys.slope_model()
    config = processes.tf_config(["127.0.0.1:1", "127.0.0.1:2"], 0)
    monkeypatch.setenv("TF_CONFIG", config)
    x, y = toys.slope_rows(1)
    averaging = toys.avg.PeriodicAveraging(1)
    with pytest.raises(RuntimeError, match="read when the strategy is made"):
        model.fit(x, y, verbose=0, callbacks=[averaging])


@pytest.mark.parametrize("how", ["tensor", "list_devices"])
def test_laun_01_a_started_tensorflow_is_an_error(how):
    addresses = processes.free_addresses(2)
    with workers_at(addresses, [0], how) as (worker,):
        start_time = time.monotonic()
        assert code_of(worker) == 1
        assert "before TensorFlow starts" in worker.text()
        assert "to the top of the script" in worker.text()
        # At once: nobody was waited for.
        assert time.monotonic() - start_time < 60


def test_laun_01_device_settings_may_come_first(communicator):
    with processes.Job(
        "start_worker.py", "devices", size=2, communicator=communicator
    ) as job:
        assert job.wait(60) == [0, 0]
        for rank, worker in enumerate(job.workers):
            assert "replicas 2 here and 4 in all" in worker.text()
            assert f"worker {rank} of 2" in worker.text()
            assert "met [0, 1]" in worker.text()


def test_laun_02_a_worker_that_does_not_come_is_listed():
    addresses = processes.free_addresses(3)
    with workers_at(addresses, [0, 2]) as (first, last):
        begin = time.monotonic()
        codes = code_of(first), code_of(last)
        assert codes == (lost_exit.LOST_EXIT_CODE,) * 2
        # Two imports of TensorFlow side by side, the limit, and asking.
        assert time.monotonic() - begin < 10 + 60
        for worker in (first, last):
            assert "worker 1 at " + addresses[1] in worker.text()


def test_laun_02_two_workers_of_one_index():
    addresses = processes.free_addresses(2)
    with workers_at(addresses, [0, 0]) as workers:
        codes = sorted(code_of(worker) for worker in workers)
        assert codes == [1, lost_exit.LOST_EXIT_CODE]
        texts = [worker.text() for worker in workers]
        # Whoever came second could not have the port.
        assert sum("needs the port" in text for text in texts) == 1
        assert all(addresses[0] in t or addresses[1] in t for t in texts)


def test_laun_03_a_port_that_is_taken_is_named():
    addresses = processes.free_addresses(2)
    host, _, port = addresses[1].rpartition(":")
    with (
        socket.create_server((host, int(port))),
        workers_at(addresses, [0, 1]) as (first, second),
    ):
        begin = time.monotonic()
        assert code_of(second) == 1
        assert f"Received: {addresses[1]}" in second.text()
        assert code_of(first) == lost_exit.LOST_EXIT_CODE
        assert time.monotonic() - begin < 70


def test_laun_03_one_job_after_the_other_on_the_same_ports():
    addresses = processes.free_addresses(2)
    for _ in range(2):
        with workers_at(addresses, [0, 1]) as workers:
            assert [code_of(worker) for worker in workers] == [0, 0]


def test_the_launcher_makes_virtual_devices():
    done = subprocess.run(
        [
            pathlib.Path(sys.executable).parent / "tf-avgstrategy",
            "launch",
            "--workers=2",
            "--devices_per_worker=2",
            processes.HERE / "start_worker.py",
            "plain",
        ],
        env=processes.clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert re.search(
            rf"^\[{rank}\] .*collective, worker {rank} of 2, replicas 2 here "
            "and 4 in all",
            done.stdout,
            re.M,
        )


def test_horovod_joins_the_workers_of_tf_config():
    pytest.importorskip("horovod")
    addresses = processes.free_addresses(2)
    with processes.Workers(1, "none") as job:
        (environment,) = job.environments
        for rank in range(2):
            config = processes.tf_config(addresses, rank)
            job.workers.append(
                processes.Worker(
                    "start_worker.py",
                    ["plain", "horovod"],
                    {**environment, "TF_CONFIG": config},
                )
            )
        assert [code_of(worker) for worker in job.workers] == [0, 0]
        for rank, worker in enumerate(job.workers):
            assert f"communicator horovod, worker {rank} of 2" in worker.text()
