"""Mean reads: a function that trains nothing sees the mean of the replicas."""

import weakref
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework import func_graph

from tf_avgstrategy.state import variables

__all__ = ["MeanReads"]

_KEPT = "_tf_avgstrategy_means"


class MeanReads:
    """Lets replicas read means, in functions that train nothing.

    A function trains if it writes a trainable variable, or reads one while a
    `tf.GradientTape` records. It reads each replica's own copies. Any other
    function reads them of those variables alone that it writes; of all others
    it reads the mean of the local replicas, of which each device holds a copy.
    What replicas own stays untouched: nothing has to be put back.

    Means are computed when they are read and something has been written since
    the last time. They take memory until `free`.

    In a graph it is known what a function does once it is traced. Its
    operations then get the handles of the means in place of those of the
    replicas' copies. Eagerly a function begins with means. One that turns out
    to train begins again, before it has written anything.

    Args:
        num_replicas: Int, the local replicas. With one, all reads are its own.
        device: String, the device of small variables.
    """

    def __init__(self, num_replicas, device):
        self._is_alone = num_replicas == 1
        self._device = device
        self._known = weakref.WeakKeyDictionary()
        self._eager_run = None
        self._with_means = []
        # Counts what was written.
        self._version = variables.make_counter(0, device)

    def note_writes(self):
        """Is told that copies were written, eagerly or within a function."""
        # Not in a graph of TensorFlow 1, where nothing reads means.
        is_tensorflow_2 = tf.compat.v1.executing_eagerly_outside_functions()
        if is_tensorflow_2 and not self._is_alone:
            self._version.assign_add(1)

    def free(self):
        """Frees the memory of the means, until they are read again."""
        with_means = [reference() for reference in self._with_means]
        for variable in with_means:
            if variable is not None:
                variable.free_means()
        self.note_writes()

    def read(self, variable, replica_id):
        """Returns what a replica reads of a variable: its copy, or the mean.

        Args:
            variable: `ReplicaLocalVariable`.
            replica_id: Int, the local replica.
        """
        run = self._eager_run
        if run is None or not tf.executing_eagerly():
            return variable.values[replica_id]
        if is_recorded(variable):
            run.note_training()
        if not run.reads_mean(variable):
            return variable.values[replica_id]
        self._take_means(variable)
        return variable.means[replica_id]

    def note_write(self, variable):
        """Is told before a replica writes its copy of a variable."""
        if self._eager_run is not None and tf.executing_eagerly():
            self._eager_run.note_write(variable)

    def run_eagerly(self, function, static, run):
        """Runs a function eagerly on all replicas.

        Args:
            function: What stays the same when it is run again.
            static: Hashable, what it is told in plain Python.
            run: Function without arguments that runs it.

        Returns:
            What `run` returns.

        Raises:
            RuntimeError: If it turns out to train when it has read means and
                written something already.
        """
        if self._is_alone:
            return run()
        known = self._known.setdefault(function, {})
        does = known.setdefault(static, _Does())
        try:
            while True:
                self._eager_run = _EagerRun(does)
                try:
                    return run()
                except _BeginAgain:
                    continue
        finally:
            self._eager_run = None
            self.note_writes()

    def trace(self, run, is_training):
        """Traces a function for all replicas.

        Args:
            run: Function without arguments that traces it.
            is_training: Function without arguments that returns whether, as
                far as was seen while it was traced, it trains.

        Returns:
            What `run` returns.
        """
        graph = tf.compat.v1.get_default_graph()
        if self._is_alone or not isinstance(graph, func_graph.FuncGraph):
            return run()
        num_before = len(graph.get_operations())
        outputs = run()
        uses = _uses(graph, set(graph.get_operations()[num_before:]))
        written = [use.variable for use in uses if use.is_written]
        if not is_training() and not any(v.trainable for v in written):
            names = {v.unique_name for v in written}
            self._redirect(
                graph, [u for u in uses if u.variable.unique_name not in names]
            )
        if written:
            self.note_writes()
        return outputs

    def _redirect(self, graph, uses):
        """Lets operations read the means in place of the replicas' copies."""
        uses = [use for use in uses if use.variable.has_mean]
        if not uses:
            return
        read = {use.variable.unique_name: use.variable for use in uses}
        checked = variables.make_counter(-1, self._device)
        self._keep(graph, checked)
        version = self._version.read_value()

        def take():
            for variable in read.values():
                self._take_means(variable)
            checked.assign(version)
            return True

        is_taken = tf.cond(version != checked, take, lambda: True)
        for use in uses:
            mean = use.variable.means[use.replica_id]
            with tf.device(mean.device):
                # Automatic control dependencies see through `Identity`, and
                # would let these reads come first.
                with tf.control_dependencies([is_taken]):
                    (handle,) = tf.raw_ops.IdentityN(input=[mean.handle])
                for operation in use.operations:
                    for place, given in enumerate(operation.inputs):
                        if given is use.handle:
                            operation._update_input(place, handle)
                # Who takes means next waits for this read, which they see.
                with tf.control_dependencies(use.operations):
                    tf.raw_ops.VariableShape(input=mean.handle)

    def _take_means(self, variable):
        if variable.means is None:
            self._with_means.append(weakref.ref(variable))
            variable.make_means()
        variable.take_means()

    def _keep(self, graph, thing):
        """Keeps an object for as long as a graph, or one around it."""
        while isinstance(graph, func_graph.FuncGraph):
            setattr(graph, _KEPT, [*getattr(graph, _KEPT, []), thing])
            graph = graph.outer_graph


def is_recorded(variable):
    """Returns whether a gradient may be taken of what is read now."""
    return variable.trainable and record.could_possibly_record()


class _Use(NamedTuple):
    """How operations use a replica's copy of a variable.

    Attributes:
        variable: `ReplicaLocalVariable`.
        replica_id: Int.
        handle: Resource tensor, the copy's handle in the graph.
        operations: List of `tf.Operation` that it is an input of.
        is_written: Bool, whether one of them may write the copy.
    """

    variable: variables.ReplicaLocalVariable
    replica_id: int
    handle: tf.Tensor
    operations: list
    is_written: bool


def _uses(graph, operations):
    """Returns the list of `_Use` of these operations of a `FuncGraph`."""
    uses = []
    for captured, handle in graph.captures:
        variable = variables.of_handle(captured)
        if variable is None:
            continue
        consumers = [op for op in handle.consumers() if op in operations]
        if consumers:
            handles = [copy.handle for copy in variable.values]
            (replica_id,) = (
                r for r, own in enumerate(handles) if own is captured
            )
            is_written = any(_writes(op, handle) for op in consumers)
            uses.append(
                _Use(variable, replica_id, handle, consumers, is_written)
            )
    return uses


def _writes(operation, handle):
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(
        operation
    )
    return handle in written


class _BeginAgain(BaseException):
    """Ends an eager run that has read means of what it should not."""


class _Does:
    """What a function is known to do.

    Attributes:
        trains: Bool.
        writes: Set of the `unique_name` of variables that do not train.
    """

    def __init__(self):
        self.trains = False
        self.writes = set()


class _EagerRun:
    """One eager run of a function, on all replicas one after the other."""

    def __init__(self, does):
        self._does = does
        self._read_means = set()
        self._has_written = False

    def reads_mean(self, variable):
        """Returns whether a replica reads the mean of a variable."""
        name = variable.unique_name
        is_own = self._does.trains or name in self._does.writes
        if is_own or not variable.has_mean or variable.has_equal_copies():
            return False
        self._read_means.add(name)
        return True

    def note_training(self):
        """Is told that the function trains."""
        if self._does.trains:
            return
        self._does.trains = True
        if self._read_means:
            self._begin_again()

    def note_write(self, variable):
        """Is told before the function writes a variable."""
        if variable.trainable:
            self.note_training()
        elif variable.unique_name not in self._does.writes:
            self._does.writes.add(variable.unique_name)
            if variable.unique_name in self._read_means:
                self._begin_again()
        self._has_written = True

    def _begin_again(self):
        if self._has_written:
            raise RuntimeError(
                "A function that trains reads each replica's own variables, "
                "any other function their mean. Received: a function, run "
                "eagerly for the first time where replicas differ, that has "
                "written a variable before it was seen that it trains. Run it "
                "within a `tf.function`, or for the first time before replicas "
                "train."
            )
        raise _BeginAgain
