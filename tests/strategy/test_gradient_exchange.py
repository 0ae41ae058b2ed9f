"""Synchronous steps: equal to one device on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg
from tf_avgstrategy.strategy import gradient_exchange

# After steps 1, 2, 3: replica means of T1, which SGD makes of mean gradients.
T1_PATH = [5.5, 6.0625, 6.2734375]


def network(optimizer, **options):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8, "tanh"),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True) * 3


def compare(make, count=27, replicas=2, **options):
    """Differences to one device: of weights, of logs. Batches of 6 rows."""
    data = toys.dataset(rows(count), 6)
    alone = network(make(), **options)
    # Keras' ScheduleFreeAdamW is another one if a step builds it.
    alone.optimizer.build(alone.trainable_variables)
    expected = toys.fit(alone, data, epochs=2).history
    strategy = toys.make_strategy(replicas, gradient_sync="worker")
    with strategy.scope():
        model = network(make(), **options)
    averaging = avg.PeriodicAveraging(4)
    history = toys.fit(model, data, epochs=2, callbacks=[averaging]).history
    toys.assert_replicas_equal(model)
    assert int(model.optimizer.iterations.numpy()) == int(
        alone.optimizer.iterations.numpy()
    )
    return (
        max(
            np.abs(a - b).max()
            for a, b in zip(model.get_weights(), alone.get_weights())
        ),
        max(
            np.abs(np.subtract(history[k], expected[k])).max() for k in expected
        ),
    )


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, clipvalue=0.25),
    "accumulation": lambda: keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2
    ),
    "ema": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=16.0
    ),
    **{
        name: lambda name=name: getattr(keras.optimizers, name)(0.01)
        for name in (
            # Whole variables in one number, a step by signs, matrices, two
            # sets of weights.
            "Lamb",
            "Lion",
            "Muon",
            "ScheduleFreeAdamW",
        )
        if hasattr(keras.optimizers, name)
    },
}


class TestWithinAWorker:
    @pytest.mark.core
    def test_t1(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            model = toys.slope_model()
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        averaging = avg.PeriodicAveraging(10)
        x, y = toys.slope_rows(3)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        assert seen == [[w, w] for w in T1_PATH]
        assert averaging.averager.rounds == 1

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_equals_one_device_on_the_whole_batch(self, name):
        # The last batch has 3 rows: 2 and 1. Sums of float32 in another order;
        # Adam and its kind divide numbers that may be small.
        weights, logs = compare(OPTIMIZERS[name])
        assert weights < 2e-5
        assert logs < 2e-4

    def test_a_replica_without_rows_takes_the_step_too(self):
        # The last batch has 1 row.
        for make in (OPTIMIZERS["global_clipnorm"], OPTIMIZERS["accumulation"]):
            weights, logs = compare(make, count=25)
            assert weights < 2e-5
            assert logs < 2e-4

    def test_several_steps_an_execution(self):
        weights, _ = compare(
            OPTIMIZERS["SGD"], count=25, replicas=3, steps_per_execution=4
        )
        assert weights < 2e-5

    def test_an_infinite_gradient_of_one_skips_the_step_of_all(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(
                toys.sgd(), initial_scale=4.0
            )
            model = toys.slope_model(optimizer)
        x, y = toys.slope_rows(2)
        y[1] = np.inf  # Replica B in step 1.
        toys.fit(
            model,
            x,
            y,
            batch_size=2,
            callbacks=[avg.PeriodicAveraging(10)],
        )
        assert toys.scalars(optimizer.dynamic_scale) == [2.0, 2.0]
        assert toys.scalars(optimizer.inner_optimizer.iterations) == [1.0, 1.0]
        assert toys.scalars(model.trainable_variables[0]) == [5.5, 5.5]

    def test_two_optimizers_in_one_step(self):
        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.one, self.two = toys.slope_layer(), toys.slope_layer()
                self.optimizers = [toys.sgd(), toys.sgd()]

            def call(self, x):
                return self.one(x) + self.two(x)

            def train_step(self, data):
                x, y = data
                for layer, optimizer in zip(
                    (self.one, self.two), self.optimizers
                ):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(tf.square(layer(x) - y))
                    weights = layer.trainable_variables
                    optimizer.apply_gradients(
                        zip(tape.gradient(loss, weights), weights)
                    )
                return {"loss": loss}

        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            model = Two()
            model.compile()
            for layer, optimizer in zip(
                (model.one, model.two), model.optimizers
            ):
                layer.build((None, 1))
                optimizer.build(layer.trainable_variables)
        x, y = toys.slope_rows(2)
        toys.fit(
            model, x, y, batch_size=2, callbacks=[avg.PeriodicAveraging(10)]
        )
        for layer in (model.one, model.two):
            assert toys.scalars(layer.kernel) == [T1_PATH[1]] * 2

    def test_a_table_that_all_replicas_look_into(self):
        strategy = toys.make_strategy(
            gradient_sync="worker", timeout_seconds=20
        )
        with strategy.scope():
            inputs = layers.Input((1,), dtype="string")
            lookup = layers.StringLookup(vocabulary=["a", "b"])
            numbers = layers.Rescaling(1.0)(lookup(inputs))
            model = keras.Model(inputs, toys.slope_layer()(numbers))
            model.compile(toys.sgd(), "mse")
        x = np.array([["a"], ["b"]])
        y = np.array([[0.0], [16.0]], "float32")
        # Index 1 and 2 are the inputs of T1.
        toys.fit(
            model, x, y, batch_size=2, callbacks=[avg.PeriodicAveraging(10)]
        )
        assert toys.weight(model) == T1_PATH[0]

    def test_a_gradient_whose_shape_is_not_known(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((2, 1)), toys.slope_layer(), layers.Flatten()]
            )
            model.compile(toys.sgd(), "mse")
        x = np.array([[[1.0], [1.0]], [[2.0], [2.0]]], "float32")
        y = np.array([[0.0, 0.0], [16.0, 16.0]], "float32")
        toys.fit(
            model, x, y, batch_size=2, callbacks=[avg.PeriodicAveraging(10)]
        )
        assert toys.weight(model) == T1_PATH[0]

    @pytest.mark.parametrize("with_variables", [True, False])
    def test_slices_of_an_embedding(self, with_variables):
        # 0.125 times the mean gradient, 2 * (w - y) / 2, of the rows' entries.
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            embedding = layers.Embedding(3, 1, embeddings_initializer="ones")
            embedding.build((None, 1))
            optimizer = toys.sgd()
            optimizer.build(embedding.trainable_variables)

        def update(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(embedding(x)))
            gradients = tape.gradient(loss, embedding.trainable_variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            variables = [embedding.trainable_variables] * with_variables
            optimizer.apply(gradients, *variables)

        step = tf.function(lambda x: strategy.run(update, args=(x,)))
        data = tf.data.Dataset.from_tensor_slices([[0], [2]]).batch(2)
        for x in strategy.experimental_distribute_dataset(data):
            step(x)
        for copy in toys.copies(embedding.embeddings):
            assert copy.ravel().tolist() == [0.875, 1.0, 0.875]

    def test_statistics_stay_local_until_a_round(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            model = keras.Sequential(
                [
                    layers.Input((1,)),
                    layers.BatchNormalization(momentum=0.5),
                    toys.slope_layer(),
                ]
            )
            model.compile(toys.sgd(), "mse")
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.layers[0].moving_mean))

        x = np.array([[2.0], [2.0], [6.0], [6.0], [4.0]], "float32")
        toys.fit(
            model,
            x,
            x,
            batch_size=4,
            callbacks=[avg.PeriodicAveraging(10), Look()],
        )
        # Replica 1 has no rows in the last batch.
        assert seen == [[1.0, 3.0], [2.5, 3.0]]
        assert (
            toys.scalars(model.layers[0].moving_mean)
            == [pytest.approx((3 * 2.5 + 2 * 3.0) / 5, rel=1e-6)] * 2
        )

    def test_custom_loop(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            model = toys.CustomStep()
            model.compile(toys.sgd())
            model(tf.zeros([1, 1]))
            model.optimizer.build(model.trainable_variables)
        step = tf.function(lambda *args: strategy.run(model.update, args=args))
        data = toys.dataset(toys.slope_rows(3), 2)
        for x, y in strategy.experimental_distribute_dataset(data):
            step(x, y)
        assert toys.scalars(model.trainable_variables[0]) == [T1_PATH[2]] * 2

    def test_strategies_do_not_disturb_each_other(self):
        models = []
        for _ in range(2):
            with toys.make_strategy(gradient_sync="worker").scope():
                models.append(toys.slope_model())
        x, y = toys.slope_rows(1)
        for _ in range(2):
            for model in models:
                toys.fit(
                    model,
                    x,
                    y,
                    batch_size=2,
                    callbacks=[avg.PeriodicAveraging(10)],
                )
        assert [toys.weight(model) for model in models] == [T1_PATH[1]] * 2

    def test_one_replica_exchanges_nothing(self):
        strategy = toys.make_strategy(1, gradient_sync="global")
        assert strategy.extended.exchange is None


class TestWarmUp:
    @pytest.mark.parametrize("base", ["none", "worker"])
    def test_gradients_first_then_local_steps(self, base):
        strategy = toys.make_strategy(gradient_sync=base)
        with strategy.scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(2, warmup_steps=2, warmup="gradients")
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        x, y = toys.slope_rows(4)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        # From 6.0625 on two local steps: A 3.41015625, B 8.
        path = [5.5, 6.0625, [4.546875, 8.0], 5.705078125]
        if base == "worker":
            path = [5.5, 6.0625, 6.2734375, 6.3525390625]
        assert seen == [w if isinstance(w, list) else [w, w] for w in path]
        assert averaging.averager.rounds == 2

    def test_local_steps_are_untouched_afterwards(self):
        """Bit for bit, on numbers that are not exact."""

        def train(**options):
            with toys.make_strategy().scope():
                model = network(keras.optimizers.Adam(0.01))
            # 3 rows a replica: times 3 and divided by 3 is not the same.
            toys.fit(
                model,
                *rows(24),
                batch_size=6,
                callbacks=[avg.PeriodicAveraging(2, **options)],
            )
            return model.get_weights()

        model = train(warmup_steps=0, warmup="gradients")
        for ours, plain in zip(model, train()):
            np.testing.assert_array_equal(ours, plain)

    def test_of_a_model_that_was_traced_before(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model, other = toys.slope_model(), toys.slope_model()
        x, y = toys.slope_rows(1)
        toys.fit(
            model, x, y, batch_size=2, callbacks=[avg.PeriodicAveraging(1)]
        )
        for trained in (other, model):
            warm_up = avg.PeriodicAveraging(9, 2, warmup="gradients")
            toys.fit(trained, x, y, batch_size=2, callbacks=[warm_up])
        toys.assert_replicas_equal(model)
        assert toys.weight(model) == T1_PATH[1]

    def test_of_a_loop_that_was_traced_before(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        step = tf.function(lambda data: strategy.run(model.train_step, (data,)))
        data = [tf.constant([[number]]) for number in toys.ROW_B]
        step(data)
        averager = avg.ParameterAverager(
            strategy,
            model.variables,
            model.optimizer,
            period=4,
            warmup_steps=2,
            warmup="gradients",
        )
        step(data)
        with pytest.raises(RuntimeError, match="traced after the averager"):
            averager.step()

    def test_it_ends_with_fit(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            model, eager = (
                toys.slope_model(),
                toys.slope_model(run_eagerly=True),
            )
        x, y = toys.slope_rows(1)
        warm_up = avg.PeriodicAveraging(4, 4, warmup="gradients")
        toys.fit(model, x, y, batch_size=2, callbacks=[warm_up])
        assert not strategy.extended.exchange.is_in_force
        toys.fit(
            eager, x, y, batch_size=2, callbacks=[avg.PeriodicAveraging(1)]
        )
        assert toys.weight(eager) == T1_PATH[0]

    def test_an_unknown_warm_up_is_refused(self):
        with pytest.raises(ValueError, match="`warmup` .*'gradients'.*'both'"):
            avg.PeriodicAveraging(2, 2, warmup="both")


class TestErrors:
    def test_unknown(self):
        with pytest.raises(
            ValueError, match="'none', 'worker', 'global'.*'all'"
        ):
            toys.make_strategy(gradient_sync="all")

    def test_a_device_that_is_not_there(self):
        with pytest.raises(ValueError, match="device of its own.*CPU:99"):
            avg.ParameterAveragingStrategy(
                ["CPU:0", "CPU:99"], gradient_sync="worker"
            )

    def test_eager_steps(self):
        with toys.make_strategy(gradient_sync="worker").scope():
            model = toys.slope_model(run_eagerly=True)
        with pytest.raises(
            ValueError, match="`tf.function`.*run_eagerly=False"
        ):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(2)],
            )

    def test_xla(self):
        with toys.make_strategy(gradient_sync="worker").scope():
            model = toys.slope_model(jit_compile=True)
        with pytest.raises(ValueError, match="XLA cannot .*jit_compile=False"):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=2,
                callbacks=[avg.PeriodicAveraging(2)],
            )

    def test_xla_of_an_earlier_fit(self):
        with toys.make_strategy().scope():
            model = toys.slope_model(jit_compile=True)
        x, y = toys.slope_rows(1)
        for options in ({}, {"warmup_steps": 2, "warmup": "gradients"}):
            averaging = avg.PeriodicAveraging(2, **options)
            if options:
                with pytest.raises(ValueError, match="XLA cannot compile"):
                    toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
            else:
                toys.fit(model, x, y, batch_size=2, callbacks=[averaging])

    @pytest.mark.parametrize("gradient_sync", ["none", "worker"])
    def test_no_gradient_at_all(self, gradient_sync):
        """As Keras says it."""
        strategy = toys.make_strategy(gradient_sync=gradient_sync)
        with strategy.scope():
            optimizer = toys.sgd()
            weight = tf.Variable(1.0)
            optimizer.build([weight])

        @tf.function
        def step():
            strategy.run(lambda: optimizer.apply([None], [weight]))

        with pytest.raises(ValueError, match="No gradients provided"):
            step()

    def test_an_optimizer_that_is_not_built(self):
        strategy = toys.make_strategy(gradient_sync="worker")
        with strategy.scope():
            optimizer = toys.sgd()
            weight = tf.Variable(1.0)

        @tf.function
        def step():
            strategy.run(lambda: optimizer.apply([weight + 1.0], [weight]))

        with pytest.raises(ValueError, match="built before.*optimizer.build"):
            step()

    def test_a_communicator_that_cannot(self):
        strategy = toys.make_strategy(
            communicator=toys.TwinCommunicator(), gradient_sync="global"
        )
        with strategy.scope():
            model = toys.slope_model()
        with pytest.raises(ValueError, match="needs a communicator.*Twin"):
            toys.fit(
                model,
                *toys.slope_rows(1),
                batch_size=4,
                callbacks=[avg.PeriodicAveraging(2)],
            )


def test_keys_tell_shapes_and_places_apart():
    keys = {
        gradient_exchange._key(kind, call, place, tf.zeros([size], dtype))
        for kind in ("sum", "tell", "workers")
        for call in range(3)
        for place in range(5)
        for size in (1, 2, 30)
        for dtype in (tf.float32, tf.float64)
    }
    assert len(keys) == 3 * 3 * 5 * 3 * 2
    assert all(0 <= key < 2**30 for key in keys)
