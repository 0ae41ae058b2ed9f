"""Keras callbacks: rounds inside `model.fit`."""

import math

import keras
import tensorflow as tf

from tf_avgstrategy import averager as averagers
from tf_avgstrategy import optimizer_parts
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
        self._has_begun = False
        self._is_epoch_open = False

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

    def on_train_begin(self, logs=None):
        self._check_alone()
        self._check_steps_per_execution()
        self.model.distribute_strategy.check_environment()
        _move_new_optimizer_into_scope(self.model)
        self._prepare_averager(optimizer_parts.find_optimizers(self.model))
        _compile_per_replica(self.model)
        # Keras distributes validation data before it says that validation
        # begins, and workers exchange for that, too.
        self.model.distribute_strategy.extended.before_sharding = (
            self._end_epoch
        )
        # A `fit` that failed may have left it on.
        self.model.distribute_strategy.count_all_runs(False)
        self._steps_seen = self._num_steps_run()

    def on_epoch_begin(self, epoch, logs=None):
        self._has_begun = True
        self._is_epoch_open = True

    def on_train_batch_begin(self, batch, logs=None):
        self._is_epoch_open = True
        self.model.distribute_strategy.count_all_runs(True)

    def on_train_batch_end(self, batch, logs=None):
        self._count_steps()

    def on_epoch_end(self, epoch, logs=None):
        self._end_epoch()

    def on_test_begin(self, logs=None):
        # In `fit` validation comes before `on_epoch_end`.
        if self._is_epoch_open:
            self._end_epoch()
        else:
            self._average_if_stepped()

    def on_predict_begin(self, logs=None):
        self._average_if_stepped()

    def on_train_end(self, logs=None):
        # Before this hook Keras has overwritten each replica's weights with
        # its own moving average, if the optimizer keeps one.
        self._count_steps()
        rounds = self.averager.rounds
        self.averager.end_training()
        if self.averager.rounds > rounds:
            # Of workers that went on, after Keras was done here.
            optimizer_parts.finalize(self.model)
        if self.averager.keeps_local("ema"):
            self.averager.average()
        self._is_epoch_open = False
        self.model.distribute_strategy.extended.before_sharding = lambda: None
        self.params.pop("averaging", None)

    def _prepare_averager(self, optimizers):
        variables = self.model.variables
        last = self.averager
        if last is not None and last.is_for(variables, optimizers):
            last.start_counting_rows()
            last.start()
            return
        self.averager = averagers.ParameterAverager(
            self.model.distribute_strategy,
            variables,
            optimizers,
            period=self.period,
            warmup_steps=self.warmup_steps,
            slots=self.slots,
            overrides=self.overrides,
        )
        if last is not None:
            self.averager.steps, self.averager.rounds = last.steps, last.rounds

    def _end_epoch(self):
        # Keras 3.5 ends no batch if the data ends within an execution.
        self._count_steps()
        if self._is_epoch_open:
            self._is_epoch_open = False
            self.averager.end_epoch()

    def _num_steps_run(self):
        return self.model.distribute_strategy.training_progress().steps

    def _count_steps(self):
        # Not from the batch's number: with steps_per_execution it is not the
        # same in all Keras releases, and counts steps that the data was too
        # short for.
        self.model.distribute_strategy.count_all_runs(False)
        steps = self._num_steps_run()
        self.averager.step(steps - self._steps_seen)
        self._steps_seen = steps

    def _average_if_stepped(self):
        if self.averager is None:
            return False
        self._count_steps()
        return self.averager.average_if_stepped()

    def _check_alone(self):
        # Keras hands one dict of parameters to all callbacks of one `fit`.
        # Where a `fit` failed, the mark of a list that is used again is ours.
        if self.params is None:
            self.params = {}
        other = self.params.get("averaging")
        if other is not None and (other is not self or not self._has_begun):
            raise ValueError(
                "There must be one `PeriodicAveraging` in a `fit`, two would "
                "average twice. Received: one of "
                f"period={other.period} and one of period={self.period}. "
                "Remove one of them from `callbacks`."
            )
        self.params["averaging"] = self
        self._has_begun = False
        self._is_epoch_open = False

    def _check_steps_per_execution(self):
        executed = self.model.steps_per_execution
        accumulated = optimizer_parts.gradient_accumulation_steps(
            optimizer_parts.find_optimizers(self.model)
        )
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


class _CompiledStep:
    """A `train_step` that XLA compiles on each replica.

    Not a `tf.function` itself, which Keras would track and export.
    """

    def __init__(self, model):
        self.train_step = model.train_step
        self.compilation = optimizer_parts.compilation(model)
        self._compiled = tf.function(self.train_step, jit_compile=True)

    def __call__(self, data):
        return self._compiled(data)


def _compile_per_replica(model):
    """Moves XLA from the step of all replicas to the step of each one."""
    step = vars(model).get("train_step")
    if isinstance(step, _CompiledStep) and (
        step.compilation is not optimizer_parts.compilation(model)
    ):
        # `compile` was called again: what was traced belongs to the past.
        model.train_step = step.train_step
        model.make_train_function(force=True)
    if model.jit_compile:
        model.jit_compile = False
        model.train_step = _CompiledStep(model)
        model.make_train_function(force=True)


def _move_new_optimizer_into_scope(model):
    """Makes the optimizer of `compile("sgd")` outside the scope again inside.

    Keras does not complain about it if the optimizer has no slots. One that
    was told more than its name is refused: whoever told it holds it.
    """
    strategy = model.distribute_strategy
    optimizer = model.optimizer
    if optimizer is None or optimizer_parts.is_in_scope(optimizer, strategy):
        return
    if optimizer_parts.has_only_defaults(optimizer):
        with strategy.scope():
            model.optimizer = type(optimizer).from_config(
                optimizer.get_config()
            )
            model.optimizer.build(model.trainable_variables)
        model.make_train_function(force=True)
