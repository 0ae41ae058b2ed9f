"""What do the strategy's step and its round cost, on 2 virtual CPU replicas?

python benchmarks/step_overhead.py --output=step_overhead.json

Only ratios are worth reading. Both sides of a ratio take turns on the same two
cores, so a busy machine slows both, and each side is the median of its turns.
"""

import ctypes
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy

_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the numbers.")
_TURNS = flags.DEFINE_integer("turns", 12, "Turns that each side takes.")

_ROWS = 32  # Of one replica, in one step.
_STEPS = {"CNN": 30, "10 MB MLP": 8}  # In one turn.
_DEVICES = ["CPU:0", "CPU:1"]
_NUM_LAYERS = 30  # Of the model of a round, two variables each.


class Row(NamedTuple):
    """One line of the table; `ours` and `reference` are in `unit`."""

    what: str
    ours: float
    reference: float
    unit: str
    aim: str

    @property
    def ratio(self):
        return self.ours / self.reference


def cnn():
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def mlp():
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(1240, activation="relu"),
            layers.Dense(1240, activation="relu"),
            layers.Dense(10),
        ]
    )


class Training:
    """Steps of Keras' own `train_function`, under any strategy."""

    def __init__(self, build_model, strategy, rows):
        with strategy.scope():
            self.model = build_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(
                keras.optimizers.Adam(), loss, metrics=["accuracy"]
            )
        # One batch, kept, of a size that tracing does not know, as in `fit`.
        random = np.random.default_rng(0)
        images = random.random((rows, 28, 28, 1), np.float32)
        batches = tf.data.Dataset.from_tensor_slices(
            (images, random.integers(10, size=rows))
        ).batch(rows)
        options = tf.data.Options()
        options.autotune.enabled = False
        batches = batches.cache().repeat().with_options(options)
        # Builds and traces what `fit` does.
        self.model.fit(batches, steps_per_epoch=2, verbose=0)
        if strategy.num_replicas_in_sync > 1:
            batches = strategy.experimental_distribute_dataset(batches)
        self.iterator = iter(batches)

    def turn(self, num_steps):
        """Returns the milliseconds of each step of one turn."""
        self.model.train_function(self.iterator)  # Wakes threads and caches.
        return [
            milliseconds(lambda: self.model.train_function(self.iterator))
            for _ in range(num_steps)
        ]


def milliseconds(call):
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def serve_single_device(connection, barrier, core):
    """In a process of its own: one device that trains on one core."""
    os.sched_setaffinity(0, [core])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.get_strategy()
    trainings = {
        "CNN": Training(cnn, strategy, _ROWS),
        "10 MB MLP": Training(mlp, strategy, _ROWS),
    }
    connection.send("ready")
    for name in iter(connection.recv, None):
        barrier.wait()
        connection.send(trainings[name].turn(_STEPS[name]))


class SingleDevices:
    """One process per core, which take their turns at the same time."""

    def __init__(self, cores):
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(len(cores))
        self.connections = []
        for core in cores:
            ours, theirs = context.Pipe()
            self.connections.append(ours)
            context.Process(
                target=serve_single_device,
                args=(theirs, barrier, core),
                daemon=True,
            ).start()
        for connection in self.connections:
            connection.recv()

    def turn(self, name):
        for connection in self.connections:
            connection.send(name)
        return [t for c in self.connections for t in c.recv()]

    def close(self):
        for connection in self.connections:
            connection.send(None)


def step_rows(name, build_model, mirrored, singles, turns):
    """Our step beside MirroredStrategy's and beside single devices'."""
    rows = _ROWS * len(_DEVICES)
    independent = tf_avgstrategy.ParameterAveragingStrategy(_DEVICES)
    sides = {
        "ours": Training(build_model, independent, rows),
        "mirrored": Training(build_model, mirrored, rows),
    }
    times = {"ours": [], "mirrored": [], "single": []}
    for _ in range(turns):
        for side, training in sides.items():
            times[side] += training.turn(_STEPS[name])
        times["single"] += singles.turn(name)
    medians = {k: statistics.median(v) for k, v in times.items()}
    ours = medians["ours"]
    return [
        Row(
            f"step, {name} / MirroredStrategy",
            ours,
            medians["mirrored"],
            "ms",
            "< 1",
        ),
        Row(
            f"step, {name} / 1 device a core",
            ours,
            medians["single"],
            "ms",
            "1.1",
        ),
    ]


class Rounds:
    """A model of `megabytes` per replica, its rounds and its writes."""

    def __init__(self, megabytes):
        width = round((megabytes * 1e6 / 4 / _NUM_LAYERS) ** 0.5)
        self.strategy = tf_avgstrategy.ParameterAveragingStrategy(_DEVICES)
        with self.strategy.scope():
            stack = [layers.Dense(width) for _ in range(_NUM_LAYERS)]
            model = keras.Sequential([layers.Input((width,)), *stack])
            model.compile(keras.optimizers.SGD())
        self.variables = model.variables
        # The same few zeros for all variables: they stay in the cache.
        self.zeros = {v.shape: tf.zeros(v.shape) for v in self.variables}
        self.averager = tf_avgstrategy.ParameterAverager(
            self.strategy, model.variables, model.optimizer, period=1
        )
        self.write = tf.function(lambda: self.strategy.run(self._add_zeros))
        self.round_and_write()

    def _add_zeros(self):
        for variable in self.variables:
            variable.value.assign_add(self.zeros[variable.shape])

    def round(self):
        self.averager.average()

    def round_and_write(self):
        # A round leaves one buffer in both replicas' variables. TensorFlow
        # makes the second one when a replica writes.
        self.round()
        self.write()


def round_rows(megabytes, turns):
    """A round beside the copying of the bytes that it reads and writes."""
    rounds = Rounds(megabytes)
    pairs = [
        (np.ones(v.shape, np.float32), np.zeros(v.shape, np.float32))
        for v in rounds.variables
        for _ in _DEVICES
    ]

    def copy():
        for source, target in pairs:
            np.copyto(target, source)

    def copy_and_write():
        copy()
        rounds.write()

    sides = [rounds.round, copy, rounds.round_and_write, copy_and_write]
    times = {side: [] for side in sides}
    for _ in range(turns):
        for side in sides:
            rounds.write()
            times[side].append(milliseconds(side))
    medians = [statistics.median(times[side]) for side in sides]
    what = f"round, {megabytes} MB"
    return [
        Row(f"{what} / copying", *medians[:2], "ms", "2"),
        Row(f"{what} + write / copying + write", *medians[2:], "ms", "2"),
    ]


def memory_row(megabytes):
    """Peak memory beside the model in a round, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        extra, size = pool.apply(measure_memory, (megabytes,))
    what = f"memory beside the model, {megabytes} MB / one copy"
    return Row(what, extra, size, "MB", "1")


def measure_memory(megabytes):
    """Returns a round's peak memory beside the model, and a copy's size."""
    make_replicas()
    rounds = Rounds(megabytes)
    # Freed memory stays with malloc, and using it again would show nowhere.
    ctypes.CDLL(None).malloc_trim(0)
    before = megabytes_in_status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The peak starts anew from what is resident now.
    rounds.round()
    extra = megabytes_in_status("VmHWM") - before
    return extra, rounds.averager.bytes_per_round / 1e6


def megabytes_in_status(field):
    with open("/proc/self/status") as file:
        found = re.search(rf"{field}:\s+(\d+) kB", file.read())
    return int(found[1]) * 1024 / 1e6


def make_replicas():
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = [tf.config.LogicalDeviceConfiguration()] * len(_DEVICES)
    tf.config.set_logical_device_configuration(cpu, replicas)


def print_table(rows):
    line = "{:46}{:>12}{:>12}{:>8}{:>6}".format
    print(line("ours / reference", "ours", "reference", "ratio", "aim"))
    for row in rows:
        ours, reference = (
            f"{value:.2f} {row.unit}" for value in (row.ours, row.reference)
        )
        print(line(row.what, ours, reference, f"{row.ratio:.2f}", row.aim))


def main(_):
    cores = sorted(os.sched_getaffinity(0))[: len(_DEVICES)]
    os.sched_setaffinity(0, cores)
    make_replicas()
    rows = [memory_row(100)]
    singles = SingleDevices(cores)
    # One for both models: the collectives of two would clash.
    mirrored = tf.distribute.MirroredStrategy(_DEVICES)
    rows += step_rows("CNN", cnn, mirrored, singles, _TURNS.value)
    rows += step_rows("10 MB MLP", mlp, mirrored, singles, _TURNS.value)
    singles.close()
    rows += round_rows(10, 2 * _TURNS.value)
    rows += round_rows(100, _TURNS.value)
    print_table(rows)
    if _OUTPUT.value:
        report = {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "machine": platform.processor() or platform.machine(),
            "rows": [{**row._asdict(), "ratio": row.ratio} for row in rows],
        }
        with open(_OUTPUT.value, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    app.run(main)
