"""What callbacks, metrics and files see. Run by the workers of a pool."""

import csv
import pathlib

import keras
import numpy as np
import scenarios
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg


def slope_model_with(loss):
    model = keras.Sequential([layers.Input((1,)), toys.slope_layer()])
    model.compile(toys.sgd(), loss)
    return model


def own_dataset(strategy, x, y, batch_size):
    """A dataset of this worker's own."""
    return strategy.distribute_datasets_from_function(
        lambda _: toys.dataset((x, y), batch_size)
    )


def validate_with_unequal_shards(folder):
    """METR-01: 100 rows of loss 1 on worker 0, 10 of loss 2 on worker 1."""
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = slope_model_with("mae")
    rows = [100, 10][rank]
    validation = own_dataset(
        strategy, np.zeros([rows, 1]), np.full([rows, 1], rank + 1.0), 10
    )
    seen = []
    path = pathlib.Path(folder) / f"worker{rank}.csv"
    zeros = np.zeros([4, 1], "float32")
    history = scenarios.toys_fit(
        model,
        toys.dataset((zeros, zeros), 2),
        validation_data=validation,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])
            ),
            keras.callbacks.CSVLogger(path),
            avg.PeriodicAveraging(2),
        ],
    )
    with path.open() as file:
        (row,) = csv.DictReader(file)
    return {
        "history": history.history["val_loss"],
        "seen": seen,
        "file": float(row["val_loss"]),
        "evaluate": model.evaluate(validation, verbose=0),
    }


def observe_on_the_chief_alone(folder, what):
    """METR-02: T1 with callbacks or validation data on worker 0 alone."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    data = toys.dataset(toys.slope_rows(4, scenarios.ROWS), 2)
    arguments = {"callbacks": [avg.PeriodicAveraging(2)]}
    if strategy.is_chief and what == "callbacks":
        arguments["callbacks"] += [
            keras.callbacks.TensorBoard(folder, histogram_freq=1),
            keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
        ]
    if strategy.is_chief and what == "validation":
        arguments["validation_data"] = data
    try:
        scenarios.toys_fit(model, data, epochs=2, **arguments)
    except ValueError as error:
        return str(error)
    return toys.weight(model)


def decide_on_validation(folder, losses):
    """METR-03: each worker's own validation loss by epoch, three deciders."""
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = slope_model_with("mae")
        epoch = tf.Variable(0)
    own = tf.constant(losses[rank], tf.float32)

    def make(_):
        row = tf.data.Dataset.from_tensors(0).map(
            lambda _: (tf.zeros([1, 1]), tf.reshape(own[epoch], [1, 1]))
        )
        return row.repeat(2)

    zeros = np.zeros([4, 1], "float32")
    rates = []
    callbacks = keras.callbacks
    history = scenarios.toys_fit(
        model,
        toys.dataset((zeros, zeros), 2),
        epochs=4,
        validation_data=strategy.distribute_datasets_from_function(make),
        callbacks=[
            callbacks.LambdaCallback(
                on_epoch_begin=lambda number, logs: epoch.assign(number),
                on_epoch_end=lambda number, logs: rates.append(
                    float(model.optimizer.learning_rate)
                ),
            ),
            callbacks.EarlyStopping("val_loss", patience=1),
            callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1),
            callbacks.ModelCheckpoint(
                f"{folder}/{{epoch}}.keras", save_best_only=True
            ),
            avg.PeriodicAveraging(2),
        ],
    )
    return {
        "val_loss": history.history["val_loss"],
        "learning_rate": float(model.optimizer.learning_rate),
        "rates": rates,
    }


class NumMistakes(keras.metrics.Metric):
    """Counts rows whose class is not the predicted one, in integers."""

    def __init__(self, name="mistakes"):
        super().__init__(name=name)
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", name="count"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        wrong = tf.not_equal(
            tf.cast(tf.reshape(y_true, [-1]), tf.int32),
            tf.cast(tf.reshape(y_pred, [-1]) > 0.5, tf.int32),
        )
        self.count.assign_add(tf.reduce_sum(tf.cast(wrong, tf.int32)))

    def result(self):
        return self.count


def classifier():
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(1, activation="sigmoid")]
    )
    metrics = keras.metrics
    model.compile(
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics=[
            "accuracy",
            metrics.AUC(name="auc"),
            metrics.Precision(name="precision"),
            metrics.F1Score(name="f1", threshold=0.5),
            NumMistakes(),
            metrics.BinaryIoU(name="iou"),
        ],
        weighted_metrics=[metrics.BinaryAccuracy(name="weighted")],
    )
    return model


def classified_rows(rows):
    random = np.random.default_rng(5)
    x = random.normal(size=(rows, 3)).astype("float32")
    y = (random.random([rows, 1]) < 0.4).astype("float32")
    return x, y, random.random(rows).astype("float32")


def evaluate_many_metrics(rows, replicas):
    """Of all rows: in `fit` (that changes nothing), validation, `evaluate`."""
    strategy = scenarios.make_strategy(replicas)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = classifier()
    x, y, weights = classified_rows(rows)
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=8,
        validation_data=(x, y, weights),
        verbose=0,
        callbacks=[avg.PeriodicAveraging(2)],
    )
    evaluated = model.evaluate(
        x, y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True
    )
    in_fit = {key: values[-1] for key, values in history.history.items()}
    return [_numbers(in_fit), _numbers(evaluated)]


def _numbers(logs):
    return {key: np.asarray(v).ravel().tolist() for key, v in logs.items()}


def evaluate_on_one_device(rows):
    keras.utils.set_random_seed(2)
    model = classifier()
    x, y, weights = classified_rows(rows)
    return _numbers(
        model.evaluate(
            x,
            y,
            sample_weight=weights,
            batch_size=8,
            verbose=0,
            return_dict=True,
        )
    )


def train_by_an_own_step(replicas):
    """One epoch of two batches: the mean over all rows of the last one."""
    strategy = scenarios.make_strategy(replicas)
    with strategy.scope():
        model = toys.CustomStep()
        model.compile(keras.optimizers.SGD(0.0))
    total = strategy.num_replicas_in_sync
    # Loss 16 * x**2 where y is 0.
    x = np.arange(1.0, 2 * total + 1, dtype="float32").reshape(-1, 1)
    history = scenarios.toys_fit(
        model,
        toys.dataset((x, np.zeros_like(x)), total),
        callbacks=[avg.PeriodicAveraging(2)],
    )
    return history.history["own"]


def save_on_all_workers(folder, times):
    """CKPT-01: one path, by `ModelCheckpoint` and by all workers at the end."""
    strategy = scenarios.make_strategy()
    path = pathlib.Path(folder) / "model.keras"
    weights = []
    for _ in range(times):
        with strategy.scope():
            model = toys.slope_model()
        rows = (*scenarios.ROWS, toys.ROW_B)
        scenarios.toys_fit(
            model,
            toys.dataset(toys.slope_rows(2, rows), 3),
            epochs=2,
            callbacks=[
                keras.callbacks.ModelCheckpoint(path),
                avg.PeriodicAveraging(2),
            ],
        )
        model.save(path)
        strategy.communicator.barrier()
        saved = keras.models.load_model(path, compile=False)
        weights.append((toys.weight(model), toys.weight(saved)))
        strategy.communicator.barrier()
    return weights


class UserSgd(keras.optimizers.SGD):
    """An optimizer that no library knows."""


def go_on_from_a_file(folder, kind, with_callback):
    """CKPT-04: T1 with K=2, 2 steps, saved, loaded in the scope, 2 more."""
    strategy = scenarios.make_strategy()
    make = {
        "sgd": toys.sgd,
        "adam": lambda: keras.optimizers.Adam(0.1),
        "user": lambda: UserSgd(toys.T1_LEARNING_RATE),
    }[kind]

    def train(model, with_callback=True):
        scenarios.toys_fit(
            model,
            toys.dataset(toys.slope_rows(2, scenarios.ROWS), 2),
            callbacks=[avg.PeriodicAveraging(2)] if with_callback else [],
        )

    with strategy.scope():
        straight = toys.slope_model(make())
    train(straight)
    path = f"{folder}/model.keras"
    straight.save(path)
    strategy.communicator.barrier()
    with strategy.scope():
        loaded = keras.models.load_model(
            path, custom_objects={"UserSgd": UserSgd}
        )
    train(straight)
    messages = scenarios.messages_of(lambda: train(loaded, with_callback))
    return toys.weight(straight), toys.weight(loaded), messages


def all_callbacks_together(folder):
    """Every callback of Keras that decides or writes, on uneven data."""
    strategy = scenarios.make_strategy(2)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.05, use_ema=True)
    model = scenarios.dense_model(strategy, optimizer)
    folder = pathlib.Path(folder)
    callbacks = keras.callbacks
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)).astype("float32")
    y = x[:, :1]
    decisions = []

    def decide(epoch, logs):
        decisions.append(
            [
                epoch,
                float(model.optimizer.learning_rate),
                {k: float(v).hex() for k, v in sorted(logs.items())},
            ]
        )

    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=6,
        validation_data=(x[:20], y[:20]),
        verbose=0,
        callbacks=[
            callbacks.ModelCheckpoint(
                folder / "best.keras", save_best_only=True
            ),
            callbacks.ModelCheckpoint(folder / "every_{epoch}.weights.h5"),
            callbacks.BackupAndRestore(folder / "backup", save_freq=3),
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.TensorBoard(folder / "board", histogram_freq=1),
            callbacks.EarlyStopping(
                "loss", patience=2, restore_best_weights=True
            ),
            callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            callbacks.SwapEMAWeights(swap_on_epoch=True),
            callbacks.TerminateOnNaN(),
            callbacks.LambdaCallback(on_epoch_end=decide),
            avg.PeriodicAveraging(3),
        ],
    )
    return {
        "decisions": decisions,
        "epochs": len(history.history["loss"]),
        "bits": scenarios.weights_of(model),
        "files": sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and "board" not in path.parts
        ),
        "boards": len(list((folder / "board").rglob("*tfevents*"))),
    }


def train_with_nan(on_non_finite):
    """FAIL-03: worker 2 of three gets NaN in the step before the round."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    x, y = toys.slope_rows(2, (toys.ROW_A, toys.ROW_B, toys.ROW_B))
    y[5] = np.nan
    history = scenarios.toys_fit(
        model,
        toys.dataset((x, y), 3),
        callbacks=[avg.PeriodicAveraging(2, on_non_finite=on_non_finite)],
    )
    return toys.weight(model), history.history["excluded"]


def count_exchanges(steps):
    """The calls of a communicator in an epoch that has no round within it."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    calls = []

    def count(epoch, logs):
        calls.append(strategy.communicator._num_calls)

    data = toys.dataset(toys.slope_rows(steps, scenarios.ROWS), 2)
    scenarios.toys_fit(
        model,
        data,
        epochs=2,
        validation_data=data,
        callbacks=[
            avg.PeriodicAveraging(100),
            keras.callbacks.LambdaCallback(on_epoch_end=count),
        ],
    )
    return calls[1] - calls[0]


def restore_within_a_period(folder, stop):
    """Each worker's checkpoint in a folder of its own, 7 steps in all.

    Returns the bits of a run that did not stop and of one that did.
    """
    strategy = scenarios.make_strategy(2)
    rank = strategy.communicator.rank
    random = np.random.default_rng(3)
    x = random.normal(size=(7 * 12, 3)).astype("float32")

    def begin():
        keras.utils.set_random_seed(1)
        with strategy.scope():
            optimizer = keras.optimizers.Adam(0.01)
        model = scenarios.dense_model(strategy, optimizer)
        averager = avg.ParameterAverager(
            strategy, model.variables, optimizer, period=3
        )
        return model, averager

    def run(model, averager, first, last):
        def train(rows):
            scenarios.train(model, rows, rows[:, :1])

        step = tf.function(lambda rows: strategy.run(train, args=(rows,)))
        data = strategy.experimental_distribute_dataset(
            toys.dataset(x[first * 12 : last * 12], 12)
        )
        for batch in data:
            step(batch)
            averager.step()

    def checkpoint_of(model, averager):
        return tf.train.Checkpoint(model=model, averager=averager)

    straight = begin()
    run(*straight, 0, 7)
    saved = begin()
    run(*saved, 0, stop)
    path = checkpoint_of(*saved).save(f"{folder}/worker{rank}/checkpoint")
    restored = begin()
    checkpoint_of(*restored).restore(path)
    run(*restored, stop, 7)
    bits = [scenarios.weights_of(model) for model, _ in (straight, restored)]
    return bits[0] == bits[1], restored[1].steps, restored[1].rounds


def look_within_an_epoch(who, steps_of_worker=(8, 8)):
    """T1 with period 4. After step 2 workers predict, then evaluate.

    Args:
        who: "chief" predicts alone, "all" do, "alone" evaluates on the chief
            alone, "as ready" predict rows in the order in which they are ready.
        steps_of_worker: The batches that each worker has.
    """
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    x = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
    seen = {}

    def look(batch, logs):
        if batch != 1:
            return
        if who == "all" or (who == "chief" and rank == 0):
            seen["predicted"] = model.predict(x, verbose=0).ravel().tolist()
            seen["on_batch"] = model.predict_on_batch(x).ravel().tolist()
        if who == "as ready":
            rows = tf.data.Dataset.from_tensor_slices(x).map(
                abs, num_parallel_calls=2, deterministic=False
            )
            model.predict(rows.batch(4), verbose=0)
        if who == "all" or (who == "alone" and rank == 0):
            seen["loss"] = model.evaluate(x, 0 * x, batch_size=4, verbose=0)

    row = [toys.ROW_A, toys.ROW_B][rank]
    own = toys.slope_rows(steps_of_worker[rank], [row])
    averaging = avg.PeriodicAveraging(4)
    try:
        scenarios.toys_fit(
            model,
            own_dataset(strategy, *own, 1),
            callbacks=[
                averaging,
                keras.callbacks.LambdaCallback(on_train_batch_end=look),
            ],
        )
    except (ValueError, RuntimeError) as error:
        return str(error)
    return {
        **seen,
        "weight": toys.weight(model),
        "rounds": averaging.averager.rounds,
        "steps": averaging.averager.steps,
    }
