"""A worker of `network.py` that trains with Keras. Started by it."""

import functools
import json
import os
import pathlib
import sys

import keras
import network_meeting
import numpy as np
import tensorflow as tf


def _model(megabytes):
    width, widths = network_meeting.shapes(megabytes)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((width,))])
    for own in widths:
        model.add(keras.layers.Dense(own, "relu"))
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model, width


def _rows(width, rows, rank):
    x = np.random.default_rng(rank).normal(size=(rows, width))
    return tf.constant(x, tf.float32)


class _Timer(keras.callbacks.Callback):
    def __init__(self, marks):
        super().__init__()
        self._marks = marks
        self._count = 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1
        self._marks.step(self._count)


class _Fit:
    """`model.fit` under a strategy.

    Args:
        strategy: `tf.distribute.Strategy`.
        megabytes: Float, the size of the model.
        rows: Int, rows of a worker's batch.
        rank: Int, this worker's.
        callbacks: List of `keras.callbacks.Callback`.
    """

    def __init__(self, strategy, megabytes, rows, rank, callbacks=()):
        with strategy.scope():
            self._model, width = _model(megabytes)
        batch = _rows(width, rows, rank)

        def make(_):
            data = tf.data.Dataset.from_tensors((batch, batch)).repeat()
            options = tf.data.Options()
            options.threading.private_threadpool_size = 1
            options.autotune.enabled = False
            return data.with_options(options)

        self._data = strategy.distribute_datasets_from_function(make)
        self._callbacks = list(callbacks)

    def train(self, marks):
        self._model.fit(
            self._data,
            steps_per_epoch=marks.num_steps,
            verbose=0,
            callbacks=[*self._callbacks, _Timer(marks)],
        )


class _HorovodTape:
    """A training loop with Horovod's `DistributedGradientTape`."""

    def __init__(self, task, megabytes, rank):
        import horovod.tensorflow as hvd

        self._model, width = _model(megabytes)
        self._x = _rows(width, task["rows"], rank)
        model = self._model
        weights = model.trainable_variables
        model.optimizer.build(weights)
        hvd.broadcast_variables([w.value for w in weights], root_rank=0)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - x))
            # All gradients are one group: Horovod's grouped all-reduce.
            tape = hvd.DistributedGradientTape(tape, num_groups=1)
            gradients = tape.gradient(loss, [w.value for w in weights])
            model.optimizer.apply(gradients, weights)
            return loss

        self._step = step

    def train(self, marks):
        for count in range(1, marks.num_steps + 1):
            self._step(self._x).numpy()
            marks.step(count)


def _ours(task, megabytes, rank, *, period=None, gradient_sync="none"):
    import tf_avgstrategy as avg

    strategy = avg.ParameterAveragingStrategy(
        ["CPU:0"],
        gradient_sync=gradient_sync,
        timeout_seconds=900,
    )
    # Without a period there is no round within what is measured.
    averaging = avg.PeriodicAveraging(period or 10**9)
    return _Fit(strategy, megabytes, task["rows"], rank, [averaging])


def _alone(task, megabytes, rank):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    return _Fit(strategy, megabytes, task["rows"], rank)


def _makers(task):
    makers = {
        "alone": _alone,
        "gradients": functools.partial(_ours, gradient_sync="global"),
    }
    for name, period in task["periods"].items():
        makers[name] = functools.partial(_ours, period=period)
    return makers


def main():
    folder, task = sys.argv[1], json.loads(sys.argv[2])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if task["library"] == "mirrored":
        import repaired_strategy

        strategy = repaired_strategy.RepairedMultiWorkerMirroredStrategy()
        makers = {
            "mirrored": lambda task, megabytes, rank: _Fit(
                strategy, megabytes, task["rows"], rank
            )
        }
    elif task["library"] == "tape":
        # Without this library, which changes Horovod's settings.
        import horovod.tensorflow as hvd

        hvd.init()
        makers = {"horovod": _HorovodTape}
    else:
        makers = _makers(task)
        # Which starts the communicator, before anything starts TensorFlow.
        import tf_avgstrategy as avg

        avg.ParameterAveragingStrategy(["CPU:0"], timeout_seconds=900)
    rank, size = _rank_and_size()
    meeting = network_meeting.Meeting(pathlib.Path(folder), rank, size)
    for megabytes, name in task["wanted"]:
        way = makers[name](task, megabytes, rank)
        result = network_meeting.measure(
            meeting,
            way.train,
            unit=task["periods"].get(name, 1),
            seconds=task["seconds"],
        )
        if rank == 0:
            result |= {"megabytes": megabytes, "way": name}
            print(f"RESULT {json.dumps(result)}", flush=True)
        del way
        keras.backend.clear_session()
    meeting.gather(None)


def _rank_and_size():
    """Returns rank and number of workers, of either communicator."""
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    rank, addresses = network_meeting.cluster()
    return rank, len(addresses)


if __name__ == "__main__":
    main()
