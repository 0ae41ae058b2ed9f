import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_avgstrategy.tensors import mean


def weighted_mean(values, weights):
    """The mean as a round takes it: around the value of the largest share."""
    ratios, anchor = mean.shares(weights)
    values = [tf.constant(value) for value in values]
    center = values.pop(anchor)
    if not values:
        return center.numpy()
    del ratios[anchor]
    offset = mean.weighted_offset(values, center, ratios)
    return (tf.cast(center, offset.dtype) + offset).numpy()


class TestShares:
    def test_divides_by_the_sum_of_weights_once(self):
        assert mean.shares([3, 1]) == ([0.75, 0.25], 0)

    def test_anchor_is_the_first_of_the_heaviest(self):
        assert mean.shares([1, 2, 2]).anchor == 1

    def test_rejects_weights_that_are_all_zero(self):
        with pytest.raises(ValueError, match=r"> 0: a mean.*\[0\.0, 0\.0\]"):
            mean.shares([0, 0])

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
    def test_rejects_a_weight_that_is_no_weight(self, weight):
        with pytest.raises(ValueError, match=f"finite numbers.*{weight}"):
            mean.shares([1.0, weight])


class TestWeightedMean:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [([3, 1], 3.6875), ([5, 5], 5.125), ([1, 0], 2.25), ([0, 1], 8.0)],
    )
    def test_of_two_values_by_hand(self, weights, expected):
        values = [np.float32(2.25), np.float32(8.0)]
        assert weighted_mean(values, weights) == expected

    @hypothesis.given(
        value=st.floats(width=32, allow_nan=False, allow_infinity=False),
        weights=st.lists(st.integers(1, 1000), min_size=1, max_size=9),
    )
    def test_of_equal_values_keeps_their_bits(self, value, weights):
        values = [np.float32(value)] * len(weights)
        result = weighted_mean(values, weights)
        # TensorFlow's kernels flush subnormal numbers to 0.
        expected = value if abs(value) >= np.finfo("float32").tiny else 0.0
        assert result in (value, expected)

    def test_of_one_replica_keeps_its_bits(self):
        value = np.array([0.1, -0.0, 1e-45, 3e38], "float32")
        result = weighted_mean([value], [7])
        assert result.tobytes() == value.tobytes()

    def test_does_not_overflow(self):
        largest = np.float32(3e38)
        assert weighted_mean([largest] * 3, [1, 1, 1]) == largest

    def test_of_half_precision_is_taken_in_float32(self):
        values = [np.float16(60000)] * 2
        result = weighted_mean(values, [1, 1])
        assert result.dtype == np.float32
        assert result == 60000

    def test_of_float64_is_taken_in_float64(self):
        values = [np.float64(1), np.float64(1 + 2**-40)]
        assert weighted_mean(values, [1, 1]) == 1 + 2**-41

    def test_ratios_are_not_rounded_to_float32_for_float64(self):
        values = [np.float64(0), np.float64(3)]
        assert weighted_mean(values, [2, 1]) == pytest.approx(1, abs=1e-15)

    @hypothesis.given(
        st.lists(
            st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 100)),
            min_size=2,
            max_size=6,
        ).filter(lambda pairs: any(weight for _, weight in pairs))
    )
    def test_equals_the_definition_in_float64(self, pairs):
        values, weights = zip(*pairs)
        expected = np.average(np.float64(values), weights=weights)
        result = weighted_mean(np.float32(values), weights)
        # One rounding per product and sum, of numbers up to 2e6 in size.
        tolerance = 4 * len(pairs) * np.finfo("float32").eps
        scale = max(map(abs, values))
        assert abs(result - expected) <= tolerance * 2 * scale + 1e-37


class TestWeightedOffset:
    def test_of_what_equals_the_center_is_nothing(self):
        values = [tf.constant([0.1, 1e30])] * 3
        offset = mean.weighted_offset(values, values[0], [0.2, 0.3, 0.5])
        np.testing.assert_array_equal(offset, [0.0, 0.0])

    def test_leaves_out_what_has_no_share(self):
        values = [tf.constant(float("nan")), tf.constant(3.0)]
        offset = mean.weighted_offset(values, tf.constant(1.0), [0.0, 0.5])
        assert offset.numpy() == 1.0

    def test_parts_of_a_whole_add_up(self):
        # 2.25 and 8 around 4, as two workers with half the weight each.
        parts = [
            mean.weighted_offset([tf.constant(w)], tf.constant(4.0), [0.5])
            for w in (2.25, 8.0)
        ]
        assert 4.0 + sum(part.numpy() for part in parts) == 5.125


class TestTotalVariances:
    def test_adds_the_variance_of_the_means(self):
        totals = mean.total_variances(
            [tf.constant(1.0), tf.constant(1.0)],
            [tf.constant(0.0), tf.constant(4.0)],
            tf.constant(2.0),
        )
        assert weighted_mean(totals, [1, 1]) == 5.0

    def test_give_the_variance_of_all_rows_together(self):
        rng = np.random.default_rng(0)
        parts = [rng.normal(3, 2, 100), rng.normal(-1, 1, 300)]
        means = [tf.constant(part.mean()) for part in parts]
        variances = [tf.constant(part.var()) for part in parts]
        center = weighted_mean(means, [100, 300])
        totals = mean.total_variances(variances, means, center)
        everything = np.concatenate(parts)
        # Float64 rounding of sums over 400 rows.
        np.testing.assert_allclose(
            weighted_mean(totals, [100, 300]), everything.var(), rtol=1e-12
        )


class TestDistance:
    def test_by_hand(self):
        values = [tf.constant([3.0, 1.0]), tf.constant(5.0)]
        references = [tf.constant([0.0, 1.0]), tf.constant(1.0)]
        assert mean.distance(values, references).numpy() == 5.0
        assert mean.norm(values).numpy() == np.sqrt(35.0)

    def test_of_half_precision_is_taken_in_float32(self):
        # The square alone would be infinite.
        value = tf.constant([1000.0], tf.float16)
        assert mean.norm([value]).numpy() == 1000.0
        assert mean.distance([value], [-value]).numpy() == 2000.0

    def test_of_nothing_is_zero(self):
        assert mean.norm([]).numpy() == 0.0

    def test_of_many_numbers(self):
        values = np.random.default_rng(0).normal(1, 1, 3_000_000)
        values = values.astype("float32")
        expected = np.linalg.norm(values.astype("float64"))
        # Sums of float32 squares, each of some thousand: rounding errors of
        # 6e-8 that do not add up.
        assert mean.norm([tf.constant(values)]).numpy() == pytest.approx(
            expected, rel=1e-6
        )
