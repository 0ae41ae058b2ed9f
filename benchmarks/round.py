"""What does a round cost, between workers and between hosts?

python benchmarks/round.py

The same workers take turns at three things: a round of the averager, the
communicator's bare all-reduce of one flat tensor of as many bytes, and a round
that is recorded (`telemetry=True`). They start each together, and the slowest
one's time counts. On hosts, which
`tests/hosts.sh` makes of one machine, both are also compared with the time that
the network needs at least: in an all-reduce between N hosts each must send
2 (N - 1) / N of the bytes. There the bytes of the network interface are
counted too, in rounds and in training steps between rounds.

Prints tables in Markdown and writes all numbers to a JSON file. Takes about 10
minutes on 2 cores. Hosts need root and iproute2; without, workers are measured
on loopback alone.
"""

import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
from absl import app
from absl import flags

_OUTPUT = flags.DEFINE_string(
    "output", "build/round.json", "JSON file for the numbers."
)
_PLACES = flags.DEFINE_list(
    "places", ["loopback", "hosts"], "Where workers run."
)
_COMMUNICATORS = flags.DEFINE_list(
    "communicators", ["collective", "horovod"], "How they exchange."
)
_WORKERS = flags.DEFINE_list("workers", ["2", "3"], "How many they are.")
_MEGABYTES = flags.DEFINE_list(
    "megabytes", ["1", "10", "100"], "Sizes of a round, in 1e6 bytes."
)
_RATE = flags.DEFINE_string("rate", "200mbit", "What a host may send.")
_SECONDS = flags.DEFINE_float(
    "seconds", 4.0, "For the turns of one size, of which there are 3 to 30."
)
_PAUSE = flags.DEFINE_float(
    "pause", 5.0, "Seconds of training steps in which bytes are counted."
)
_WORKER = flags.DEFINE_string(
    "worker", "", "Internal: the folder for the results of a worker."
)

_ROOT = pathlib.Path(__file__).parents[1]
_NUM_VARIABLES = 60
_ROUND_AIM, _WIRE_AIM, _RECORDED_AIM = 1.1, 1.15, 1.02
_SKIPPED = 77  # What tests/hosts.sh says where it cannot make hosts.
_SETTLE_SECONDS = 0.5
_LARGE_BYTES = 50e6
# What tc takes: "200mbit" is 200e6 bits a second.
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Spread(NamedTuple):
    """Of the numbers of several turns."""

    median: float
    least: float
    most: float

    def __str__(self):
        median, least, most = map(digits, self)
        return f"{median} ({least}..{most})"


class Row(NamedTuple):
    """One size at one place. Times are in milliseconds."""

    place: str
    # What a host may send, for tc. None where there is no limit.
    rate: str | None
    communicator: str
    workers: int
    megabytes: float
    turns: int
    round_ms: Spread
    bare_ms: Spread
    # Of a round and the bare all-reduce that followed it.
    ratio: Spread
    # Of a recorded round and the plain one before it.
    recorded: Spread
    # None where there is no limit.
    wire_ms: float | None
    # What a host sends in a round, and what it sends and receives while it
    # trains without one. None where there are no hosts.
    round_bytes: float | None
    pause_bytes_per_second: float | None

    @property
    def bytes_of_a_ring(self):
        """What each worker must send at least."""
        share = 2 * (self.workers - 1) / self.workers
        return share * self.megabytes * 1e6


def main(_):
    if _WORKER.value:
        work(pathlib.Path(_WORKER.value))
        return
    rows = []
    for place in _PLACES.value:
        for communicator in _COMMUNICATORS.value:
            if communicator == "horovod" and not has_horovod():
                print("Horovod is not installed: measured without it.")
                continue
            for workers in map(int, _WORKERS.value):
                rows += measure(place, communicator, workers)
    print_tables(rows)
    write(rows)


def has_horovod():
    return importlib.util.find_spec("horovod") is not None


def measure(place, communicator, workers):
    """Starts workers and returns the rows that they measured."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            __file__,
            f"--worker={folder}",
            f"--seconds={_SECONDS.value}",
            f"--pause={_PAUSE.value}",
            f"--megabytes={','.join(_MEGABYTES.value)}",
        ]
        start = start_on_hosts if place == "hosts" else start_here
        print(f"{place}, {communicator}, {workers} workers", flush=True)
        done = start(arguments, communicator, workers)
        if place == "hosts" and done.returncode == _SKIPPED:
            print(done.stdout, flush=True)
            return []
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}\nexit code {done.returncode}")
        text = pathlib.Path(folder, "results").read_text()
    return [
        row_of(place, communicator, workers, result)
        for result in json.loads(text)
    ]


def start_here(arguments, communicator, workers):
    program = pathlib.Path(sys.executable).with_name("tf-avgstrategy")
    command = [program, "launch", f"--workers={workers}"]
    command += [f"--communicator={communicator}"]
    return run([*command, *arguments])


def start_on_hosts(arguments, communicator, workers):
    command = [_ROOT / "tests" / "hosts.sh", "run", f"--hosts={workers}"]
    command += [f"--rate={_RATE.value}", f"--communicator={communicator}"]
    return run([*command, "--limit=900", "--", *arguments])


def run(command):
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **os.environ,
            "PYTHON": sys.executable,
        },
    )


def row_of(place, communicator, workers, result):
    rounds, bares, recorded = np.array(result["seconds"]) * 1e3
    on_hosts = place == "hosts"
    row = Row(
        place=place,
        rate=_RATE.value if on_hosts else None,
        communicator=communicator,
        workers=workers,
        megabytes=result["bytes"] / 1e6,
        turns=len(rounds),
        round_ms=spread(rounds),
        bare_ms=spread(bares),
        ratio=spread(rounds / bares),
        recorded=spread(recorded / rounds),
        wire_ms=None,
        round_bytes=result["round_bytes"] if on_hosts else None,
        pause_bytes_per_second=(
            result["pause_bytes_per_second"] if on_hosts else None
        ),
    )
    if not on_hosts:
        return row
    wire_ms = row.bytes_of_a_ring * 8 / bits_per_second(_RATE.value) * 1e3
    return row._replace(wire_ms=wire_ms)


def spread(numbers):
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def bits_per_second(rate):
    number, unit = re.fullmatch(r"([\d.]+)([a-z]+)", rate).groups()
    return float(number) * _UNITS[unit]


def print_tables(rows):
    print_times(rows)
    print_records(rows)
    on_hosts = [row for row in rows if row.place == "hosts"]
    if on_hosts:
        print_bytes_of_rounds(on_hosts)
        print_bytes_of_pauses(on_hosts)
    else:
        print("\nNo hosts were measured.")


def print_times(rows):
    print("\nMilliseconds: median (least..most) of the turns.\n")
    print_row(
        ["place", "communicator", "workers", "MB", "round", "bare all-reduce"],
        [f"ratio, aim {_ROUND_AIM}", "wire limit"],
        [f"round / limit, aim {_WIRE_AIM}", "bare / limit"],
    )
    print_row(["---"] * 10)
    for row in rows:
        limit = row.wire_ms
        print_row(
            [row.place, row.communicator, row.workers, f"{row.megabytes:g}"],
            [row.round_ms, row.bare_ms, row.ratio],
            [f"{limit:.1f}" if limit else ""],
            [over(t.median, limit) for t in (row.round_ms, row.bare_ms)],
        )


def print_records(rows):
    print("\nA recorded round, as a multiple of the plain one before it.\n")
    print_row(
        ["place", "communicator", "workers", "MB"],
        [f"ratio, aim {_RECORDED_AIM}"],
    )
    print_row(["---"] * 5)
    for row in rows:
        print_row(
            [row.place, row.communicator, row.workers, f"{row.megabytes:g}"],
            [row.recorded],
        )


def print_bytes_of_rounds(rows):
    print("\nBytes that the busiest host sends in a round.\n")
    print_row(
        ["communicator", "workers", "MB", "sent", "sent / 2 (N - 1) / N x MB"]
    )
    print_row(["---"] * 5)
    for row in rows:
        print_row(
            [row.communicator, row.workers, f"{row.megabytes:g}"],
            [f"{row.round_bytes:.0f}"],
            [over(row.round_bytes, row.bytes_of_a_ring)],
        )


def print_bytes_of_pauses(rows):
    print("\nBytes that the busiest host sends and receives between rounds.\n")
    print_row(["communicator", "workers", "bytes per second"])
    print_row(["---"] * 3)
    for key in dict.fromkeys(
        (row.communicator, row.workers, f"{row.pause_bytes_per_second:.0f}")
        for row in rows
    ):
        print_row(key)


def digits(number):
    """Three of them that count, and no exponent."""
    if number >= 100:
        return f"{number:.0f}"
    return np.format_float_positional(
        number, precision=3, fractional=False, trim="k", min_digits=3
    )


def print_row(*groups):
    cells = [str(cell) for group in groups for cell in group]
    print(f"| {' | '.join(cells)} |")


def over(value, reference):
    return f"{value / reference:.3f}" if reference else ""


def write(rows):
    report = [
        {
            name: value._asdict() if isinstance(value, Spread) else value
            for name, value in row._asdict().items()
        }
        for row in rows
    ]
    path = pathlib.Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def work(folder):
    """What each worker does. The chief writes the results."""
    import tf_avgstrategy

    strategy = tf_avgstrategy.ParameterAveragingStrategy(["CPU:0"])
    results = []
    for megabytes in _MEGABYTES.value:
        rounds = Rounds(strategy, int(float(megabytes) * 1e6))
        results.append(rounds.measure())
    pause = rounds.pause()
    strategy.communicator.barrier()
    if strategy.is_chief:
        text = json.dumps([{**result, **pause} for result in results])
        pathlib.Path(folder, "results").write_text(text)


class Rounds:
    """Variables of so many bytes, and their rounds."""

    def __init__(self, strategy, num_bytes):
        import keras
        import tensorflow as tf

        import tf_avgstrategy

        self._strategy = strategy
        self._communicator = strategy.communicator
        self._num_bytes = num_bytes
        with strategy.scope():
            self._variables = [
                keras.Variable(np.zeros(shape, np.float32))
                for shape in shapes(num_bytes // 4)
            ]
            optimizer = keras.optimizers.SGD()
        self._averager, self._recorder = (
            tf_avgstrategy.ParameterAverager(
                strategy,
                self._variables,
                optimizer,
                period=1,
                telemetry=telemetry,
            )
            for telemetry in (False, True)
        )
        self._flat = tf.random.uniform([num_bytes // 4])
        self._step = tf.function(lambda: strategy.run(self._train))
        self._interface = Interface()

    def _train(self):
        # Another distance on each worker, as different rows would give.
        for variable in self._variables:
            distance = 0.01 * (self._communicator.rank + 1)
            variable.assign(0.9 * variable + distance)

    def measure(self):
        """Returns the numbers of one size, a dict. On every worker."""
        num_turns = self._num_turns()
        own = []
        round_bytes = []
        for _ in range(num_turns):
            self._step()
            before = self._interface.sent()
            own.append(self._seconds(self._averager.average))
            round_bytes.append(self._interface.sent() - before)
            own.append(self._seconds(self._reduce_flat))
            self._step()
            own.append(self._seconds(self._recorder.average))
        every = self._communicator.all_gather(np.array(own))
        slowest = every.max(axis=0).reshape(num_turns, 3).T
        return {
            "bytes": self._num_bytes,
            "seconds": slowest.tolist(),
            "round_bytes": self._busiest(np.median(round_bytes)),
        }

    def pause(self):
        """Trains without a round and counts bytes. A dict, on every worker."""
        if not self._interface.is_counted:
            return {}
        self._communicator.barrier()
        time.sleep(_SETTLE_SECONDS)
        before, start = self._interface.both_ways(), time.perf_counter()
        while time.perf_counter() - start < _PAUSE.value:
            self._step()
        seconds = time.perf_counter() - start
        rate = (self._interface.both_ways() - before) / seconds
        # So that no worker's next message falls into another one's pause.
        time.sleep(2 * _SETTLE_SECONDS)
        return {"pause_bytes_per_second": self._busiest(rate)}

    def _busiest(self, number):
        every = self._communicator.all_gather(np.array(number, np.float64))
        return float(every.max())

    def _num_turns(self):
        """After the first turns, which are not counted, how many follow."""
        for _ in range(1 if self._num_bytes > _LARGE_BYTES else 2):
            self._step()
            own = self._seconds(self._averager.average)
            own += self._seconds(self._reduce_flat)
            self._step()
            own += self._seconds(self._recorder.average)
        slowest = self._communicator.all_gather(np.array(own)).max()
        return int(np.clip(math.ceil(_SECONDS.value / slowest), 3, 30))

    def _reduce_flat(self):
        self._communicator.all_reduce_sum([self._flat])

    def _seconds(self, call):
        self._communicator.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class Interface:
    """The counters of this host's network interface. 0 where it has none."""

    def __init__(self):
        name = os.environ.get("AVG_HOSTS_INTERFACE", "")
        self.is_counted = bool(name)
        self._folder = pathlib.Path("/sys/class/net", name, "statistics")

    def sent(self):
        return self._read("tx_bytes")

    def both_ways(self):
        return self._read("tx_bytes") + self._read("rx_bytes")

    def _read(self, counter):
        if not self.is_counted:
            return 0
        return int((self._folder / counter).read_text())


def shapes(num_elements):
    """Returns the shapes of a kernel and a bias for each of 30 layers.

    Each layer is about 1.2 times as large as the one before it: the largest
    holds a sixth of all elements, the smallest a thousandth.
    """
    num_layers = _NUM_VARIABLES // 2
    total = sum(1.2**layer for layer in range(num_layers))
    found = []
    for layer in range(num_layers - 1):
        width = math.isqrt(int(num_elements * 1.2**layer / total))
        found += [(width, width), (width,)]
    width = math.isqrt(num_elements) // 3
    rest = num_elements - sum(map(math.prod, found)) - width
    return [*found, (rest,), (width,)]


if __name__ == "__main__":
    app.run(main)
