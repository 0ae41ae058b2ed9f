"""An exchange of another kind takes the place of the all-reduce."""

import numpy as np
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.averaging import exchanges


class InFloat16(exchanges.Exchange):
    """Sends buffers in half as many bytes, and only when it must."""

    def begin(self, offsets):
        self.communicator.begun += 1
        return [tf.cast(offset, tf.float16) for offset in offsets]

    def finish(self, handle):
        self.communicator.finished += 1
        sums = self.communicator.all_reduce_sum(handle, is_agreed=True)
        return [tf.cast(total, tf.float32) for total in sums]


class Counting(toys.TwinCommunicator):
    begun = 0
    finished = 0
    sent = ()

    def _reduce(self, tensors):
        self.sent = [tensor.dtype for tensor in tensors]
        return super()._reduce(tensors)


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_exchange_needs_nothing_else(monkeypatch, fragments):
    monkeypatch.setattr(exchanges, "AllReduce", InFloat16)
    communicator = Counting()
    strategy = toys.make_strategy(2, communicator=communicator)
    with strategy.scope():
        variables = [tf.Variable(1.0, name=name) for name in ("a", "b")]
        optimizer = toys.sgd()
    averager = avg.ParameterAverager(
        strategy, variables, optimizer, period=2, fragments=fragments
    )
    for variable in variables:
        toys.assign_per_replica(variable, [1.1, 1.3])
    averager.average()
    # Each of four replicas, of which two are here, has a share of a quarter.
    offset = np.float16(
        np.float32(0.25) * (np.float32(1.1) - np.float32(1))
        + np.float32(0.25) * (np.float32(1.3) - np.float32(1))
    )
    expected = float(np.float32(1) + np.float32(offset + offset))
    for variable in variables:
        assert toys.scalars(variable) == [expected] * 2
    # Learning rates and counters do not travel.
    assert communicator.sent == [tf.float16] * len(communicator.sent)
    assert communicator.begun == communicator.finished == fragments


def test_one_worker_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(exchanges, "AllReduce", None)
    model, _ = toys.fit_slope(2, period=2)
    assert toys.weight(model) == 5.125
