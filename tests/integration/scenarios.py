"""What the workers of a pool run. Every worker runs the same function.

What a function returns goes back to the test, so it is plain Python.
"""

import logging as python_logging
import subprocess
import time

import keras
import numpy as np
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg
from tf_avgstrategy.workers import startup

# One worker's rows, from the worker's first replica on.
ROWS = (toys.ROW_A, toys.ROW_B)


def communicator():
    return startup.make_communicator(
        "auto", timeout_seconds=60, start_timeout_seconds=60
    )


def make_strategy(num_replicas=1, **arguments):
    # The pool's first strategy sets the limits of the whole process.
    arguments = {
        "timeout_seconds": 60,
        "start_timeout_seconds": 60,
        **arguments,
    }
    return toys.make_strategy(num_replicas, **arguments)


def exchange_payloads():
    """The contract of a communicator, on all that may travel."""
    ours = communicator()
    rank, size = ours.rank, ours.size
    total = sum(range(1, size + 1))
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        payloads = [
            tf.cast([[rank + 1.0, 0.0], [0.5, -2.0]], dtype),
            tf.zeros([0, 3], dtype),
            tf.cast(rank + 1, dtype),
            tf.cast([rank + 1], dtype),
        ]
        sums = ours.all_reduce_sum(payloads)
        expected = [
            [[total, 0.0], [0.5 * size, -2.0 * size]],
            np.zeros([0, 3]),
            total,
            [total],
        ]
        for result, payload, value in zip(sums, payloads, expected):
            assert result.dtype == payload.dtype
            assert result.shape == payload.shape
            np.testing.assert_array_equal(tf.cast(result, tf.float64), value)
    return ours.name, rank, size


def broadcast_payloads():
    ours = communicator()
    root = ours.size - 1
    chosen = [
        np.array([-0.0, np.nan, np.inf, 1e-45], "float32"),
        np.array([1.5], tf.bfloat16.as_numpy_dtype),
        np.array(3.5, "float16"),
        np.array([[2**40 + 1]], "int64"),
        np.array([True, False, True]),
        np.array([1, 2, 255], "uint8"),
        np.zeros([0], "float64"),
    ]
    own = [v if ours.rank == root else np.zeros_like(v) for v in chosen]
    received = ours.broadcast([tf.constant(v) for v in own], root=root)
    for value, expected in zip(received, chosen):
        assert value.dtype == expected.dtype
        assert value.numpy().tobytes() == expected.tobytes()


def gather_payloads():
    ours = communicator()
    texts = [
        f"worker {rank} " * rank * 100 + "\u00fc" for rank in range(ours.size)
    ]
    assert ours.all_gather_strings(texts[ours.rank]) == texts
    numbers = ours.all_gather(np.arange(100.0) + ours.rank)
    np.testing.assert_array_equal(
        numbers, [np.arange(100.0) + rank for rank in range(ours.size)]
    )
    ours.barrier()


def exchange_300_megabytes():
    ours = communicator()
    payload = tf.fill([75_000_000], float(ours.rank + 1))
    (total,) = ours.all_reduce_sum([payload])
    expected = sum(range(1, ours.size + 1))
    return bool(tf.reduce_all(total == expected))


def barrier_waits_for_the_last():
    """Whether the first worker waits for one that comes half a second late."""
    ours = communicator()
    ours.barrier()
    if ours.rank == ours.size - 1:
        time.sleep(0.5)
    start = time.monotonic()
    ours.barrier()
    return time.monotonic() - start


def is_exact_on_every_worker(elements):
    """Sums of numbers that must be rounded; bits must not differ."""
    ours = communicator()
    values = np.random.default_rng(ours.rank).normal(size=elements)
    (total,) = ours.all_reduce_sum([tf.constant(values, tf.float32)])
    return total.numpy().tobytes().hex()


def slope(
    steps,
    period,
    *,
    replicas=1,
    optimizer="sgd",
    by="fit",
    slots="mean",
    epochs=1,
):
    """T1, T2 or T3: the first half of the job has row A, the second row B."""
    strategy = make_strategy(replicas)
    make = {
        "sgd": toys.sgd,
        "momentum": lambda: toys.sgd(momentum=0.5),
        "adam": lambda: keras.optimizers.Adam(0.1),
    }[optimizer]
    with strategy.scope():
        model = toys.slope_model(make())
    total = strategy.num_replicas_in_sync
    rows = ROWS if total == 2 else (toys.ROW_A,) * 2 + (toys.ROW_B,) * 2
    data = toys.dataset(toys.slope_rows(steps, rows), total)
    if by == "fit":
        averaging = avg.PeriodicAveraging(period, slots=slots)
        toys_fit(model, data, epochs=epochs, callbacks=[averaging])
        averager = averaging.averager
    else:
        data = strategy.experimental_distribute_dataset(data)
        averager = loop(strategy, model, data, period=period, slots=slots)
    optimizer = model.optimizer
    return {
        "weights": toys.scalars(model.trainable_variables[0]),
        "slots": [
            toys.scalars(v) for v in optimizer.variables if "dense" in v.path
        ],
        "iterations": toys.scalars(optimizer.iterations),
        "rounds": averager.rounds,
    }


def loop(strategy, model, data, **arguments):
    """One epoch of a custom training loop. Returns the averager."""
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, **arguments
    )
    step = tf.function(lambda x, y: strategy.run(train, args=(model, x, y)))
    for x, y in data:
        step(x, y)
        averager.step()
    averager.end_epoch()
    return averager


def train(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def toys_fit(model, data, **arguments):
    return model.fit(data, verbose=0, shuffle=False, **arguments)


def weights_of(model):
    """All variables' bits on each replica, of which there may be one set."""
    return [
        [copy.tobytes().hex() for copy in toys.copies(variable)]
        for variable in [*model.variables, *model.optimizer.variables]
        if "seed" not in variable.path
    ]


def dense_model(strategy, optimizer="adam"):
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((3,)),
                layers.Dense(4, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse")
    return model


def different_calls():
    """The last thing a pool can do: its communicator is of no use after."""
    ours = communicator()
    try:
        if ours.rank == 0:
            ours.barrier()
        else:
            ours.all_reduce_sum([tf.constant(1.0)])
    except RuntimeError as error:
        return str(error)
    return "no error"


def train_dense_model():
    strategy = make_strategy(2)
    keras.utils.set_random_seed(strategy.communicator.rank)
    model = dense_model(strategy)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    model.fit(
        x,
        x[:, :1],
        batch_size=16,
        epochs=2,
        verbose=0,
        callbacks=[avg.PeriodicAveraging(3)],
    )
    dropout = model.layers[2]
    ones = tf.ones([1, 64])
    masks = strategy.run(lambda: dropout(ones, training=True))
    return {
        "bits": [values[0] for values in weights_of(model)],
        "masks": [
            mask.numpy().tobytes().hex()
            for mask in strategy.experimental_local_results(masks)
        ],
    }


def train_with_a_frozen_layer():
    strategy = make_strategy(2)
    with strategy.scope():
        frozen = layers.Dense(50, trainable=False)
        model = keras.Sequential([layers.Input((3,)), frozen, layers.Dense(1)])
        model.compile("sgd", "mse")
    rank = strategy.communicator.rank
    # Rows and so weights differ, and the shares 3/7 and 4/7 must be rounded.
    x = np.ones([7, 3], "float32") * (rank + 1)
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=1
    )
    before = frozen.kernel.numpy().tobytes()
    for _ in range(10):
        model.train_on_batch(x[:1], x[:1, :1])
        averager.average([3 + rank, 0])
    return before.hex(), frozen.kernel.numpy().tobytes().hex()


def _error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its text is what is asked for.
        return str(error)
    return "no error"


def start_with_another_model():
    strategy = make_strategy()
    with strategy.scope():
        units = 1 + strategy.communicator.rank
        model = keras.Sequential(
            [layers.Input((1,)), layers.Dense(units, name="dense")],
            name="model",
        )
        model.compile(toys.sgd(), "mse")
    return _error_of(
        lambda: model.fit(
            np.ones([4, 1]),
            np.ones([4, 1]),
            verbose=0,
            callbacks=[avg.PeriodicAveraging(2)],
        )
    )


def start_with_another_period():
    strategy = make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(2 + strategy.communicator.rank)
    x, y = toys.slope_rows(1)
    return _error_of(lambda: model.fit(x, y, verbose=0, callbacks=[averaging]))


def change_a_weight_between_fits():
    """One step on rows that leave w as it is: what is left is the start."""
    strategy = make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(1)
    x = y = np.zeros([2, 1], "float32")
    toys_fit(model, toys.dataset((x, y), 2), callbacks=[averaging])
    rank = strategy.communicator.rank
    model.trainable_variables[0].assign([[4.75 + rank]])
    toys_fit(model, toys.dataset((x, y), 2), callbacks=[averaging])
    return toys.weight(model)


def own_rows(strategy, row, batches, batch_size=1):
    """A dataset of this worker's own: that many batches of one row."""

    def make(_):
        data = np.array([row] * batches * batch_size, "float32")
        data = data.reshape(-1, 2)
        return toys.dataset((data[:, :1], data[:, 1:]), batch_size)

    return strategy.distribute_datasets_from_function(make)


def uneven(batches, period, epochs=1, steps_per_epoch=None, validates=0):
    """T1 with another number of batches on each worker."""
    strategy = make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    weights = []
    averaging = avg.PeriodicAveraging(period)
    toys_fit(
        model,
        own_rows(strategy, ROWS[rank], batches[rank]),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=_validation_data(validates),
        callbacks=[
            averaging,
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: weights.append(toys.weight(model))
            ),
        ],
    )
    return {
        "weights": weights,
        "rounds": averaging.averager.rounds,
        "steps": averaging.averager.steps,
    }


def _validation_data(kind):
    """None, arrays, or a dataset whose order workers must agree on."""
    arrays = toys.slope_rows(4)
    if kind < 2:
        return arrays if kind else None
    return tf.data.Dataset.from_tensor_slices(arrays).shuffle(8).batch(2)


def average_what_one_has_done():
    strategy = make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=100
    )
    for x, y in own_rows(strategy, toys.ROW_B, rank):
        strategy.run(train, args=(model, x, y))
        averager.step()
    was_run = [averager.average_if_stepped() for _ in range(2)]
    return toys.weight(model), was_run


def rows_of_fit_without_sharding():
    strategy = make_strategy(2)
    with strategy.scope():
        model = RowRecorder(strategy)
        model.build((None, 1))
        model.compile(toys.sgd(), "mse", run_eagerly=True)
    x = np.arange(12, dtype="float32").reshape(-1, 1)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = toys.dataset((x, 0 * x), 4).with_options(options)
    toys_fit(model, data, callbacks=[avg.PeriodicAveraging(2)])
    return sorted(model.seen)


def uneven_loop(batches, period):
    strategy = make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    data = own_rows(strategy, ROWS[rank], batches[rank])
    averager = loop(strategy, model, data, period=period)
    return {
        "weight": toys.weight(model),
        "steps": averager.steps,
        "rounds": averager.rounds,
    }


def stop_one_worker_early(use_ema=False):
    strategy = make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model(toys.sgd(use_ema=use_ema))

    def stop(epoch, logs):
        model.stop_training = rank == 0 and epoch == 0

    averaging = avg.PeriodicAveraging(2)
    history = toys_fit(
        model,
        own_rows(strategy, ROWS[rank], 3),
        epochs=4,
        callbacks=[
            averaging,
            keras.callbacks.LambdaCallback(on_epoch_end=stop),
        ],
    )
    return {
        "weights": [toys.weight(model)],
        "rounds": averaging.averager.rounds,
        "epochs": len(history.epoch),
    }


def rows_three_to_one():
    strategy = make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    data = own_rows(strategy, ROWS[rank], 1, batch_size=3 - 2 * rank)
    toys_fit(model, data, callbacks=[avg.PeriodicAveraging(1)])
    return toys.weight(model)


def one_and_two_replicas():
    """LAUN-04. Global batches of 3 rows: A for worker 0, B and B for 1."""
    rank = communicator().rank
    strategy = make_strategy(1 + rank)
    with strategy.scope():
        model = toys.slope_model()
    rows = (toys.ROW_A, toys.ROW_B, toys.ROW_B)
    data = toys.dataset(toys.slope_rows(2, rows), 3)
    toys_fit(model, data, callbacks=[avg.PeriodicAveraging(2)])
    return toys.scalars(model.trainable_variables[0])


def rows_of_files(sizes, policy, folder):
    """The numbered rows that this worker's replicas get, or an error's text."""
    strategy = make_strategy()
    names = [f"{folder}/{index}.tfrecord" for index in range(len(sizes))]
    if strategy.is_chief:
        number = 0
        for name, size in zip(names, sizes):
            with tf.io.TFRecordWriter(name) as writer:
                for _ in range(size):
                    writer.write(str(number))
                    number += 1
    strategy.communicator.barrier()
    data = tf.data.TFRecordDataset(names)
    data = data.map(lambda record: tf.strings.to_number(record, tf.int32))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    data = data.batch(4).with_options(options)
    try:
        return _rows_of_epoch(
            strategy, strategy.experimental_distribute_dataset(data)
        )
    except ValueError as error:
        return str(error)


def _rows_of_epoch(strategy, data):
    seen = []
    for batch in data:
        for part in strategy.experimental_local_results(batch):
            seen.extend(part.numpy().ravel().tolist())
    return seen


class RowRecorder(keras.Model):
    """Remembers the rows that it is trained on."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.dense = layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, _ = data
        self.seen.extend(x.numpy().ravel().astype(int).tolist())
        return super().train_step(data)


def rows_of_arrays(rows, replicas):
    strategy = make_strategy(replicas)
    keras.utils.set_random_seed(strategy.communicator.rank)
    with strategy.scope():
        model = RowRecorder(strategy)
        model.build((None, 1))
        model.compile(toys.sgd(), "mse", run_eagerly=True)
    x = np.arange(rows, dtype="float32").reshape(-1, 1)
    epochs = []

    def end(epoch, logs):
        epochs.append(model.seen[:])
        model.seen.clear()

    model.fit(
        x,
        0 * x,
        batch_size=6,
        epochs=3,
        verbose=0,
        callbacks=[
            avg.PeriodicAveraging(2),
            keras.callbacks.LambdaCallback(on_epoch_end=end),
        ],
    )
    return epochs


def uneven_messages(batches):
    messages = messages_of(lambda: uneven(batches, period=2))
    return [m for m in messages if "ran out" in m]


def messages_of(call):
    """The warnings that are logged in a call."""
    messages = []

    class Handler(python_logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Handler(python_logging.WARNING)
    logger = python_logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return messages


def start_differently():
    """OPT-01: worker 1 has another seed, rate and velocity before `fit`."""
    strategy = make_strategy()
    rank = strategy.communicator.rank
    keras.utils.set_random_seed(rank)
    with strategy.scope():
        model = toys.slope_model(toys.sgd(momentum=0.5))
        model.optimizer.build(model.trainable_variables)
    optimizer = model.optimizer
    (velocity,) = (v for v in optimizer.variables if "momentum" in v.path)
    if rank == 1:
        optimizer.learning_rate = 0.5
        velocity.assign([[3.0]])
        optimizer.iterations.assign(7)
        model.trainable_variables[0].assign([[9.0]])
    before = {}

    def remember(epoch, logs):
        before.update(
            weight=toys.weight(model),
            velocity=float(velocity.numpy()[0, 0]),
            iterations=int(optimizer.iterations.numpy()),
        )

    data = toys.dataset(toys.slope_rows(2, ROWS), 2)
    toys_fit(
        model,
        data,
        callbacks=[
            avg.PeriodicAveraging(2),
            keras.callbacks.LambdaCallback(on_epoch_begin=remember),
        ],
    )
    return {
        "before": before,
        "learning_rates": toys.scalars(optimizer._learning_rate),
        "weight": toys.weight(model),
    }


def follow_a_learning_rate(kind):
    schedules = keras.optimizers.schedules
    schedule = {
        # Keras compares `step <= boundary`, steps counted from 0.
        "piecewise": lambda: schedules.PiecewiseConstantDecay(
            [1], [0.125, 0.0]
        ),
        "cosine": lambda: schedules.CosineDecay(0.125, 4),
    }[kind]()
    strategy = make_strategy()
    with strategy.scope():
        model = toys.slope_model(keras.optimizers.SGD(schedule))
    rates, weights = [], []

    def remember(batch, logs):
        rates.append(float(model.optimizer.learning_rate))
        if batch % 2:
            weights.append(toys.weight(model))

    toys_fit(
        model,
        toys.dataset(toys.slope_rows(4, ROWS), 2),
        callbacks=[
            avg.PeriodicAveraging(2),
            keras.callbacks.LambdaCallback(on_train_batch_end=remember),
        ],
    )
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "rates": rates,
        "rates of one process": [float(schedule(n)) for n in range(1, 5)],
        "weights": [None, *weights],
    }


def fail_within_a_round():
    """FAIL-02: the second variable's exchange fails once."""
    strategy = make_strategy()
    ours = strategy.communicator
    rank = ours.rank
    with strategy.scope():
        weights = [tf.Variable(4.0, name=f"w{i}") for i in range(2)]
    averager = avg.ParameterAverager(strategy, weights, [], period=2)
    for weight in weights:
        weight.assign([2.25, 8.0][rank])
    before = [toys.scalars(w)[0] for w in weights]
    reduce_all = ours._reduce

    def fail_at_the_second(tensors):
        first, second = tf.split(tensors[0], 2)
        reduce_all([first])
        raise ValueError(f"on purpose, before {second}")

    ours._reduce = fail_at_the_second
    try:
        averager.average()
    except ValueError:
        failed = [toys.scalars(w)[0] for w in weights]
    finally:
        ours._reduce = reduce_all
    averager.average()
    return before, failed, [toys.scalars(w)[0] for w in weights]


def step_to_nan():
    """FAIL-03: worker 2 gets NaN in the step before the round."""
    strategy = make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    rows = (toys.ROW_A, toys.ROW_B, toys.ROW_B)
    x, y = toys.slope_rows(2, rows)
    y[5] = np.nan
    try:
        toys_fit(
            model,
            toys.dataset((x, y), 3),
            callbacks=[avg.PeriodicAveraging(2)],
        )
    except FloatingPointError as error:
        return str(error)
    return "no error"


def average_large_weights():
    strategy = make_strategy()
    with strategy.scope():
        weight = tf.Variable(4.0)
    averager = avg.ParameterAverager(strategy, [weight], [], period=2)
    weight.assign(3e38)
    averager.average()
    return toys.scalars(weight)[0]


def leave_a_process():
    return subprocess.Popen(["sleep", "600"]).pid
