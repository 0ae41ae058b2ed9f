import numpy as np
import pytest
import tensorflow as tf

from tf_avgstrategy import communicators

PAYLOADS = [
    np.float16(3),
    np.zeros([0], "float32"),
    np.array([1.5], "float32"),
    np.arange(6, dtype="float64").reshape(2, 3),
]


@pytest.fixture(params=["eager", "traced"])
def call(request):
    """Calls a function of tensors, eagerly or in a `tf.function`."""
    if request.param == "eager":
        return lambda fn, *args: fn(*args)
    return lambda fn, *args: tf.function(fn)(*args)


class TestSingleWorkerCommunicator:
    def test_is_the_only_worker(self):
        communicator = communicators.SingleWorkerCommunicator()
        assert (communicator.rank, communicator.size) == (0, 1)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_sum_over_one_worker_keeps_bits(self, call, payload):
        communicator = communicators.SingleWorkerCommunicator()
        tensors = [tf.constant(payload), tf.constant(payload)]
        for result in call(communicator.all_reduce_sum, tensors):
            assert result.dtype == payload.dtype
            np.testing.assert_array_equal(result, payload)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_broadcast_from_itself_keeps_bits(self, call, payload):
        communicator = communicators.SingleWorkerCommunicator()
        (result,) = call(communicator.broadcast, [tf.constant(payload)])
        np.testing.assert_array_equal(result, payload)

    def test_gather_adds_an_axis_of_ranks(self, call):
        communicator = communicators.SingleWorkerCommunicator()
        result = call(communicator.all_gather, tf.constant(["a", "b"]))
        assert result.shape == (1, 2)

    def test_barrier_and_close_return(self):
        communicator = communicators.SingleWorkerCommunicator()
        communicator.barrier()
        communicator.close()
