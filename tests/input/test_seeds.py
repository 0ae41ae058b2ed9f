"""All workers draw the chief's random numbers, until they seed them."""

import random

import numpy as np
import toys

from tf_avgstrategy.input import seeds
from tf_avgstrategy.workers import communicators


class _Gathering(toys.TwinCommunicator):
    """The worker after a chief that gives this state."""

    def __init__(self, chiefs):
        super().__init__()
        self.chiefs = chiefs
        self.calls = 0

    def all_gather_bytes(self, data, purpose=""):
        self.calls += 1
        return [self.chiefs or data, data]


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.normal(),
    ]


def seed(number):
    random.seed(number)
    np.random.seed(number)
    # Each keeps half of a pair of normal numbers for the next time.
    draw()


def test_takes_the_chiefs_state():
    seed(1)
    chiefs = seeds._state()
    expected = draw()
    seed(2)
    communicator = _Gathering(chiefs)
    seeds.agree_on_seeds(communicator)
    assert draw() == expected
    # Once: later seeds are the script's own.
    seed(2)
    own = draw()
    seed(2)
    seeds.agree_on_seeds(communicator)
    assert draw() == own
    assert communicator.calls == 1


def test_seeds_that_are_equal_stay():
    seed(3)
    expected = draw()
    seed(3)
    seeds.agree_on_seeds(_Gathering(None))
    assert draw() == expected


def test_one_worker_agrees_with_itself():
    seed(4)
    expected = draw()
    seed(4)
    toys.make_strategy()
    seeds.agree_on_seeds(communicators.SingleWorkerCommunicator())
    assert draw() == expected
