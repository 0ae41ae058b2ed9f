"""Keras callbacks: rounds inside `model.fit`."""

import math

import keras
import tensorflow as tf

from tf_avgstrategy import averager as averagers
from tf_avgstrategy import schedules
from tf_avgstrategy import state

__all__ = ["PeriodicAveraging"]


class PeriodicAveraging(keras.callbacks.Callback):
    """Averages parameters and optimizer slots over replicas during `fit`.

    Rounds follow steps `period`, `2 * period`, ... of the training. One more
    comes before each validation and at the end of `fit`, unless no step was
    made since the last one. A step is a batch, or where the optimizer
    accumulates gradients, an update. Steps are counted on over several calls
    of `fit` with the same callback.

    The model and its optimizer must be made inside the scope of a
    `ParameterAveragingStrategy`. With one replica a round changes no bit.

    With `compile(jit_compile=True)` the callback has XLA compile one program
    per replica, and `evaluate` and `predict` run without XLA from then on.

    Args:
        period: Int >= 1, local training steps between two rounds. With
            `steps_per_execution=k` a multiple of k.
        warmup_steps: Int >= 0, opening steps that are each followed by a
            round (post-local SGD).
        slots: What a round does to optimizer slots (momentum, Adam's moments).
            "mean" averages them, "keep" leaves each replica its own, "reset"
            sets them to the value that they were created with.
        overrides: Dict from regular expression to rule, for variables whose
            path it is found in. `{"embedding": "keep"}` leaves each replica
            its own embeddings and their slots. `describe()` lists all paths.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range. At the start of `fit`:
            if the model or its optimizer was made outside the scope, if a
            pattern matches no variable, if there are two of these callbacks,
            or if `steps_per_execution` does not divide `period`.

    Example:

    ```python
    strategy = tf_avgstrategy.ParameterAveragingStrategy()
    with strategy.scope():
        model = build_model()
        model.compile("adamw", "sparse_categorical_crossentropy")
    model.fit(x, y, callbacks=[tf_avgstrategy.PeriodicAveraging(period=16)])
    ```

    References:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019,
        https://arxiv.org/abs/1805.09767. Averaged slots: Yu et al., On the
        Linear Speedup Analysis of Communication Efficient Momentum SGD, ICML
        2019, https://arxiv.org/abs/1905.03817.
    """

    def __init__(self, period, warmup_steps=0, slots="mean", overrides=None):
        super().__init__()
        schedules.Periodic(period, warmup_steps)
        state.check_slots(slots)
        self.period = period
        self.warmup_steps = warmup_steps
        self.slots = slots
        self.overrides = overrides
        self.averager = None
        self._steps_seen = 0

    def describe(self):
        """Returns a table, as a string, of what a round does to what.

        Raises:
            RuntimeError: Before the first `fit`, when there is no model yet.
        """
        if self.averager is None:
            raise RuntimeError(
                "`describe` needs the model's variables, which are known from "
                "the start of `fit` on. Received: a callback that was not in "
                "`fit` yet. Call it after or during `fit`, or use "
                "`ParameterAverager(...).describe()`."
            )
        return self.averager.describe()

    def set_model(self, model):
        averagers.check_strategy(model.distribute_strategy)
        if self.averager is not None and model is not self.model:
            self.averager = None
        super().set_model(model)
        _compile_per_replica(model)
        _move_new_optimizer_into_scope(model)

    def on_train_begin(self, logs=None):
        self._check_alone()
        strategy = self.model.distribute_strategy
        optimizers = state.find_optimizers(self.model)
        self._check_steps_per_execution(optimizers)
        if self.averager is None:
            self.averager = averagers.ParameterAverager(
                strategy,
                self.model.variables,
                optimizers,
                period=self.period,
                warmup_steps=self.warmup_steps,
                slots=self.slots,
                overrides=self.overrides,
            )
        self._steps_seen = strategy.training_progress().steps

    def on_train_batch_end(self, batch, logs=None):
        # Not from `batch`: with steps_per_execution it is not the same in all
        # Keras releases, and counts steps that the data was too short for.
        progress = self.model.distribute_strategy.training_progress()
        self.averager.step(progress.steps - self._steps_seen)
        self._steps_seen = progress.steps

    def on_test_begin(self, logs=None):
        self._average_if_stepped()

    def on_predict_begin(self, logs=None):
        self._average_if_stepped()

    def on_train_end(self, logs=None):
        # Before this hook Keras has overwritten each replica's weights with
        # its own moving average, if the optimizer keeps one.
        if not self._average_if_stepped() and self.averager.keeps_local("ema"):
            self.averager.average()
        del self.params["averaging_period"]

    def _average_if_stepped(self):
        return self.averager is not None and self.averager.average_if_stepped()

    def _check_alone(self):
        # Keras hands one dict of parameters to all callbacks of one `fit`.
        other = self.params.get("averaging_period")
        if other is not None:
            raise ValueError(
                "There must be one `PeriodicAveraging` in a `fit`, two would "
                f"average twice. Received: one of period={other} and one of "
                f"period={self.period}. Remove one of them from `callbacks`."
            )
        self.params["averaging_period"] = self.period

    def _check_steps_per_execution(self, optimizers):
        executed = self.model.steps_per_execution
        accumulated = state.gradient_accumulation_steps(optimizers)
        unit = executed // math.gcd(executed, accumulated)
        if self.period % unit:
            fitting = -(-self.period // unit) * unit
            raise ValueError(
                "`period` must be a multiple of the steps that Keras runs "
                "between two callbacks, or rounds come late. Received: "
                f"period={self.period} with steps_per_execution={executed}. "
                f"Pass period={fitting} or compile with steps_per_execution=1."
            )
        if self.warmup_steps and unit > 1:
            raise ValueError(
                "`warmup_steps` needs a callback after every step. Received: "
                f"warmup_steps={self.warmup_steps} with steps_per_execution="
                f"{executed}. Compile with steps_per_execution=1 or pass "
                "warmup_steps=0."
            )


def _compile_per_replica(model):
    """Moves XLA from the step of all replicas to the step of each one."""
    if not model.jit_compile:
        return
    train_step = tf.function(model.train_step, jit_compile=True)
    model.jit_compile = False
    model.train_function = None
    # Not the `tf.function` itself, which Keras would track and export.
    model.train_step = lambda data: train_step(data)


def _move_new_optimizer_into_scope(model):
    """Makes an optimizer that `compile` made outside the scope again inside.

    Keras has no way to do it itself, and for an optimizer without slots it
    does not complain either.
    """
    optimizer = model.optimizer
    strategy = model.distribute_strategy
    if optimizer is None or state.is_in_scope(optimizer, strategy):
        return
    if int(optimizer.iterations.numpy()) == 0:
        with strategy.scope():
            model.optimizer = type(optimizer).from_config(
                optimizer.get_config()
            )
            model.optimizer.build(model.trainable_variables)
        model.train_function = None
