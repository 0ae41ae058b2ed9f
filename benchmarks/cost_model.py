"""The cost model of `scaling.py`: what a round takes, and what training."""

import math
from typing import NamedTuple

import numpy as np
import scipy.optimize


class Point(NamedTuple):
    """A measured round.

    Attributes:
        workers: Int >= 2.
        num_bytes: Float, what each worker contributes.
        rate: Float, bytes that a host may send in a second.
        seconds: Float.
    """

    workers: int
    num_bytes: float
    rate: float
    seconds: float


class Model(NamedTuple):
    """What a round takes.

    Attributes:
        shape: String, "ring" or "tree".
        start: Float, seconds that any round takes.
        latency: Float, seconds for each message that waits for another.
        work: Float, seconds for each byte.
        overhead: Float, bytes on the wire for each byte of payload.
    """

    shape: str
    start: float
    latency: float
    work: float
    overhead: float

    def seconds(self, workers, num_bytes, rate):
        """Returns what a round takes, a float."""
        factors = _factors(self.shape, workers, num_bytes, rate)
        return float(np.dot(factors, self[1:]))


def _factors(shape, workers, num_bytes, rate):
    """What start, latency, work and overhead are multiplied by."""
    if shape == "ring":
        messages, share = 2 * (workers - 1), 2 * (workers - 1) / workers
    else:
        messages = share = 2 * math.log2(workers)
    return [1.0, messages, num_bytes, share * num_bytes / rate]


def fit(shape, points):
    """Returns the `Model` that errs least, by the share of the time.

    Args:
        shape: "ring" or "tree".
        points: List of `Point`, of several sizes, rates and numbers of workers.
    """
    rows = np.array([_factors(shape, *point[:3]) for point in points])
    seconds = np.array([point.seconds for point in points])
    # No parameter is negative. Columns differ by 10 powers of 10.
    scaled = rows / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    solution, _ = scipy.optimize.nnls(scaled / norms, np.ones(len(points)))
    return Model(shape, *(solution / norms).tolist())


def errors(model, points):
    """Returns by which share of the time the model errs at each point."""
    return [model.seconds(*point[:3]) / point.seconds - 1 for point in points]


class Training(NamedTuple):
    """Training steps of one job, computed.

    Attributes:
        model: `Model` of its rounds.
        workers: Int.
        weights: Float, bytes of the model's weights.
        rate: Float, bytes that a worker may send in a second.
        step: Float, seconds of a step that exchanges nothing.
    """

    model: Model
    workers: int
    weights: float
    rate: float
    step: float

    def synchronous(self):
        """Seconds of a step that exchanges its gradients."""
        return self.step + self.round(1)

    def round(self, copies):
        """Seconds of a round.

        Args:
            copies: Int, how much travels: 1 are the weights alone, 2 with
                momentum, 3 with the two slots of Adam.
        """
        return self.model.seconds(
            self.workers, copies * self.weights, self.rate
        )

    def local(self, period, copies):
        """Seconds of a step, with a round after each `period` of them."""
        return self.step + self.round(copies) / period
