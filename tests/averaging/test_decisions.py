"""What all workers have said, and what comes of it, by tables."""

import types

import numpy as np
import pytest

from tf_avgstrategy.averaging import decisions


def status(says="", stale=(1, 0), weights=(2.0, 0.0), replicas=2):
    """What a worker says: "asks" the schedule, "wants" a round, "excludes"."""
    return types.SimpleNamespace(
        looks="asks" in says,
        wants_round="wants" in says,
        num_excluded=int("excludes" in says),
        num_replicas=replicas,
        fragments=np.stack([weights, stale], axis=1).astype(float),
    )


def decide(*says, due=False, warm=False, alpha=1.0, stale=(1, 0)):
    """Of two fragments the schedule's next round moves the second."""
    return decisions.decide(
        [status(words, stale) for words in says],
        is_due=lambda: due,
        is_warming_up=warm,
        travelling=[False, True],
        elastic_alpha=alpha,
    )


@pytest.mark.parametrize(
    "says, options, is_round, places",
    [
        # Nobody wants anything.
        (["", ""], {}, False, []),
        # The schedule says no, or yes, to any worker that asks.
        (["asks", "asks"], {}, False, []),
        (["asks", "asks"], {"due": True}, True, [1]),
        (["", "asks"], {"due": True}, True, [1]),
        # In a warm-up, and where a replica adopts the mean, all travels.
        (["asks", "asks"], {"due": True, "warm": True}, True, [0, 1]),
        (["asks", "asks excludes"], {"due": True}, True, [0, 1]),
        # A round that is wanted moves what has stepped since it travelled, or
        # all if nothing has.
        (["wants", ""], {}, True, [0]),
        (["wants", ""], {"stale": (1, 1)}, True, [0, 1]),
        (["wants", ""], {"stale": (0, 0)}, True, [0, 1]),
        # Who waits for others leaves it to their schedule.
        (["wants", "asks"], {}, False, []),
        (["wants", "asks"], {"due": True}, True, [1]),
    ],
)
def test_rounds(says, options, is_round, places):
    decision = decide(*says, **options)
    assert decision.is_round == is_round
    assert decision.places == places
    assert decision.is_asked == any("asks" in words for words in says)


@pytest.mark.parametrize(
    "says, options, is_elastic",
    [
        (["asks"], {"due": True}, False),
        (["asks"], {"due": True, "alpha": 0.5}, True),
        (["asks"], {"due": False, "alpha": 0.5}, False),
        (["asks"], {"due": True, "alpha": 0.5, "warm": True}, False),
        (["asks excludes"], {"due": True, "alpha": 0.5}, False),
        (["wants"], {"alpha": 0.5}, False),
    ],
)
def test_elastic(says, options, is_elastic):
    assert decide(*says, **options).is_elastic == is_elastic


def test_the_schedule_is_asked_only_if_somebody_asks():
    def fails():
        raise AssertionError

    decisions.decide(
        [status("wants")],
        is_due=fails,
        is_warming_up=False,
        travelling=[True],
        elastic_alpha=1.0,
    )


class TestWeigh:
    def weigh(self, rows, healthy, **options):
        options = {"are_given": False, **options}
        statuses = [status(weights=(3.0, 0.0)), status(weights=(1.0, 0.0))]
        return decisions.weigh(statuses, rows, np.array(healthy), **options)

    def test_by_rows_of_all_workers(self):
        shares = self.weigh([[1, 2], [0, 0]], [True, True])
        # Of 4 rows in all 3 are here.
        assert shares(0).ratios == [0.25, 0.5]

    def test_equally_where_nobody_has_any(self):
        shares = self.weigh([[1, 2], [0, 0]], [True, True])
        assert shares(1).ratios == [0.25, 0.25]

    def test_an_excluded_replica_counts_nothing(self):
        shares = self.weigh([[1, 2], [0, 0]], [True, False])
        assert shares(0).ratios == [0.25, 0]
        assert shares(1).ratios == [0.25, 0]

    def test_numbers_of_the_users_are_taken_as_they_are(self):
        with pytest.raises(ValueError):
            self.weigh([[1, 2], [0, 0]], [True, True], are_given=True)(1)
