"""CKPT-02, CKPT-05, CKPT-06: what was saved goes on as if it had not stopped.

Each run makes a strategy and a model of its own, as a new process would.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from keras import layers

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers


def momentum_model():
    return toys.slope_model(toys.sgd(momentum=0.5))


def train(model, steps, period=2):
    """T1 or T2 in `fit`, from wherever the model is."""
    averaging = avg.PeriodicAveraging(period)
    toys.fit(
        model, *toys.slope_rows(steps), batch_size=2, callbacks=[averaging]
    )
    return averaging


class Loop:
    """T1 or T2 in a custom loop."""

    def __init__(self, make_model=toys.slope_model, replicas=2, **options):
        self.strategy = toys.make_strategy(replicas)
        with self.strategy.scope():
            self.model = make_model()
        self.averager = avg.ParameterAverager(
            self.strategy,
            self.model.variables,
            self.model.optimizer,
            **(options or {"period": 2}),
        )
        self.checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.model.optimizer,
            averager=self.averager,
        )
        self._step = tf.function(
            lambda x, y: self.strategy.run(self._train, args=(x, y))
        )

    def _train(self, x, y):
        model = self.model
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(
            zip(gradients, model.trainable_variables)
        )
        return loss

    def run(self, steps, rows=(toys.ROW_A, toys.ROW_B)):
        data = toys.dataset(toys.slope_rows(steps, rows), len(rows))
        for x, y in self.strategy.experimental_distribute_dataset(data):
            loss = self._step(x, y)
            self.averager.step(loss=self.strategy.reduce("MEAN", loss, None))


@pytest.mark.parametrize("kind", ["keras", "weights"])
def test_ckpt_02_files_hold_the_slots(kind, tmp_path):
    with toys.make_strategy().scope():
        model = momentum_model()
    train(model, 2)
    path = tmp_path / {"keras": "a.keras", "weights": "a.weights.h5"}[kind]
    save = model.save if kind == "keras" else model.save_weights
    save(path)
    with toys.make_strategy().scope():
        if kind == "keras":
            loaded = keras.models.load_model(path)
        else:
            loaded = momentum_model()
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(path)
    averaging = train(loaded, 2)
    assert toys.weight(loaded) == 5.98046875
    assert int(loaded.optimizer.iterations.numpy()) == 4
    assert averaging.averager.steps == 4


@pytest.mark.core
def test_ckpt_02_a_checkpoint_holds_the_slots(tmp_path):
    saved = Loop(momentum_model)
    saved.run(2)
    path = saved.checkpoint.save(tmp_path / "checkpoint")
    restored = Loop(momentum_model)
    restored.checkpoint.restore(path).assert_consumed()
    restored.run(2)
    assert toys.weight(restored.model) == 5.98046875
    assert int(restored.model.optimizer.iterations.numpy()) == 4


def test_ckpt_02_restored_outside_of_the_scope(tmp_path):
    with toys.make_strategy().scope():
        model = momentum_model()
    train(model, 2)
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    with pytest.raises(ValueError, match="ParameterAveragingStrategy"):
        train(loaded, 2)


@pytest.mark.core
def test_ckpt_05_a_loaded_model_keeps_the_phase_of_rounds(tmp_path):
    # Saving within a period is a round: 5.81640625, see behaviour.md.
    with toys.make_strategy().scope():
        model = toys.slope_model()
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "a.keras", save_freq=4
    )
    averaging = avg.PeriodicAveraging(3)
    toys.fit(
        model,
        *toys.slope_rows(4),
        batch_size=2,
        callbacks=[checkpoint, averaging],
    )
    assert toys.weight(model) == 5.81640625
    with toys.make_strategy().scope():
        loaded = keras.models.load_model(tmp_path / "a.keras")
    averaging = avg.PeriodicAveraging(3)
    rounds = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rounds.append(
            averaging.averager.rounds
        )
    )
    toys.fit(
        loaded, *toys.slope_rows(2), batch_size=2, callbacks=[averaging, look]
    )
    # After step 6, not 7.
    assert rounds == [0, 1]
    assert toys.weight(loaded) == 5.6358642578125
    assert int(loaded.optimizer.iterations.numpy()) == 6


@pytest.mark.core
def test_ckpt_05_a_checkpoint_holds_each_replica(tmp_path):
    saved = Loop(period=3)
    saved.run(4)
    path = saved.checkpoint.save(tmp_path / "checkpoint")
    restored = Loop(period=3)
    restored.checkpoint.restore(path).assert_consumed()
    assert restored.averager.steps == 4
    # One local step from 4.84375, not their mean.
    assert toys.scalars(restored.model.trainable_variables[0]) == [
        0.75 * 4.84375,
        8.0,
    ]
    restored.run(2)
    assert toys.weight(restored.model) == 5.021728515625


def test_ckpt_05_rows_of_an_open_period_are_counted_on(tmp_path):
    def run(stops):
        loop = Loop(period=4)
        # Replica 0 gets 2 of 3 rows; replica 1 the other.
        loop.run(2, rows=(toys.ROW_A, toys.ROW_A, toys.ROW_B))
        if stops:
            path = loop.checkpoint.save(tmp_path / "checkpoint")
            loop = Loop(period=4)
            loop.checkpoint.restore(path)
        loop.run(2)
        return toys.weight(loop.model)

    # The weights are 6 and 4 rows.
    assert (
        run(stops=True)
        == run(stops=False)
        == pytest.approx((6 * 4 * 0.75**4 + 4 * 8) / 10, rel=1e-6)
    )


OPTIONS = {
    "outer": {"period": 3, "outer_optimizer": outer_optimizers.diloco()},
    "schedule": {"schedule": avg.QuadraticSynchronizationRule(1, 0.2165)},
    "fragments": {
        "period": 4,
        "fragments": 4,
        "outer_optimizer": outer_optimizers.slow_momentum(),
    },
    "elastic": {"period": 2, "elastic_alpha": 0.25},
    "local": {"period": 4, "local_period": 2},
    "loss": {"schedule": avg.AdaComm(2, 2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_holds_all_that_decides(name, tmp_path):
    """Bit for bit, at any step, with a running mean beside it."""

    def start():
        loop = Loop(momentum_model, **OPTIONS[name])
        loop.averager.keep_running_mean(0.75)
        return loop

    def end(loop, steps):
        loop.run(steps)
        rounds = loop.averager.rounds
        loop.averager.end_epoch()
        with loop.averager.averaged_weights():
            mean = toys.weight(loop.model)
        return rounds, toys.weight(loop.model), mean

    expected = end(start(), 7)
    # Saving changes nothing.
    saved = start()
    paths = {}
    for step in range(1, 6):
        saved.run(1)
        if step != 3:
            paths[step] = saved.checkpoint.save(tmp_path / "checkpoint")
    assert end(saved, 2) == expected
    for step, path in paths.items():
        restored = start()
        restored.checkpoint.restore(path).assert_consumed()
        assert end(restored, 7 - step) == expected, step


@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_a_checkpoint_goes_on_with_other_replicas(replicas, tmp_path):
    saved = Loop(momentum_model, period=3)
    saved.run(4)
    path = saved.checkpoint.save(tmp_path / "checkpoint")
    mean = toys.weight(saved.model)
    restored = Loop(momentum_model, period=3, replicas=replicas)
    restored.checkpoint.restore(path).assert_consumed()
    assert restored.averager.steps == 4
    weights = toys.scalars(restored.model.trainable_variables[0])
    assert weights == [mean] * replicas


def dropout_model():
    model = keras.Sequential(
        [
            layers.Input((1,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_checkpoint_goes_on_bit_for_bit(stop, tmp_path):
    def copies(loop):
        variables = [*loop.model.variables, *loop.model.optimizer.variables]
        return [toys.copies(v) for v in variables]

    straight = Loop(dropout_model, period=4)
    first = toys.copies(straight.model.trainable_variables[0])
    straight.run(7)
    keras.utils.set_random_seed(0)
    saved = Loop(dropout_model, period=4)
    np.testing.assert_array_equal(
        toys.copies(saved.model.trainable_variables[0]), first
    )
    saved.run(stop)
    path = saved.checkpoint.save(tmp_path / "checkpoint")
    restored = Loop(dropout_model, period=4)
    restored.checkpoint.restore(path).assert_consumed()
    restored.run(7 - stop)
    for one, other in zip(copies(straight), copies(restored)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.core
def test_a_checkpoint_of_plain_keras_is_restored(tmp_path):
    model = momentum_model()
    toys.fit(model, *toys.slope_rows(1), batch_size=2)
    plain = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = plain.save(tmp_path / "checkpoint")
    restored = Loop(momentum_model)
    restored.checkpoint.restore(path).expect_partial()
    weights = toys.scalars(restored.model.trainable_variables[0])
    assert weights == [toys.weight(model)] * 2


def fit_with_backup(folder, steps, *, stop=None, callbacks=(), build=None):
    """T1 with K=3 and a backup each 4 steps, which may stop at a step."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == stop:
                raise KeyboardInterrupt

    with toys.make_strategy().scope():
        model = (build or toys.slope_model)()
    averaging = avg.PeriodicAveraging(3)
    with contextlib.suppress(KeyboardInterrupt):
        toys.fit(
            model,
            *toys.slope_rows(steps),
            batch_size=2,
            callbacks=[
                *callbacks,
                keras.callbacks.BackupAndRestore(folder, save_freq=4),
                Stop(),
                averaging,
            ],
        )
    return model, averaging.averager


@pytest.mark.core
@pytest.mark.parametrize("stop", [4, 5])
def test_ckpt_05_a_backup_within_an_epoch_is_a_round(stop, tmp_path):
    folder = tmp_path / "backup"
    fit_with_backup(folder, 6, stop=stop)
    model, averager = fit_with_backup(folder, 6)
    assert toys.weight(model) == 5.6358642578125
    assert (averager.steps, averager.rounds) == (6, 3)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert not folder.exists()


def test_ckpt_05_a_model_that_is_not_built(tmp_path):
    def build():
        model = keras.Sequential([toys.slope_layer()])
        model.compile(toys.sgd(), "mse")
        return model

    fit_with_backup(tmp_path / "backup", 6, stop=5, build=build)
    model, _ = fit_with_backup(tmp_path / "backup", 6, build=build)
    assert toys.weight(model) == 5.6358642578125


def test_ckpt_05_the_best_file_survives_a_worse_epoch(tmp_path):
    """The best loss is remembered over a stop, as all that decides is."""
    path = tmp_path / "best.keras"

    def run(epochs, stops):
        with toys.make_strategy().scope():
            model = toys.slope_model(keras.optimizers.SGD(0.0))
            worse = tf.Variable(1.0)

        def end(epoch):
            if stops and epoch == 0:
                raise KeyboardInterrupt

        data = tf.data.Dataset.from_tensors(0).map(
            lambda _: (tf.zeros([2, 1]), tf.fill([2, 1], worse))
        )
        best = keras.callbacks.ModelCheckpoint(
            path, monitor="loss", save_best_only=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(
                data,
                epochs=epochs,
                verbose=0,
                callbacks=[
                    keras.callbacks.LambdaCallback(
                        on_epoch_begin=lambda epoch, logs: worse.assign(
                            1.0 + epoch
                        )
                    ),
                    best,
                    keras.callbacks.BackupAndRestore(tmp_path / "backup"),
                    avg.PeriodicAveraging(1),
                    keras.callbacks.LambdaCallback(
                        on_epoch_begin=lambda epoch, logs: end(epoch - 1)
                    ),
                ],
            )
        return best

    run(2, stops=True)
    before = path.read_bytes()
    best = run(2, stops=False)
    assert best.best == 1.0
    assert path.read_bytes() == before


@pytest.mark.parametrize("is_file", [True, False])
def test_ckpt_06_offline_average(tmp_path, is_file):
    models = []
    for value in (1.0, 2.0, 6.0):
        model = toys.slope_model()
        model.layers[0].kernel.assign([[value]])
        models.append(model)
    unbuilt = keras.Sequential([layers.Dense(1, use_bias=False)])
    if is_file:
        for place, model in enumerate([*models, unbuilt]):
            model.save(tmp_path / f"{place}.keras")
        *models, unbuilt = sorted(tmp_path.iterdir())
    assert toys.weight(avg.average_models(models)) == 3.0
    with pytest.raises(ValueError, match="Build the model|is not built"):
        avg.average_models([*models, unbuilt])


def test_a_backup_of_another_model_is_refused(tmp_path):
    fit_with_backup(tmp_path / "backup", 6, stop=5)

    def build():
        model = keras.Sequential([layers.Input((1,)), layers.Dense(1)])
        model.compile(toys.sgd(), "mse")
        return model

    with pytest.raises(ValueError, match="bias.*Remove `backup_dir`"):
        fit_with_backup(tmp_path / "backup", 6, build=build)


def test_a_backup_of_plain_keras_is_restored(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = lambda: keras.callbacks.BackupAndRestore(  # noqa: E731
        tmp_path / "backup"
    )
    model = toys.slope_model()
    with pytest.raises(KeyboardInterrupt):
        toys.fit(
            model,
            *toys.slope_rows(2),
            batch_size=2,
            epochs=2,
            callbacks=[backup(), Stop()],
        )
    with toys.make_strategy().scope():
        ours = toys.slope_model(keras.optimizers.SGD(0.0))
    epochs, weights = [], []

    def begin(epoch, logs):
        epochs.append(epoch)
        weights.append(toys.weight(ours))

    toys.fit(
        ours,
        *toys.slope_rows(2),
        batch_size=2,
        epochs=2,
        callbacks=[
            backup(),
            avg.PeriodicAveraging(2),
            keras.callbacks.LambdaCallback(on_epoch_begin=begin),
        ],
    )
    assert epochs == [1]
    assert weights == [toys.weight(model)]
