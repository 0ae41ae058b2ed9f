import functools

import numpy as np
import pytest
import tensorflow as tf
import toys

from tf_avgstrategy.strategy import replica_step


def make_step(fn, **arguments):
    options = {"compiled": False, "skips_empty": True}
    options.update(arguments)
    return replica_step.ReplicaStep(fn, seed_offset=lambda r: r, **options)


class TestNumRows:
    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ((np.zeros([3, 2]),), 3),
            (({"b": tf.zeros([4]), "a": tf.zeros([5, 1])},), 5),
            ((1.0, tf.zeros([]), tf.zeros([7])), 7),
            ((), 1),
            ((tf.zeros([]),), 1),
            ((None, tf.zeros([0, 3])), 0),
            ((tf.ragged.constant([[1], [2, 3]]),), 2),
            ((tf.sparse.eye(6),), 6),
        ],
    )
    def test_is_axis_0_of_the_first_tensor_that_has_one(self, args, expected):
        assert int(replica_step.num_rows(args)) == expected

    def test_of_an_unknown_size_is_a_tensor(self):
        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def rows(x):
            result = replica_step.num_rows((x,))
            assert tf.is_tensor(result)
            return result

        assert rows(tf.zeros([9, 2])) == 9


class TestReplicaStep:
    def test_traced_empty_replica_gets_zeros_of_every_output(self):
        def fn(x):
            return {"loss": tf.reduce_mean(x), "all": x, "none": None}

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def run(x):
            step = make_step(fn)
            return step(0, replica_step.num_rows((x,)), (x,), {})

        outputs = run(tf.zeros([0, 2]))
        assert outputs["loss"] == 0
        assert outputs["all"].shape == (0, 2)
        assert outputs["none"] is None
        assert run(tf.ones([3, 2]))["loss"] == 1

    def test_eager_empty_replica_gets_zeros_too(self):
        calls = tf.Variable(0)

        def fn(x):
            calls.assign_add(1)
            return tf.reduce_sum(x), x

        step = make_step(fn)
        assert step(0, 2, (tf.ones([2]),), {})[0] == 2
        total, rows = step(1, 0, (tf.ones([0]),), {})
        assert total == 0
        assert rows.shape == (0,)
        assert calls.numpy() == 1

    def test_eager_step_may_return_anything_where_all_have_rows(self):
        result = object()
        step = make_step(lambda x: result)
        assert step(0, 2, (tf.ones([2]),), {}) is result

    def test_runs_an_empty_batch_where_it_is_told_to(self):
        step = make_step(tf.reduce_sum, skips_empty=False)
        assert step(0, 0, (tf.ones([0]),), {}) == 0

    def test_compiled_step_is_one_xla_program(self):
        def fn(x):
            return x + 1

        @tf.function
        def run(x):
            return make_step(fn, compiled=True)(0, 2, (x,), {})

        graph = run.get_concrete_function(tf.zeros([2])).graph
        calls = [op for op in graph.get_operations() if "Call" in op.type]
        assert [op.get_attr("_XlaMustCompile") for op in calls] == [True]

    def test_random_ops_differ_between_replicas_of_a_seeded_graph(self):
        tf.random.set_seed(1)

        @tf.function
        def run():
            # Two graphs of their own, in which ops would get equal seeds.
            def draw():
                return tf.random.uniform([4])

            return [
                make_step(draw, compiled=True)(r, 1, (), {}) for r in (0, 1)
            ]

        first, second = run()
        assert not np.array_equal(first, second)

    def test_seed_of_the_graph_is_restored(self):
        with tf.Graph().as_default() as graph:
            graph.seed = 5
            make_step(lambda: None, skips_empty=False)(3, 1, (), {})
            assert graph.seed == 5

    def test_function_is_the_same_for_what_a_loop_makes_anew(self):
        class Model:
            def train_step(self):
                pass

        model = Model()
        functions = [
            make_step(model.train_step).function,
            make_step(functools.partial(model.train_step)).function,
        ]
        assert functions == [Model.train_step] * 2
        lambdas = [make_step(lambda: None).function for _ in range(2)]
        assert lambdas[0] is lambdas[1]

    def test_function_of_an_object_that_cannot_be_a_weak_key_is_its_class(self):
        class Slots:
            __slots__ = ()

            def __call__(self):
                pass

        class Unhashable:
            __hash__ = None

            def __call__(self):
                pass

        for cls in (Slots, Unhashable):
            assert make_step(cls()).function is cls
        strategy = toys.make_strategy()
        strategy.run(Slots())
        strategy.run(Unhashable())
