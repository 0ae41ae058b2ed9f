import numpy as np
import pytest
import tensorflow as tf

from tf_avgstrategy.tools import network_probe
from tf_avgstrategy.workers import communicators

# Powers of 2, so that sums of times are exact: 1 ms, and 64 MiB per second.
LATENCY = 2**-10
PER_BYTE = 2**-26


class ClockedCommunicator(communicators.Communicator):
    """Two workers and a clock on which exchanges take what they should.

    Args:
        latency: Float, seconds of each message.
        per_byte: Float, seconds of each byte of an all-reduce.
        slowness: Float, how many times as long the other worker takes.
    """

    def __init__(self, latency=LATENCY, per_byte=PER_BYTE, slowness=1):
        super().__init__(rank=0, size=2)
        self.now = 0.0
        self.delays = []
        self.reduced = []
        self._latency = latency
        self._per_byte = per_byte
        self._slowness = slowness

    def clock(self):
        return self.now

    def all_gather(self, tensor, purpose=""):
        gathered = super().all_gather(tensor, purpose)
        if purpose == "times: ":
            gathered[1] *= self._slowness
        return gathered

    def _gather(self, array):
        self.now += self._latency
        return np.stack([array, array])

    def _reduce(self, tensors):
        sizes = [t.shape.num_elements() for t in tensors]
        self.reduced.append(sizes)
        self.now += self._latency + 4 * sum(sizes) * self._per_byte
        if self.delays:
            self.now += self.delays.pop(0)
        return [2 * tensor for tensor in tensors]

    def _broadcast(self, tensors, root):
        return tensors


def measure_network(communicator):
    return network_probe.measure_network(communicator, clock=communicator.clock)


def measure_round(communicator, num_elements):
    network = network_probe.Network(2, LATENCY, PER_BYTE, ())
    return network_probe.measure_round(
        communicator, network, num_elements, clock=communicator.clock
    )


class TestMeasureNetwork:
    def test_finds_what_the_network_was_made_of(self):
        network = measure_network(ClockedCommunicator())
        assert network.size == 2
        # One number has 4 bytes.
        assert network.latency_seconds == LATENCY + 4 * PER_BYTE
        # A fit, which rounds.
        assert network.seconds_per_byte == pytest.approx(PER_BYTE, rel=1e-9)
        # Of two workers each sends half of a tensor, twice.
        assert network.bytes_per_second == pytest.approx(2**26, rel=1e-9)

    def test_payloads_grow_until_one_takes_half_a_second(self):
        network = measure_network(ClockedCommunicator())
        sizes = [payload.num_bytes for payload in network.payloads]
        # 64 MiB take a second, 16 MiB a quarter of one.
        assert sizes == [2**power for power in (16, 18, 20, 22, 24, 26)]
        for payload in network.payloads:
            assert payload.seconds == LATENCY + payload.num_bytes * PER_BYTE
        # For a second each, but for no fewer than two and no more than 30.
        turns = [payload.num_turns for payload in network.payloads]
        assert turns == [30, 30, 30, 16, 4, 2]

    def test_a_slow_network_sees_one_payload(self):
        # 64 KiB in 64 s.
        network = measure_network(ClockedCommunicator(per_byte=2**-10))
        (payload,) = network.payloads
        assert payload == (2**16, LATENCY + 64, 2)
        assert network.seconds_per_byte == (LATENCY + 64) / 2**16

    def test_the_slowest_worker_counts(self):
        network = measure_network(ClockedCommunicator(slowness=4))
        assert network.latency_seconds == 4 * (LATENCY + 4 * PER_BYTE)
        assert network.seconds_per_byte == pytest.approx(4 * PER_BYTE)

    def test_more_workers_send_more_of_a_tensor(self):
        network = network_probe.Network(4, LATENCY, 0.5, ())
        # 2 * 3 / 4 of a byte in half a second.
        assert network.bytes_per_second == 3
        assert network.seconds(10) == LATENCY + 5

    def test_times_that_do_not_grow_are_noise(self):
        payloads = [
            network_probe.Exchange(100, 2.0, 3),
            network_probe.Exchange(400, 1.0, 3),
        ]
        assert network_probe._seconds_per_byte(payloads) == 1 / 400


class TestMeasureRound:
    @pytest.mark.parametrize("num_elements", [1, 63, 64, 1000, 2**20 + 1])
    def test_every_element_travels_once(self, num_elements):
        communicator = ClockedCommunicator()
        exchange = measure_round(communicator, num_elements)
        assert exchange.num_bytes == 4 * num_elements
        # Workers agree, then exchange.
        assert exchange.seconds == 2 * LATENCY + 4 * num_elements * PER_BYTE
        # The first one is not counted.
        assert len(communicator.reduced) == 1 + exchange.num_turns
        for sizes in communicator.reduced:
            assert sum(sizes) == num_elements
            assert len(sizes) == min(64, num_elements)
            assert max(sizes) - min(sizes) <= 1

    def test_tensors_are_fused_into_buckets(self):
        communicator = ClockedCommunicator()
        # 64 tensors of 64 bytes, of which 16 fill a bucket.
        communicator.bucket_bytes = 1024
        measure_round(communicator, 64 * 16)
        assert communicator.reduced[0] == [256] * 4

    def test_fills_seconds_with_turns(self):
        # 64 MiB take a second, and a bit: 5 s for 4.99 of them.
        assert measure_round(ClockedCommunicator(), 2**24).num_turns == 5

    def test_neither_the_first_turn_nor_a_late_one_counts(self):
        communicator = ClockedCommunicator()
        communicator.delays = [9, 0, 0, 5]
        exchange = measure_round(communicator, 2**24)
        assert exchange.seconds == 2 * LATENCY + 1

    @pytest.mark.parametrize(
        ("num_elements", "per_byte"),
        # 32 s; 8 GiB in an instant.
        [(2**23, 2**-20), (2**31, 2**-60)],
    )
    def test_what_is_too_much_is_computed(self, num_elements, per_byte):
        communicator = ClockedCommunicator()
        network = network_probe.Network(2, LATENCY, per_byte, ())
        exchange = network_probe.measure_round(
            communicator, network, num_elements, clock=communicator.clock
        )
        seconds = 2 * LATENCY + 4 * num_elements * per_byte
        assert exchange == (4 * num_elements, seconds, 0)
        assert not communicator.reduced

    def test_results_are_of_the_size_that_was_sent(self, monkeypatch):
        unpacked = []
        unpack = network_probe.buckets.unpack

        def note(plan, sums):
            unpacked.append(unpack(plan, sums))
            return unpacked[-1]

        monkeypatch.setattr(network_probe.buckets, "unpack", note)
        measure_round(ClockedCommunicator(), 100)
        shapes = [t.shape for t in unpacked[0]]
        assert sum(map(tf.TensorShape.num_elements, shapes)) == 100


class TestPeriodForShare:
    @pytest.mark.parametrize(
        ("round_seconds", "step_seconds", "period"),
        [
            (1.0, 1.0, 20),
            (2.0, 0.1, 400),
            # 20.2 steps would do.
            (1.01, 1.0, 21),
            (1e-6, 1.0, 1),
        ],
    )
    def test_rounds_cost_5_percent(self, round_seconds, step_seconds, period):
        assert network_probe.period_for_share(round_seconds, step_seconds) == (
            period
        )

    def test_of_a_share_that_is_chosen(self):
        assert network_probe.period_for_share(1.0, 1.0, share=0.25) == 4
