import contextlib
import socket

from tf_avgstrategy.workers import liveness


def test_a_beacon_answers_until_it_is_closed():
    beacon = liveness.Beacon("127.0.0.1")
    assert liveness.silent([beacon.address] * 3) == []
    beacon.close()
    assert liveness.silent([beacon.address]) == [0]


def test_who_listens_but_does_not_answer_is_silent():
    # As a stopped process: its kernel accepts the connection.
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert liveness.silent([address], timeout_seconds=0.2) == [0]


def test_names_places_of_those_that_are_silent():
    beacon = liveness.Beacon("localhost")
    gone = liveness.Beacon("127.0.0.1")
    gone.close()
    addresses = [gone.address, beacon.address, "no.such.host.invalid:1"]
    assert liveness.silent(addresses) == [0, 2]
    assert liveness.silent([]) == []
    beacon.close()
