"""Data of a script that sets no seed. Run by the workers of a pool."""

import pathlib
import random

import keras
import numpy as np
import scenarios
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy.input import seeds

NUM_ROWS = 32
EPOCHS = 2


def _as_in_a_new_process():
    """Forgets all seeds, and that workers have agreed on some."""
    # Before TensorFlow starts.
    scenarios.communicator()
    random.seed()
    np.random.seed()
    tf.random.set_seed(None)
    seeds._agreed.clear()


def _rows():
    return np.arange(NUM_ROWS, dtype="float32").reshape(-1, 1)


def _slices(rows):
    return tf.data.Dataset.from_tensor_slices(rows).batch(8)


class _Shuffling(keras.utils.PyDataset):
    """Batches of rows, in an order that NumPy draws anew for each epoch."""

    def __init__(self, shuffle=None, **arguments):
        super().__init__(**arguments)
        self._shuffle = shuffle or np.random.shuffle
        self._order = _rows()
        self._shuffle(self._order)

    def __len__(self):
        return NUM_ROWS // 8

    def __getitem__(self, place):
        rows = self._order[8 * place : 8 * (place + 1)].copy()
        return rows, 0 * rows

    def on_epoch_end(self):
        self._shuffle(self._order)


def _generator(rows):
    signature = tf.TensorSpec([1], tf.float32)
    return tf.data.Dataset.from_generator(
        lambda: iter(rows), output_signature=signature
    ).batch(8)


def _images(folder):
    files = keras.utils.image_dataset_from_directory(
        folder,
        labels=None,
        color_mode="grayscale",
        image_size=(4, 4),
        batch_size=8,
    )
    return files.map(lambda images: images[:, 0, 0])


def _texts(folder):
    files = keras.utils.text_dataset_from_directory(
        folder, labels=None, batch_size=8
    )
    return files.map(lambda texts: tf.strings.to_number(texts)[:, None])


def _timeseries(_):
    return keras.utils.timeseries_dataset_from_array(
        _rows(), None, sequence_length=1, batch_size=8, shuffle=True
    ).map(lambda series: series[:, 0])


def _augmented(_):
    """Rows, and beside them random numbers that do not move their order."""
    data = tf.data.Dataset.from_tensor_slices(_rows()).shuffle(NUM_ROWS)
    return data.map(lambda row: row + tf.random.uniform([], 0, 0.5)).batch(8)


def _sampled(_):
    halves = [_rows()[:16], _rows()[16:]]
    return tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.from_tensor_slices(h).shuffle(16) for h in halves]
    ).batch(8)


# What trains on each row once.
WORKS = {
    "np.random.permutation, then fit(x, y)": lambda _: np.random.permutation(
        _rows()
    ),
    "np.random.permutation, then from_tensor_slices": lambda _: _slices(
        np.random.permutation(_rows())
    ),
    "random.sample, then from_tensor_slices": lambda _: _slices(
        _rows()[random.sample(range(NUM_ROWS), NUM_ROWS)]
    ),
    "image_dataset_from_directory": _images,
    "text_dataset_from_directory": _texts,
    "timeseries_dataset_from_array": _timeseries,
    "a PyDataset that NumPy shuffles": lambda _: _Shuffling(),
    "a PyDataset with two threads": lambda _: _Shuffling(
        workers=2, max_queue_size=2
    ),
    "a generator that NumPy has shuffled": lambda _: _generator(
        np.random.permutation(_rows())
    ),
    "a seed": lambda _: _slices(np.random.default_rng(3).permutation(_rows())),
    "Dataset.shuffle": lambda _: (
        tf.data.Dataset.from_tensor_slices(_rows()).shuffle(NUM_ROWS).batch(8)
    ),
    "augmentation in map": _augmented,
    "sample_from_datasets": _sampled,
}


def _shards_by(function):
    def make(rank, size):
        rows = tf.data.Dataset.from_tensor_slices(_rows())
        return function(rows, rank, size).batch(4)

    return make


# What cannot be seen from here is an error.
FAILS = {
    "default_rng": lambda rank, size: np.random.default_rng().permutation(
        _rows()
    ),
    "a PyDataset with default_rng": lambda rank, size: _Shuffling(
        np.random.default_rng().shuffle
    ),
    "a generator with default_rng": lambda rank, size: _generator(
        np.random.default_rng().permutation(_rows())
    ),
    "shard": _shards_by(lambda rows, rank, size: rows.shard(size, rank)),
    "skip and take": _shards_by(
        lambda rows, rank, size: rows.skip(8 * rank).take(8)
    ),
    "filter": _shards_by(
        lambda rows, rank, size: (
            rows.enumerate()
            .filter(lambda place, _: place % size == rank)
            .map(lambda _, row: row)
        )
    ),
    "files": lambda rank, size: (
        tf.data.TextLineDataset(
            [f"{(place + rank) % size}.txt" for place in range(size)]
        )
        .map(lambda line: tf.strings.to_number(line)[None])
        .batch(8)
    ),
    "other rows": lambda rank, size: _rows() + 100 * rank,
}


def _fit(strategy, data):
    """Returns the rows that were trained on here, by epoch."""
    with strategy.scope():
        model = scenarios.RowRecorder(strategy)
        model.build((None, 1))
        model.compile(toys.sgd(), "mse", run_eagerly=True)
    epochs = []

    def end(epoch, logs):
        epochs.append(model.seen[:])
        model.seen.clear()

    if isinstance(data, tf.data.Dataset):
        data = data.map(lambda rows: (rows, 0 * rows))
    x, y = (data, 0 * data) if isinstance(data, np.ndarray) else (data, None)
    model.fit(
        x,
        y,
        batch_size=8 if y is not None else None,
        shuffle=False,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            avg.PeriodicAveraging(2),
            keras.callbacks.LambdaCallback(on_epoch_end=end),
        ],
    )
    return epochs


def rows_trained_on(folder):
    """By kind of data, the rows that were trained on here, by epoch."""
    found = {}
    for kind, make in WORKS.items():
        _as_in_a_new_process()
        strategy = scenarios.make_strategy()
        place = "images" if kind.startswith("image") else "texts"
        found[kind] = _fit(strategy, make(str(pathlib.Path(folder) / place)))
    return found


def errors():
    """By kind of data, the text of the error."""
    found = {}
    for kind, make in FAILS.items():
        _as_in_a_new_process()
        strategy = scenarios.make_strategy()
        communicator = strategy.communicator
        try:
            _fit(strategy, make(communicator.rank, communicator.size))
        except ValueError as error:
            found[kind] = str(error)
    return found


def rows_of_own_data(kind):
    """Of rows that differ on purpose, each worker trains on all of its own."""
    _as_in_a_new_process()
    strategy = scenarios.make_strategy()
    communicator = strategy.communicator
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = FAILS[kind](communicator.rank, communicator.size)
    if isinstance(data, np.ndarray):
        data = _slices(data)
    return _fit(strategy, data.with_options(options))


def draw_after_the_start():
    """What is drawn before a strategy is made, after it, and after a seed."""
    _as_in_a_new_process()
    strategy = scenarios.make_strategy()
    drawn = [random.random(), float(np.random.random())]
    random.seed(strategy.communicator.rank)
    np.random.seed(strategy.communicator.rank)
    own = [random.random(), float(np.random.random())]
    # A second strategy touches nothing.
    scenarios.make_strategy()
    return drawn, own, [random.random(), float(np.random.random())]


def masks_after_the_start():
    """What a Dropout layer draws on each local replica."""
    _as_in_a_new_process()
    strategy = scenarios.make_strategy(2)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
        layer.build([None, 64])
    ones = tf.ones([1, 64])
    masks = strategy.run(lambda: layer(ones, training=True))
    return [
        mask.numpy().tobytes().hex()
        for mask in strategy.experimental_local_results(masks)
    ]
