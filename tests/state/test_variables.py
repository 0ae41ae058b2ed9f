import copy

import numpy as np
import pytest
import tensorflow as tf
import toys

from tf_avgstrategy.state import variables


def make_variable(value, num_replicas=2, **arguments):
    strategy = toys.make_strategy(num_replicas)
    with strategy.scope():
        return strategy, tf.Variable(value, **arguments)


class TestReplicaLocalVariable:
    def test_each_replica_writes_and_reads_its_own_copy(self):
        strategy, v = make_variable(1.0)

        @tf.function
        def run():
            def write():
                replica = tf.distribute.get_replica_context()
                offset = tf.cast(replica.replica_id_in_sync_group, tf.float32)
                v.assign_add(offset)
                return v.read_value()

            return strategy.run(write)

        assert strategy.experimental_local_results(run()) == (1.0, 2.0)
        assert toys.scalars(v) == [1.0, 2.0]

    @pytest.mark.parametrize("inside_scope", [True, False])
    def test_a_read_outside_a_replica_is_the_mean(self, inside_scope):
        strategy, v = make_variable(0.0)
        toys.assign_per_replica(v, [1.0, 4.0])
        reads = {
            "numpy": lambda: v.numpy(),
            "array": lambda: np.array(v),
            "read_value": lambda: v.read_value(),
            "value": lambda: v.value(),
            "convert": lambda: tf.convert_to_tensor(v),
            "operator": lambda: v + 0.0,
            "traced": lambda: tf.function(lambda: v + 0.0)(),
            "on a device": lambda: on_device(tf.function(v.read_value)),
        }

        def on_device(read):
            with tf.device("CPU:1"):
                return read()

        for name, read in reads.items():
            if inside_scope:
                with strategy.scope():
                    assert float(read()) == 2.5, name
            else:
                assert float(read()) == 2.5, name

    def test_the_mean_of_equal_copies_has_their_bits(self):
        _, v = make_variable(0.1, num_replicas=3)
        assert v.numpy() == np.float32(0.1)

    @pytest.mark.parametrize("in_function", [True, False])
    def test_a_gradient_outside_a_replica_is_that_of_the_mean(
        self, in_function
    ):
        _, v = make_variable(0.0, num_replicas=3)
        toys.assign_per_replica(v, [1.0, 2.0, 6.0])

        def gradient():
            with tf.GradientTape() as tape:
                squared = tf.square(v)
            return tape.gradient(squared, v)

        run = tf.function(gradient) if in_function else gradient
        assert run() == 6.0

    def test_a_mean_in_half_precision_does_not_overflow(self):
        _, v = make_variable(60000.0, dtype=tf.float16)
        assert v.numpy() == 60000

    def test_a_read_of_integers_is_replica_0s(self):
        _, v = make_variable([0, 0], dtype=tf.int32)
        toys.assign_per_replica(v, [3, 4])
        np.testing.assert_array_equal(v.numpy(), [3, 3])

    def test_a_write_outside_a_replica_goes_to_every_copy(self):
        _, v = make_variable(0.0)
        toys.assign_per_replica(v, [1.0, 4.0])
        v.assign_add(1.0)
        assert toys.scalars(v) == [2.0, 5.0]
        v.assign(7.0)
        assert toys.scalars(v) == [7.0, 7.0]

    @pytest.mark.parametrize(
        "synchronization",
        [
            tf.VariableSynchronization.AUTO,
            tf.VariableSynchronization.ON_WRITE,
        ],
    )
    def test_every_variable_is_replica_local(self, synchronization):
        _, v = make_variable(
            1.0,
            synchronization=synchronization,
            aggregation=tf.VariableAggregation.SUM,
        )
        assert len(variables.replica_copies(v)) == 2
        assert isinstance(v, tf.distribute.DistributedValues)
        assert type(v).__name__ == "ReplicaLocalVariable"

    def test_a_metrics_variable_stays_a_sum_over_replicas(self):
        strategy, v = make_variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        strategy.run(lambda: v.assign_add(2.0))
        assert v.numpy() == 4.0
        assert variables.replica_copies(v) is None

    def test_checkpoint_holds_the_mean_and_restores_it_everywhere(
        self, tmp_path
    ):
        strategy, v = make_variable(0.0)
        toys.assign_per_replica(v, [1.0, 4.0])
        path = tf.train.Checkpoint(v=v).write(str(tmp_path / "file"))
        assert toys.scalars(v) == [1.0, 4.0]
        plain = tf.Variable(0.0)
        tf.train.Checkpoint(v=plain).read(path).assert_consumed()
        assert plain.numpy() == 2.5
        tf.train.Checkpoint(v=v).read(path).assert_consumed()
        assert toys.scalars(v) == [2.5, 2.5]

    def test_strategies_of_one_process_do_not_meet(self):
        first, v = make_variable(1.0)
        second, w = make_variable(2.0, num_replicas=3)
        first.run(lambda: v.assign_add(1.0))
        second.run(lambda: w.assign_add(1.0))
        assert (v.numpy(), w.numpy()) == (2.0, 3.0)


class TestGraphsOfTensorFlow1:
    """The values of a session, which initializers and checkpoints give."""

    @pytest.fixture
    def checkpoint(self, tmp_path):
        path = str(tmp_path / "model")
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.get_variable("saved", initializer=[1.0, 2.0])
            session.run(tf.compat.v1.global_variables_initializer())
            return tf.compat.v1.train.Saver().save(session, path)

    @pytest.mark.parametrize("in_replica", [True, False])
    def test_init_from_checkpoint_sets_every_copy(self, checkpoint, in_replica):
        strategy = toys.make_strategy(2)

        def make():
            v = tf.compat.v1.get_variable("new", [2])
            tf.compat.v1.train.init_from_checkpoint(
                checkpoint, {"saved": "new"}
            )
            return v

        with tf.Graph().as_default(), strategy.scope():
            v = strategy.run(make) if in_replica else make()
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                reads = [copy.read_value() for copy in v.values]
                assert tf.compat.v1.trainable_variables()[-1] is v
                np.testing.assert_array_equal(
                    session.run([v.read_value(), *reads]), [[1.0, 2.0]] * 3
                )

    def test_a_session_fetches_the_mean(self):
        strategy = toys.make_strategy(3)
        with tf.Graph().as_default(), strategy.scope():
            v = tf.Variable(0.0)
            writes = [
                copy.assign(value)
                for copy, value in zip(v.values, [1.0, 2.0, 6.0])
            ]
            with tf.compat.v1.Session() as session:
                session.run(writes)
                assert session.run([v, v.read_value(), v + 1]) == [3, 3, 4]

    def test_init_from_checkpoint_sets_every_copy_eagerly(self, checkpoint):
        _, v = make_variable([0.0, 0.0])
        tf.compat.v1.train.init_from_checkpoint(checkpoint, {"saved": v})
        np.testing.assert_array_equal(toys.copies(v), [[1.0, 2.0]] * 2)

    @pytest.mark.parametrize("in_replica", [True, False])
    def test_an_initializer_may_read_another_variable(self, in_replica):
        strategy = toys.make_strategy(2)

        def make():
            v = tf.Variable(2.0)
            return v, tf.Variable(lambda: v + 1.0)

        with tf.Graph().as_default(), strategy.scope():
            v, w = strategy.run(make) if in_replica else make()
            with tf.compat.v1.Session() as session:
                session.run(v.initializer)
                session.run(w.initializer)
                reads = [copy.read_value() for copy in w.values]
                assert session.run([w.read_value(), *reads]) == [3.0] * 3


class TestAggregation:
    KINDS = tuple(tf.VariableAggregation)

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_was_asked_for_is_said_and_not_done(self, kind):
        strategy, v = make_variable([0.0, 0.0], aggregation=kind)
        assert v.aggregation == kind
        assert copy.deepcopy(v).aggregation == kind
        assert variables.aggregation(v) == tf.VariableAggregation.NONE

        def write(name):
            replica = tf.distribute.get_replica_context()
            value = tf.cast(replica.replica_id_in_sync_group + 1, tf.float32)
            if name.startswith("scatter"):
                value = tf.IndexedSlices(value[None], tf.constant([0]))
            else:
                value = tf.stack([value, 0.0])
            getattr(v, name)(value)

        for name, expected in {
            "assign_add": (1.0, 2.0),
            "scatter_add": (2.0, 4.0),
            "scatter_max": (2.0, 4.0),
            "scatter_min": (1.0, 2.0),
            "assign": (1.0, 2.0),
            "assign_sub": (0.0, 0.0),
            "scatter_update": (1.0, 2.0),
        }.items():
            strategy.run(write, args=(name,))
            assert tuple(toys.scalars(v)) == expected, name

    def test_a_number_needs_no_aggregation(self):
        strategy, v = make_variable(0.0, aggregation=tf.VariableAggregation.SUM)
        strategy.run(lambda: v.assign_add(1.0))
        assert toys.scalars(v) == [1.0, 1.0]

    def test_without_a_word_there_is_none(self):
        _, v = make_variable(0.0)
        assert v.aggregation == tf.VariableAggregation.NONE

    def test_integers_may_ask_for_a_mean(self):
        _, v = make_variable(0, aggregation=tf.VariableAggregation.MEAN)
        assert toys.copies(v) == [0, 0]

    def test_another_word_is_refused(self):
        with pytest.raises(ValueError, match="Invalid variable aggregation"):
            make_variable(0.0, aggregation="mean")


class TestReplicaSeedVariable:
    NAME = "dropout/seed_generator_state"

    def seeds(self, num_replicas=3):
        return make_variable(
            [5, 0], num_replicas, dtype=tf.int64, name=self.NAME
        )

    def test_every_replica_has_its_own_seed_and_the_same_counter(self):
        _, v = self.seeds()
        states = np.array(toys.copies(v))
        assert len(set(states[:, 0])) == 3
        np.testing.assert_array_equal(states[:, 1], [0, 0, 0])

    def test_outside_there_is_one_state_for_any_number_of_replicas(self):
        for num_replicas in (1, 2, 4):
            _, v = self.seeds(num_replicas)
            np.testing.assert_array_equal(v.numpy(), [5, 0])

    def test_a_state_that_is_loaded_is_spread_over_replicas_again(self):
        _, v = self.seeds()
        before = toys.copies(v)
        v.assign([5, 0])
        np.testing.assert_array_equal(toys.copies(v), before)
        v.assign([6, 9])
        states = np.array(toys.copies(v))
        np.testing.assert_array_equal(states - before, [[1, 9]] * 3)
        np.testing.assert_array_equal(v.numpy(), [6, 9])

    def test_a_replica_advances_its_own_state(self):
        strategy, v = self.seeds(2)
        before = np.array(toys.copies(v))
        strategy.run(lambda: v.assign(v + tf.constant([0, 1], tf.int64)))
        np.testing.assert_array_equal(toys.copies(v), before + [0, 1])

    def test_replica_0_has_the_seed_of_a_single_device(self):
        _, v = self.seeds()
        np.testing.assert_array_equal(toys.copies(v)[0], [5, 0])
