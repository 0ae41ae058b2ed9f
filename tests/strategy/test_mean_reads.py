"""Who looks sees the mean of the replicas, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
# Of replicas with w = 2 and w = 8, on X against zeros. Their mean is 5:
# 25 * (1 + 4 + 9 + 16) / 4.
LOSS = 187.5


def slopes(first=2.0, second=8.0, **compile_arguments):
    """A model whose replicas hold these weights."""
    with toys.make_strategy().scope():
        model = toys.slope_model(**compile_arguments)
    toys.assign_per_replica(model.trainable_variables[0], [first, second])
    return model


def raw(model):
    return model.trainable_variables[0]._value


@pytest.mark.core
@pytest.mark.parametrize("run_eagerly", [False, True])
class TestKeras:
    def test_predict(self, run_eagerly):
        model = slopes(run_eagerly=run_eagerly)
        found = model.predict(X, batch_size=2, verbose=0)
        assert found.ravel().tolist() == [5, 10, 15, 20]
        assert toys.scalars(model.trainable_variables[0]) == [2, 8]

    def test_predict_on_batch_gives_each_row_once(self, run_eagerly):
        model = slopes(run_eagerly=run_eagerly)
        for rows in (4, 3, 1):
            found = model.predict_on_batch(X[:rows])
            assert found.ravel().tolist() == [5, 10, 15, 20][:rows]

    def test_evaluate(self, run_eagerly):
        model = slopes(run_eagerly=run_eagerly)
        # Twice: nothing is left of the first time.
        for _ in range(2):
            assert model.evaluate(X, 0 * X, batch_size=2, verbose=0) == LOSS
        toys.assign_per_replica(model.trainable_variables[0], [4, 6])
        assert model.evaluate(X, 0 * X, batch_size=4, verbose=0) == LOSS
        assert toys.scalars(model.trainable_variables[0]) == [4, 6]

    def test_test_on_batch(self, run_eagerly):
        assert slopes(run_eagerly=run_eagerly).test_on_batch(X, 0 * X) == LOSS

    def test_training_sees_each_replicas_own(self, run_eagerly):
        model = slopes(run_eagerly=run_eagerly)
        toys.fit(model, *toys.slope_rows(1), batch_size=2)
        # 2 * 0.75, and the step on row B that sets w to 8.
        assert toys.scalars(model.trainable_variables[0]) == [1.5, 8]


def test_predict_on_batch_of_several_inputs():
    with toys.make_strategy(3).scope():
        inputs = [layers.Input((1,), name="a"), layers.Input((2,), name="b")]
        model = keras.Model(inputs, layers.Concatenate()(inputs))
    a = np.arange(5, dtype="float32")[:, None]
    b = np.concatenate([10 + a, 20 + a], axis=1)
    found = model.predict_on_batch({"a": a, "b": b})
    np.testing.assert_array_equal(found, np.concatenate([a, b], axis=1))


class Looks(keras.callbacks.Callback):
    """Calls a function after the batch of this number."""

    def __init__(self, batch, function, hook="end"):
        super().__init__()
        self.found = []
        setattr(self, f"on_train_batch_{hook}", self._look)
        self._batch = batch
        self._function = function

    def _look(self, batch, logs=None):
        if batch == self._batch:
            self.found.append(self._function(self.model))


@pytest.mark.core
@pytest.mark.parametrize("hook", ["begin", "end"])
def test_a_look_within_an_epoch_changes_nothing(hook):
    """T1, 8 steps with period 4, looked at after step 2."""

    def look(model):
        model.predict(X, verbose=0)
        model.predict_on_batch(X)
        model.test_on_batch(X, 0 * X)
        return model.evaluate(X, 0 * X, batch_size=2, verbose=0)

    looks = Looks(1 if hook == "end" else 2, look, hook)
    model, averaging = toys.fit_slope(8, period=4, callbacks=[looks])
    untouched, without = toys.fit_slope(8, period=4)
    # 4.6328125 after step 4, on rows A another four times, and 8 on rows B.
    assert toys.weight(untouched) == (4.6328125 * 0.75**4 + 8) / 2
    assert toys.weight(model) == toys.weight(untouched)
    assert averaging.averager.rounds == without.averager.rounds == 2
    assert averaging.averager.steps == without.averager.steps == 8
    # Weights 2.25 and 8, their mean 5.125.
    assert looks.found == [5.125**2 * 7.5]


def test_predict_within_an_epoch_of_four_rows():
    """Their weights then are 2.25 and 8, `get_weights` says 5.125."""
    looks = Looks(1, lambda m: m.predict(np.arange(1.0, 6), verbose=0))
    rows = (toys.ROW_A, toys.ROW_A, toys.ROW_B, toys.ROW_B)
    with toys.make_strategy().scope():
        model = toys.slope_model()
    x, y = toys.slope_rows(2, rows)
    averaging = avg.PeriodicAveraging(4)
    toys.fit(model, x, y, batch_size=4, callbacks=[averaging, looks])
    assert looks.found[0].ravel().tolist() == [
        5.125 * n for n in (1, 2, 3, 4, 5)
    ]


def test_evaluations_within_an_epoch_agree_with_the_file(tmp_path):
    """Also of BatchNormalization, whose statistics replicas own as well."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype("float32")
    y = x[:, :1] * 3

    def look(model):
        path = tmp_path / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        return [
            model.evaluate(x, y, verbose=0),
            model.evaluate(x, y, verbose=0),
            loaded.evaluate(x, y, verbose=0),
        ]

    with toys.make_strategy().scope():
        model = keras.Sequential(
            [
                layers.Input((3,)),
                layers.Dense(4),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.5),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse")
    looks = Looks(2, look)
    averaging = avg.PeriodicAveraging(2)
    toys.fit(model, x, y, batch_size=4, callbacks=[averaging, looks])
    first, second, file = looks.found[0]
    # Sums over rows in another order.
    assert first == second == pytest.approx(file, rel=1e-6)
    assert averaging.averager.rounds == 2


def test_a_look_does_not_reach_a_schedule_by_losses():
    """AdaComm is told the losses of training, in the same bits."""

    def fit(callbacks):
        averaging = avg.PeriodicAveraging(schedule=avg.AdaComm(4, 4))
        with toys.make_strategy().scope():
            model = toys.slope_model()
        x, y = toys.slope_rows(16)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, *callbacks])
        return toys.weight(model), averaging.averager.rounds

    looks = Looks(5, lambda m: m.evaluate(1e3 * X, X, batch_size=2, verbose=0))
    assert fit([looks]) == fit([])
    assert looks.found


class TestRun:
    """Functions of a custom loop."""

    def run(self, model, function, in_graph, args=()):
        strategy = model.distribute_strategy

        def run():
            return strategy.run(function, args=args)

        results = (tf.function(run) if in_graph else run)()
        return [
            np.asarray(result).ravel().tolist()
            for result in strategy.experimental_local_results(results)
        ]

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_what_trains_nothing_sees_the_mean(self, in_graph):
        model = slopes()
        for _ in range(2):
            assert (
                self.run(model, model, in_graph, [X[1:]]) == [[10, 15, 20]] * 2
            )
        assert toys.scalars(raw(model)) == [2, 8]

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_writes_are_seen(self, in_graph):
        model = slopes()
        variable = raw(model)

        def look():
            return variable.read_value()

        def train():
            replica = tf.distribute.get_replica_context()
            number = replica.replica_id_in_sync_group
            variable.assign_add([[2.0 * tf.cast(number, tf.float32)]])

        assert self.run(model, look, in_graph) == [[5], [5]]
        self.run(model, train, in_graph)
        assert self.run(model, look, in_graph) == [[6], [6]]
        variable.assign([[1.0]])
        assert self.run(model, look, in_graph) == [[1], [1]]
        self.run(model, train, in_graph)
        assert self.run(model, look, in_graph) == [[2], [2]]
        assert toys.scalars(variable) == [1, 3]

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_a_round_is_seen(self, in_graph):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        averager = avg.ParameterAverager(
            strategy, model.variables, model.optimizer, period=1
        )
        variable = raw(model)
        self.run(model, lambda: variable.assign([[4.0]]), in_graph)
        toys.assign_per_replica(variable, [2, 8])
        assert self.run(model, model, in_graph, [X[:1]]) == [[5], [5]]
        averager.average(weights=[1, 2])
        assert self.run(model, model, in_graph, [X[:1]]) == [[6], [6]]

    def test_looks_and_steps_in_one_function(self):
        model = slopes()
        strategy = model.distribute_strategy
        variable = raw(model)

        def add():
            replica = tf.distribute.get_replica_context()
            number = tf.cast(replica.replica_id_in_sync_group, tf.float32)
            variable.assign_add([[number]])

        @tf.function
        def all_in_one():
            seen = []
            for _ in range(3):
                seen.append(strategy.run(variable.read_value))
                strategy.run(add)
            return seen

        for start in (5.0, 6.5):
            for place, seen in enumerate(all_in_one()):
                values = strategy.experimental_local_results(seen)
                assert [float(v[0, 0]) for v in values] == [
                    start + place / 2
                ] * 2
        assert toys.scalars(variable) == [2, 14]

    def test_within_loops_and_branches(self):
        model = slopes()
        strategy = model.distribute_strategy
        variable = raw(model)

        @tf.function
        def loop():
            total = tf.zeros([])
            for step in tf.range(3):
                if step != 1:
                    seen = strategy.run(lambda: variable * 2.0)
                    total += strategy.reduce("SUM", seen, axis=None)[0, 0]
                strategy.run(lambda: variable.assign_add([[1.0]]))
            return total

        # 2 replicas that see twice 5, and twice 7.
        assert float(loop()) == 2 * 10 + 2 * 14

    def test_a_gradient_is_of_each_replicas_own_weights(self):
        """Though it is applied later, or nowhere."""
        model = slopes()
        variable = raw(model)

        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(variable))
            return tape.gradient(loss, variable)

        for in_graph in (False, True, True):
            assert self.run(model, gradient, in_graph) == [[4], [16]]
        assert model.distribute_strategy.training_progress().steps == 0

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_what_a_function_writes_is_its_own(self, in_graph):
        """Statistics that are counted again belong to each replica."""
        strategy = toys.make_strategy()
        with strategy.scope():
            weight = tf.Variable(0.0)
            total = tf.Variable(0.0, trainable=False)
        toys.assign_per_replica(weight, [2, 8])
        toys.assign_per_replica(total, [10, 20])

        def count():
            return total.assign(total + weight)

        def run():
            return strategy.run(count)

        (tf.function(run) if in_graph else run)()
        assert toys.scalars(total) == [15, 25]
        assert toys.scalars(weight) == [2, 8]

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_integers_and_embeddings(self, in_graph):
        strategy = toys.make_strategy()
        with strategy.scope():
            table = tf.Variable([[0.0], [0.0], [0.0]])
            count = tf.Variable(0, trainable=False)
        toys.assign_per_replica(table, [2, 8])
        toys.assign_per_replica(count, [3, 4])

        def look():
            return tf.gather(table, [2, 0]), count.read_value()

        def run():
            return strategy.run(look)

        rows, counts = (tf.function(run) if in_graph else run)()
        for values in strategy.experimental_local_results(rows):
            assert values.numpy().tolist() == [[5], [5]]
        # Outside of replicas a counter reads as replica 0's, too.
        for value in strategy.experimental_local_results(counts):
            assert int(value) == 3

    def test_eager_step_that_is_new_where_replicas_differ(self):
        """It reads before it is seen to train, and runs once all the same."""
        model = slopes()
        variable = raw(model)

        def step():
            variable.assign(variable * 2.0 - 1.0)

        self.run(model, step, in_graph=False)
        assert toys.scalars(variable) == [3, 15]

    def test_eager_step_that_was_not_seen_to_train_in_time(self):
        strategy = toys.make_strategy()
        with strategy.scope():
            weight = tf.Variable(0.0)
            other = tf.Variable(0.0, trainable=False)
        toys.assign_per_replica(weight, [2, 8])

        def step():
            other.assign(1.0)
            weight.assign(weight * 2.0)

        with pytest.raises(RuntimeError, match="that has written a variable"):
            strategy.run(step)
        assert toys.scalars(weight) == [2, 8]
        # Now it is known.
        strategy.run(step)
        assert toys.scalars(weight) == [4, 16]

    def test_an_error_leaves_replicas_as_they_were(self):
        model = slopes()

        @tf.function
        def fails(x):
            def look(x):
                y = model(x)
                tf.debugging.assert_less(y, 3.0)
                return y

            return model.distribute_strategy.run(look, args=(x,))

        with pytest.raises(tf.errors.InvalidArgumentError):
            fails(X)
        assert toys.scalars(model.trainable_variables[0]) == [2, 8]
        toys.fit(model, *toys.slope_rows(1), batch_size=2)
        assert toys.scalars(model.trainable_variables[0]) == [1.5, 8]


def test_means_take_no_memory_once_evaluate_is_done():
    model = slopes()
    assert raw(model).means is None
    for _ in range(2):
        model.evaluate(X, X, verbose=0)
        for variable in raw(model).means:
            assert (
                tf.size(
                    tf.raw_ops.ReadVariableOp(
                        resource=variable.handle, dtype=tf.float32
                    )
                )
                == 0
            )


def test_one_replica_reads_its_own():
    with toys.make_strategy(1).scope():
        model = toys.slope_model()
    assert model.predict(X, verbose=0).ravel().tolist() == [4, 8, 12, 16]
    assert raw(model).means is None
