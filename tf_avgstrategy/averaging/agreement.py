"""Agreement: what workers tell each other around rounds, and at the start."""

import hashlib
from typing import NamedTuple

import numpy as np
from absl import logging

__all__ = [
    "AFTER_EPOCH",
    "AFTER_TRAINING",
    "IN_EPOCH",
    "METRICS",
    "NOTHING",
    "PLANS",
    "STATES",
    "Status",
    "check_gathers",
    "check_health",
    "check_same",
    "extremes",
    "find_sick",
    "warn_of_excluded",
    "warn_of_idle_workers",
]

# How far a worker is. One that is further along than others takes part in
# their rounds, with what it has not contributed yet, until they are as far.
IN_EPOCH, AFTER_EPOCH, AFTER_TRAINING = range(3)

# What workers gather from all of them, without a round.
NOTHING, METRICS, PLANS, STATES = range(4)


class Status(NamedTuple):
    """What a worker tells all others before a round.

    Attributes:
        progress: `IN_EPOCH`, `AFTER_EPOCH` or `AFTER_TRAINING`.
        steps: Int, training steps of its schedule.
        num_replicas: Int, its replicas that are not excluded.
        wants_round: Bool, whether the worker asks for a round.
        looks: Bool, whether it asks the schedule.
        gathers: `NOTHING`, `METRICS`, `PLANS` or `STATES`.
        learning_rate: Float, that of its replicas. NaN: unknown.
        loss: Float, its mean since the last look.
        loss_weight: Float >= 0, the rows of that mean. 0: unknown.
        drift: Float >= 0, how far its replicas are from the references.
        seconds: Float >= 0, time since the last round by its clock.
        divergence: Float, of its replicas in the last round. NaN: unknown.
        sick_replica: Int, the first of its replicas with a variable that is
            not finite, -1 if there is none.
        sick_variable: Int, that variable's place.
        num_excluded: Int, the replicas that do not count because of that.
        fragments: Float64 array of shape `[F, 2]`. Of each fragment: what the
            replicas that are not excluded weigh together, and the training
            steps since it travelled.
        first_batch: Int64 vector, see `fingerprints.FirstBatch`.
        extremes: Int64 array of shape `[A, 2]`, the smallest and largest value
            on its replicas of each variable on which replicas must agree. Of
            floating point variables it contains float64 numbers.
    """

    progress: int
    steps: int
    num_replicas: int
    wants_round: bool
    looks: bool
    gathers: int
    learning_rate: float
    loss: float
    loss_weight: float
    drift: float
    seconds: float
    divergence: float
    sick_replica: int
    sick_variable: int
    num_excluded: int
    fragments: np.ndarray
    first_batch: np.ndarray
    extremes: np.ndarray

    @property
    def weight(self):
        """Float >= 0, what its replicas weigh together in all fragments."""
        return float(self.fragments[:, 0].sum())

    def exchange(self, communicator):
        """Returns the list of all workers' `Status`, by rank."""
        numbers = np.array(self[: len(_KINDS)], np.float64)
        floats = np.concatenate([numbers, self.fragments.ravel()])
        parts = [floats.view(np.int64), self.first_batch, self.extremes.ravel()]
        ends = np.cumsum([len(part) for part in parts])
        return [
            _status(*np.split(row, ends[:-1]))
            for row in communicator.all_gather(
                np.concatenate(parts), "a round: "
            )
        ]


def _status(numbers, first_batch, extremes):
    floats = numbers.view(np.float64)
    return Status(
        *(kind(number) for kind, number in zip(_KINDS, floats)),
        fragments=floats[len(_KINDS) :].reshape(-1, 2),
        first_batch=first_batch,
        extremes=extremes.reshape(-1, 2),
    )


# Of the attributes that are numbers.
_KINDS = (
    *(int, int, int, bool, bool, int),
    *(float, float, float, float, float, float),
    *(int, int, int),
)


def check_gathers(statuses):
    """Raises a RuntimeError unless workers gather the same at the same time.

    Those that wait for others, done with an epoch, gather nothing.

    Args:
        statuses: List of `Status`, by rank.
    """
    kinds = {
        rank: status.gathers
        for rank, status in enumerate(statuses)
        if status.progress == IN_EPOCH
    }
    if len(set(kinds.values())) > 1:
        gathering = [rank for rank, kind in kinds.items() if kind]
        raise RuntimeError(
            "`evaluate` exchanges metrics between workers, so all of them must "
            "call it after the same step. Received: workers that do so at the "
            f"same time: {gathering} of {sorted(kinds)}. Call it on every "
            "worker or use `predict`, which exchanges nothing."
        )


def extremes(statuses, is_floating):
    """Returns the smallest and largest values on the replicas of all workers.

    Args:
        statuses: List of `Status`.
        is_floating: List of A bools, which of the variables are floating point.

    Returns:
        Int64 array of shape `[A, 2]`, see `Status.extremes`.
    """
    every = np.stack([status.extremes for status in statuses])
    floats = _least_and_most(every.view(np.float64)).view(np.int64)
    mask = np.array(is_floating, bool)[:, None]
    return np.where(mask, floats, _least_and_most(every))


def _least_and_most(every):
    return np.stack([every[..., 0].min(0), every[..., 1].max(0)], axis=-1)


def check_health(statuses, paths):
    """Raises a FloatingPointError if what counts is not finite somewhere.

    Every worker sees the same and raises it, before anything is written.

    Args:
        statuses: List of `Status`, by rank.
        paths: List of strings, the names of the variables by their places.
    """
    has_weights = any(status.weight for status in statuses)
    for rank, status in enumerate(statuses):
        is_idle = has_weights and not status.weight
        if status.sick_replica < 0 or status.num_excluded or is_idle:
            continue
        raise FloatingPointError(
            "All variables must be finite before a round, or every replica "
            f"would get what is not. Received: {paths[status.sick_variable]!r} "
            f"on replica {status.sick_replica} of worker {rank} is not finite "
            f"after step {status.steps}. Nothing was written on any worker. "
            "Lower the learning rate, clip gradients, look at the rows of that "
            'worker, or pass `on_non_finite="exclude"`.'
        )
    if not has_weights and not any(s.num_replicas for s in statuses):
        raise FloatingPointError(
            "A round needs a replica that is finite. Received: replicas of "
            f"{len(statuses)} workers, each with a variable that is not finite "
            f"after step {statuses[0].steps}. Nothing was written on any "
            "worker. Lower the learning rate or clip gradients."
        )


def warn_of_excluded(statuses, paths):
    """Logs which replicas a round leaves out.

    Args:
        statuses: List of `Status`, by rank.
        paths: List of strings, the names of the variables by their places.

    Returns:
        Int, how many.
    """
    for rank, status in enumerate(statuses):
        if status.num_excluded:
            logging.warning(
                "%d replicas of worker %d are not finite after step %d, first "
                "%r on replica %d. They do not count in this round and adopt "
                "its mean.",
                status.num_excluded,
                rank,
                status.steps,
                paths[status.sick_variable],
                status.sick_replica,
            )
    return sum(status.num_excluded for status in statuses)


def find_sick(is_finite, weights):
    """Returns which replicas hold what is not finite.

    Args:
        is_finite: Bool array of shape `[R, T]`.
        weights: List of R numbers. Replicas of weight 0 do not count, unless
            all have it.

    Returns:
        Bool array of shape `[R, T]`.
    """
    counts = np.array(weights) > 0
    counts |= not counts.any()
    return ~is_finite & counts[:, None]


def warn_of_idle_workers(statuses):
    """Logs which workers have had less data than others, if any.

    Returns:
        Bool, whether there is one.
    """
    least = min(status.progress for status in statuses)
    most_steps = max(status.steps for status in statuses)
    idle = [
        (rank, status)
        for rank, status in enumerate(statuses)
        if status.progress > least
        or (least > IN_EPOCH and status.steps < most_steps)
    ]
    for rank, status in idle:
        logging.warning(
            "Worker %d ran out of data after step %d. It takes part in rounds "
            "until every worker is done, with weight 0 once it has given what "
            "it had.",
            rank,
            status.steps,
        )
    return bool(idle)


def check_same(communicator, lines, subject):
    """Raises a ValueError on every worker unless all have the same list.

    Args:
        communicator: `Communicator`.
        lines: List of strings.
        subject: String, what a line describes.
    """
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = communicator.all_gather_strings(digest)
    if len(set(digests)) == 1:
        return
    lists = [t.split("\n") for t in communicator.all_gather_strings(text)]
    for rank, other in enumerate(lists):
        if other != lists[0]:
            place, chiefs, others = _first_difference(lists[0], other)
            raise ValueError(
                f"Every worker must have the same list of {subject}. "
                f"Received: at place {place}, worker 0 has {chiefs!r} and "
                f"worker {rank} has {others!r}. Run the same script with the "
                "same settings on every worker."
            )


def _first_difference(first, second):
    longest = max(len(first), len(second))
    padded = [
        [*lines, *["nothing"] * (longest - len(lines))]
        for lines in (first, second)
    ]
    return next(
        (place, one, other)
        for place, (one, other) in enumerate(zip(*padded))
        if one != other
    )
