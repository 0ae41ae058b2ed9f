import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tf_avgstrategy.tensors import buckets

SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        st.sampled_from([tf.float32, tf.float64]),
    ),
    max_size=20,
)


def tensors_of(specs):
    count = 0
    tensors = []
    for shape, dtype in specs:
        size = int(np.prod(shape, dtype=int))
        values = np.arange(count, count + size).reshape(shape)
        tensors.append(tf.constant(values, dtype))
        count += size
    return tensors


@hypothesis.given(SHAPES, st.integers(0, 400))
def test_unpack_is_the_inverse_of_pack(specs, bucket_bytes):
    tensors = tensors_of(specs)
    plan = buckets.plan_buckets(tensors, bucket_bytes)
    result = buckets.unpack(plan, buckets.pack(plan, tensors))
    assert len(result) == len(tensors)
    for before, after in zip(tensors, result):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before)


@hypothesis.given(SHAPES, st.integers(0, 400))
def test_every_tensor_is_in_one_bucket_of_its_dtype(specs, bucket_bytes):
    tensors = tensors_of(specs)
    plan = buckets.plan_buckets(tensors, bucket_bytes)
    placed = [index for bucket in plan for index in bucket.indices]
    assert sorted(placed) == list(range(len(tensors)))
    for bucket in plan:
        assert {tensors[i].dtype for i in bucket.indices} == {bucket.dtype}


@hypothesis.given(SHAPES, st.integers(0, 400))
def test_only_a_single_tensor_may_exceed_the_limit(specs, bucket_bytes):
    tensors = tensors_of(specs)
    for bucket in buckets.plan_buckets(tensors, bucket_bytes):
        size = sum(buckets.num_bytes(tensors[i]) for i in bucket.indices)
        assert size <= bucket_bytes or len(bucket.indices) == 1


def test_fuses_up_to_the_limit():
    tensors = [tf.zeros([2])] * 5
    plan = buckets.plan_buckets(tensors, bucket_bytes=16)
    assert [bucket.indices for bucket in plan] == [(0, 1), (2, 3), (4,)]


def test_a_limit_of_zero_gives_every_tensor_its_own_bucket():
    plan = buckets.plan_buckets([tf.zeros([2])] * 3, bucket_bytes=0)
    assert [bucket.indices for bucket in plan] == [(0,), (1,), (2,)]


def test_num_bytes_counts_elements_and_their_size():
    assert buckets.num_bytes(tf.TensorSpec([3, 5], tf.float64)) == 120
