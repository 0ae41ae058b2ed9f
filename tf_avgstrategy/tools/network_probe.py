"""The network probe: what exchanging costs between the workers that there are.

Every number is the same on all workers: the slowest of them counts.
"""

import math
import time
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_avgstrategy.tensors import buckets

__all__ = [
    "Exchange",
    "Network",
    "measure_network",
    "measure_round",
    "period_for_share",
]

_LATENCY_BYTES = 4
_PAYLOAD_BYTES = tuple(2**power for power in range(16, 28, 2))
# A payload that takes longer is the largest one.
_LONG_SECONDS = 0.5
# For all turns of one size, within the numbers of turns below.
_SECONDS_PER_PAYLOAD = 1.0
_SECONDS_PER_ROUND = 5.0
_LEAST_TURNS, _MOST_TURNS = 2, 30
# A round beyond these is not measured but computed.
_MOST_ROUND_SECONDS = 30.0
_MOST_ROUND_BYTES = 2 * 2**30
_NUM_TENSORS = 64
# Of the message by which workers agree on a round, in numbers of 8 bytes.
_NUM_STATUS_NUMBERS = 17


class Exchange(NamedTuple):
    """What exchanging so many bytes takes.

    Attributes:
        num_bytes: Int, what each worker contributes to the sum.
        seconds: Float, the median over turns of the slowest worker's time. 0
            turns: what the measured network would need.
        num_turns: Int >= 0, how often it was measured. A first turn, in which
            functions are traced and buffers made, is not counted.
    """

    num_bytes: int
    seconds: float
    num_turns: int


class Network(NamedTuple):
    """The network between the workers of a job, measured.

    Attributes:
        size: Int >= 2, the number of workers.
        latency_seconds: Float > 0, what an all-reduce of one number takes.
        seconds_per_byte: Float > 0, how much longer an all-reduce takes for
            each byte that every worker contributes.
        payloads: Tuple of `Exchange`, from which that was computed.
    """

    size: int
    latency_seconds: float
    seconds_per_byte: float
    payloads: tuple

    @property
    def bytes_per_second(self):
        """Float > 0, what each worker sends, and receives, in a second.

        In a ring of N workers that is 2 (N - 1) / N of what it contributes.
        """
        return 2 * (self.size - 1) / self.size / self.seconds_per_byte

    def seconds(self, num_bytes):
        """Returns what an all-reduce of so many bytes takes, computed."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte


def measure_network(communicator, *, clock=time.perf_counter):
    """Measures latency and bandwidth by all-reduces of growing size.

    To be called on every worker. It takes some 10 s: sizes grow fourfold from
    64 KiB to 64 MiB, or until one takes more than half a second.

    Args:
        communicator: `Communicator` of several workers.
        clock: Function that returns seconds, a float.

    Returns:
        `Network`, the same on every worker.

    Raises:
        WorkerLostError: If a worker does not take part in time.
    """
    latency = _measure_payload(communicator, _LATENCY_BYTES, clock)
    payloads = []
    for num_bytes in _PAYLOAD_BYTES:
        payloads.append(_measure_payload(communicator, num_bytes, clock))
        if payloads[-1].seconds > _LONG_SECONDS:
            break
    return Network(
        communicator.size,
        latency.seconds,
        _seconds_per_byte(payloads),
        tuple(payloads),
    )


def measure_round(
    communicator, network, num_elements, *, clock=time.perf_counter
):
    """Measures what a round does between reading and writing variables.

    Workers agree by one small message; float32 tensors, 64 of about the same
    size, are fused into the communicator's buckets, summed over all workers
    and taken apart again. Not in it: the arithmetic on a worker's own
    replicas, and waiting for workers that are late.

    What would take more than 30 s, or moves more than 2 GiB, is computed from
    `network` instead.

    Args:
        communicator: `Communicator` of several workers.
        network: `Network` between them.
        num_elements: Int >= 1, how many numbers travel.
        clock: Function that returns seconds, a float.

    Returns:
        `Exchange`, the same on every worker.

    Raises:
        WorkerLostError: If a worker does not take part in time.
    """
    num_bytes = num_elements * tf.float32.size
    # A message by which workers agree comes first.
    expected = network.latency_seconds + network.seconds(num_bytes)
    if expected > _MOST_ROUND_SECONDS or num_bytes > _MOST_ROUND_BYTES:
        return Exchange(num_bytes, expected, 0)
    tensors = [tf.zeros([size]) for size in _sizes(num_elements)]
    plan = buckets.plan_buckets(tensors, communicator.bucket_bytes)
    pack = tf.function(lambda parts: buckets.pack(plan, parts))
    unpack = tf.function(lambda sums: buckets.unpack(plan, sums))
    status = np.zeros([_NUM_STATUS_NUMBERS])

    def exchange():
        fused = pack(tensors)
        communicator.all_gather(status, "a round: ")
        return unpack(communicator.all_reduce_sum(fused, is_agreed=True))

    turns = _Turns(communicator, exchange, clock)
    turns.take(1)
    times = turns.take(_num_turns(_SECONDS_PER_ROUND / expected))
    return Exchange(num_bytes, float(np.median(times)), len(times))


def period_for_share(round_seconds, step_seconds, share=0.05):
    """Returns the least period at which rounds cost no more than a share.

    Args:
        round_seconds: Float > 0, what a round takes.
        step_seconds: Float > 0, what a training step takes without it.
        share: Float > 0, the most that rounds may add to the time of steps.

    Example:
        A round of 2 s after 400 steps of 0.1 s, which are 40 s:

        >>> period_for_share(2.0, 0.1)
        400
    """
    # 2 / (0.05 * 0.1) is 400 and a rounding error, which is no step.
    steps = round(round_seconds / (share * step_seconds), 6)
    return max(1, math.ceil(steps))


class _Turns:
    """An exchange that is repeated on every worker, and timed.

    Turns follow each other at once: an exchange ends nowhere before it has
    begun everywhere, which keeps workers in step better than a barrier does.
    """

    def __init__(self, communicator, exchange, clock):
        self._communicator = communicator
        self._exchange = exchange
        self._clock = clock

    def take(self, count):
        """Returns the slowest worker's seconds in each turn, an array."""
        own = np.array([self._seconds() for _ in range(count)])
        return self._communicator.all_gather(own, "times: ").max(axis=0)

    def _seconds(self):
        start = self._clock()
        # A GPU may not have done yet what it was given: its result is read.
        self._exchange()[-1][:1].numpy()
        return self._clock() - start


def _measure_payload(communicator, num_bytes, clock):
    tensor = tf.zeros([num_bytes // tf.float32.size])

    def exchange():
        return communicator.all_reduce_sum([tensor], is_agreed=True)

    # All agree here on what follows, so that nothing else travels with it.
    communicator.barrier()
    turns = _Turns(communicator, exchange, clock)
    turns.take(1)
    (seconds,) = turns.take(1)
    times = turns.take(_num_turns(_SECONDS_PER_PAYLOAD / seconds))
    return Exchange(num_bytes, float(np.median(times)), len(times))


def _num_turns(wanted):
    return int(np.clip(math.ceil(wanted), _LEAST_TURNS, _MOST_TURNS))


def _seconds_per_byte(payloads):
    """The slope of a line through the times, by least squares.

    A deviation counts by its share of the time: else the largest payload alone
    would decide.
    """
    num_bytes = np.array([payload.num_bytes for payload in payloads], float)
    seconds = np.array([payload.seconds for payload in payloads])
    largest = seconds[-1] / num_bytes[-1]
    if len(payloads) == 1:
        return largest
    slope = np.polyfit(num_bytes, seconds, deg=1, w=1 / seconds)[0]
    # Times that do not grow with the payload say nothing but noise.
    return float(slope) if slope > 0 else largest


def _sizes(num_elements):
    """Splits a number into parts that differ by at most one."""
    count = min(_NUM_TENSORS, num_elements)
    ends = [num_elements * place // count for place in range(count + 1)]
    return [end - start for start, end in zip(ends, ends[1:])]
