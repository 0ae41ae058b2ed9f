"""Compilation: step and optimizer of a compiled model, ready for replicas."""

import math

import tensorflow as tf

from tf_avgstrategy.state import optimizer_parts

__all__ = [
    "check_steps_per_execution",
    "compile_per_replica",
    "move_new_optimizer_into_scope",
    "prepare_gradient_exchange",
]


def compile_per_replica(model):
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


def move_new_optimizer_into_scope(model):
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


def prepare_gradient_exchange(model, schedule):
    """Lets steps exchange gradients, where strategy or schedule ask for it.

    Args:
        model: `keras.Model`.
        schedule: `Schedule` of the rounds.

    Raises:
        ValueError: If a step of the model cannot.
    """
    extended = model.distribute_strategy.extended
    if schedule.gradient_steps:
        extended.prepare_gradient_exchange()
    exchange = extended.exchange
    if exchange is None:
        return
    if _compiles(model):
        raise ValueError(
            "XLA cannot compile a step that exchanges gradients. Received: "
            "`jit_compile=True` with `gradient_sync` or "
            '`warmup="gradients"`. Compile with jit_compile=False.'
        )
    executed = model.steps_per_execution
    is_global = exchange.spans_workers or schedule.gradient_steps
    if executed > 1 and is_global and extended.communicator.size > 1:
        # Their data may end at different steps of an execution, of which
        # no worker knows.
        raise ValueError(
            "Workers that exchange gradients must come back to Keras after "
            f"every step. Received: steps_per_execution={executed} with "
            '`gradient_sync="global"` or `warmup="gradients"`. Compile '
            "with steps_per_execution=1."
        )
    if model not in exchange.models:
        exchange.models.add(model)
        # What was traced before exchanges none.
        model.make_train_function(force=True)


def check_steps_per_execution(model, schedule, local_period):
    """Raises a ValueError if rounds would come late.

    Args:
        model: `keras.Model`.
        schedule: `Schedule` of the rounds.
        local_period: Int >= 1 or None, that of rounds within a worker.
    """
    executed = model.steps_per_execution
    accumulated = optimizer_parts.gradient_accumulation_steps(
        optimizer_parts.find_optimizers(model)
    )
    unit = executed // math.gcd(executed, accumulated)
    warmup_steps = getattr(schedule, "warmup_steps", 0)
    if 1 in schedule.periods[:1] and warmup_steps and unit > 1:
        raise ValueError(
            "`warmup_steps` needs a callback after every step. Received: "
            f"warmup_steps={warmup_steps} with steps_per_execution="
            f"{executed}. Compile with steps_per_execution=1 or pass "
            "warmup_steps=0."
        )
    local = [local_period] if local_period else []
    for period in (*schedule.periods, *local):
        if period % unit:
            fitting = -(-period // unit) * unit
            raise ValueError(
                "`period` must be a multiple of the steps that Keras runs "
                "between two callbacks, or rounds come late. Received: "
                f"period={period} with steps_per_execution={executed}. "
                f"Pass period={fitting} or compile with "
                "steps_per_execution=1."
            )


def _compiles(model):
    step = vars(model).get("train_step")
    is_compiled = isinstance(step, _CompiledStep) and (
        step.compilation is optimizer_parts.compilation(model)
    )
    return model.jit_compile or is_compiled


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
