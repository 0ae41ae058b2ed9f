"""Pools of workers, each started once for all tests of a process."""

import random

import processes
import pytest


@pytest.fixture(scope="session")
def pools():
    """Returns a function of size and communicator that gives a pool."""
    started = {}

    def get(size, communicator):
        key = size, communicator
        if key in started and started[key].is_broken:
            started.pop(key).close()
        if key not in started:
            started[key] = processes.Pool(size, communicator)
        return started[key]

    yield get
    for pool in started.values():
        pool.close()


@pytest.fixture(params=processes.COMMUNICATORS)
def communicator(request):
    return request.param


@pytest.fixture
def pool(pools, communicator):
    """Two workers."""
    return pools(2, communicator)


@pytest.fixture
def some_pools(pools, request):
    """As `pools`, by a communicator that the test's name chooses.

    For what lies above communicators: that these do the same has its own tests.
    """
    known = ["collective"]
    if processes.HAS_HOROVOD:
        known.append("horovod")
    chosen = random.Random(request.node.name).choice(known)
    return lambda size: pools(size, chosen)


@pytest.fixture
def some_pool(some_pools):
    """Two workers, see `some_pools`."""
    return some_pools(2)
