import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers
from keras import optimizers

import tf_avgstrategy as avg


def momentum():
    return toys.sgd(momentum=0.5)


class TestRounds:
    @pytest.mark.core
    @pytest.mark.parametrize(("period", "steps"), sorted(toys.T1_WEIGHTS))
    def test_follow_the_hand_computed_trajectory(self, period, steps):
        model, averaging = toys.fit_slope(steps, period)
        assert (
            toys.scalars(model.trainable_variables[0])
            == [toys.T1_WEIGHTS[period, steps]] * 2
        )
        assert averaging.averager.rounds == steps // period

    def test_come_at_the_end_of_fit_but_never_twice_in_a_row(self):
        assert toys.fit_slope(2, 10)[1].averager.rounds == 1
        assert toys.fit_slope(2, 2)[1].averager.rounds == 1
        assert toys.fit_slope(3, 2)[1].averager.rounds == 2

    def test_come_before_validation(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(10)
        seen = []

        class Look(keras.callbacks.Callback):
            def on_test_batch_begin(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        history = toys.fit(
            model,
            *toys.slope_rows(2),
            batch_size=2,
            callbacks=[Look(), averaging],
            validation_data=toys.dataset(toys.slope_rows(1), 2),
            epochs=2,
        )
        # 2.25 and 8 -> 5.125; then 2.8828125 and 8 -> 5.44140625.
        assert seen == [[5.125] * 2, [5.44140625] * 2]
        assert averaging.averager.rounds == 2
        # (5.125**2 + 5.75**2) / 2: both rows on the mean.
        assert history.history["val_loss"][0] == 29.6640625

    def test_warm_up_averages_every_step(self):
        model, averaging = toys.fit_slope(4, 2, warmup_steps=2)
        # 6.0625 after two synchronous steps, then 3.41015625 and 8.
        assert toys.weight(model) == 5.705078125
        assert averaging.averager.rounds == 3

    def test_go_on_counting_over_several_fits(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(4)
        for _ in range(2):
            toys.fit(
                model,
                *toys.slope_rows(3),
                batch_size=2,
                callbacks=[averaging],
            )
        # After steps 3 (end), 4, 6 (end).
        assert averaging.averager.rounds == 3
        assert averaging.averager.steps == 6

    @pytest.mark.core
    def test_with_several_steps_per_execution(self):
        model, averaging = toys.fit_slope(
            8, 4, model_arguments={"steps_per_execution": 4}
        )
        assert averaging.averager.rounds == 2
        assert averaging.averager.steps == 8

    def test_with_an_execution_that_the_data_ends(self):
        # 6 steps with 4 an execution: 4, then the 2 that the data is left
        # with. The round after step 4 is in time, the end of fit is one more.
        # Not on Keras 3.5, where the step that finds no data races the one
        # before: plain Keras then counts 7 iterations for 6 batches.
        model, averaging = toys.fit_slope(
            6, 4, model_arguments={"steps_per_execution": 4}
        )
        assert averaging.averager.rounds == 2
        assert averaging.averager.steps == 6

    def test_a_half_accumulated_gradient_stays_on_its_replica(self):
        model, averaging = toys.fit_slope(
            3, 1, optimizer=lambda: toys.sgd(gradient_accumulation_steps=2)
        )
        # Step 2 averages; step 3 accumulates; the end of fit must average.
        assert averaging.averager.rounds == 2
        (accumulator,) = [
            v for v in model.optimizer.variables if "accumulator" in v.path
        ]
        # At w = 5.5 the gradients are 2w on A and 8w - 64 on B.
        assert toys.scalars(accumulator) == [11.0, -20.0]
        assert toys.scalars(model.trainable_variables[0]) == [5.5, 5.5]

    def test_print_nothing(self, capsys):
        toys.fit_slope(2, 1)
        assert capsys.readouterr().out == ""


class TestOneReplica:
    def fit(self, make_optimizer, replicas):
        keras.utils.set_random_seed(3)
        build = lambda: keras.Sequential(  # noqa: E731
            [
                layers.Input((6,)),
                layers.Dense(5, activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(2),
            ]
        )
        rng = np.random.default_rng(0)
        x = rng.normal(size=(18, 6)).astype("float32")
        y = rng.normal(size=(18, 2)).astype("float32")
        callbacks = []
        strategy = tf.distribute.get_strategy()
        if replicas:
            strategy = toys.make_strategy(1)
            callbacks = [avg.PeriodicAveraging(2)]
        with strategy.scope():
            model = build()
            model.compile(make_optimizer(), "mse")
            model.optimizer.build(model.trainable_variables)
        history = toys.fit(
            model,
            x,
            y,
            batch_size=4,
            epochs=2,
            callbacks=callbacks,
            validation_data=toys.dataset((x, y), 4),
        )
        state = model.variables + model.optimizer.variables
        return [v.numpy() for v in state], history.history

    # All others are in test_independence.py.
    @pytest.mark.parametrize(
        "name",
        ["SGD", "Adam", "Adagrad", "RMSprop", "ema", "accumulation"]
        + ["loss_scale"],
    )
    def test_equals_plain_keras_bit_for_bit(self, name):
        make = {
            "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
            "accumulation": lambda: optimizers.Adam(
                0.01, gradient_accumulation_steps=2
            ),
            "loss_scale": lambda: optimizers.LossScaleOptimizer(
                optimizers.SGD(0.1)
            ),
        }.get(name, lambda: getattr(optimizers, name)(0.01))
        plain, plain_history = self.fit(make, replicas=0)
        ours, history = self.fit(make, replicas=1)
        for expected, value in zip(plain, ours, strict=True):
            np.testing.assert_array_equal(value, expected)
        assert history == plain_history


class TestPeriodOne:
    """Period 1 and synchronous training on the whole batch."""

    def fit(self, optimizer, replicas):
        keras.utils.set_random_seed(3)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64, 6)).astype("float32")
        y = rng.normal(size=(64, 1)).astype("float32")
        strategy = tf.distribute.get_strategy()
        callbacks = []
        if replicas > 1:
            strategy = toys.make_strategy(replicas)
            callbacks = [avg.PeriodicAveraging(1)]
        with strategy.scope():
            model = keras.Sequential(
                [
                    layers.Input((6,)),
                    layers.Dense(8, activation="tanh"),
                    layers.Dense(1),
                ]
            )
            model.compile(optimizer(), "mse")
        toys.fit(model, x, y, batch_size=8, epochs=2, callbacks=callbacks)
        return np.concatenate([w.ravel() for w in model.get_weights()])

    @pytest.mark.parametrize("replicas", [2, 4])
    @pytest.mark.parametrize(
        "arguments",
        [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    )
    def test_with_sgd_are_the_same(self, arguments, replicas):
        def make():
            return optimizers.SGD(0.1, **arguments)

        # 16 steps of sums taken in another order, each 1e-7 relative.
        np.testing.assert_allclose(
            self.fit(make, replicas), self.fit(make, 1), atol=5e-6
        )

    def test_with_adam_are_not(self):
        def make():
            return optimizers.Adam(0.01)

        difference = np.abs(self.fit(make, 2) - self.fit(make, 1)).max()
        assert difference > 1e-3


class TestXla:
    @pytest.mark.core
    def test_compiles_each_replicas_step(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model(jit_compile=True)
        for steps, expected in [(4, 5.44140625), (4, 5.555423736572265625)]:
            toys.fit(
                model,
                *toys.slope_rows(steps),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(2)],
            )
            assert toys.weight(model) == expected
        assert strategy.training_progress().steps == 8
        # evaluate and predict work, without XLA.
        model.evaluate(*toys.slope_rows(1), verbose=0)

    def test_equals_the_uncompiled_run(self):
        def run(**arguments):
            keras.utils.set_random_seed(3)
            strategy = toys.make_strategy()
            with strategy.scope():
                model = keras.Sequential(
                    [layers.Input((4,)), layers.Dense(8), layers.Dense(1)]
                )
                model.compile(optimizers.Adam(0.01), "mse", **arguments)
            x = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
            toys.fit(
                model,
                x,
                x[:, :1],
                batch_size=8,
                callbacks=[avg.PeriodicAveraging(2)],
            )
            return model.get_weights()

        for ours, compiled in zip(run(), run(jit_compile=True)):
            # XLA fuses and reorders float32 arithmetic.
            np.testing.assert_allclose(compiled, ours, atol=1e-6)

    def test_is_not_left_out(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model(jit_compile=True)
        rows = toys.slope_rows(1)
        toys.fit(
            model, *rows, batch_size=2, callbacks=[avg.PeriodicAveraging(1)]
        )
        x = tf.ones([1, 1])
        graph = (
            tf.function(lambda: strategy.run(model.train_step, args=((x, x),)))
            .get_concrete_function()
            .graph
        )
        definition = graph.as_graph_def()
        nodes = [*definition.node]
        for function in definition.library.function:
            nodes.extend(function.node_def)
        compiled = [
            node.device
            for node in nodes
            if "_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b
        ]
        assert len(set(compiled)) == 2

    @pytest.mark.core
    @pytest.mark.parametrize("jit_compile", [True, False])
    def test_after_compiling_again_trains_with_what_is_new(self, jit_compile):
        with toys.make_strategy().scope():
            model = toys.slope_model(jit_compile=True)
        first = model.optimizer
        averaging = avg.PeriodicAveraging(1)

        def fit():
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[averaging],
            )

        fit()
        assert toys.weight(model) == 5.5
        with model.distribute_strategy.scope():
            model.compile(
                optimizers.SGD(1.0, momentum=0.5),
                "mae",
                jit_compile=jit_compile,
            )
        fit()
        # Slopes of |w * x - y| at 5.5: 1 on A and -2 on B.
        assert toys.weight(model) == 6.0
        assert first.iterations.numpy() == 1
        assert toys.scalars(model.optimizer.iterations) == [1, 1]
        assert toys.scalars(model.optimizer.variables[-1]) == [0.5, 0.5]
        assert averaging.averager.rounds == 2


class TestEma:
    @pytest.mark.parametrize("rule", ["mean", "keep"])
    def test_weights_end_equal_after_the_average_replaced_them(self, rule):
        overrides = {"_average": "keep"} if rule == "keep" else None
        for steps in (3, 4):
            model, _ = toys.fit_slope(
                steps,
                2,
                optimizer=lambda: toys.sgd(use_ema=True, ema_momentum=0.5),
                overrides=overrides,
            )
            first, second = toys.scalars(model.trainable_variables[0])
            assert first == second

    def test_average_is_of_the_averaged_path(self):
        model, _ = toys.fit_slope(
            2, 2, optimizer=lambda: toys.sgd(use_ema=True, ema_momentum=0.5)
        )
        # Keras' average takes the first value whole: A 3 then (3 + 2.25) / 2,
        # B 8 and 8; the mean of 2.625 and 8, which then replaces the weight.
        assert toys.weight(model) == 5.3125


class TestOptimizerFromOutsideTheScope:
    def fit(self, optimizer):
        with toys.make_strategy().scope():
            model = keras.Sequential([layers.Input((1,)), toys.slope_layer()])
        model.compile(optimizer, "mse")
        toys.fit(
            model,
            *toys.slope_rows(4),
            batch_size=2,
            callbacks=[avg.PeriodicAveraging(2)],
        )
        return model

    def test_by_name_is_made_again_inside(self):
        assert len(toys.copies(self.fit("sgd").optimizer.iterations)) == 2

    def test_that_was_told_something_is_refused(self):
        with pytest.raises(ValueError, match="'.*iteration' .* outside. Move"):
            self.fit(toys.sgd())


class TestReuse:
    """One callback in several calls of `fit`."""

    def fit(self, model, averaging, steps=2):
        toys.fit(
            model, *toys.slope_rows(steps), batch_size=2, callbacks=[averaging]
        )

    @pytest.mark.core
    def test_after_compile_the_new_optimizer_is_averaged(self):
        averaging = avg.PeriodicAveraging(2)
        with toys.make_strategy().scope():
            model = toys.slope_model()
            self.fit(model, averaging)
            model.compile(momentum(), "mse")
            self.fit(model, averaging)
        first, second = toys.scalars(model.optimizer.variables[-1])
        assert first == second != 0
        assert (averaging.averager.steps, averaging.averager.rounds) == (4, 2)

    @pytest.mark.core
    def test_a_step_that_calls_a_function_traced_before(self):
        class Fast(toys.CustomStep):
            def __init__(self):
                super().__init__()
                self.fast = tf.function(self.update)

            def train_step(self, data):
                return {"own": self.fast(*data)}

        averaging = avg.PeriodicAveraging(2)
        with toys.make_strategy().scope():
            model = Fast()
            model.compile(toys.sgd())
        self.fit(model, averaging)
        # Traces the step anew, but not what it calls.
        model.make_train_function(force=True)
        self.fit(model, averaging)
        assert (averaging.averager.steps, averaging.averager.rounds) == (4, 2)
        assert toys.weight(model) == 5.44140625

    def test_on_another_model_it_starts_anew(self):
        averaging = avg.PeriodicAveraging(2)
        for _ in range(2):
            with toys.make_strategy().scope():
                model = toys.slope_model()
            self.fit(model, averaging)
            assert averaging.averager.rounds == 1
            assert toys.weight(model) == 5.125

    def test_rows_of_another_model_do_not_count(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            models = [toys.slope_model() for _ in range(2)]
        mine, other = avg.PeriodicAveraging(1), avg.PeriodicAveraging(1)
        self.fit(models[0], mine, steps=1)
        x, y = toys.slope_rows(3)
        toys.fit(models[1], x, y, batch_size=1, callbacks=[other])
        self.fit(models[0], mine, steps=1)
        assert toys.weight(models[0]) == 6.0625

    def test_in_a_list_of_callbacks_that_is_used_again_after_an_error(self):
        class Fails(keras.callbacks.Callback):
            fails = True

            def on_train_batch_end(self, batch, logs=None):
                if self.fails:
                    raise RuntimeError("once")

        with toys.make_strategy().scope():
            model = toys.slope_model()
        fails = Fails()
        callbacks = keras.callbacks.CallbackList(
            [avg.PeriodicAveraging(1), fails], add_history=True, model=model
        )
        with pytest.raises(RuntimeError, match="once"):
            model.fit(*toys.slope_rows(2), batch_size=2, callbacks=callbacks)
        fails.fails = False
        model.fit(*toys.slope_rows(2), batch_size=2, callbacks=callbacks)
        first, second = toys.scalars(model.trainable_variables[0])
        assert first == second

    def test_in_a_custom_loop_without_parameters(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        callbacks = keras.callbacks.CallbackList(
            [avg.PeriodicAveraging(2)], model=model
        )
        callbacks.on_train_begin()
        data = toys.dataset(toys.slope_rows(4), 2)
        for step, batch in enumerate(
            strategy.experimental_distribute_dataset(data)
        ):
            callbacks.on_train_batch_begin(step)
            strategy.run(model.train_step, args=(batch,))
            callbacks.on_train_batch_end(step)
        callbacks.on_train_end()
        assert toys.weight(model) == 5.44140625


class TestAccumulation:
    """Half accumulated gradients and rounds."""

    def test_a_replica_that_missed_a_batch_starts_its_gradient_anew(self):
        with toys.make_strategy().scope():
            model = toys.slope_model(toys.sgd(gradient_accumulation_steps=2))
        averaging = avg.PeriodicAveraging(1)
        x, y = toys.slope_rows(2)
        # The second batch has no row for replica 1.
        toys.fit(model, x[:3], y[:3], batch_size=2, callbacks=[averaging])
        (accumulator,) = [
            v for v in model.optimizer.variables if "accumulator" in v.path
        ]
        assert toys.scalars(model.optimizer.variables[0]) == [2, 2]
        assert toys.scalars(accumulator) == [0.0, 0.0]

    def test_rounds_wait_for_updates_also_after_a_fit_that_ended_between(self):
        with toys.make_strategy().scope():
            model = toys.slope_model(toys.sgd(gradient_accumulation_steps=2))
        averaging = avg.PeriodicAveraging(1)
        x, y = toys.slope_rows(3)
        toys.fit(model, x[:2], y[:2], batch_size=2)
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(averaging.averager.rounds)

        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        # Batch 1 completes the update that was begun; 2 accumulates; 3
        # completes the next one.
        assert seen == [1, 1, 2]


class TestDescribe:
    def test_after_fit(self):
        _, averaging = toys.fit_slope(2, 1, optimizer=momentum)
        assert "kernel_momentum" in averaging.describe()

    def test_before_fit_is_an_error(self):
        with pytest.raises(RuntimeError, match="from the start of `fit` on"):
            avg.PeriodicAveraging(1).describe()


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"period": 0}, ValueError, "period=0"),
            ({"period": -3}, ValueError, "period=-3"),
            ({"period": 2.5}, TypeError, "period=2.5"),
            ({"period": "16"}, TypeError, "period='16'"),
            ({"period": True}, TypeError, "period=True"),
            ({"period": 2, "slots": "sum"}, ValueError, "slots='sum'"),
            ({"period": 2, "warmup_steps": 1.0}, TypeError, "warmup_steps"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        with pytest.raises(error, match=f"Received.*{message}"):
            avg.PeriodicAveraging(**arguments)

    def refused(self, message, callbacks=None, **arguments):
        """Fails with the message and leaves the model as it was."""
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model(momentum(), **arguments)
        with pytest.raises(ValueError, match=message):
            toys.fit(
                model, *toys.slope_rows(2), batch_size=2, callbacks=callbacks
            )
        assert toys.scalars(model.trainable_variables[0]) == [4.0, 4.0]
        assert model.optimizer.iterations.numpy() == 0

    def test_a_pattern_without_a_variable(self):
        self.refused(
            "'nothing'.*Paths",
            [avg.PeriodicAveraging(1, overrides={"nothing": "keep"})],
        )

    def test_two_in_one_fit(self):
        self.refused(
            "one `PeriodicAveraging` in a `fit`.*period=2.* and .*period=3",
            [avg.PeriodicAveraging(2), avg.PeriodicAveraging(3)],
        )

    def test_the_same_one_twice_in_one_fit(self):
        averaging = avg.PeriodicAveraging(2)
        self.refused("one `PeriodicAveraging`", [averaging, averaging])

    @pytest.mark.parametrize(
        ("period", "accumulation", "executed", "fix"),
        [(2, None, 3, 3), (5, None, 4, 8), (3, 2, 4, 4)],
    )
    def test_a_period_that_steps_per_execution_does_not_divide(
        self, period, accumulation, executed, fix
    ):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model(
                toys.sgd(gradient_accumulation_steps=accumulation),
                steps_per_execution=executed,
            )
        with pytest.raises(
            ValueError, match=f"period={period} .*Pass period={fix} "
        ):
            toys.fit(
                model,
                *toys.slope_rows(2),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(period)],
            )

    def test_a_warm_up_with_several_steps_per_execution(self):
        self.refused(
            "`warmup_steps` needs a callback after every step",
            [avg.PeriodicAveraging(2, warmup_steps=2)],
            steps_per_execution=2,
        )

    def test_nothing_of_the_model_is_changed_by_an_error(self):
        with toys.make_strategy().scope():
            model = keras.Sequential([layers.Input((1,)), toys.slope_layer()])
        model.compile("sgd", "mse", jit_compile=True, steps_per_execution=2)
        optimizer = model.optimizer
        with pytest.raises(ValueError, match="must be a multiple"):
            toys.fit(
                model,
                *toys.slope_rows(2),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(3)],
            )
        assert model.optimizer is optimizer
        assert model.jit_compile

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda: tf.distribute.get_strategy(), "_Default"),
            (
                lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
                "MirroredStrategy",
            ),
            (
                tf.distribute.MultiWorkerMirroredStrategy,
                "CollectiveAllReduceStrategy|MultiWorkerMirroredStrategy",
            ),
        ],
    )
    def test_another_strategy(self, make, name):
        with make().scope():
            model = toys.slope_model()
        with pytest.raises(
            ValueError, match=f"needs a `ParameterAv.*under ({name}).*Make"
        ):
            model.fit(
                *toys.slope_rows(2),
                verbose=0,
                callbacks=[avg.PeriodicAveraging(1)],
            )
        assert toys.weight(model) == 4.0

    def test_a_model_from_outside_the_scope(self):
        model = toys.slope_model()
        with (
            toys.make_strategy().scope(),
            pytest.raises(
                ValueError, match="variable .*kernel.* outside. Move"
            ),
        ):
            toys.fit(
                model,
                *toys.slope_rows(2),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(1)],
            )
