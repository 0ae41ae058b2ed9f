import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg


class Loop:
    """A custom training loop on T1."""

    def __init__(
        self,
        num_replicas=2,
        optimizer=toys.sgd,
        communicator="auto",
        **arguments,
    ):
        self.strategy = toys.make_strategy(
            num_replicas, communicator=communicator
        )
        with self.strategy.scope():
            self.model = keras.Sequential(
                [layers.Input((1,)), toys.slope_layer()]
            )
            self.optimizer = optimizer()
        self.averager = avg.ParameterAverager(
            self.strategy, self.model.variables, self.optimizer, **arguments
        )
        self.train_step = tf.function(self._train_step)

    def _train_step(self, x, y):
        def step(x, y):
            variables = self.model.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x) - y))
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables))

        self.strategy.run(step, args=(x, y))

    def run(self, steps, rows=(toys.ROW_A, toys.ROW_B)):
        data = toys.dataset(toys.slope_rows(steps, rows), len(rows))
        rounds = []
        for x, y in self.strategy.experimental_distribute_dataset(data):
            self.train_step(x, y)
            rounds.append(self.averager.step())
        return rounds

    def state(self):
        state = self.model.variables + self.optimizer.variables
        return [toys.scalars(variable) for variable in state]

    @property
    def weight(self):
        return toys.weight(self.model)

    @property
    def weights(self):
        return toys.scalars(self.model.trainable_variables[0])


class TestCustomLoop:
    @pytest.mark.core
    @pytest.mark.parametrize(("period", "steps"), sorted(toys.T1_WEIGHTS))
    def test_follows_the_hand_computed_trajectory(self, period, steps):
        loop = Loop(period=period)
        rounds = loop.run(steps)
        assert loop.weights == [toys.T1_WEIGHTS[period, steps]] * 2
        assert [n for n, done in enumerate(rounds, 1) if done] == list(
            range(period, steps + 1, period)
        )
        assert (loop.averager.steps, loop.averager.rounds) == (
            steps,
            steps // period,
        )

    def test_a_forced_round_does_not_shift_the_phase(self):
        loop = Loop(period=3)
        loop.run(4)
        # 4.84375 at step 3; then 3.6328125 and 8.
        assert loop.weights == [3.6328125, 8.0]
        loop.averager.average()
        assert loop.weights == [5.81640625] * 2
        assert loop.run(2) == [False, True]
        assert loop.weight == 5.6358642578125

    def test_steps_can_be_counted_in_groups(self):
        averager = Loop(period=4).averager
        assert not averager.step(3)
        assert averager.step(3)
        assert not averager.step(1)
        assert averager.step(5)
        assert averager.rounds == 2

    @pytest.mark.parametrize(
        ("num_steps", "error"), [(-1, ValueError), (1.5, TypeError)]
    )
    def test_a_number_of_steps_that_is_none_changes_nothing(
        self, num_steps, error
    ):
        averager = Loop(period=4).averager
        with pytest.raises(error, match=f"num_steps={num_steps}"):
            averager.step(num_steps)
        assert averager.steps == 0

    def test_average_if_stepped_runs_once_per_step(self):
        loop = Loop(period=10)
        assert not loop.averager.average_if_stepped()
        loop.run(2)
        assert loop.averager.average_if_stepped()
        assert not loop.averager.average_if_stepped()
        assert loop.weights == [5.125] * 2

    def test_builds_the_optimizer(self):
        loop = Loop(period=2, optimizer=lambda: keras.optimizers.Adam(0.1))
        assert loop.optimizer.built
        loop.run(2)
        assert loop.weight == 4.0

    def test_inside_a_traced_function_is_refused(self):
        averager = Loop(period=2).averager
        for call in (averager.step, averager.average):
            with pytest.raises(RuntimeError, match="outside of any.*after the"):
                tf.function(call)()


class TestWeights:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            ([3, 1], 3.6875),
            ([5, 5], 5.125),
            ([1, 0], 2.25),
            ([0, 1], 8.0),
            (None, 5.125),
        ],
    )
    def test_given_by_the_caller(self, weights, expected):
        loop = Loop(period=10)
        loop.run(2)
        loop.averager.average(weights)
        assert loop.weights == [expected] * 2

    def test_default_is_the_rows_since_the_last_round(self):
        loop = Loop(period=10)
        toys.assign_per_replica(loop.model.trainable_variables[0], [2.25, 8.0])
        # One batch of 4 rows of A and B, then one of which B has nothing.
        strategy = loop.strategy
        for rows in ([2, 2], [4, 0]):
            x = strategy.experimental_distribute_values_from_function(
                lambda c, rows=rows: tf.zeros(
                    [rows[c.replica_id_in_sync_group], 1]
                )
            )
            loop.train_step(x, x)
        loop.averager.average()
        assert loop.weights == [3.6875] * 2

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([0, 0], "At least one weight must be > 0"),
            ([1, -1], "finite numbers >= 0"),
            ([1], r"one number per local replica, here 2.*\[1\]"),
        ],
    )
    def test_rejects(self, weights, message):
        loop = Loop(period=10)
        loop.run(2)
        with pytest.raises(ValueError, match=message):
            loop.averager.average(weights)
        assert loop.weights == [2.25, 8.0]
        assert loop.averager.rounds == 0


class TestAllOrNothing:
    def test_a_failed_exchange_changes_nothing_and_can_be_repeated(self):
        communicator = toys.TwinCommunicator()
        loop = Loop(
            period=2,
            optimizer=lambda: toys.sgd(momentum=0.5),
            communicator=communicator,
        )
        # The twin has the second half of the rows.
        loop.run(1, rows=(toys.ROW_A, toys.ROW_B) * 2)
        before = loop.state()
        communicator.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            loop.averager.average()
        np.testing.assert_array_equal(loop.state(), before)
        assert loop.averager.rounds == 0
        communicator.fails = False
        loop.averager.average()
        assert loop.weights == [5.5] * 2


class TestGan:
    """Two optimizers over parts of one set of variables."""

    def make(self, period):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            generator = keras.Sequential(
                [layers.Input((2,)), layers.Dense(3, name="g")]
            )
            critic = keras.Sequential(
                [layers.Input((3,)), layers.Dense(1, name="c")]
            )
            optimizers = [keras.optimizers.Adam(0.01) for _ in range(2)]
            optimizers[0].build(generator.trainable_variables)
            optimizers[1].build(critic.trainable_variables)
        averager = avg.ParameterAverager(
            strategy,
            generator.variables + critic.variables,
            optimizers,
            period=period,
        )

        @tf.function
        def train_step(z, x):
            strategy.run(step, args=(z, x))

        def step(z, x):
            with tf.GradientTape(persistent=True) as tape:
                distance = tf.reduce_mean(critic(x) - critic(generator(z)))
                loss = -distance
            for optimizer, model, goal in zip(
                optimizers, (generator, critic), (distance, loss)
            ):
                weights = model.trainable_variables
                gradients = tape.gradient(goal, weights)
                optimizer.apply_gradients(zip(gradients, weights))

        return strategy, averager, optimizers, train_step

    def test_everything_travels_once_and_ends_equal(self):
        strategy, averager, optimizers, train_step = self.make(period=2)
        rng = np.random.default_rng(0)
        rows = (
            rng.normal(size=(8, 2)).astype("float32"),
            rng.normal(size=(8, 3)).astype("float32"),
        )
        data = toys.dataset(rows, 4)
        for z, x in strategy.experimental_distribute_dataset(data):
            train_step(z, x)
            averager.step()
        assert averager.rounds == 1
        # 13 weights with two slots each, 4 bytes.
        assert averager.bytes_per_round == 13 * 3 * 4
        for optimizer in optimizers:
            for variable in optimizer.variables:
                first, second = toys.copies(variable)
                np.testing.assert_array_equal(first, second)
            assert optimizer.iterations.numpy() == 2

    def test_two_optimizers_that_share_variables_send_them_once(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = toys.slope_model()
            optimizers = [toys.sgd(momentum=0.5), toys.sgd(momentum=0.5)]
            for optimizer in optimizers:
                optimizer.build(model.trainable_variables)
        averager = avg.ParameterAverager(
            strategy, model.variables * 2, optimizers, period=1
        )
        assert averager.bytes_per_round == 3 * 4


class TestCheckpoint:
    def test_counters_are_saved_and_the_phase_goes_on(self, tmp_path):
        loop = Loop(period=3)
        loop.run(4)
        checkpoint = tf.train.Checkpoint(
            averager=loop.averager, model=loop.model
        )
        path = checkpoint.save(str(tmp_path / "file"))
        assert loop.weights == [3.6328125, 8.0]
        other = Loop(period=3)
        tf.train.Checkpoint(averager=other.averager, model=other.model).restore(
            path
        ).assert_existing_objects_matched()
        assert (other.averager.steps, other.averager.rounds) == (4, 1)
        # The file holds each replica.
        assert other.weights == [3.6328125, 8.0]
        assert other.run(2) == [False, True]
        assert other.weight == 5.021728515625


class TestDescribe:
    def test_is_a_table_of_paths_kinds_and_rules(self):
        loop = Loop(period=1, optimizer=lambda: toys.sgd(momentum=0.5))
        header, line, *rows = loop.averager.describe().splitlines()
        assert header.split() == ["variable", "kind", "rule", "dtype", "shape"]
        assert set(line) == {"-", " "}
        assert len(rows) == 4
        kernel, momentum = rows[0], rows[-1]
        assert kernel.split()[1:] == ["weight", "mean", "float32", "(1,", "1)"]
        assert momentum.split()[1:3] == ["slot", "mean"]


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"period": 0}, ValueError, "period=0"),
            ({"period": "16"}, TypeError, "'16'"),
            ({"period": 2, "slots": "sum"}, ValueError, "'sum'"),
            ({"period": 2, "warmup_steps": -1}, ValueError, "warmup_steps=-1"),
        ],
    )
    def test_rejects_before_anything_is_built(self, arguments, error, message):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = toys.slope_model(toys.sgd(momentum=0.5))
        with pytest.raises(error, match=message):
            avg.ParameterAverager(
                strategy, model.variables, model.optimizer, **arguments
            )
        assert not model.optimizer.built

    def test_needs_a_model_that_is_built(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = keras.Sequential([layers.Dense(1)])
            optimizer = toys.sgd()
        with pytest.raises(ValueError, match="empty list. Build the model"):
            avg.ParameterAverager(
                strategy, model.variables, optimizer, period=1
            )

    def test_rejects_a_pattern_without_a_variable(self):
        with pytest.raises(ValueError, match="'nothing'"):
            Loop(period=1, overrides={"nothing": "keep"})

    def test_a_pattern_may_name_slots_of_an_optimizer_built_here(self):
        loop = Loop(
            period=1,
            optimizer=lambda: toys.sgd(momentum=0.5),
            overrides={"momentum": "keep"},
        )
        assert loop.averager.describe().count("keep") == 2

    def test_needs_the_strategy(self):
        stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with pytest.raises(ValueError, match="under MirroredStrategy. Make"):
            avg.ParameterAverager(stock, [], [], period=1)
