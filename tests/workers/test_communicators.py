import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_avgstrategy.workers import communicators

PAYLOADS = [
    np.float16(3),
    np.zeros([0], "float32"),
    np.array([1.5], "float32"),
    np.arange(6, dtype="float64").reshape(2, 3),
]


class TestSingleWorkerCommunicator:
    def test_is_the_only_worker(self):
        communicator = communicators.SingleWorkerCommunicator()
        assert (communicator.rank, communicator.size) == (0, 1)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_sum_over_one_worker_keeps_bits(self, payload):
        communicator = communicators.SingleWorkerCommunicator()
        tensors = [tf.constant(payload), tf.constant(payload)]
        for result in communicator.all_reduce_sum(tensors):
            assert result.dtype == payload.dtype
            np.testing.assert_array_equal(result, payload)

    @pytest.mark.parametrize("payload", [*PAYLOADS, np.array([True, False])])
    def test_broadcast_from_itself_keeps_bits(self, payload):
        communicator = communicators.SingleWorkerCommunicator()
        (result,) = communicator.broadcast([tf.constant(payload)])
        assert result.dtype == payload.dtype
        np.testing.assert_array_equal(result, payload)

    def test_gathers_add_an_axis_of_ranks(self):
        communicator = communicators.SingleWorkerCommunicator()
        result = communicator.all_gather(np.arange(3.0))
        np.testing.assert_array_equal(result, [[0.0, 1.0, 2.0]])
        for text in ("", "a", "\u00e9" * 1000):
            assert communicator.all_gather_strings(text) == [text]

    def test_a_closed_one_takes_no_call(self):
        communicator = communicators.SingleWorkerCommunicator()
        communicator.barrier()
        communicator.close()
        with pytest.raises(
            communicators.WorkerLostError, match="closed.*`barrier`"
        ):
            communicator.barrier()

    def test_a_second_thread_must_wait_its_turn(self):
        communicator = communicators.SingleWorkerCommunicator()
        entered, leave = threading.Event(), threading.Event()

        def gather(array):
            entered.set()
            leave.wait(10)
            return array[None]

        communicator._gather = gather
        thread = threading.Thread(target=communicator.barrier)
        thread.start()
        entered.wait(10)
        with pytest.raises(RuntimeError, match="one call at a time"):
            communicator.barrier()
        leave.set()
        thread.join()
