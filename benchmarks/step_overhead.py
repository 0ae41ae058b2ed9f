"""What do a training step and a round cost, on 2 virtual CPU replicas?

python benchmarks/step_overhead.py --output=step_overhead.json

Only the ratios mean something; none should be above its aim. The two sides of
a ratio take turns on the same two cores, so that whatever else runs there slows
both, and a side's time is the median of its turns.
"""

import functools
import json
import multiprocessing
import os
import statistics
import timeit
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy

_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the numbers.")
_TURNS = flags.DEFINE_integer("turns", 30, "Turns that each side takes.")

_DEVICES = ["CPU:0", "CPU:1"]
_ROWS = 32  # Of one replica, in one step.
_STEPS = {"CNN": 25, "10 MB MLP": 6}  # In one turn.
_ROUND_LAYERS = 30  # Of the model of a round, two variables each.


class Row(NamedTuple):
    what: str
    ours: float
    reference: float
    unit: str
    aim: float

    @property
    def ratio(self):
        return self.ours / self.reference


def build_layers(name):
    if name == "CNN":
        hidden = [
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
        ]
    else:
        dense = [layers.Dense(1240, activation="relu") for _ in range(2)]
        hidden = [layers.Flatten(), *dense]
    return [layers.Input((28, 28, 1)), *hidden, layers.Dense(10)]


def milliseconds(call, number=1):
    return timeit.timeit(call, number=number) / number * 1e3


def medians_of_turns(sides, num_turns):
    turns = [[side() for side in sides] for _ in range(num_turns)]
    return list(map(statistics.median, zip(*turns)))


def use_one_thread_per_core(cores):
    os.sched_setaffinity(0, cores)
    tf.config.threading.set_inter_op_parallelism_threads(len(cores))
    tf.config.threading.set_intra_op_parallelism_threads(1)


class Training:
    """Keras' traced training step, under any strategy.

    Every step takes the same batch, since input is not what is measured. As in
    `fit`, the number of its rows is not known to tracing.
    """

    def __init__(self, name, strategy, rows):
        with strategy.scope():
            model = keras.Sequential(build_layers(name))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
        random = np.random.default_rng(0)
        images = random.random((rows, 28, 28, 1), np.float32)
        labels = random.integers(10, size=rows)
        data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(rows)
        model.fit(data, shuffle=False, verbose=0)  # Builds all variables.
        batches = strategy.experimental_distribute_dataset(data)
        self._batch = next(iter(batches))
        self._num_steps = _STEPS[name]
        self._step = tf.function(
            lambda batch: strategy.run(model.train_step, args=(batch,)),
            input_signature=[batches.element_spec],
        )
        self.turn()

    def turn(self):
        """Returns the milliseconds of a step, the mean of several."""
        step = functools.partial(self._step, self._batch)
        step()  # Wakes threads and caches.
        return milliseconds(step, self._num_steps)


def serve_single_device(connection, core):
    """In a process of its own, one device that trains on one core."""
    use_one_thread_per_core([core])
    strategy = tf.distribute.get_strategy()
    trainings = {name: Training(name, strategy, _ROWS) for name in _STEPS}
    connection.send("ready")
    for name in iter(connection.recv, "stop"):
        connection.send(trainings[name].turn())


def start_single_devices(cores):
    """Returns connections to the processes, one per core, when all serve."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in cores]
    for (_, theirs), core in zip(pipes, cores):
        spawn.Process(
            target=serve_single_device, args=(theirs, core), daemon=True
        ).start()
        theirs.close()
    for connection, _ in pipes:
        connection.recv()
    return [connection for connection, _ in pipes]


def turn_of_single_devices(connections, name):
    # Of processes that run at the same time the slower one counts: our step,
    # too, ends when its slower replica does.
    for connection in connections:
        connection.send(name)
    return max([connection.recv() for connection in connections])


def measure_steps(single_devices, num_turns):
    rows = _ROWS * len(_DEVICES)
    # One for both models: the collectives of two such strategies clash.
    mirrored_strategy = tf.distribute.MirroredStrategy(_DEVICES)
    our_strategy = tf_avgstrategy.ParameterAveragingStrategy(_DEVICES)
    for name in _STEPS:
        sides = [
            Training(name, our_strategy, rows).turn,
            Training(name, mirrored_strategy, rows).turn,
            lambda name=name: turn_of_single_devices(single_devices, name),
        ]
        ours, mirrored, single = medians_of_turns(sides, num_turns)
        yield Row(f"{name} step / MirroredStrategy's", ours, mirrored, "ms", 1)
        yield Row(f"{name} step / one device's", ours, single, "ms", 1.1)
    for connection in single_devices:
        connection.send("stop")


class Rounds:
    """A model of `megabytes` on each replica, its rounds and its writes."""

    def __init__(self, megabytes):
        width = round((megabytes * 1e6 / 4 / _ROUND_LAYERS) ** 0.5)
        self._strategy = tf_avgstrategy.ParameterAveragingStrategy(_DEVICES)
        with self._strategy.scope():
            stack = [layers.Dense(width) for _ in range(_ROUND_LAYERS)]
            model = keras.Sequential([layers.Input((width,)), *stack])
            optimizer = keras.optimizers.SGD()
        self.variables = model.variables
        self.averager = tf_avgstrategy.ParameterAverager(
            self._strategy, self.variables, optimizer, period=1
        )
        # Few, so that reading them costs little beside the writing.
        self._zeros = {v.shape: tf.zeros(v.shape) for v in self.variables}
        self.write = tf.function(lambda: self._strategy.run(self._add_zeros))
        self.round_and_write()

    def _add_zeros(self):
        for variable in self.variables:
            variable.value.assign_add(self._zeros[variable.shape])

    def round_and_write(self):
        # A round on CPU leaves one buffer to both replicas. TensorFlow makes
        # the second one when a replica writes.
        self.averager.average()
        self.write()


def measure_rounds(megabytes, num_turns):
    rounds = Rounds(megabytes)
    pairs = [
        (np.ones(v.shape, np.float32), np.zeros(v.shape, np.float32))
        for v in rounds.variables * len(_DEVICES)
    ]

    def copy():
        for source, target in pairs:
            np.copyto(target, source)

    def copy_and_write():
        copy()
        rounds.write()

    def turn(side):
        rounds.write()  # Each replica has a buffer of its own again.
        return milliseconds(side)

    sides = [rounds.averager.average, copy]
    sides += [rounds.round_and_write, copy_and_write]
    sides = [functools.partial(turn, side) for side in sides]
    medians = medians_of_turns(sides, num_turns)
    what = f"{megabytes} MB round"
    yield Row(f"{what} / copying", *medians[:2], "ms", 2)
    yield Row(f"{what}, write / copying, write", *medians[2:], "ms", 2)


def measure_memory(megabytes):
    rounds = Rounds(megabytes)
    # TensorFlow's allocator, one for all virtual devices, keeps what is freed:
    # resident memory would not show the peak.
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    rounds.averager.average()
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    extra, copy = peak - before, rounds.averager.bytes_per_round
    what = f"{megabytes} MB round, peak memory / one copy"
    yield Row(what, extra / 1e6, copy / 1e6, "MB", 1)


def print_table(rows):
    line = "{:40}{:>12}{:>12}{:>8}{:>6}".format
    print(line("ours / reference", "ours", "reference", "ratio", "aim"))
    for row in rows:
        values = [f"{v:.2f} {row.unit}" for v in (row.ours, row.reference)]
        print(line(row.what, *values, f"{row.ratio:.2f}", row.aim))


def main(_):
    tf.get_logger().setLevel("ERROR")
    cores = sorted(os.sched_getaffinity(0))[: len(_DEVICES)]
    use_one_thread_per_core(cores)
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = [tf.config.LogicalDeviceConfiguration()] * len(_DEVICES)
    tf.config.set_logical_device_configuration(cpu, replicas)
    rows = list(measure_memory(100))
    rows += measure_steps(start_single_devices(cores), _TURNS.value)
    for megabytes in (10, 100):
        rows += measure_rounds(megabytes, _TURNS.value)
    print_table(rows)
    if _OUTPUT.value:
        report = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        with open(_OUTPUT.value, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    app.run(main)
