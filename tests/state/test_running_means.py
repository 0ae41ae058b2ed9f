import numpy as np
import pytest
import tensorflow as tf
import toys

from tf_avgstrategy.state import running_means
from tf_avgstrategy.state import state


def make(decay=None, replicas=2, **options):
    with toys.make_strategy(replicas).scope():
        variables = [
            tf.Variable([1.0, 2.0], name="a", **options),
            tf.Variable(3, dtype=tf.int64, name="count"),
            tf.Variable([5.0], name="b", **options),
        ]
    rules = state.state_rules(variables, [], slots="mean", overrides={})
    return variables, rules, running_means.RunningMean(rules, decay)


def feed(average, rules, *values):
    for value in values:
        average.update(
            rules, lambda rule, v=value: tf.fill(rule.variable.shape, v)
        )


def inside(average, variable):
    with average.in_place():
        return [value.ravel()[0] for value in toys.copies(variable)]


class TestRunningMean:
    def test_is_the_mean_of_all_rounds(self):
        (a, count, _), rules, average = make()
        feed(average, rules, 1.0, 2.0, 6.0)
        assert inside(average, a) == [3.0, 3.0]
        with average.in_place():
            assert count.numpy() == 3

    def test_moves_exponentially_from_the_first_round_on(self):
        (a, _, _), rules, average = make(0.75)
        feed(average, rules, 4.0, 8.0)
        assert inside(average, a) == [5.0, 5.0]

    def test_what_does_not_travel_stays(self):
        (a, _, b), rules, average = make()
        feed(average, rules, 2.0)
        feed(average, rules[2:], 4.0)
        assert inside(average, a) == [2.0, 2.0]
        assert inside(average, b) == [3.0, 3.0]

    def test_low_precision_is_added_up_in_float32(self):
        (a, _, _), rules, average = make(dtype=tf.bfloat16)
        feed(average, rules, *([256.0] * 3 + [260.0]))
        # bfloat16 has no number between 256 and 258.
        assert average.tensors()["0"].numpy().tolist() == [257.0, 257.0]
        assert inside(average, a) == [256.0, 256.0]

    def test_gives_back_the_bits_of_each_replica(self):
        (a, _, _), rules, average = make()
        feed(average, rules, 9.0)
        odd = np.array([[np.nan, -0.0], [1e-45, np.inf]], "float32")
        toys.assign_per_replica(a, odd)
        with pytest.raises(KeyError), average.in_place():
            assert toys.copies(a)[1].tolist() == [9.0, 9.0]
            raise KeyError
        for before, after in zip(odd, toys.copies(a)):
            assert before.tobytes() == after.tobytes()

    def test_changes_nothing_before_the_first_round(self):
        (a, _, _), _, average = make()
        assert inside(average, a) == [1.0, 1.0]

    def test_is_saved_and_restored(self):
        _, rules, average = make(0.5)
        feed(average, rules, 4.0, 8.0)
        (a, _, _), others, again = make(0.5)
        again.restore(average.tensors())
        feed(again, others, 2.0)
        assert inside(again, a) == [4.0, 4.0]

    def test_takes_nothing_of_another_model(self):
        (a, _, _), _, average = make()
        average.restore({"0": tf.zeros([7]), "counts": tf.ones([1], tf.int64)})
        assert inside(average, a) == [1.0, 1.0]

    @pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, "0.9", True])
    def test_rejects_a_decay(self, decay):
        with pytest.raises(ValueError, match=rf"\(0, 1\).*decay={decay!r}"):
            make(decay)
