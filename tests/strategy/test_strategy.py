import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg


class TestReplicas:
    def test_takes_all_virtual_cpus_without_gpus(self):
        assert avg.ParameterAveragingStrategy().num_replicas_in_sync == 4

    def test_there_is_one_replica_inside_and_all_of_them_outside(self):
        strategy = toys.make_strategy(3)
        inside = []

        def note():
            replica = tf.distribute.get_replica_context()
            inside.append(
                (
                    tf.distribute.get_strategy().num_replicas_in_sync,
                    replica.num_replicas_in_sync,
                )
            )

        strategy.run(note)
        assert inside == [(1, 1)] * 3
        assert strategy.num_replicas_in_sync == 3
        with strategy.scope():
            assert strategy.num_replicas_in_sync == 3

    def test_all_reduce_in_a_replica_gives_its_own_value(self):
        strategy = toys.make_strategy(2)

        @tf.function
        def run(value):
            def reduce(value):
                replica = tf.distribute.get_replica_context()
                return replica.all_reduce("SUM", {"a": value, "b": [value]})

            return strategy.run(reduce, args=(value,))

        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(float(context.replica_id_in_sync_group))
        )
        result = run(values)
        for part in (result["a"], result["b"][0]):
            assert strategy.experimental_local_results(part) == (0.0, 1.0)

    def test_reduce_over_replicas_works_as_under_any_strategy(self):
        strategy = toys.make_strategy(2)
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                [float(context.replica_id_in_sync_group)] * 2
            )
        )
        total = strategy.reduce("SUM", values, axis=None)
        np.testing.assert_array_equal(total, [1.0, 1.0])
        assert strategy.reduce("MEAN", values, axis=0) == 0.5

    def test_another_strategys_answers_do_not_change(self):
        ours = toys.make_strategy(2)
        stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with ours.scope():
            assert stock.extended._use_merge_call()

    def test_counts_training_steps_and_the_rows_of_each_replica(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = toys.slope_model()
        x, y = np.ones([7, 1], "float32"), np.ones([7, 1], "float32")
        toys.fit(model, x, y, batch_size=4)
        assert strategy.training_progress() == (2, (4, 3))
        model.evaluate(toys.dataset((x, y), 4), verbose=0)
        model.predict(toys.dataset(x, 4), verbose=0)
        assert strategy.training_progress() == (2, (4, 3))

    @pytest.mark.parametrize("kind", ["traced inside", "eager", "lambda"])
    def test_counts_steps_of_custom_loops(self, kind):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            v = tf.Variable(1.0)

        def step(x):
            v.assign_sub(tf.reduce_mean(x))

        traced = tf.function(step)
        for _ in range(3):
            x = strategy.experimental_distribute_values_from_function(
                lambda context: tf.ones([2 + context.replica_id_in_sync_group])
            )
            if kind == "traced inside":
                strategy.run(traced, args=(x,))
            elif kind == "eager":
                strategy.run(step, args=(x,))
            else:
                strategy.run(lambda x: traced(x), args=(x,))
        assert strategy.training_progress() == (3, (6, 9))

    def test_a_step_that_is_told_not_to_train_does_not_count(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            v = tf.Variable(1.0)

        def step(x, training):
            if training:
                v.assign_sub(tf.reduce_mean(x))
            return v * 1.0

        for training in (True, False, True, False, False):
            strategy.run(step, args=(tf.ones([3]), training))
        assert strategy.training_progress() == (2, (6, 6))

    def test_counts_every_run_where_it_is_told_to(self):
        strategy = toys.make_strategy(2)
        run = tf.function(lambda: strategy.run(lambda: tf.ones([3])))
        run()
        strategy.count_all_runs(True)
        run()
        strategy.count_all_runs(False)
        run()
        assert strategy.training_progress() == (1, (1, 1))

    @pytest.mark.parametrize("traced", [True, False])
    @pytest.mark.parametrize("rows", [3, 1])
    def test_a_step_may_return_ragged_and_sparse_tensors(self, rows, traced):
        strategy = toys.make_strategy(2)
        data = strategy.experimental_distribute_dataset(
            toys.dataset(np.ones([rows, 2], "float32"), 2)
        )

        def step(x):
            ragged = tf.RaggedTensor.from_tensor(x)
            return ragged, tf.sparse.from_dense(x), None, 1.0

        def run(x):
            return strategy.run(step, args=(x,))

        total = 0
        for x in data:
            result = (tf.function(run) if traced else run)(x)
            for part in strategy.experimental_local_results(result[0]):
                total += int(part.nrows())
            for part in strategy.experimental_local_results(result[1]):
                assert part.shape[1] == 2
        assert total == rows

    def test_autograph_converts_the_users_step(self):
        strategy = toys.make_strategy(2)

        @tf.function
        def step(x):
            total = 0.0
            for value in x:
                if value > 1.0:
                    total += value
            return total

        x = tf.constant([1.0, 2.0, 3.0])
        for run in (
            lambda: strategy.run(step, args=(x,)),
            tf.function(lambda: strategy.run(step.python_function, args=(x,))),
        ):
            assert strategy.experimental_local_results(run()) == (5.0, 5.0)


class TestReduce:
    def values(self, strategy, parts):
        return strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant(parts[c.replica_id_in_sync_group])
        )

    def test_mean_of_a_batch_that_has_none_is_replica_0s_part(self):
        strategy = toys.make_strategy(2)
        for parts in ([[0.0, 0.0], [1.0]], [["a"], ["b"]]):
            result = strategy.reduce("MEAN", self.values(strategy, parts), None)
            np.testing.assert_array_equal(result, tf.constant(parts[0]))

    def test_a_sum_of_unequal_parts_is_an_error_as_everywhere(self):
        strategy = toys.make_strategy(2)
        values = self.values(strategy, [[0.0, 0.0], [1.0]])
        with pytest.raises(tf.errors.InvalidArgumentError):
            strategy.reduce("SUM", values, axis=None)


class TestErrors:
    def test_xla_around_all_replicas_is_refused(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            model = toys.slope_model(jit_compile=True)
        x, y = toys.slope_rows(2)
        with pytest.raises(
            ValueError, match="function that XLA compiles.*PeriodicAveraging"
        ):
            model.evaluate(x, y, verbose=0)

    def test_an_optimizer_from_outside_the_scope_is_refused(self):
        strategy = toys.make_strategy(2)
        optimizer = keras.optimizers.Adam()
        with strategy.scope():
            model = toys.slope_model(optimizer)
        with pytest.raises(
            ValueError, match=r"belong inside\s+`strategy.scope\(\)`.*Move"
        ):
            toys.fit(model, *toys.slope_rows(2), batch_size=2)
        assert toys.scalars(model.trainable_variables[0]) == [4.0, 4.0]

    def test_other_errors_pass_through_the_scope(self):
        scope = toys.make_strategy(2).scope()
        with pytest.raises(RuntimeError, match="^other$"), scope:
            raise RuntimeError("other")


class TestWhereReplicasMeet:
    """Calls with which TensorFlow lets replicas meet within a step."""

    def run(self, step, rows=None):
        """The results of a function of rows, one for each replica."""
        strategy = toys.make_strategy(2)
        x = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                [float(context.replica_id_in_sync_group + 1)]
            )
        )
        batches = itertools.repeat(x)
        if rows is not None:
            batches = iter(strategy.experimental_distribute_dataset(rows))
        run = tf.function(lambda: strategy.run(step, args=(next(batches),)))
        results = strategy.experimental_local_results(run())
        return [result.numpy().ravel().tolist() for result in results]

    def gather(self, x):
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    def merge(self, x):
        replica = tf.distribute.get_replica_context()
        return replica.merge_call(
            lambda strategy, x: strategy.reduce("SUM", x, axis=None), args=(x,)
        )

    def test_all_gather_and_merge_call_exchange(self):
        assert self.run(self.gather) == [[1.0, 2.0], [1.0, 2.0]]
        assert self.run(self.merge) == [[3.0]]

    @pytest.mark.parametrize("name", ["gather", "merge"])
    def test_they_need_a_known_number_of_rows(self, name):
        rows = toys.dataset(np.ones([4], "float32"), 2)
        with pytest.raises(RuntimeError, match="`merge_call` called while"):
            self.run(getattr(self, name), rows)

    def test_the_gradient_of_all_gather_is_that_of_the_own_loss(self):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(self.gather([x, x])))
            return tape.gradient(loss, x)

        # x is twice in the own loss, and in that of the other replica.
        assert self.run(step) == [[4.0], [8.0]]

    def test_optimizers_of_tensorflow_1_add_up_gradients(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            v = tf.Variable(3.0)
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.125)

        def step():
            replica = tf.distribute.get_replica_context()
            gradient = tf.cast(replica.replica_id_in_sync_group + 1, "float32")
            optimizer.apply_gradients([(gradient, v)])

        strategy.run(step)
        assert toys.scalars(v) == [2.625, 2.625]


class TestGraphsOfTensorFlow1:
    """Replicas run there, which TensorFlow's own tests do."""

    def in_graph(self, build):
        """Runs in turn what `build` makes. Returns what comes of the last."""
        strategy = toys.make_strategy(2)
        with tf.Graph().as_default(), strategy.scope():
            all_fetches = build(strategy)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(tf.compat.v1.local_variables_initializer())
                return [session.run(fetches) for fetches in all_fetches][-1]

    @pytest.mark.parametrize("in_function", [True, False])
    def test_a_function_runs_on_every_replica(self, in_function):
        @tf.function
        def step():
            replica = tf.distribute.get_replica_context()
            return {"id": tf.identity(replica.replica_id_in_sync_group)}

        def build(strategy):
            def run():
                return strategy.run(step)

            result = tf.function(run)() if in_function else run()
            return [strategy.experimental_local_results(result)]

        assert self.in_graph(build) == ({"id": 0}, {"id": 1})

    def test_rows_of_unknown_number_are_reduced(self):
        def build(strategy):
            def part():
                replica = tf.distribute.get_replica_context()
                rows = replica.replica_id_in_sync_group + 1
                return tf.compat.v1.placeholder_with_default(
                    tf.fill(tf.reshape(rows, [1]), 3.0), [None]
                )

            parts = strategy.run(part)
            return [[strategy.reduce(op, parts, 0) for op in ("SUM", "MEAN")]]

        assert self.in_graph(build) == [9.0, 3.0]

    def test_a_metric_counts_the_rows_of_all_replicas(self):
        def build(strategy):
            def count(rows):
                # How many there are is known when the graph runs.
                rows = tf.compat.v1.placeholder_with_default(rows, [None])
                return tf.compat.v1.metrics.mean(rows)

            rows = strategy.experimental_distribute_values_from_function(
                lambda context: tf.fill(
                    [context.replica_id_in_sync_group + 1], 3.0
                )
            )
            value, update = strategy.run(count, args=(rows,))
            return strategy.group(update), value

        assert self.in_graph(build) == 3.0

    def test_the_strategys_counters_are_not_in_the_users_graph(self):
        with tf.Graph().as_default():
            strategy = toys.make_strategy(2)
            with strategy.scope():
                v = tf.Variable(1.0)
            names = {v.name for v in tf.compat.v1.global_variables()}
            assert v.name == "Variable:0"
            assert names == {"Variable:0", "Variable/replica_1:0"}
        strategy.run(lambda: tf.ones([3]))
        assert strategy.training_progress() == (0, (0, 0))

    def test_what_needs_numbers_is_refused(self):
        strategy = toys.make_strategy(2)
        with tf.Graph().as_default(), strategy.scope():
            v = tf.Variable(1.0)
            for refused in (
                lambda: avg.ParameterAverager(strategy, [v], [], period=1),
                strategy.training_progress,
                lambda: toys.make_strategy(2, gradient_sync="worker"),
            ):
                with pytest.raises(
                    RuntimeError,
                    match="executes eagerly.*a graph of TensorFlow 1. Train",
                ):
                    refused()


class TestDropout:
    def masks(self, num_replicas, seed=1, **arguments):
        keras.utils.set_random_seed(seed)
        strategy = toys.make_strategy(num_replicas)
        with strategy.scope():
            layer = layers.Dropout(0.5, **arguments)
            layer.build((8, 64))
        ones = tf.ones([8, 64])
        run = tf.function(
            lambda: strategy.run(lambda: layer(ones, training=True))
        )
        results = [run() for _ in range(2)]
        return [
            mask.numpy()
            for result in results
            for mask in strategy.experimental_local_results(result)
        ]

    @pytest.mark.core
    @pytest.mark.parametrize("arguments", [{}, {"seed": 7}])
    def test_masks_differ_between_replicas_and_steps(self, arguments):
        masks = self.masks(4, **arguments)
        different = {mask.tobytes() for mask in masks}
        assert len(different) == 8

    def test_masks_are_reproducible(self):
        np.testing.assert_array_equal(self.masks(2), self.masks(2))
        assert not np.array_equal(self.masks(2), self.masks(2, seed=2))

    def test_replica_0_has_the_masks_of_a_single_device(self):
        many = self.masks(3)
        alone = self.masks(1)
        np.testing.assert_array_equal(many[0], alone[0])
        np.testing.assert_array_equal(many[3], alone[1])

    def test_tensorflows_own_random_ops_differ_between_replicas(self):
        tf.random.set_seed(1)
        strategy = toys.make_strategy(2)
        data = strategy.experimental_distribute_dataset(
            toys.dataset(np.ones([4, 1]), 2)
        )

        @tf.function
        def run(x):
            # The size of x is unknown: each replica is a graph of its own.
            return strategy.run(lambda x: tf.random.uniform([4]), args=(x,))

        for x in data:
            first, second = strategy.experimental_local_results(run(x))
            assert not np.array_equal(first, second)

    def test_a_random_generator_differs_between_replicas(self):
        strategy = toys.make_strategy(2)
        with strategy.scope():
            generator = tf.random.Generator.from_seed(3)
        result = strategy.run(lambda: generator.uniform([4]))
        first, second = strategy.experimental_local_results(result)
        assert not np.array_equal(first, second)
