import numpy as np
import pytest
import toys

from tf_avgstrategy.averaging import agreement


def status(weight=8.0, **fields):
    defaults = {
        "progress": agreement.IN_EPOCH,
        "steps": 4,
        "num_replicas": 2,
        "wants_round": True,
        "looks": False,
        "gathers": agreement.NOTHING,
        "learning_rate": 0.1,
        "loss": 2.5,
        "loss_weight": 8.0,
        "drift": 0.0,
        "seconds": 1.5,
        "divergence": 0.25,
        "num_excluded": 0,
        "sick_replica": -1,
        "sick_variable": -1,
        "fragments": np.array([[weight, 4.0]]),
        "first_batch": np.arange(10),
        "extremes": np.zeros([0, 2], np.int64),
    }
    return agreement.Status(**{**defaults, **fields})


class TestExchange:
    def test_everyone_gets_what_everyone_sent(self):
        # float64 would round the counter.
        sent = status(extremes=np.array([[2**53 + 1, 2**62 + 1]]))
        for received in sent.exchange(toys.TwinCommunicator()):
            assert received[:-3] == sent[:-3]
            for own, other in zip(received[-3:], sent[-3:]):
                np.testing.assert_array_equal(own, other)


class TestExtremes:
    def test_of_integers_and_of_contained_floats(self):
        floats = np.array([[-1.5, 2.0], [-2.5, -0.5]]).view(np.int64)
        statuses = [
            status(extremes=np.array([[3, 7], floats[0]])),
            status(extremes=np.array([[-4, 5], floats[1]])),
        ]
        extremes = agreement.extremes(statuses, [False, True])
        assert extremes[0].tolist() == [-4, 7]
        assert extremes[1].view(np.float64).tolist() == [-2.5, 2.0]

    def test_of_nothing(self):
        assert agreement.extremes([status()] * 2, []).shape == (0, 2)


class TestCheckHealth:
    def test_the_first_sick_worker_is_named(self):
        sick = status(sick_replica=1, sick_variable=0)
        with pytest.raises(
            FloatingPointError, match="'w' on replica 1 of worker 1 .* step 4"
        ):
            agreement.check_health([status(), sick], ["w"])

    def test_without_any_rows_all_count(self):
        sick = status(sick_replica=1, sick_variable=0, weight=0.0)
        with pytest.raises(FloatingPointError, match="worker 1"):
            agreement.check_health([status(weight=0.0), sick], ["w"])

    def test_who_contributes_nothing_may_be_sick(self):
        sick = status(sick_replica=0, sick_variable=0, weight=0.0)
        agreement.check_health([status(), sick], ["w"])


class TestWarnOfIdleWorkers:
    @pytest.mark.parametrize(
        ("statuses", "is_idle"),
        [
            ([status(), status()], False),
            # Rounds may wait for half accumulated gradients.
            ([status(), status(steps=5)], False),
            ([status(progress=agreement.AFTER_EPOCH), status()], True),
            ([status(progress=1), status(progress=1, steps=5)], True),
            ([status(progress=1), status(progress=1)], False),
        ],
    )
    def test_tells_who_had_less_data(self, statuses, is_idle):
        assert agreement.warn_of_idle_workers(statuses) is is_idle


class TestCheckSame:
    def test_equal_lists_pass(self):
        agreement.check_same(toys.TwinCommunicator(), ["a", "b"], "things")

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (["a", "c"], "at place 1, worker 0 has 'b' and worker 1 has 'c'"),
            (["a"], "worker 0 has 'b' and worker 1 has 'nothing'"),
            (["a", "b", "c"], "at place 2, .*'nothing' and worker 1 has 'c'"),
        ],
    )
    def test_the_first_difference_is_named(self, other, message):
        class Two:
            def all_gather_strings(self, text):
                is_digest = "\n" not in text and len(text) == 64
                return [text, "0" * 64 if is_digest else "\n".join(other)]

        with pytest.raises(ValueError, match=message):
            agreement.check_same(Two(), ["a", "b"], "things")
