"""The maths of a round: weights of replicas, mean, pooled variance."""

import math
from typing import NamedTuple

import tensorflow as tf

__all__ = [
    "Shares",
    "accumulation_dtype",
    "check_weights",
    "distance",
    "norm",
    "shares",
    "total_variances",
    "weighted_offset",
]


class Shares(NamedTuple):
    """How much each of R replicas contributes to a mean.

    Attributes:
        ratios: List of R floats >= 0, which sum to 1 over all workers.
        anchor: Int, the replica with the largest ratio, the first of them.
    """

    ratios: list
    anchor: int


def shares(weights, total=None):
    """Turns the weights of R replicas into their `Shares`.

    Args:
        weights: Sequence of R finite numbers >= 0, such as the rows that each
            replica has seen.
        total: Float > 0, the weight of all replicas of all workers. `None`: of
            these ones, at least one of which must be > 0.

    Returns:
        `Shares`.

    Raises:
        ValueError: If a weight is negative or not finite, or all are 0.
    """
    weights = check_weights(weights)
    total = math.fsum(weights) if total is None else total
    if total == 0:
        raise ValueError(
            "At least one weight must be > 0: a mean over nothing does not "
            f"exist. Received: weights={weights}. Pass 1 for every replica "
            "for the plain mean."
        )
    return Shares([w / total for w in weights], weights.index(max(weights)))


def check_weights(weights):
    """Returns the weights of replicas as floats.

    Raises:
        ValueError: If a weight is negative or not finite.
    """
    weights = [float(weight) for weight in weights]
    if any(not math.isfinite(w) or w < 0 for w in weights):
        raise ValueError(
            "Weights must be finite numbers >= 0, one per replica. "
            f"Received: weights={weights}. Pass the number of rows that each "
            "replica stands for."
        )
    return weights


def accumulation_dtype(dtype):
    """The dtype in which values of `dtype` are averaged and travel."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def weighted_offset(values, center, ratios):
    """Returns how far the weighted mean of replicas' values is from `center`.

    That is `sum(ratio * (value - center))`. The mean is `center` plus its sum
    over all workers. Values that equal the center give exactly 0, so the mean
    of equal values has their bits (3 values summed and divided by 3 do not),
    and what no replica has changed, no number of rounds can move. The sum
    cannot overflow unless values are further apart than the dtype's largest
    number.

    Args:
        values: List of tensors of one shape and one floating point dtype.
        center: Tensor of that shape, on every worker the same.
        ratios: List of as many float64 scalars, each replica's share among all
            replicas of all workers. A value whose share is 0 may be anything.

    Returns:
        Tensor of that shape in the accumulation dtype.
    """
    dtype = accumulation_dtype(center.dtype)
    center = tf.cast(center, dtype)
    parts = [
        # Times 0 gives 0, even of what is not finite.
        tf.math.multiply_no_nan(
            tf.cast(value, dtype) - center,
            tf.cast(tf.convert_to_tensor(ratio, tf.float64), dtype),
        )
        for value, ratio in zip(values, ratios)
    ]
    return tf.add_n(parts) if parts else tf.zeros_like(center)


def total_variances(variances, means, mean):
    """Returns what the mean of gives the variance of all rows taken together.

    By the law of total variance it is the mean of the variances plus the
    variance of the means. The mean of the variances alone would miss how far
    the replicas' data lie apart.

    Args:
        variances: List of tensors of one shape, each >= 0.
        means: List of as many tensors of that shape, the means that belong to
            them.
        mean: Tensor of that shape, the weighted mean of all replicas' `means`.

    Returns:
        List of tensors of that shape in the variances' accumulation dtype.
    """
    dtype = accumulation_dtype(variances[0].dtype)
    mean = tf.cast(mean, dtype)
    return [
        tf.cast(variance, dtype) + tf.square(tf.cast(m, dtype) - mean)
        for variance, m in zip(variances, means)
    ]


def distance(values, references):
    """Returns the L2 distance between two lists of tensors.

    Args:
        values: List of floating point tensors.
        references: List of tensors of the same shapes.

    Returns:
        Float64 scalar, to which many small squares can be added.
    """
    differences = [
        tf.cast(value, dtype) - tf.cast(reference, dtype)
        for value, reference in zip(values, references)
        for dtype in [accumulation_dtype(reference.dtype)]
    ]
    return norm(differences)


def norm(values):
    """Returns the L2 norm of a list of tensors.

    Args:
        values: List of floating point tensors.

    Returns:
        Float64 scalar, to which many small squares can be added.
    """
    # `l2_loss` keeps no squares in memory, and gives half of their sum.
    halves = [
        tf.nn.l2_loss(tf.cast(value, accumulation_dtype(value.dtype)))
        for value in values
    ]
    with tf.device("CPU:0"):
        total = tf.add_n([tf.cast(h, tf.float64) for h in halves] or [0.0])
        return tf.sqrt(2.0 * tf.cast(total, tf.float64))
