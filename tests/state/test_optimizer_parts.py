import keras
import pytest
import tensorflow as tf
import toys
from keras import layers
from keras import optimizers

from tf_avgstrategy.state import optimizer_parts


@pytest.mark.parametrize(
    ("steps", "expected"), [([None], 1), ([2], 2), ([4, 6], 12)]
)
def test_accumulation_ends_together(steps, expected):
    made = [
        optimizers.LossScaleOptimizer(
            optimizers.SGD(gradient_accumulation_steps=n)
        )
        for n in steps
    ]
    assert optimizer_parts.gradient_accumulation_steps(made) == expected


class TestFindOptimizers:
    def test_as_attributes_in_lists_dicts_and_submodels(self):
        made = [optimizers.SGD() for _ in range(4)]
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model(made[0])
            inner = optimizers.SGD()
            model.part = toys.slope_model(inner)
        model.one = made[1]
        model.several = [made[2]]
        model.named = {"last": (made[3],)}
        found = optimizer_parts.find_optimizers(model)
        assert {id(o) for o in found} == {id(o) for o in [*made, inner]}
        assert len(found) == 5

    def test_a_part_that_was_trained_elsewhere_does_not_matter(self):
        part = toys.slope_model(optimizers.SGD())
        with toys.make_strategy().scope():
            model = keras.Sequential([layers.Input((1,)), part])
            model.compile("sgd")
        assert optimizer_parts.find_optimizers(model) == [model.optimizer]


class TestHasOnlyDefaults:
    @pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
    def test_of_a_name(self, name):
        assert optimizer_parts.has_only_defaults(optimizers.get(name))

    def test_not_of_one_that_was_told_something(self):
        told = optimizers.SGD()
        told.exclude_from_weight_decay(var_names=["bias"])
        for optimizer in (told, optimizers.SGD(0.5)):
            assert not optimizer_parts.has_only_defaults(optimizer)


class TestDescribe:
    def test_tells_settings_but_not_a_variable_rate_or_a_name(self):
        one = optimizers.SGD(0.5, momentum=0.25, name="one")
        other = optimizers.SGD(0.125, momentum=0.25, name="other")
        assert optimizer_parts.describe(one) == optimizer_parts.describe(other)
        assert "'momentum': 0.25" in optimizer_parts.describe(one)

    def test_of_what_a_loss_scale_wraps(self):
        texts = {
            optimizer_parts.describe(
                optimizers.LossScaleOptimizer(
                    optimizers.SGD(rate, momentum=0.25, name=name)
                )
            )
            for rate, name in ((0.5, "one"), (0.25, "other"))
        }
        (text,) = texts
        assert "'momentum': 0.25" in text

    def test_a_schedule_is_a_setting(self):
        schedules = optimizers.schedules
        texts = {
            optimizer_parts.describe(
                optimizers.SGD(schedules.ExponentialDecay(rate, 10, 0.5))
            )
            for rate in (0.5, 0.25)
        }
        assert len(texts) == 2


@pytest.mark.skipif(
    not hasattr(optimizers, "ScheduleFreeAdamW"),
    reason="This Keras has no ScheduleFreeAdamW.",
)
@pytest.mark.parametrize("in_function", [True, False])
def test_a_step_that_builds_an_optimizer_builds_it_on_all_replicas(in_function):
    strategy = toys.make_strategy(2)
    with strategy.scope():
        v = keras.Variable(2.0)
        optimizer = optimizers.ScheduleFreeAdamW(1.0)

    def run():
        strategy.run(lambda: optimizer.apply([tf.zeros([])], [v]))

    tf.function(run)() if in_function else run()
    assert toys.scalars(v) == [2.0, 2.0]
    for momentum in optimizer._momentums:
        assert toys.scalars(momentum) == [2.0, 2.0]
