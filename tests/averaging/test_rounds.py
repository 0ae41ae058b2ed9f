import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

from tf_avgstrategy.averaging import exchanges
from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.state import state
from tf_avgstrategy.state import variables
from tf_avgstrategy.tensors import mean


def make(values, communicator=None, **options):
    """Variables with these values per replica, and a round of them."""
    arguments = {} if communicator is None else {"communicator": communicator}
    strategy = toys.make_strategy(len(next(iter(values.values()))), **arguments)
    made = {}
    with strategy.scope():
        for name, copies in values.items():
            made[name] = tf.Variable(copies[0], name=name, **options)
    for name, copies in values.items():
        toys.assign_per_replica(made[name], copies)
    rules = state.state_rules(
        list(made.values()), [], slots="mean", overrides={}
    )
    travelling = state.travelling_rules(rules)
    if communicator is None:
        return made, rounds.Round(rules)
    references = [tf.Variable(tf.zeros([])) for _ in travelling]
    exchange = exchanges.AllReduce(communicator)
    return made, rounds.Round(rules, exchange, references)


def extremes(number=0):
    return np.zeros([number, 2], np.int64)


class TestAlone:
    def test_writes_the_weighted_mean_to_every_replica(self):
        made, round_ = make({"w": [2.25, 8.0]})
        round_.run(mean.shares([1, 3]), extremes())
        assert toys.scalars(made["w"]) == [6.5625] * 2

    def test_one_replica_keeps_its_bits(self):
        # An array: TensorFlow keeps one tensor for the Python numbers 0.0 and
        # -0.0, whichever was there first.
        made, round_ = make({"w": [np.array(-0.0, "float32")]})
        round_.run(mean.shares([5]), extremes())
        (value,) = toys.copies(made["w"])
        assert np.signbit(value)

    def test_says_which_variable_is_not_finite_where(self):
        _, round_ = make({"a": [1.0, 2.0], "b": [1.0, np.inf]})
        is_finite, _ = round_.replica_state()
        assert is_finite.tolist() == [[True, True], [True, False]]

    def test_counters_tell_smallest_and_largest(self):
        _, round_ = make({"count": [3, 2**53 + 1]}, dtype=tf.int64)
        is_finite, found = round_.replica_state()
        assert is_finite.shape[1] == 0
        assert found.tolist() == [[3, 2**53 + 1]]
        assert round_.agrees_on_floats == [False]


class TestWithAnotherWorker:
    """The twin holds the same values, so the mean is that of this worker."""

    def test_the_mean_is_taken_around_the_reference(self):
        made, round_ = make({"w": [2.25, 8.0]}, toys.TwinCommunicator())
        for expected in (5.125, 5.125):
            round_.run(mean.shares([1, 1], total=4), extremes())
            assert toys.scalars(made["w"]) == [expected] * 2

    def test_who_has_no_weight_adopts_the_mean_even_from_nan(self):
        made, round_ = make({"w": [np.nan, 8.0]}, toys.TwinCommunicator())
        round_.run(mean.shares([0, 1], total=2), extremes())
        assert toys.scalars(made["w"]) == [8.0] * 2

    def test_variances_are_pooled_around_the_common_mean(self):
        communicator = toys.TwinCommunicator()
        strategy = toys.make_strategy(2, communicator=communicator)
        with strategy.scope():
            layer = layers.BatchNormalization(center=False, scale=False)
            layer.build((None, 1))
        toys.assign_per_replica(layer.moving_mean, [0.0, 4.0])
        rules = state.state_rules(
            layer.variables, [], slots="mean", overrides={}
        )
        references = [tf.Variable([0.0]), tf.Variable([0.0])]
        exchange = exchanges.AllReduce(communicator)
        round_ = rounds.Round(rules, exchange, references)
        round_.run(mean.shares([1, 1], total=4), extremes())
        assert toys.scalars(layer.moving_mean) == [2.0] * 2
        assert toys.scalars(layer.moving_variance) == [5.0] * 2

    def test_a_failed_exchange_writes_nothing(self):
        communicator = toys.TwinCommunicator()
        made, round_ = make({"w": [2.25, 8.0]}, communicator)
        communicator.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            round_.run(mean.shares([1, 1], total=4), extremes())
        assert toys.scalars(made["w"]) == [2.25, 8.0]
        assert variables.replica_copies(made["w"])
