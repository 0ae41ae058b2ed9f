"""`fit` takes what it takes in Keras, and ends with equal replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg

X = np.random.default_rng(0).normal(size=(37, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def dense_model(**arguments):
    model = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], **arguments)
    return model


def named_model():
    a = layers.Input((3,), name="a")
    b = layers.Input((2,), name="b")
    hidden = layers.Concatenate()([a, b])
    outputs = {
        "one": layers.Dense(1, name="one")(hidden),
        "two": layers.Dense(2, name="two")(hidden),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("adam", {"one": "mse", "two": "mae"})
    return model


def train(build, *data, replicas=2, period=2, **arguments):
    strategy = toys.make_strategy(replicas)
    with strategy.scope():
        model = build()
    averaging = avg.PeriodicAveraging(period)
    history = model.fit(
        *data, verbose=0, callbacks=[averaging], **arguments
    ).history
    toys.assert_replicas_equal(model)
    for values in history.values():
        assert np.isfinite(values).all()
    for variable in model.variables:
        if variable.dtype == "float32":
            assert np.isfinite(variable.numpy()).all()
    return model, averaging, history


def dataset(*arrays, batch_size=8):
    return toys.dataset(arrays if len(arrays) > 1 else arrays[0], batch_size)


class TestInputs:
    @pytest.mark.core
    def test_numpy_arrays_with_a_short_last_batch(self):
        _, averaging, _ = train(dense_model, X, Y, batch_size=8)
        assert averaging.averager.steps == 5

    def test_tf_data(self):
        train(dense_model, dataset(X, Y))

    @pytest.mark.parametrize("kind", ["arrays", "tf.data"])
    def test_dicts_and_several_outputs(self, kind):
        data = ({"a": X, "b": X[:, :2]}, {"one": Y, "two": X[:, :2]})
        if kind == "arrays":
            train(named_model, *data, batch_size=8)
        else:
            train(named_model, dataset(*data))

    def test_tuples(self):
        def build():
            a, b = layers.Input((3,)), layers.Input((2,))
            out = layers.Dense(1)(layers.Concatenate()([a, b]))
            model = keras.Model([a, b], out)
            model.compile("adam", "mse")
            return model

        train(build, (X, X[:, :2]), Y, batch_size=8)

    def test_sample_weights_and_class_weights(self):
        train(dense_model, X, Y, batch_size=8, sample_weight=np.ones(37))

        def build():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
            return model

        labels = (Y[:, 0] > 0).astype("int32")
        train(build, X, labels, batch_size=8, class_weight={0: 1.0, 1: 2.0})

    def test_validation_split_and_several_epochs(self):
        _, averaging, history = train(
            dense_model,
            X,
            Y,
            batch_size=8,
            epochs=2,
            validation_split=0.2,
            period=100,
        )
        assert len(history["val_loss"]) == 2
        assert averaging.averager.rounds == 2

    def test_a_dataset_from_a_function(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = dense_model()
        data = strategy.distribute_datasets_from_function(
            lambda context: dataset(X, Y, batch_size=4)
        )
        toys.fit(
            model,
            data,
            steps_per_epoch=3,
            callbacks=[avg.PeriodicAveraging(2)],
        )
        toys.assert_replicas_equal(model)

    def test_sparse_tensors(self):
        def build():
            model = keras.Sequential(
                [layers.Input((3,), sparse=True), layers.Dense(1)]
            )
            model.compile("adam", "mse")
            return model

        data = dataset(X, Y).map(lambda x, y: (tf.sparse.from_dense(x), y))
        train(build, data)

    def test_train_on_batch(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = dense_model()
        for _ in range(3):
            loss = model.train_on_batch(X[:8], Y[:8])
            assert np.isfinite(loss).all()


class TestUnevenRows:
    @pytest.mark.parametrize(
        ("rows", "run_eagerly"),
        [(1, False), (3, False), (9, False), (9, True)],
    )
    def test_fewer_rows_than_replicas(self, rows, run_eagerly):
        _, averaging, _ = train(
            lambda: dense_model(run_eagerly=run_eagerly),
            X[:rows],
            Y[:rows],
            batch_size=8,
            replicas=4,
        )
        strategy = averaging.model.distribute_strategy
        assert sum(strategy.training_progress().rows) == rows

    def test_a_replica_without_rows_keeps_everything(self):
        strategy = toys.make_strategy(4)
        with strategy.scope():
            model = keras.Sequential(
                [
                    layers.Input((1,)),
                    layers.BatchNormalization(),
                    toys.slope_layer(),
                ]
            )
            model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
        x = np.arange(1, 6, dtype="float32").reshape(-1, 1)
        toys.fit(model, x[:4], x[:4], batch_size=4)
        state = model.variables + model.optimizer.variables
        before = [toys.copies(variable) for variable in state]
        toys.fit(model, x[4:], x[4:], batch_size=4)
        for variable, values in zip(state, before):
            first, *others = toys.copies(variable)
            np.testing.assert_array_equal(others, values[1:])
            if "moving_mean" in variable.path or "iteration" in variable.path:
                assert not np.array_equal(first, values[0]), variable.path

    def test_metrics_are_those_of_one_device(self):
        strategy = toys.make_strategy(4)
        with strategy.scope():
            model = dense_model()
        plain = dense_model()
        plain.set_weights(model.get_weights())
        for rows in (1, 6, 37):
            ours = model.evaluate(X[:rows], Y[:rows], batch_size=8, verbose=0)
            theirs = plain.evaluate(X[:rows], Y[:rows], batch_size=8, verbose=0)
            # Sums over rows, taken in another order.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)

    def test_predict_gives_every_row_once(self):
        strategy = toys.make_strategy(4)
        with strategy.scope():
            model = dense_model()
        plain = dense_model()
        plain.set_weights(model.get_weights())
        for rows in (1, 9, 37):
            np.testing.assert_allclose(
                model.predict(X[:rows], batch_size=8, verbose=0),
                plain.predict(X[:rows], batch_size=8, verbose=0),
                # Matrix products of other sizes.
                atol=1e-6,
            )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.layers_list = [layers.Dense(3), layers.Dense(1)]
        self.layers_dict = {"dropout": layers.Dropout(0.5)}

    def call(self, x, training=False):
        for layer in self.layers_list:
            x = layer(x)
        return self.layers_dict["dropout"](x, training=training)


class Gan(keras.Model):
    """Two optimizers, built by the first step."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([layers.Input((2,)), layers.Dense(3)])
        self.critic = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(1)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def call(self, x):
        return self.critic(x)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        z = keras.random.normal((tf.shape(x)[0], 2), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.critic(self.generator(z))
            distance = tf.reduce_mean(self.critic(x)) - tf.reduce_mean(fake)
            loss = -distance
        for model, optimizer, goal in (
            (self.critic, self.critic_optimizer, loss),
            (self.generator, self.generator_optimizer, distance),
        ):
            weights = model.trainable_variables
            gradients = tape.gradient(goal, weights)
            optimizer.apply_gradients(zip(gradients, weights))
        return {"distance": distance}


class Counting(layers.Layer):
    def build(self, input_shape):
        self.calls = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros"
        )
        self.called = self.add_weight(
            shape=(), dtype="bool", trainable=False, initializer="zeros"
        )

    def call(self, x):
        self.calls.assign_add(1)
        self.called.assign(True)
        return x


def compiled(build, **arguments):
    def make():
        model = build()
        model.compile("adam", "mse", **arguments)
        return model

    return make


class TestModels:
    @pytest.mark.core
    def test_custom_train_step(self):
        model, averaging, history = train(
            compiled(toys.CustomStep), *toys.slope_rows(2), batch_size=2
        )
        assert averaging.averager.rounds == 1
        assert set(history) == {"own"}

    def test_subclassed_and_not_built_yet(self):
        train(compiled(Subclassed), X, Y, batch_size=8)

    def test_sequential_that_is_not_built_yet(self):
        train(
            compiled(lambda: keras.Sequential([layers.Dense(1)])),
            X,
            Y,
            batch_size=8,
        )

    def test_two_optimizers_that_the_first_step_builds(self):
        def build():
            model = Gan()
            model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
            return model

        model, averaging, _ = train(build, X, batch_size=8)
        for optimizer in (model.generator_optimizer, model.critic_optimizer):
            for variable in optimizer.variables:
                first, second = toys.copies(variable)
                np.testing.assert_array_equal(first, second)
        table = averaging.describe()
        assert table.count("velocity") >= 4

    def test_frozen_layers(self):
        def build():
            model = dense_model()
            model.layers[0].trainable = False
            model.compile("adam", "mse")
            return model

        # Rounds of three replicas must not move what nobody trains.
        model, _, _ = train(build, X, Y, batch_size=8, replicas=3, period=1)
        kernel = model.layers[0].kernel
        before = toys.copies(kernel)
        toys.fit(
            model,
            X,
            Y,
            batch_size=8,
            epochs=3,
            callbacks=[avg.PeriodicAveraging(1)],
        )
        np.testing.assert_array_equal(toys.copies(kernel), before)

    def test_tied_weights(self):
        def build():
            tokens = layers.Input((3,), dtype="int32")
            embedding = layers.Embedding(5, 4, name="tied")
            hidden = layers.GlobalAveragePooling1D()(embedding(tokens))
            logits = layers.Lambda(
                lambda h: keras.ops.matmul(
                    h, keras.ops.transpose(embedding.embeddings)
                ),
                output_shape=(5,),
            )(hidden)
            model = keras.Model(tokens, logits)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
            return model

        tokens = np.random.default_rng(0).integers(0, 5, (24, 3))
        model, averaging, _ = train(build, tokens, tokens[:, 0], batch_size=4)
        # The table and its momentum, once each.
        assert averaging.averager.bytes_per_round == 2 * 5 * 4 * 4
        assert len(model.trainable_variables) == 1

    def test_integer_and_bool_state(self):
        def build():
            model = keras.Sequential(
                [layers.Input((3,)), Counting(), layers.Dense(1)]
            )
            model.compile("adam", "mse")
            return model

        model, _, _ = train(build, X, Y, batch_size=8)
        calls, called = model.layers[0].variables
        assert toys.scalars(calls) == [5, 5]
        assert toys.scalars(called) == [1, 1]

    def test_string_inputs_and_lookup_tables(self):
        def build():
            words = layers.Input((1,), dtype="string")
            tokens = layers.StringLookup(vocabulary=["a", "b"])(words)
            hidden = layers.Flatten()(layers.Embedding(3, 4)(tokens))
            model = keras.Model(words, layers.Dense(1)(hidden))
            model.compile("adam", "mse")
            return model

        words = np.array([["a"], ["b"], ["c"], ["a"], ["b"]])
        train(build, dataset(words, np.ones([5, 1], "float32"), batch_size=2))


class TestEagerly:
    def test_a_step_may_read_numbers_also_without_rows_for_all(self):
        class Model(toys.CustomStep):
            def train_step(self, data):
                loss = super().train_step(data)["own"]
                return {"loss": loss, "seen": float(loss.numpy())}

        x, y = toys.slope_rows(2)
        train(compiled(Model, run_eagerly=True), x[:3], y[:3], batch_size=2)


class TestCompileArguments:
    @pytest.mark.core
    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
    def test_mixed_precision(self, policy):
        keras.config.set_dtype_policy(policy)
        model, _, _ = train(dense_model, X, Y, batch_size=8)
        assert model.layers[0].kernel.dtype == "float32"

    @pytest.mark.parametrize(
        "arguments",
        [{"run_eagerly": True}, {"steps_per_execution": 2}],
    )
    def test_they_change_nothing(self, arguments):
        def weights(**arguments):
            keras.utils.set_random_seed(0)

            def build():
                model = dense_model()
                # Adam would blow up the rounding of gradients that are 0.
                model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
                return model

            model, _, _ = train(build, dataset(X, Y))
            return model.get_weights()

        for ours, expected in zip(weights(**arguments), weights()):
            # Eager ops are not fused into the same kernels.
            np.testing.assert_allclose(ours, expected, atol=1e-6)
