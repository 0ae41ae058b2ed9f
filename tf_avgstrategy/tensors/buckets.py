"""Buckets: many tensors fused into few flat buffers that travel as one."""

from typing import NamedTuple

import tensorflow as tf

__all__ = ["Bucket", "num_bytes", "pack", "plan_buckets", "unpack"]


class Bucket(NamedTuple):
    """The tensors that share one flat buffer.

    Attributes:
        dtype: `tf.DType` of all of them.
        indices: Tuple of ints, their places in the list that was planned.
        shapes: Tuple of tuples of ints, their shapes.
    """

    dtype: tf.DType
    indices: tuple
    shapes: tuple


def num_bytes(spec):
    """Returns the size in bytes of what a `tf.TensorSpec` describes."""
    elements = tf.TensorShape(spec.shape).num_elements()
    return elements * tf.as_dtype(spec.dtype).size


def plan_buckets(specs, bucket_bytes):
    """Assigns tensors to buckets, in order, one dtype a bucket.

    A bucket closes when the next tensor of its dtype would take it above
    `bucket_bytes`. A tensor larger than that has a bucket to itself.

    Args:
        specs: Sequence of objects with a fully defined `shape` and a `dtype`,
            such as `tf.TensorSpec`.
        bucket_bytes: Int >= 0, upper limit of a fused buffer in bytes. 0 gives
            every tensor its own bucket, which costs no copy.

    Returns:
        List of `Bucket`. Every tensor is in exactly one of them.
    """
    open_groups = {}
    groups = []
    for index, spec in enumerate(specs):
        dtype = tf.as_dtype(spec.dtype)
        group, used_bytes = open_groups.get(dtype, (None, 0))
        if group is None or used_bytes + num_bytes(spec) > bucket_bytes:
            group, used_bytes = [], 0
            groups.append((dtype, group))
        group.append(index)
        open_groups[dtype] = (group, used_bytes + num_bytes(spec))
    return [
        Bucket(
            dtype,
            tuple(group),
            tuple(tuple(specs[index].shape) for index in group),
        )
        for dtype, group in groups
    ]


def pack(plan, tensors):
    """Returns one flat tensor per bucket of `plan`.

    Args:
        plan: List of `Bucket`.
        tensors: The tensors that were planned, in that order.
    """
    return [
        _concat([tf.reshape(tensors[index], [-1]) for index in bucket.indices])
        for bucket in plan
    ]


def unpack(plan, buffers):
    """Returns the tensors that `pack` fused into `buffers`, in their order."""
    tensors = {}
    for bucket, buffer in zip(plan, buffers):
        sizes = [tf.TensorShape(s).num_elements() for s in bucket.shapes]
        flat = tf.split(buffer, sizes) if len(sizes) > 1 else [buffer]
        for index, shape, part in zip(bucket.indices, bucket.shapes, flat):
            tensors[index] = tf.reshape(part, shape)
    return [tensors[index] for index in range(len(tensors))]


def _concat(parts):
    return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
