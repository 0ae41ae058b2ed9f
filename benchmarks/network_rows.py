"""The rows of `network.py`'s file: what is run, what is known, their names."""

from typing import NamedTuple

NAMES = {
    ("collective", "alone"): "Keras, no exchange at all: the limit",
    ("collective", "gradients"): "ours, collectives, gradient_sync",
    ("horovod", "gradients"): "ours, Horovod, gradient_sync",
    ("tape", "horovod"): "Horovod, DistributedGradientTape",
    ("mirrored", "mirrored"): "MultiWorkerMirroredStrategy, repaired",
    ("torch", "alone"): "PyTorch, no exchange at all: its limit",
    ("torch", "gradients"): "PyTorch, DistributedDataParallel",
}
LIBRARY_NAMES = {
    "collective": "ours, collectives",
    "horovod": "ours, Horovod",
    "torch": "PyTorch, PostLocalSGDOptimizer",
}
# In the order of tables.
LIBRARIES = ("collective", "horovod", "tape", "mirrored", "torch")
_OURS = ("collective", "horovod")


class Place(NamedTuple):
    """Where ways are compared with each other: a column of the tables."""

    hosts: int
    rate: str
    megabytes: float

    def __str__(self):
        limit = "no limit" if self.rate == "none" else f"{self.rate}/s"
        return f"{self.hosts} hosts, {self.megabytes:g} MB, {limit}"


def place_of(row):
    return Place(row["hosts"], row["rate"], row["megabytes"])


def name_of(row):
    """Returns what a row is called in tables."""
    key = row["library"], row["way"]
    if key in NAMES:
        return NAMES[key]
    return f"{LIBRARY_NAMES[row['library']]}, {row['way']}"


def key_of(row):
    """Returns where a row is in the tables: column and line."""
    return place_of(row), name_of(row)


def is_measured(row):
    return "not_run" not in row


def kind_of(row):
    """Returns what a row competes in: "gradients", a period, or None."""
    if row["way"] == "alone":
        return None
    is_local = row["way"].startswith("period ")
    return row["way"] if is_local else "gradients"


def is_ours(row):
    return row["library"] in _OURS


def ways(library, periods):
    """Returns the names of what a library runs, in order."""
    local = [f"period {period}" for period in periods]
    return {
        "collective": ["alone", "gradients", *local],
        "horovod": ["gradients", *local],
        # In processes of its own, with Horovod's own settings.
        "tape": ["horovod"],
        "mirrored": ["mirrored"],
        "torch": ["alone", "gradients", *local],
    }[library]


def missing(rows, *, hosts, rate, library, sizes, periods):
    """Returns what is not measured yet, as pairs of megabytes and way."""
    known = {
        (row["megabytes"], row["way"])
        for row in rows
        if is_measured(row)
        and (row["hosts"], row["rate"], row["library"])
        == (hosts, rate, library)
    }
    return [
        (size, way)
        for size in sizes
        for way in ways(library, periods)
        if (size, way) not in known
    ]


def replaced(rows, new):
    """Returns rows with a new one, in place of what was known of the same."""

    def key(row):
        return place_of(row), row["library"], row["way"]

    return [*(row for row in rows if key(row) != key(new)), new]
