"""One contract over every communicator, between real processes."""

import processes
import pytest

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=processes.COMMUNICATORS)
def transport(request):
    return request.param


@pytest.fixture(scope="module", params=SIZES)
def workers(request, transport):
    size = request.param
    alone = size == 1 and transport == "collective"
    pool = processes.Pool(size, "none" if alone else transport)
    yield pool
    pool.close()


def test_sums_every_type_and_shape(workers, transport):
    alone = workers.size == 1
    assert workers.run("exchange_payloads") == [
        ("none" if alone else transport, rank, workers.size)
        for rank in range(workers.size)
    ]


def test_broadcast_keeps_bits(workers):
    workers.run("broadcast_payloads")


def test_gathers_texts_of_unequal_lengths(workers):
    workers.run("gather_payloads")


def test_what_must_be_rounded_is_the_same_everywhere(workers):
    for elements in (1, 7, 100_001):
        assert len(set(workers.run("is_exact_on_every_worker", elements))) == 1


def test_a_large_payload(workers):
    assert workers.run("exchange_300_megabytes") == [True] * workers.size


def test_a_barrier_waits_for_the_last(workers):
    seconds = workers.run("barrier_waits_for_the_last")
    # The first one cannot return before the last has come.
    assert workers.size == 1 or seconds[0] > 0.3


def test_other_calls_are_an_error_on_every_worker(workers):
    if workers.size == 1:
        pytest.skip("One worker cannot differ from itself.")
    for message in workers.run("different_calls"):
        assert "the same calls" in message and "`barrier`" in message
