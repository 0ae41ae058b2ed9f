"""Metrics of a model over the replicas of all workers."""

import contextlib
import json
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_avgstrategy.state import variables as replica_variables

__all__ = ["loss_sums", "metric_copies", "over_workers", "reads_sums"]


class _Part(NamedTuple):
    """What one worker contributes.

    Attributes:
        replicas: Int, its replicas.
        logs: Dict from string to float, of a step that returns no metrics of
            the model but numbers of its own. Else None.
        state: Float64 vector, the sum of its metric states.
    """

    replicas: int
    logs: dict
    state: np.ndarray

    def to_bytes(self):
        about = json.dumps([self.replicas, self.logs])
        return about.encode() + b"\n" + self.state.tobytes()

    @classmethod
    def from_bytes(cls, data):
        about, _, state = data.partition(b"\n")
        return cls(*json.loads(about), np.frombuffer(state, np.float64))


def metric_copies(model):
    """Returns the copies of the variables of a model's metrics.

    Args:
        model: A compiled `keras.Model`.

    Returns:
        List of tuples of `tf.Variable`, one per local replica.
    """
    return [replica_variables.all_copies(v) for v in _metric_variables(model)]


def loss_sums(model):
    """Returns what the local replicas have summed up for the epoch's loss.

    Args:
        model: A compiled `keras.Model`.

    Returns:
        Two floats, the sum over rows of their losses and the number of rows.
        None if the model keeps no mean called "loss".
    """
    for metric in model.metrics:
        is_mean = hasattr(metric, "total") and hasattr(metric, "count")
        if metric.name == "loss" and is_mean:
            return tuple(
                sum(float(copy.numpy()) for copy in copies)
                for copies in map(
                    replica_variables.all_copies, (metric.total, metric.count)
                )
            )
    return None


def over_workers(model, logs, compute, *, gather, is_chief):
    """Returns the logs of an epoch or an evaluation, over all workers.

    The state of each metric (rows, sums of losses, confusion matrices) is added
    up in float64 over all replicas of all workers, and the metric makes its
    result of the sum. Integers are exact up to 2**53. What a custom step
    returns in place of its metrics becomes the mean over all replicas of what
    each had last.

    Args:
        model: A compiled `keras.Model`.
        logs: Dict, what the last step returned. {} on a worker that had none.
        compute: Function of the logs: Keras' choice between the results of
            `model.metrics` and these logs.
        gather: Function that takes bytes of this worker to the list of those of
            all, by rank. b"" comes from a worker that has nothing to add.
        is_chief: Bool, whether this is the worker with rank 0.

    Returns:
        Dict, bit for bit the same on every worker.
    """
    variables = _metric_variables(model)
    names = set(model.get_metrics_result())
    own = _Part(
        replicas=len(replica_variables.all_copies(variables[0]))
        if variables
        else 1,
        logs=_own_logs(logs) if logs and set(logs) != names else None,
        state=_local_state(variables, is_chief),
    )
    parts = [_Part.from_bytes(p) for p in gather(own.to_bytes()) if p]
    with_logs = [part for part in parts if part.logs is not None]
    if with_logs:
        return {**logs, **_mean_logs(with_logs)}
    total = np.sum([part.state for part in parts], axis=0)
    with _holding(variables, total):
        results = compute(logs or dict.fromkeys(names))
        return tf.nest.map_structure(_read_now, results)


def reads_sums(model):
    """Returns whether metrics read the sum over the local replicas.

    Keras 3.5 does not ask for it.
    """
    variables = _metric_variables(model)
    return all(_reads_sum(variable) for variable in variables)


def _reads_sum(variable):
    return replica_variables.aggregation(variable) == (
        tf.VariableAggregation.SUM
    )


def _is_summed(variable):
    """Whether a metric means the sum over all replicas."""
    return replica_variables.aggregation(variable) in (
        tf.VariableAggregation.SUM,
        tf.VariableAggregation.NONE,
    )


def _read_now(result):
    """What a metric returns may be its state itself, a variable."""
    is_number = isinstance(result, (int, float))
    return result if is_number else tf.convert_to_tensor(result)


def _metric_variables(model):
    variables = [v for metric in model.metrics for v in metric.variables]
    return list({id(variable): variable for variable in variables}.values())


def _own_logs(logs):
    numbers = {key: np.asarray(value) for key, value in logs.items()}
    return {
        key: float(number)
        for key, number in sorted(numbers.items())
        if number.shape == () and number.dtype.kind in "fiub"
    }


def _mean_logs(parts):
    """The mean of what steps returned on all workers that had one."""
    total = sum(part.replicas for part in parts)
    common = set.intersection(*(set(part.logs) for part in parts))
    return {
        key: np.float32(
            sum(part.logs[key] * part.replicas for part in parts) / total
        )
        for key in parts[0].logs
        if key in common
    }


def _local_state(variables, is_chief):
    state = [np.zeros(0)]
    for variable in variables:
        values = [
            copy.numpy().astype(np.float64).ravel()
            for copy in replica_variables.all_copies(variable)
        ]
        if _is_summed(variable):
            state.append(np.sum(values, axis=0))
        else:
            # There is one for all: the chief's.
            state.append(values[0] if is_chief else np.zeros_like(values[0]))
    return np.concatenate(state)


@contextlib.contextmanager
def _holding(variables, state):
    """Lets metrics hold the state of all workers for as long as it takes."""
    copies = [replica_variables.all_copies(v) for v in variables]
    before = [[copy.numpy() for copy in of_one] for of_one in copies]
    sizes = [int(np.prod(first.shape)) for first, *_ in copies]
    values = np.split(state, np.cumsum(sizes)[:-1]) if sizes else []
    try:
        for variable, of_one, value in zip(variables, copies, values):
            reads_sum = _reads_sum(variable)
            for place, copy in enumerate(of_one):
                is_here = place == 0 or not reads_sum
                value_here = value if is_here else np.zeros_like(value)
                copy.assign(tf.cast(value_here.reshape(copy.shape), copy.dtype))
        yield
    finally:
        for of_one, saved in zip(copies, before):
            for copy, value in zip(of_one, saved):
                copy.assign(value)
