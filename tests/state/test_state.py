import keras
import pytest
import tensorflow as tf
import toys
from keras import layers
from keras import optimizers

from tf_avgstrategy.state import state


def rules_of(build, optimizer, *, slots="mean", overrides=None):
    """The rules of a model and optimizer, as {path suffix: (kind, rule)}."""
    strategy = toys.make_strategy(2)
    with strategy.scope():
        model = build()
        optimizer = optimizer()
        optimizer.build(model.trainable_variables)
    return state.state_rules(
        model.variables,
        [optimizer],
        slots=slots,
        overrides=overrides or {},
    )


def kinds_and_rules(rules):
    return {rule.path.split("/")[-1]: rule[1:3] for rule in rules}


def dense_model():
    return keras.Sequential([layers.Input((3,)), layers.Dense(2, name="d")])


def normalized_model():
    return keras.Sequential(
        [
            layers.Input((3,)),
            layers.BatchNormalization(name="bn"),
            layers.Dropout(0.5),
            layers.Embedding(4, 2, name="embedding"),
        ]
    )


class TestModelState:
    def test_every_kind_of_variable_has_its_rule(self):
        rules = kinds_and_rules(rules_of(normalized_model, optimizers.SGD))
        assert rules == {
            "gamma": ("weight", "mean"),
            "beta": ("weight", "mean"),
            "moving_mean": ("statistic", "mean"),
            "moving_variance": ("variance", "pooled"),
            "seed_generator_state": ("other", "keep"),
            "embeddings": ("weight", "mean"),
            "iteration": ("iterations", "maximum"),
            "learning_rate": ("learning rate", "keep"),
        }

    def test_a_variance_is_pooled_around_the_mean_of_its_own_layer(self):
        def build():
            return keras.Sequential(
                [
                    layers.Input((3,)),
                    layers.BatchNormalization(name="one"),
                    layers.BatchNormalization(name="two"),
                ]
            )

        rules = rules_of(build, optimizers.SGD)
        by_path = {rule.path: rule for rule in rules}
        for name in ("one", "two"):
            variance = next(
                r for p, r in by_path.items() if f"{name}/moving_var" in p
            )
            mean = next(
                r for p, r in by_path.items() if f"{name}/moving_mean" in p
            )
            assert variance.partner[0] is mean.copies[0]

    def test_a_metrics_variable_is_never_touched(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            metric = keras.metrics.Mean()
        (total, count) = state.state_rules(
            metric.variables, [], slots="mean", overrides={}
        )
        assert total.rule == count.rule == "keep"

    def test_tied_variables_are_listed_once(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            v = tf.Variable(1.0)
        rules = state.state_rules([v, v], [], slots="mean", overrides={})
        assert len(rules) == 1


class TestOptimizerState:
    @pytest.mark.parametrize("slots", ["mean", "keep", "reset"])
    def test_slots_follow_the_argument(self, slots):
        rules = kinds_and_rules(
            rules_of(dense_model, optimizers.Adam, slots=slots)
        )
        for name in ("d_kernel_momentum", "d_bias_velocity"):
            assert next(
                rule for path, rule in rules.items() if name in path
            ) == ("slot", slots)
        assert rules["kernel"] == ("weight", "mean")

    def test_moving_averages_and_accumulators_have_rules_of_their_own(self):
        rules = rules_of(
            dense_model,
            lambda: optimizers.SGD(
                momentum=0.9, use_ema=True, gradient_accumulation_steps=2
            ),
            slots="reset",
        )
        kinds = [(rule.kind, rule.rule) for rule in rules]
        assert kinds.count(("ema", "mean")) == 2
        assert kinds.count(("accumulator", "keep in step")) == 2
        assert kinds.count(("slot", "reset")) == 2

    def test_the_loss_scale_is_a_minimum_and_its_counter_restarts(self):
        rules = rules_of(
            dense_model,
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD(momentum=0.9)),
        )
        by_kind = {rule.kind: rule for rule in rules}
        assert by_kind["loss scale"].rule == "minimum"
        counter = by_kind["loss scale counter"]
        assert counter.rule == "restart"
        assert counter.partner == by_kind["loss scale"].copies
        assert by_kind["slot"].rule == "mean"

    def test_adagrad_resets_to_the_value_it_starts_with(self):
        rules = rules_of(
            dense_model,
            lambda: optimizers.Adagrad(initial_accumulator_value=0.25),
            slots="reset",
        )
        (slot, _) = [rule for rule in rules if rule.kind == "slot"]
        assert slot.initial_value == 0.25

    def test_nadams_product_of_momenta_is_not_reset(self):
        rules = rules_of(dense_model, optimizers.Nadam, slots="reset")
        (product,) = [rule for rule in rules if rule.kind == "scalar"]
        assert product.rule == "mean"

    def test_adafactors_factors_belong_to_their_variable(self):
        rules = rules_of(
            dense_model, optimizers.Adafactor, overrides={"d/kernel": "keep"}
        )
        kept = [r for r in rules if r.kind == "slot" and r.rule == "keep"]
        # Row, column and full second moment of the kernel, none of the bias.
        assert sorted(tuple(r.copies[0].shape) for r in kept) == [
            (2,),
            (3,),
            (3, 2),
        ]

    @pytest.mark.skipif(
        not hasattr(optimizers, "ScheduleFreeAdamW"),
        reason="This Keras has no ScheduleFreeAdamW.",
    )
    def test_schedule_frees_sequence_is_averaged_like_a_parameter(self):
        rules = rules_of(
            dense_model, optimizers.ScheduleFreeAdamW, slots="reset"
        )
        kinds = [(rule.kind, rule.rule) for rule in rules]
        assert kinds.count(("iterate", "mean")) == 2
        assert kinds.count(("slot", "reset")) == 2

    @pytest.mark.skipif(
        not hasattr(optimizers, "MultiOptimizer"),
        reason="This Keras has no MultiOptimizer.",
    )
    def test_optimizers_inside_an_optimizer_are_found(self):
        def make():
            return optimizers.MultiOptimizer(
                optimizers.OptimizerMap(
                    optimizers.SGD(momentum=0.9), {".*bias": optimizers.Adam()}
                )
            )

        kinds = [rule.kind for rule in rules_of(dense_model, make)]
        assert kinds.count("slot") == 3
        assert kinds.count("iterations") == 3


class TestOverrides:
    def test_a_kept_weight_keeps_its_slots(self):
        rules = kinds_and_rules(
            rules_of(
                normalized_model,
                lambda: optimizers.SGD(momentum=0.9),
                overrides={"embedding/": "keep"},
            )
        )
        assert rules["embeddings"] == ("weight", "keep")
        (slot,) = [r for p, r in rules.items() if "embeddings_mom" in p]
        assert slot == ("slot", "keep")
        (slot,) = [r for p, r in rules.items() if "gamma_mom" in p]
        assert slot == ("slot", "mean")

    def test_a_variance_can_be_averaged_plainly(self):
        rules = kinds_and_rules(
            rules_of(
                normalized_model,
                optimizers.SGD,
                overrides={"moving_variance": "mean"},
            )
        )
        assert rules["moving_variance"] == ("variance", "mean")

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"nothing": "keep"}, "'nothing'.*Paths.*kernel"),
            ({"kernel": "reset"}, "weight must be .*'mean', 'keep'.*'reset'"),
            ({"kernel": "maximum"}, "Received: 'maximum' for .*kernel"),
            ({"iteration": "keep"}, "'iteration', which matches.*counters"),
            (
                {"kernel": "keep", "/k": "mean"},
                "Two patterns.*'kernel' and '/k'",
            ),
        ],
    )
    def test_rejects(self, overrides, message):
        with pytest.raises(ValueError, match=message):
            rules_of(dense_model, optimizers.SGD, overrides=overrides)


class TestErrors:
    def test_a_variable_from_outside_the_scope_is_named(self):
        strategy = toys.make_strategy(2)
        model = dense_model()
        with pytest.raises(ValueError, match="variable '.*kernel'.*Move the"):
            state.check_scope(model.variables, [], strategy)

    @pytest.mark.parametrize("slots", ["sum", None, True])
    def test_unknown_rules_for_slots_are_refused(self, slots):
        with pytest.raises(ValueError, match=f"'mean', .*slots={slots!r}"):
            state.check_slots(slots)


def test_an_optimizer_that_horovod_wrapped_is_refused():
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    # What Horovod makes: a subclass of the same name in its own module.
    wrapped = type(
        "SGD", (keras.optimizers.SGD,), {"__module__": "horovod._keras"}
    )
    with strategy.scope():
        optimizer = wrapped()
    with pytest.raises(ValueError, match="exchanges nothing on Keras 3"):
        state.check_scope(model.variables, [optimizer], strategy)
