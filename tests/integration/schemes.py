"""When workers average, and what they do with the mean, on T1.

Every worker of a pool runs the same function.
"""

import json
import pathlib
import time

import keras
import numpy as np
import scenarios
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers

SCHEMES = {
    "half of the way": lambda: {
        "period": 2,
        "outer_optimizer": keras.optimizers.SGD(0.5),
    },
    "nesterov": lambda: {
        "period": 2,
        "outer_optimizer": outer_optimizers.diloco(0.5, 0.5),
    },
    "nesterov in a fragment": lambda: {
        "period": 2,
        "fragments": 2,
        "outer_optimizer": outer_optimizers.diloco(0.5, 0.5),
    },
    "elastic": lambda: {"period": 2, "elastic_alpha": 0.5},
    "stages": lambda: {"schedule": avg.Stagewise({0: 1, 2: 2})},
    "growing": lambda: {"schedule": avg.QuadraticSynchronizationRule(1, 0.25)},
    "apart": lambda: {"schedule": avg.DivergenceTriggered(0.55, check_every=2)},
    "loss": lambda: {"schedule": avg.AdaComm(2, 2)},
    "time": lambda: {"schedule": avg.TimeBased(1e-6)},
    "two levels": lambda: {"period": 4, "local_period": 2},
    "seldom": lambda: {"period": 100},
    "every 2": lambda: {"period": 2},
    "warm-up": lambda: {
        "period": 2,
        "warmup_steps": 2,
        "warmup": "gradients",
    },
}


def path(scheme, steps, rows, replicas=1, gradient_sync="none"):
    """Weights and rounds after T1 with a row for each replica of all."""
    strategy = scenarios.make_strategy(replicas, gradient_sync=gradient_sync)
    with strategy.scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(**SCHEMES[scheme]())
    data = toys.dataset(toys.slope_rows(steps, rows), len(rows))
    scenarios.toys_fit(model, data, callbacks=[averaging])
    weights = toys.scalars(model.trainable_variables[0])
    return weights, averaging.averager.rounds


def uneven(scheme, steps):
    """A custom loop in which workers have other losses and amounts of data."""
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, **SCHEMES[scheme]()
    )
    rng = np.random.default_rng(rank)
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    for epoch in range(2):
        for _ in range(steps[rank]):
            strategy.run(scenarios.train, args=(model, x, y))
            averager.step(loss=rng.uniform(0.1, 2.0 - epoch))
        averager.end_epoch()
    averager.end_training()
    return {
        "weight": toys.weight(model),
        "steps": averager.steps,
        "rounds": averager.rounds,
    }


def other_learning_rates():
    """Rounds where each worker has a learning rate of its own."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy,
        model.variables,
        model.optimizer,
        schedule=avg.QuadraticSynchronizationRule(1, 0.25),
    )
    rank = strategy.communicator.rank
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    rounds = []
    for step in range(1, 13):
        # The chief's is 0.125, for which the period is 4.
        model.optimizer.learning_rate = 0.125 / (1 + rank)
        strategy.run(scenarios.train, args=(model, x, y))
        if averager.step():
            rounds.append(step)
    averager.end_training()
    return rounds


def other_settings():
    """The error of workers that do not want the same."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    rate = 0.5 + 0.25 * strategy.communicator.rank
    try:
        avg.ParameterAverager(
            strategy,
            model.variables,
            model.optimizer,
            period=2,
            outer_optimizer=keras.optimizers.SGD(rate, momentum=rate),
        )
    except ValueError as error:
        return str(error)
    return None


def running_mean():
    """The mean over rounds, on each worker, and what is there after it."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=2
    )
    averager.keep_running_mean()
    rank = strategy.communicator.rank
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    for _ in range(4):
        strategy.run(scenarios.train, args=(model, x, y))
        averager.step()
    averager.end_training()
    with averager.averaged_weights():
        inside = toys.weight(model)
    return inside, toys.weight(model)


def synchronous_network(replicas):
    """Digests, and the differences to one device on the whole batches."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(25, 4)).astype("float32")
    # The last batch has one row.
    data = toys.dataset((x, x.sum(axis=1, keepdims=True)), 6)

    def make():
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.AdamW(
            0.01, global_clipnorm=0.5, gradient_accumulation_steps=2
        )
        model.compile(optimizer, "mse")
        return model

    strategy = scenarios.make_strategy(replicas, gradient_sync="global")
    with strategy.scope():
        model = make()
    logs = scenarios.toys_fit(
        model, data, epochs=2, callbacks=[avg.PeriodicAveraging(100)]
    ).history
    alone = make()
    expected = scenarios.toys_fit(alone, data, epochs=2).history
    pairs = zip(model.get_weights(), alone.get_weights())
    return (
        scenarios.weights_of(model),
        max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs),
        float(np.abs(np.subtract(logs["loss"], expected["loss"])).max()),
    )


def synchronous_uneven(batches, epochs=1, save_freq=None, folder=None):
    """T1 with another number of batches on each worker."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(3)
    callbacks = [averaging]
    if save_freq is not None:
        callbacks += [
            keras.callbacks.BackupAndRestore(
                f"{folder}/backup", save_freq=save_freq
            ),
            keras.callbacks.ModelCheckpoint(
                f"{folder}/model.keras", save_freq=save_freq - 1
            ),
        ]
    data = scenarios.own_rows(strategy, scenarios.ROWS[rank], batches[rank])
    history = scenarios.toys_fit(
        model,
        data,
        epochs=epochs,
        validation_data=toys.slope_rows(2),
        callbacks=callbacks,
    ).history
    return {
        "weights": toys.scalars(model.trainable_variables[0]),
        "steps": averaging.averager.steps,
        "rounds": averaging.averager.rounds,
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": history,
    }


def synchronous_loop(batches):
    """The same in a custom loop."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    data = scenarios.own_rows(strategy, scenarios.ROWS[rank], batches[rank])
    averager = scenarios.loop(strategy, model, data, period=3)
    return toys.weight(model), averager.steps, averager.rounds


def synchronous_models(batches):
    """Weights of two models that are trained in turns."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank
    with strategy.scope():
        models = toys.slope_model(), toys.slope_model()
    data = scenarios.own_rows(strategy, scenarios.ROWS[rank], batches[rank])
    # Steps are traced in the first turn alone.
    for _ in range(2):
        for model in models:
            scenarios.toys_fit(
                model, data, callbacks=[avg.PeriodicAveraging(100)]
            )
    return tuple(map(toys.weight, models))


def synchronous_images(batches):
    """A digest of a network that takes images of any size."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank
    keras.utils.set_random_seed(rank)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((None, None, 1)),
                keras.layers.Conv2D(2, 3),
                keras.layers.GlobalMaxPooling2D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")

    def make(_):
        def images():
            for size in range(5, 5 + batches[rank]):
                yield np.ones([1, size, size, 1]), np.ones([1, 1])

        return tf.data.Dataset.from_generator(
            images,
            output_signature=(
                tf.TensorSpec([None, None, None, 1]),
                tf.TensorSpec([None, 1]),
            ),
        )

    scenarios.toys_fit(
        model,
        strategy.distribute_datasets_from_function(make),
        callbacks=[avg.PeriodicAveraging(100)],
    )
    return scenarios.weights_of(model)


class _Interrupted(Exception):
    """Both workers raise it after the same step."""


def synchronous_resume(folder):
    """An epoch with 2 and 7 batches, and the same resumed from its third."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank

    def train(ends_at=None):
        with strategy.scope():
            model = toys.slope_model(metrics=["mae"])
        averaging = avg.PeriodicAveraging(100)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
        count = averaging.moments.advance

        def advance(steps):
            if averaging.averager.steps == ends_at:
                raise _Interrupted
            return count(steps)

        class Interrupt(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                if ends_at is not None:
                    averaging.moments.advance = advance

        history = scenarios.toys_fit(
            model,
            scenarios.own_rows(strategy, scenarios.ROWS[rank], (2, 7)[rank]),
            callbacks=[averaging, Interrupt(), backup],
        ).history
        return toys.weight(model), history, averaging.averager.steps

    whole = train()
    try:
        train(ends_at=5)
    except _Interrupted:
        return whole, train()
    return None


def synchronous_executions():
    """The error of several steps an execution."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    with strategy.scope():
        model = toys.slope_model(steps_per_execution=4)
    try:
        scenarios.toys_fit(
            model,
            toys.dataset(toys.slope_rows(4), 2),
            callbacks=[avg.PeriodicAveraging(4)],
        )
    except ValueError as error:
        return str(error)
    return None


def synchronous_stop():
    """Epochs that are run where one worker wants to stop after the first."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()

    def stop(epoch, logs):
        model.stop_training = rank == 1

    history = scenarios.toys_fit(
        model,
        toys.dataset(toys.slope_rows(3), 2),
        epochs=4,
        callbacks=[
            avg.PeriodicAveraging(100),
            keras.callbacks.LambdaCallback(on_epoch_end=stop),
        ],
    )
    return len(history.epoch), toys.weight(model)


def synchronous_without_data():
    """The error of a worker that has no batch at all."""
    strategy = scenarios.make_strategy(gradient_sync="global")
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=2
    )
    try:
        averager.end_epoch()
    except RuntimeError as error:
        return str(error)
    return None


def telemetry(folder):
    """Logs, and the lines of the chief's file."""
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model(toys.sgd(momentum=0.5))

    path = pathlib.Path(folder) / "run.jsonl"

    class Late(keras.callbacks.Callback):
        """Worker 1 begins the last step before a round after the chief has."""

        def on_epoch_begin(self, epoch, logs=None):
            self._epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if batch not in (1, 3):
                return
            begun = pathlib.Path(folder) / f"begun-{self._epoch}-{batch}"
            if rank == 0:
                begun.touch()
                return
            while not begun.exists():
                time.sleep(0.01)
            time.sleep(0.5)

    averaging = avg.PeriodicAveraging(2, log_file=path)
    path = pathlib.Path(folder) / "run.jsonl"
    history = scenarios.toys_fit(
        model,
        toys.dataset(toys.slope_rows(4), 2),
        epochs=2,
        callbacks=[averaging, Late()],
    ).history
    strategy.communicator.barrier()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return history["divergence"], history["megabytes_sent"], lines
