"""Which step a worker runs once its data has ended."""

import gc

import pytest
import tensorflow as tf

from tf_avgstrategy.strategy import steps_without_rows

pytestmark = pytest.mark.core
SPECS = ((tf.TensorSpec([None, 3]),), {})


class Steps:
    """Steps that add their number to a list, in the graph that runs them."""

    def __init__(self):
        self.ran = []
        self.steps = steps_without_rows.StepsWithoutRows(self._run, "CPU:0")

    def _run(self, step, args, kwargs):
        step(*args, **kwargs)
        self.steps.note(step, SPECS)

    def make(self, number):
        """A step, and a function that runs it on rows."""

        def step(x):
            rows = tf.shape(x)[0]
            tf.py_function(
                lambda count: self.ran.append((number, int(count))), [rows], []
            )

        return step, tf.function(lambda x: self._run(step, (x,), {}))


@pytest.fixture
def steps():
    return Steps()


def test_there_is_none_before_the_first(steps):
    assert not steps.steps.run()
    assert steps.steps.num_steps == 0


def test_the_last_one_to_run_is_run_again(steps):
    (_, first), (_, second) = steps.make(1), steps.make(2)
    for function in (first, second, first):
        function(tf.zeros([2, 3]))
    assert steps.steps.run()
    assert steps.ran == [(1, 2), (2, 2), (1, 2), (1, 0)]
    # Traced long ago.
    second(tf.zeros([2, 3]))
    assert steps.steps.run()
    assert steps.steps.run()
    assert steps.ran[4:] == [(2, 2), (2, 0), (2, 0)]
    assert steps.steps.num_steps == 7


def test_within_a_loop_of_a_graph(steps):
    step, _ = steps.make(1)

    @tf.function
    def loop():
        for _ in tf.range(2):
            steps._run(step, (tf.zeros([4, 3]),), {})

    loop()
    assert steps.steps.run()
    assert steps.ran == [(1, 4), (1, 4), (1, 0)]


def test_the_function_is_gone(steps):
    def epoch():
        _, function = steps.make(1)
        function(tf.zeros([2, 3]))

    epoch()
    gc.collect()
    assert steps.steps.run()
    assert steps.ran == [(1, 2), (1, 0)]


def test_what_a_training_begins_with(steps):
    _, earlier = steps.make(1)
    earlier(tf.zeros([2, 3]))
    expected, _ = steps.make(2)
    steps.steps.expect(expected, SPECS)
    assert steps.steps.run()
    assert steps.ran[1:] == [(2, 0)]
    steps.steps.expect(None, None)
    assert not steps.steps.run()


def test_specs_are_those_of_one_replica():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    data = tf.data.Dataset.from_tensors(
        {
            "dense": tf.zeros([4, 3]),
            "ragged": tf.ragged.constant([[1], [2, 3], [], [4]]),
            "none": None,
        }
    )
    distributed = strategy.experimental_distribute_dataset(data)
    specs = steps_without_rows.specs_of_element(distributed.element_spec)
    assert specs["dense"] == tf.TensorSpec([None, 3])
    assert isinstance(specs["ragged"], tf.RaggedTensorSpec)
    assert specs["none"] is None
