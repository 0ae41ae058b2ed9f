"""Trains a small model on several workers with a backup; may be killed in it.

python resume_worker.py FOLDER [--save_freq=N] [--epochs=E] [--replicas=R]
    [--kill_rank=K --kill_step=S --kill_delay=SECONDS] [--own_folders]
    [--has_callbacks] [--start_timeout=SECONDS] [--has_everything]

With `--kill_step` the worker of that rank kills itself `kill_delay` seconds
after it has begun that batch, counted from the start of this process, and once
in this folder. At the end each worker prints a digest of everything that it has
trained.
"""

import hashlib
import os
import pathlib
import signal
import threading

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy as avg
from tf_avgstrategy.state import variables

FLAGS = flags.FLAGS
flags.DEFINE_string("save_freq", "3", "Batches between backups, or epoch.")
flags.DEFINE_integer("epochs", 3, "Epochs.")
flags.DEFINE_integer("replicas", 1, "Replicas of each worker.")
flags.DEFINE_integer("kill_rank", -1, "The worker that is killed.")
flags.DEFINE_integer("kill_step", 0, "The batch in which it is.")
flags.DEFINE_float("kill_delay", 0.0, "Seconds from its beginning on.")
flags.DEFINE_float("start_timeout", 60, "Seconds to wait for the others.")
flags.DEFINE_bool("own_folders", False, "Each worker has a disk of its own.")
flags.DEFINE_bool("has_callbacks", False, "Other callbacks are there, too.")
flags.DEFINE_bool(
    "has_everything",
    False,
    "A period by the learning rate, an outer optimizer, fragments, a moving "
    "average of the mean.",
)

NUM_ROWS, BATCH_SIZE = 84, 12


def rows_of(epoch):
    """A pipeline whose order is a function of the epoch, a `tf.Variable`."""
    x = np.random.default_rng(1).normal(size=(NUM_ROWS, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def order(_):
        places = tf.random.experimental.stateless_shuffle(
            tf.range(NUM_ROWS), seed=tf.stack([7, epoch])
        )
        return tf.data.Dataset.from_tensor_slices(places)

    data = tf.data.Dataset.from_tensors(0).flat_map(order)
    data = data.map(lambda place: (tf.gather(x, place), tf.gather(y, place)))
    return data.batch(BATCH_SIZE)


class KillItself(keras.callbacks.Callback):
    def __init__(self, step, delay, mark):
        super().__init__()
        self.step, self.delay, self.mark = step, delay, mark

    def on_train_batch_begin(self, batch, logs=None):
        self.step -= 1
        if self.step == 0 and not self.mark.exists():
            self.mark.touch()
            number = os.getpid()
            threading.Timer(
                self.delay, os.kill, [number, signal.SIGKILL]
            ).start()


def make_model():
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


def other_callbacks(folder):
    callbacks = keras.callbacks
    return [
        callbacks.ModelCheckpoint(
            folder / "best.keras", monitor="mae", save_best_only=True
        ),
        callbacks.ModelCheckpoint(folder / "batch.keras", save_freq=4),
        callbacks.ReduceLROnPlateau("mae", patience=1, min_delta=9.0),
        callbacks.EarlyStopping("mae", patience=50),
        callbacks.CSVLogger(folder / "log.csv", append=True),
    ]


def digest(model):
    found = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(variable.path.encode())
        if "seed" in variable.path:
            # Each replica has its own; from outside all workers see one.
            found.update(variable.numpy().tobytes())
            continue
        for copy in variables.all_copies(variable):
            found.update(copy.numpy().tobytes())
    return found.hexdigest()


def main(argv):
    folder = pathlib.Path(argv[1])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * FLAGS.replicas,
    )
    strategy = avg.ParameterAveragingStrategy(
        [f"CPU:{i}" for i in range(FLAGS.replicas)],
        timeout_seconds=20,
        start_timeout_seconds=FLAGS.start_timeout,
    )
    rank = strategy.communicator.rank
    if FLAGS.own_folders:
        folder = folder / f"worker{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model()
    epoch = tf.Variable(0)
    save_freq = FLAGS.save_freq
    averaging = avg.PeriodicAveraging(4)
    if FLAGS.has_everything:
        # 2 steps at the first learning rate, 0.01, and 16 at 0.001.
        averaging = avg.PeriodicAveraging(
            schedule=avg.QuadraticSynchronizationRule(2, 0.004),
            outer_optimizer=avg.outer_optimizers.diloco(),
            fragments=2,
        )
    callbacks = [
        keras.callbacks.BackupAndRestore(
            folder / "backup",
            save_freq=int(save_freq) if save_freq.isdigit() else save_freq,
        ),
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda number, logs: epoch.assign(number)
        ),
        averaging,
    ]
    if FLAGS.has_callbacks:
        callbacks += other_callbacks(folder)
    if FLAGS.has_everything:
        callbacks.append(
            avg.AveragedModelCheckpoint(folder / "mean.keras", decay=0.75)
        )
    if rank == FLAGS.kill_rank:
        callbacks.append(
            KillItself(FLAGS.kill_step, FLAGS.kill_delay, folder / "killed")
        )
    history = model.fit(
        rows_of(epoch), epochs=FLAGS.epochs, verbose=0, callbacks=callbacks
    )
    found = digest(model)
    if FLAGS.has_everything:
        with averaging.averager.averaged_weights():
            found += digest(model)
    last = {k: v[-1].hex() for k, v in sorted(history.history.items())}
    print(
        f"end: {found} steps {averaging.averager.steps} rounds "
        f"{averaging.averager.rounds} {last}",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
