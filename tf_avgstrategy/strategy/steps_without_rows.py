"""Steps without rows: how a worker whose data has ended runs the others'."""

import itertools
import weakref

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import none_tensor

from tf_avgstrategy.strategy import replica_step

__all__ = ["StepsWithoutRows", "specs_of_element"]

_NONE = -1
_STEPS = "_tf_avgstrategy_steps"


class StepsWithoutRows:
    """Runs the last training step again, on data without rows.

    Which one that is, is known at run time alone: a function that was traced
    long ago may be the one that runs.

    Args:
        run: Function of a function of one replica and its positional and
            keyword arguments, which runs it on all replicas.
        device: String, the device of a small variable.
    """

    def __init__(self, run, device):
        self._run = run
        # By number the graphs that run a step, which hold function and specs,
        # so that these vanish with them.
        self._graphs = {}
        self._numbers = itertools.count()
        self._expected = None
        self._traced_last = None
        self._is_tracing = False
        self._traced = None, None
        with tf.init_scope(), tf.device(device):
            # The number of the last step.
            self._last = tf.Variable(_NONE, trainable=False)
            self._num_steps = tf.Variable(0, trainable=False)

    @property
    def num_steps(self):
        """Int, how many steps were run, with rows or without."""
        return int(self._num_steps.numpy())

    def expect(self, step, specs):
        """Begins a training whose step is known, though it may not run here.

        Args:
            step: Function of one replica, or None if it is not known.
            specs: Nested structure, of its positional and keyword arguments,
                see `replica_step.specs_without_rows`.
        """
        self._last.assign(_NONE)
        self._traced = None, None
        self._traced_last = None
        self._expected = None if step is None else (step, specs)

    def note(self, step, specs):
        """Remembers what is being traced as the last step, whenever it runs.

        Args:
            step: See `expect`.
            specs: See `expect`.
        """
        self._num_steps.assign_add(1)
        if self._is_tracing:
            return
        self._traced_last = step, specs
        number = next(self._numbers)
        self._graphs = {key: g for key, g in self._graphs.items() if len(g)}
        self._graphs[number] = weakref.WeakSet()
        graph = tf.compat.v1.get_default_graph()
        # Any of them may be what is called later, and the others gone.
        while isinstance(graph, func_graph.FuncGraph):
            steps = getattr(graph, _STEPS, {})
            steps[number] = step, specs
            setattr(graph, _STEPS, steps)
            self._graphs[number].add(graph)
            graph = graph.outer_graph
        self._last.assign(number)

    def run(self):
        """Runs the last step without rows.

        Returns:
            Bool, whether there is one.
        """
        number = int(self._last.numpy())
        if number == _NONE:
            step = self._expected
        else:
            graphs = self._graphs.get(number, ())
            steps = [getattr(graph, _STEPS)[number] for graph in graphs]
            # The function may be gone, if it was made within a function.
            step = steps[0] if steps else self._traced_last
        if step is None:
            return False
        function, specs = step
        if self._traced[0] is not step:
            self._traced = step, self._trace(function, specs)
        self._traced[1](*replica_step.zeros(specs))
        return True

    def _trace(self, function, specs):
        """A function of what the step takes, on each replica the same."""

        def run(args, kwargs):
            self._run(function, args, kwargs)

        traced = tf.function(run, autograph=False)
        self._is_tracing = True
        try:
            # For sizes that are not known, which 0 may not suit.
            traced.get_concrete_function(*specs)
        finally:
            self._is_tracing = False
        return traced


def specs_of_element(element_spec):
    """Returns the specs of what one replica gets, less their number of rows.

    Args:
        element_spec: Nested structure, that of a distributed dataset.
    """

    def spec(value):
        if isinstance(value, values.PerReplicaSpec):
            value = value._value_specs[0]
        if isinstance(value, (tf.OptionalSpec, none_tensor.NoneTensorSpec)):
            return None  # As Keras does.
        if not isinstance(value, tf.TensorSpec):
            return value
        shape = value.shape.as_list()
        return tf.TensorSpec([None, *shape[1:]] if shape else [], value.dtype)

    return tf.nest.map_structure(spec, element_spec)
