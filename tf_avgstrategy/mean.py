"""The maths of a round: weights of replicas, mean, pooled variance."""

import math
from typing import NamedTuple

import tensorflow as tf

__all__ = [
    "Shares",
    "accumulation_dtype",
    "pooled_variance",
    "shares",
    "weighted_mean",
]


class Shares(NamedTuple):
    """How much each of R replicas contributes to a mean.

    Attributes:
        ratios: List of R floats >= 0 that sum to 1.
        anchor: Int, the replica with the largest ratio, the first of them.
    """

    ratios: list
    anchor: int


def shares(weights):
    """Turns the weights of R replicas into their `Shares`.

    Args:
        weights: Sequence of R finite numbers >= 0, at least one of them > 0,
            such as the rows that each replica has seen.

    Returns:
        `Shares`.

    Raises:
        ValueError: If a weight is negative or not finite, or all are 0.
    """
    weights = [float(weight) for weight in weights]
    if any(not math.isfinite(w) or w < 0 for w in weights):
        raise ValueError(
            "Weights must be finite numbers >= 0, one per replica. "
            f"Received: weights={weights}. Pass the number of rows that each "
            "replica stands for."
        )
    total = math.fsum(weights)
    if total == 0:
        raise ValueError(
            "At least one weight must be > 0: a mean over nothing does not "
            f"exist. Received: weights={weights}. Pass 1 for every replica "
            "for the plain mean."
        )
    return Shares([w / total for w in weights], weights.index(max(weights)))


def accumulation_dtype(dtype):
    """The dtype in which values of `dtype` are averaged and travel."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def weighted_mean(values, ratios, anchor):
    """Returns the weighted mean of one variable's values on R replicas.

    Computed as `a + sum(ratio * (value - a))` around the anchor's value `a`,
    in the values' accumulation dtype. Equal values therefore give back their
    own bits (3 values summed and divided by 3 do not), so what no replica has
    changed, no number of rounds can move; and the sum cannot overflow unless
    two replicas are further apart than the dtype's largest number. A ratio of
    1 gives the anchor's bits.

    Args:
        values: List of R tensors of one shape and one floating point dtype.
        ratios: Float64 tensor of shape `[R]`, each replica's share.
        anchor: Int, the replica whose share is largest.

    Returns:
        Tensor of the values' shape in their accumulation dtype.
    """
    dtype = accumulation_dtype(values[anchor].dtype)
    center = tf.cast(values[anchor], dtype)
    ratios = tf.cast(ratios, dtype)
    parts = [
        (tf.cast(value, dtype) - center) * ratios[replica]
        for replica, value in enumerate(values)
        if replica != anchor
    ]
    return tf.add_n([center, *parts]) if parts else center


def pooled_variance(variances, means, mean, ratios, anchor):
    """Returns the variance of the rows of R replicas taken together.

    It is the mean of the variances plus the variance of the means, by the law
    of total variance. The mean of the variances alone would miss how far the
    replicas' data lie apart.

    Args:
        variances: List of R tensors of one shape, each >= 0.
        means: List of R tensors of that shape, the means that belong to them.
        mean: Tensor of that shape, the weighted mean of `means`.
        ratios: Float64 tensor of shape `[R]`, each replica's share.
        anchor: Int, the replica whose share is largest.

    Returns:
        Tensor of the variances' shape in their accumulation dtype.
    """
    dtype = accumulation_dtype(variances[anchor].dtype)
    mean = tf.cast(mean, dtype)
    squares = [tf.square(tf.cast(m, dtype) - mean) for m in means]
    totals = [
        tf.cast(variance, dtype) + square
        for variance, square in zip(variances, squares)
    ]
    return weighted_mean(totals, ratios, anchor)
