"""Telemetry: what rounds cost and how far replicas were apart."""

import contextlib
import dataclasses
import json
import math
import time

import tensorflow as tf

__all__ = ["Recorder", "RoundLog", "RoundRecord", "Stopwatch", "epoch_logs"]


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What happened in one round.

    Attributes:
        round: Int, its number, from 1.
        step: Int, training steps before it.
        time: Float, seconds since training began, on the chief.
        period: Int, training steps since the last round.
        is_scheduled: Bool, whether the schedule asked for it.
        fragments: List of ints, which fragments travelled.
        seconds: Float, how long this worker was busy with it.
        waiting_seconds: Float, of these for the slowest worker.
        exchanging_seconds: Float, of these with messages.
        computing_seconds: Float, of these the rest.
        payload_bytes: Int, the size of what travelled, of one replica.
        bytes_sent: Int, what each worker sent in a ring all-reduce of it.
        divergence: Float, L2 distance of a replica's weights, of those that
            travelled, from their mean, by the norm of that. Root of the mean
            square over the replicas of a worker, mean over workers.
        weights: List of floats, what the replicas of each worker weighed.
        late: Int, the rank of the worker that came last.
        late_seconds: Float, by how much later than the first one.
        excluded: List of ints, how many replicas of each worker did not count.
    """

    round: int
    step: int
    time: float
    period: int
    is_scheduled: bool
    fragments: list
    seconds: float
    waiting_seconds: float
    exchanging_seconds: float
    computing_seconds: float
    payload_bytes: int
    bytes_sent: int
    divergence: float
    weights: list
    late: int
    late_seconds: float
    excluded: list


# What TensorBoard shows.
_SCALARS = (
    "divergence",
    "period",
    "seconds",
    "waiting_seconds",
    "exchanging_seconds",
    "computing_seconds",
    "bytes_sent",
)


class Stopwatch:
    """Adds up the time of parts of a round."""

    def __init__(self):
        self._start = time.perf_counter()
        self.exchanging = 0.0

    @property
    def seconds(self):
        """Float, since it was made."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def exchange(self):
        """Counts as time with messages, or for others, what is within."""
        start = time.perf_counter()
        yield
        self.exchanging += time.perf_counter() - start


class Recorder:
    """Makes records of rounds, and tells them once all is known.

    How far the replicas of other workers were from the mean comes with the
    next message that workers exchange anyway.

    Attributes:
        divergence: Float, of the local replicas in the last round. NaN: there
            was none.
    """

    def __init__(self):
        self._start = time.monotonic()
        self._last_step = 0
        self._pending = None
        self._tellers = []
        self.divergence = math.nan

    def tell(self, function):
        """Calls a function with each `RoundRecord`."""
        self._tellers.append(function)

    def meet(self, statuses):
        """Takes what all workers have said, which completes a record."""
        if self._pending is None:
            return
        known = [
            (status.divergence, status.num_replicas)
            for status in statuses
            if not math.isnan(status.divergence)
        ]
        total = sum(count for _, count in known)
        if total:
            mean = sum(value * count for value, count in known) / total
            self._pending = dataclasses.replace(self._pending, divergence=mean)
        self.flush()

    def flush(self):
        """Tells the last record as it is."""
        record, self._pending = self._pending, None
        if record is not None:
            for function in self._tellers:
                function(record)

    def note(self, watch, statuses, *, rank, divergence, **what):
        """Begins the record of a round that has just ended.

        Args:
            watch: `Stopwatch` of this worker's round.
            statuses: List of `Status`, by rank.
            rank: Int, this worker's.
            divergence: Float, of the local replicas.
            **what: `round`, `is_scheduled`, `fragments`, `payload_bytes`.
        """
        since = [status.seconds for status in statuses]
        waiting = min(max(since) - since[rank], watch.exchanging)
        step = max(status.steps for status in statuses)
        seconds = watch.seconds
        size = len(statuses)
        self.divergence = divergence
        self._pending = RoundRecord(
            step=step,
            time=time.monotonic() - self._start,
            period=step - self._last_step,
            seconds=seconds,
            waiting_seconds=waiting,
            exchanging_seconds=watch.exchanging - waiting,
            computing_seconds=seconds - watch.exchanging,
            bytes_sent=round(2 * (size - 1) / size * what["payload_bytes"]),
            divergence=divergence,
            weights=[status.weight for status in statuses],
            late=since.index(max(since)),
            late_seconds=max(since) - min(since),
            excluded=[status.num_excluded for status in statuses],
            **what,
        )
        self._last_step = step
        if size == 1:
            self.flush()

    def begin(self, step):
        """Counts steps and seconds from here on."""
        self._start = time.monotonic()
        self._last_step = step


class RoundLog:
    """Writes records to a file of JSON Lines and to TensorBoard.

    Args:
        log_file: String, the file, to which lines are added, or None.
        log_dir: String, TensorBoard's folder, or None.
    """

    def __init__(self, log_file, log_dir):
        self._path = log_file
        self._begin = time.monotonic()
        self._writer = None
        if log_dir is not None:
            self._writer = tf.summary.create_file_writer(log_dir)

    def write_start(self, **about):
        """Writes what does not change in a training.

        Args:
            **about: What JSON can hold.
        """
        self._begin = time.monotonic()
        self._write("start", about)

    def write_round(self, record):
        """Writes a `RoundRecord`."""
        self._write("round", dataclasses.asdict(record))
        if self._writer is None:
            return
        with self._writer.as_default(step=record.step):
            for name in _SCALARS:
                tf.summary.scalar(f"rounds/{name}", getattr(record, name))
            tf.summary.scalar("rounds/excluded", sum(record.excluded))

    def write_epoch(self, epoch, step, logs):
        """Writes an epoch's logs.

        Args:
            epoch: Int, from 0.
            step: Int, training steps so far.
            logs: Dict from string to number.
        """
        self._write(
            "epoch",
            {
                "epoch": epoch,
                "step": step,
                "time": time.monotonic() - self._begin,
                "logs": {name: float(value) for name, value in logs.items()},
            },
        )

    def _write(self, kind, fields):
        if self._path is not None:
            line = json.dumps({"kind": kind, **_finite(fields)})
            with open(self._path, "a") as file:
                file.write(f"{line}\n")

    def end(self):
        """Makes sure that all of it is on the disk."""
        if self._writer is not None:
            self._writer.flush()


def epoch_logs(records):
    """Returns what an epoch's logs say of its rounds, a dict.

    Args:
        records: List of `RoundRecord` of the epoch.
    """
    if not records:
        return {"rounds": 0}
    known = [r.divergence for r in records if not math.isnan(r.divergence)]
    return {
        "rounds": len(records),
        "round_seconds": sum(r.seconds for r in records) / len(records),
        "megabytes_sent": sum(r.bytes_sent for r in records) / 1e6,
        "divergence": sum(known) / len(known) if known else math.nan,
    }


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
