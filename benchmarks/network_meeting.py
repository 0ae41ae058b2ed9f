"""What all workers of `network.py` share: when they meet, how they measure.

Hosts are namespaces of one machine, so they can meet by files, whatever they
train with. Only the standard library is used, which every framework has.
"""

import json
import math
import os
import pathlib
import time

_POLL_SECONDS = 0.005
# A way is measured in so many parts, of at most so many steps.
_NUM_PARTS = 3
_MOST_STEPS = 1000


class Meeting:
    """Workers that wait for each other, beside what they measure.

    Args:
        folder: `pathlib.Path` that all of them see.
        rank: Int, this worker's.
        size: Int, how many they are.
    """

    def __init__(self, folder, rank, size):
        self._folder = folder
        self.rank = rank
        self.size = size
        self._count = 0

    def gather(self, value):
        """Returns the values of all workers, by rank, once all are there."""
        self._count += 1
        own = self._folder / f"{self._count}-{self.rank}"
        unfinished = own.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(value))
        unfinished.rename(own)
        paths = [self._folder / f"{self._count}-{r}" for r in range(self.size)]
        while not all(path.exists() for path in paths):
            time.sleep(_POLL_SECONDS)
        return [json.loads(path.read_text()) for path in paths]


def cluster():
    """Returns rank and addresses, as TF_CONFIG names them."""
    config = json.loads(os.environ["TF_CONFIG"])
    jobs = config["cluster"]
    addresses = jobs.get("chief", []) + jobs["worker"]
    task = config["task"]
    first = 0 if task["type"] == "chief" else len(jobs.get("chief", []))
    return first + task["index"], addresses


def bytes_sent():
    """Returns what this host's network interface has sent so far."""
    name = os.environ["AVG_HOSTS_INTERFACE"]
    counter = pathlib.Path("/sys/class/net", name, "statistics", "tx_bytes")
    return int(counter.read_text())


def measure(meeting, train, *, unit, seconds):
    """Trains for some seconds and returns what that gave, a dict.

    Args:
        meeting: `Meeting`.
        train: Function of a `Marks`, which trains as many steps as that asks
            for and tells it of each.
        unit: Int, steps of one period.
        seconds: Float, how long to measure at least.
    """
    meeting.gather(None)
    pilot = Marks([unit, 2 * unit])
    train(pilot)
    slowest = max(meeting.gather(pilot.seconds[0]))
    units = max(1, math.ceil(seconds / _NUM_PARTS / slowest))
    part = unit * min(units, max(1, _MOST_STEPS // unit))
    marks = Marks([unit + part * n for n in range(_NUM_PARTS + 1)])
    train(marks)
    results = meeting.gather([marks.seconds, marks.num_bytes])
    # The slowest worker of each part counts.
    rates = [part / max(own) for own in zip(*(r[0] for r in results))]
    sent = max(sum(r[1]) for r in results)
    return {
        "steps_per_second": sorted(rates),
        "bytes_per_step": sent / (_NUM_PARTS * part),
    }


class Marks:
    """Notes time and bytes sent between some steps of a training.

    Args:
        counts: List of ints in order, after how many steps.

    Attributes:
        seconds: List of floats, between each two of them.
        num_bytes: List of ints, what this host sent there.
    """

    def __init__(self, counts):
        self._counts = counts
        self._marks = []

    @property
    def num_steps(self):
        """Int, the steps of the whole training."""
        return self._counts[-1]

    def step(self, count):
        """Is told that `count` steps were made."""
        if count in self._counts:
            self._marks.append((time.perf_counter(), bytes_sent()))

    @property
    def seconds(self):
        return [b[0] - a[0] for a, b in zip(self._marks, self._marks[1:])]

    @property
    def num_bytes(self):
        return [b[1] - a[1] for a, b in zip(self._marks, self._marks[1:])]


def shapes(megabytes):
    """Returns input width and layer widths of an MLP of so many 1e6 bytes.

    Three layers of the same width, of float32 numbers.
    """
    width = round(math.sqrt(megabytes * 1e6 / 4 / 3))
    return width, [width] * 3
