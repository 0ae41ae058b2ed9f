import http.client
import importlib.util
import socket
import subprocess
import sys
import threading

import pytest

from tf_avgstrategy.workers import horovod_rendezvous

LOOPBACK = ["127.0.0.1", "127.0.0.1"]


def environment(rank, hosts, **settings):
    settings = {"address": "10.0.0.1", "port": 1234, **settings}
    return horovod_rendezvous.environment(rank, hosts, **settings)


def places(hosts):
    """(local rank, local size, cross rank, cross size) of each rank."""
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return [
        tuple(int(environment(r, hosts)[f"HOROVOD_{name}"]) for name in names)
        for r in range(len(hosts))
    ]


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class TestEnvironment:
    def test_values_of_the_first_of_two_ranks_of_a_host(self):
        assert environment(0, ["a", "a", "b"]) == {
            "HOROVOD_HOSTNAME": "a",
            "HOROVOD_RANK": "0",
            "HOROVOD_SIZE": "3",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            (["a", "a", "b"], [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
            (["a", "b", "a"], [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]),
            # Only b has a local rank 1, so it is the first across hosts there.
            (["a", "b", "b"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
        ],
    )
    def test_places_of_ranks_on_hosts(self, hosts, expected):
        assert places(hosts) == expected

    @pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 3, 2), (4, 4)])
    def test_places_are_those_of_horovod_for_neighbours(self, counts):
        pytest.importorskip("horovod")
        from horovod.runner.common.util import hosts as horovod_hosts

        infos = [
            horovod_hosts.HostInfo(f"h{i}", n) for i, n in enumerate(counts)
        ]
        hosts = [info.hostname for info in infos for _ in range(info.slots)]
        slots = horovod_hosts.get_host_assignments(infos, len(hosts))
        assert places(hosts) == [
            (s.local_rank, s.local_size, s.cross_rank, s.cross_size)
            for s in slots
        ]

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            (LOOPBACK, "lo"),
            (["localhost", "127.0.0.1"], "lo"),
            (["127.0.0.1", "10.0.0.1"], None),
            (["a"], None),
        ],
    )
    def test_interface_is_loopback_where_every_host_is(self, hosts, expected):
        assert environment(0, hosts).get("HOROVOD_GLOO_IFACE") == expected

    def test_interface_may_be_given(self):
        variables = environment(0, ["a", "b"], interface="eth1")
        assert variables["HOROVOD_GLOO_IFACE"] == "eth1"

    @pytest.mark.parametrize("rank", [-1, 2, None])
    def test_refuses_a_rank_without_a_host(self, rank):
        with pytest.raises(
            ValueError, match=rf"`rank` must be.*rank={rank}, 2 hosts"
        ):
            environment(rank, ["a", "b"])

    @pytest.mark.parametrize("hosts", [[], ["a", ""], "ab", ["a/b"], [1]])
    def test_refuses_what_is_no_list_of_hosts(self, hosts):
        with pytest.raises(ValueError, match="`hosts` must be a list.*hosts="):
            environment(0, hosts)

    @pytest.mark.parametrize("port", [0, 65536, "80"])
    def test_refuses_a_port_that_cannot_be(self, port):
        with pytest.raises(ValueError, match="`port` must be.*1 to 65535.*"):
            environment(0, ["a"], port=port)


class TestRendezvous:
    @pytest.fixture(autouse=True)
    def _horovod(self):
        pytest.importorskip("horovod")

    def test_answers_and_remembers(self):
        with horovod_rendezvous.Rendezvous(LOOPBACK) as rendezvous:
            assert request(rendezvous.port, "GET", "/global/0") == (404, b"")
            assert request(rendezvous.port, "PUT", "/global/0", b"x")[0] == 200
            assert request(rendezvous.port, "GET", "/global/0") == (200, b"x")

    def test_leaving_frees_the_port_and_ends_the_thread(self):
        before = threading.active_count()
        with horovod_rendezvous.Rendezvous(LOOPBACK) as rendezvous:
            port = rendezvous.port
            request(port, "GET", "/global/0")
        assert threading.active_count() == before
        with pytest.raises(ConnectionRefusedError):
            request(port, "GET", "/global/0")
        with horovod_rendezvous.Rendezvous(LOOPBACK, port=port) as again:
            assert again.port == port
            # And a server of its own, that knows nothing of the last one.
            assert request(port, "GET", "/global/0") == (404, b"")

    def test_leaves_after_an_error(self):
        rendezvous = horovod_rendezvous.Rendezvous(LOOPBACK)
        with pytest.raises(KeyError), rendezvous:
            port = rendezvous.port
            raise KeyError
        with pytest.raises(ConnectionRefusedError):
            request(port, "GET", "/global/0")

    @pytest.mark.parametrize(
        ("hosts", "name"), [(LOOPBACK, "127.0.0.1"), (["a"], "0.0.0.0")]
    )
    def test_says_which_port_is_taken(self, hosts, name):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            rendezvous = horovod_rendezvous.Rendezvous(hosts, port=port)
            with (
                pytest.raises(
                    OSError,
                    match=rf"listen on {name}:{port}\. Received: Address "
                    "already in use.*another port",
                ),
                rendezvous,
            ):
                pass

    def test_has_no_port_before_it_runs(self):
        with pytest.raises(RuntimeError, match="between entering and leaving"):
            horovod_rendezvous.Rendezvous(LOOPBACK).port  # noqa: B018


def test_refuses_a_port_beyond_the_last():
    with pytest.raises(ValueError, match="0 to 65535.*port=65536"):
        horovod_rendezvous.Rendezvous(LOOPBACK, port=65536)


def test_says_how_to_install_horovod(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "horovod" else find_spec(name),
    )
    with (
        pytest.raises(ImportError, match="tf-avgstrategy build-horovod"),
        horovod_rendezvous.Rendezvous(LOOPBACK),
    ):
        pass


def test_needs_neither_tensorflow_nor_horovod():
    program = (
        "import runpy, sys\n"
        "module = runpy.run_path(sys.argv[1])\n"
        "module['environment'](0, ['a'], address='a', port=1)\n"
        "print({'tensorflow', 'horovod'} & set(sys.modules))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, horovod_rendezvous.__file__],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output == "set()\n"
