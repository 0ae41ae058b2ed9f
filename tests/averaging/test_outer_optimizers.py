import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers
from tf_avgstrategy.averaging import outer_step


def take(step, gradients, rate=0.1):
    step.take([tf.constant(g) for g in gradients], tf.constant(rate))
    return [p.numpy().tolist() for p in step.parameters]


class TestOuterStep:
    def test_only_the_settings_are_used(self):
        optimizer = keras.optimizers.SGD(0.5)
        one, other = (
            outer_step.OuterStep(optimizer, {0: tf.constant([4.0])}, "CPU:0")
            for _ in range(2)
        )
        assert take(one, [[2.0]]) == [[3.0]]
        assert take(other, [[-2.0]]) == [[5.0]]
        assert int(optimizer.iterations.numpy()) == 0

    def test_low_precision_parameters_are_float32(self):
        values = {
            0: tf.constant([4.0], tf.bfloat16),
            1: tf.constant([1.0], "float64"),
        }
        step = outer_step.OuterStep(keras.optimizers.SGD(1.0), values, "CPU:0")
        assert [p.dtype for p in step.parameters] == [tf.float32, tf.float64]

    def test_is_made_and_taken_within_a_scope(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
            averager = avg.ParameterAverager(
                strategy,
                model.variables,
                model.optimizer,
                period=2,
                outer_optimizer=outer_optimizers.diloco(0.5, 0.5),
            )
            toys.assign_per_replica(model.trainable_variables[0], [2.25, 8.0])
            averager.average()
        assert toys.weight(model) == 4.84375

    def test_slots_come_back(self):
        one, other = (
            outer_step.OuterStep(
                outer_optimizers.diloco(0.5, 0.5),
                {place: tf.constant([4.0])},
                "CPU:0",
            )
            for place in (12, 12)
        )
        take(one, [[-1.125]])
        assert {"12/momentum", "12/iteration"} <= set(one.slots())
        for key, theirs in one.slots().items():
            other.slots()[key].assign(theirs)
        other.parameters[0].assign(one.parameters[0])
        assert take(other, [[-0.5]]) == take(one, [[-0.5]])


class TestSlowMomentum:
    """Against the paper's algorithm, which divides by the inner rate."""

    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.7])
    @pytest.mark.parametrize("alpha", [0.5, 1.0])
    def test_the_inner_rate_changes(self, momentum, alpha):
        rng = np.random.default_rng(0)
        step = outer_step.OuterStep(
            outer_optimizers.slow_momentum(momentum, alpha),
            {0: tf.constant([1.0], tf.float64)},
            "CPU:0",
        )
        x, u = 1.0, 0.0
        for rate in [0.5, 0.5, 0.25, 0.03125, 0.25]:
            gradient = rng.normal()
            u = momentum * u + gradient / rate
            x -= alpha * rate * u
            ((taken,),) = take(step, [np.array([gradient])], rate)
            # Rates are float32 there, but these are powers of 2.
            assert taken == pytest.approx(x, rel=1e-6)

    def test_rate_zero_moves_onto_the_mean_and_keeps_the_momentum(self):
        step = outer_step.OuterStep(
            outer_optimizers.slow_momentum(0.5),
            {0: tf.constant([0.0])},
            "CPU:0",
        )
        assert take(step, [[-1.0]], 0.5) == [[1.0]]
        # As the paper's step in the limit of small rates: without momentum.
        assert take(step, [[-1.0]], 0.0) == [[2.0]]
        # A rate that is not known is the last one.
        assert take(step, [[0.0]], np.nan) == [[2.5]]
        # Replicas that did not move stay where they are.
        assert take(step, [[0.0]], 0.0) == [[2.5]]
        # A quarter of the rate: a quarter of the momentum, 0.5.
        assert take(step, [[0.0]], 0.125) == [[2.5625]]

    def test_rate_zero_from_the_beginning(self):
        step = outer_step.OuterStep(
            outer_optimizers.slow_momentum(0.5, 0.25),
            {0: tf.constant([4.0])},
            "CPU:0",
        )
        # A quarter of the way to the mean, 8.
        assert take(step, [[-4.0]], 0.0) == [[5.0]]
        assert take(step, [[0.0]], 0.0) == [[5.0]]
        assert take(step, [[-4.0]], 0.5) == [[6.0]]

    def test_is_saved_by_its_config(self):
        made = keras.optimizers.deserialize(
            keras.optimizers.serialize(outer_optimizers.slow_momentum(0.6, 0.8))
        )
        assert type(made) is outer_optimizers.SlowMomentum
        assert made.momentum == 0.6


class TestOntoMean:
    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda: None, True),
            (lambda: keras.optimizers.SGD(1.0, name="other"), True),
            (lambda: keras.optimizers.SGD(0.5), False),
            (lambda: keras.optimizers.SGD(1.0, momentum=0.5), False),
            (lambda: keras.optimizers.SGD(1.0, weight_decay=0.5), False),
            (lambda: keras.optimizers.SGD(1.0, clipnorm=0.5), False),
            (lambda: keras.optimizers.Adam(1.0), False),
            (lambda: outer_optimizers.slow_momentum(0.0, 1.0), False),
        ],
    )
    def test_is_what_changes_nothing(self, make, expected):
        assert outer_step.is_onto_mean(make()) is expected

    def test_a_step_of_rate_one_ends_there_bit_for_bit(self):
        rng = np.random.default_rng(0)
        start = rng.normal(size=1000).astype("float32")
        offset = rng.normal(size=1000).astype("float32") / 8
        step = outer_step.OuterStep(
            keras.optimizers.SGD(1.0), {0: tf.constant(start)}, "CPU:0"
        )
        # Between workers the mean is the start plus an offset.
        (taken,) = take(step, [-offset])
        np.testing.assert_array_equal(taken, start + offset)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "sgd", TypeError, "`keras.optimizers.Optimizer`.*'sgd'"),
        (
            lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
            ValueError,
            "SGD with gradient_accumulation_steps",
        ),
        (
            lambda: keras.optimizers.SGD(1.0, use_ema=True),
            ValueError,
            "SGD with use_ema",
        ),
    ],
)
def test_rejects(make, error, message):
    with pytest.raises(error, match=message):
        avg.PeriodicAveraging(4, outer_optimizer=make())


def test_presets_are_what_their_papers_say():
    diloco = outer_optimizers.diloco()
    assert diloco.learning_rate.numpy() == np.float32(0.7)
    assert (diloco.momentum, diloco.nesterov) == (0.9, True)
    momentum = outer_optimizers.fed_avg_momentum()
    assert momentum.learning_rate.numpy() == 1.0
    assert (momentum.momentum, momentum.nesterov) == (0.9, False)
    adam = outer_optimizers.fed_adam()
    assert (adam.beta_1, adam.beta_2, adam.epsilon) == (0.9, 0.99, 1e-3)
