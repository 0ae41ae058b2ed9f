"""MATH-01 to MATH-07: the mean and what it is taken of."""

import keras
import numpy as np
import pytest
import toys
from keras import layers

import tf_avgstrategy as avg


@pytest.mark.parametrize("replicas", [2, 4])
def test_math_01_a_mean_and_not_a_sum_of_changes(replicas):
    strategy = toys.make_strategy(replicas)
    with strategy.scope():
        model = toys.slope_model()
    rows = (toys.ROW_A, toys.ROW_B) * (replicas // 2)
    toys.fit(
        model,
        *toys.slope_rows(2, rows),
        batch_size=replicas,
        callbacks=[avg.PeriodicAveraging(2)],
    )
    # Added changes would give 6.25 and 8.5.
    assert toys.weight(model) == 5.125


def zoo_model():
    image = layers.Input((6, 6, 1))
    hidden = layers.Conv2D(2, 3)(image)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Reshape((4, 8))(hidden)
    hidden = layers.LSTM(3)(hidden)
    token = layers.Input((1,), dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(5, 3)(token))
    out = layers.Dense(1)(layers.Add()([hidden, embedded]))
    model = keras.Model([image, token], out)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def force_round_of_constants(model, strategy, overrides=None):
    """Sets every float variable to the replica's number and averages."""
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    state = [
        variable
        for variable in model.variables + model.optimizer.variables
        if variable.dtype == "float32" and "learning_rate" not in variable.path
    ]
    for variable in state:
        toys.assign_per_replica(variable, range(3))
    averager = avg.ParameterAverager(
        strategy,
        model.variables,
        model.optimizer,
        period=1,
        overrides=overrides,
    )
    averager.average()
    return state


@pytest.mark.core
@pytest.mark.parametrize("variance_rule", ["pooled", "mean"])
def test_math_02_every_variable_of_every_layer_is_averaged(variance_rule):
    strategy = toys.make_strategy(3)
    with strategy.scope():
        model = zoo_model()
    state = force_round_of_constants(
        model, strategy, {"moving_variance": variance_rule}
    )
    # 12 variables of the model, two slots for the 10 that are trained.
    assert len(state) == 12 + 2 * 10
    for variable in state:
        is_variance = variable.path.endswith("moving_variance")
        if is_variance and variance_rule == "pooled":
            # The variance of the means 0, 1, 2 comes on top. A third is not
            # exact in float32.
            np.testing.assert_allclose(
                toys.copies(variable), 1 + 2 / 3, rtol=2e-7
            )
            continue
        for value in toys.copies(variable):
            np.testing.assert_array_equal(
                value, np.ones_like(value), variable.path
            )


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_math_02_equal_replicas_stay_the_single_process(period):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 4)).astype("float32")

    def weights(replicas):
        keras.utils.set_random_seed(0)
        with toys.make_strategy(replicas).scope():
            model = keras.Sequential(
                [layers.Input((4,)), layers.Dense(5), layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse")
        # Each batch holds the same two rows for every replica.
        x = np.repeat(rows.reshape(20, 1, 2, 4), replicas, axis=1)
        x = x.reshape(-1, 4)
        toys.fit(
            model,
            x,
            x[:, :1],
            batch_size=2 * replicas,
            callbacks=[avg.PeriodicAveraging(period)],
        )
        return model.get_weights()

    for ours, alone in zip(weights(3), weights(1), strict=True):
        np.testing.assert_array_equal(ours, alone)


class Rounds(keras.callbacks.Callback):
    """Notes after which steps all variables are equal on all replicas."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        pairs = [toys.copies(v) for v in self.model.trainable_variables]
        equal = [np.array_equal(first, second) for first, second in pairs]
        assert all(equal) or not any(equal)
        if all(equal):
            self.steps.append(int(self.model.optimizer.iterations.numpy()))


@pytest.mark.parametrize("executed", [1, 2, 4])
def test_math_03_the_period_counts_steps_not_variables(executed):
    with toys.make_strategy().scope():
        model = keras.Sequential(
            [
                layers.Input((2,)),
                layers.Dense(2, use_bias=False),
                layers.Dense(2, use_bias=False),
                layers.Dense(1, use_bias=False),
            ]
        )
        model.compile("sgd", "mse", steps_per_execution=executed)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 2)).astype("float32")
    rounds, averaging = Rounds(), avg.PeriodicAveraging(4)
    toys.fit(model, x, x[:, :1], batch_size=2, callbacks=[averaging, rounds])
    assert rounds.steps == [4, 8]
    assert averaging.averager.rounds == 2
    assert toys.scalars(model.optimizer.iterations) == [8, 8]


@pytest.mark.parametrize("executed", [1, 2, 3, 16])
def test_math_03_t1_for_every_steps_per_execution_or_refused(executed):
    def fit():
        return toys.fit_slope(
            8, 2, model_arguments={"steps_per_execution": executed}
        )

    if executed in (1, 2):
        assert toys.weight(fit()[0]) == 5.555423736572265625
    else:
        with pytest.raises(ValueError, match="must be a multiple"):
            fit()


class Tied(keras.Model):
    """One table as embedding and as output projection."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(5, 3)
        self.same = [self.embedding]

    def call(self, tokens):
        hidden = keras.ops.mean(self.embedding(tokens), axis=1)
        return keras.ops.matmul(
            hidden, keras.ops.transpose(self.same[0].embeddings)
        )


def test_math_04_tied_weights_are_exchanged_once():
    strategy = toys.make_strategy()
    with strategy.scope():
        model = Tied()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss)
        model(np.zeros([1, 2], "int32"))
    table = model.embedding.embeddings
    toys.assign_per_replica(table, [2.0, 6.0])
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=1
    )
    averager.average()
    for value in toys.copies(table):
        np.testing.assert_array_equal(value, np.full([5, 3], 4.0))
    # The table and one momentum, 15 elements of 4 bytes each.
    assert averager.bytes_per_round == 2 * 15 * 4
    tokens = np.random.default_rng(0).integers(0, 5, (24, 2))
    averaging = avg.PeriodicAveraging(2)
    toys.fit(model, tokens, tokens[:, 0], batch_size=4, callbacks=[averaging])
    assert averaging.averager.rounds == 3
    assert model.same[0].embeddings is table
    assert len(model.trainable_variables) == 1
    toys.assert_replicas_equal(model)


@pytest.mark.core
@pytest.mark.parametrize(
    ("overrides", "variance"),
    [({}, 5.0), ({"moving_variance": "mean"}, 1.0)],
)
def test_math_05_batch_normalization(overrides, variance, tmp_path):
    strategy = toys.make_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((1,)), layers.BatchNormalization()]
        )
        model.compile("sgd", "mse")
    gamma, beta, moving_mean, moving_variance = model.layers[0].variables
    toys.assign_per_replica(gamma, [1.0, 3.0])
    toys.assign_per_replica(moving_mean, [0.0, 4.0])
    toys.assign_per_replica(moving_variance, [1.0, 1.0])
    avg.ParameterAverager(
        strategy,
        model.variables,
        model.optimizer,
        period=1,
        overrides=overrides,
    ).average()
    assert toys.scalars(gamma) == [2.0, 2.0]
    assert toys.scalars(moving_mean) == [2.0, 2.0]
    assert toys.scalars(moving_variance) == [variance] * 2
    x = np.arange(8, dtype="float32").reshape(-1, 1)
    live = model.evaluate(x, x, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    with toys.make_strategy().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(x, x, batch_size=2, verbose=0) == live
    plain = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        plain.evaluate(x, x, batch_size=2, verbose=0), live, rtol=1e-6
    )


def test_math_06_a_period_longer_than_the_training(tmp_path):
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    rows = toys.slope_rows(1)
    history = toys.fit(
        model,
        *toys.slope_rows(2),
        batch_size=2,
        callbacks=[avg.PeriodicAveraging(10)],
        validation_data=toys.dataset(rows, 2),
    ).history
    assert toys.scalars(model.trainable_variables[0]) == [5.125] * 2
    # (5.125**2 + 5.75**2) / 2.
    assert history["val_loss"] == [29.6640625]
    assert model.evaluate(*rows, verbose=0) == 29.6640625
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(*rows, verbose=0) == 29.6640625


@pytest.mark.parametrize(
    ("rows", "expected"),
    [((3, 1), 3.6875), ((5, 5), 5.125), ((1, 0), 2.25)],
)
def test_math_07_weights_are_divided_by_their_sum_once(rows, expected):
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=10
    )
    toys.assign_per_replica(model.trainable_variables[0], [2.25, 8.0])
    averager.average(rows)
    assert toys.weight(model) == expected


def test_math_07_no_weight_at_all_is_an_error():
    strategy = toys.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=10
    )
    with pytest.raises(ValueError, match="a mean over nothing"):
        averager.average([0, 0])


def test_math_07_equal_weights_stay_what_they_are():
    strategy = toys.make_strategy(3)
    with strategy.scope():
        model = toys.slope_model()
    model.trainable_variables[0].assign([[1.0]])
    avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=10
    ).average([7, 2, 1])
    assert toys.scalars(model.trainable_variables[0]) == [1.0] * 3
