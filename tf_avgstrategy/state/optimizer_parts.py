"""Optimizers of a model: which there are, how they were made, where they are.

With `state.py` the only reader of Keras optimizer internals.
"""

import math

import tensorflow as tf

from tf_avgstrategy.state import variables as replica_variables

__all__ = [
    "build_on_all_replicas",
    "compilation",
    "describe",
    "finalize",
    "find_optimizers",
    "gradient_accumulation_steps",
    "has_only_defaults",
    "holds_half_gradients",
    "is_in_scope",
    "learning_rate",
    "parts",
    "per_step_settings",
    "steps_made",
    "trainable_variables",
]


def build_on_all_replicas(optimizer, trainable_variables):
    """Builds an optimizer of which a replica's step makes first use.

    Within a replica Keras would build it once, for the replica that comes
    first. What `build` assigns to slots would be missing on all others: those
    of ScheduleFreeAdamW begin as the variables do.

    Args:
        optimizer: Keras optimizer that is not built.
        trainable_variables: List of variables, of which those of another
            strategy leave it unbuilt.
    """
    first = trainable_variables[0]
    is_local = replica_variables.replica_copies(first) is not None
    if not is_local or not tf.compat.v1.executing_eagerly_outside_functions():
        return
    strategy = replica_variables.strategy_of(first)

    def build():
        with strategy.scope():
            optimizer.build(trainable_variables)

    replica_variables.outside_of_scopes(build)


def describe(optimizer):
    """Returns an optimizer's settings as text, and of those that it wraps.

    Without names, and without a learning rate that is a variable; a schedule
    is a setting.
    """
    return "; ".join(
        f"{type(part).__name__} {_settings(part)}" for part in parts(optimizer)
    )


def _settings(optimizer):
    try:
        config = optimizer.get_config()
    except NotImplementedError:
        return {}
    if not isinstance(config.get("learning_rate"), dict):
        config.pop("learning_rate", None)
    hidden = ("name", "inner_optimizer", "optimizer_map")
    return {key: v for key, v in config.items() if key not in hidden}


def find_optimizers(model):
    """Returns the optimizers of a model: compiled, attributes, in submodels.

    Args:
        model: A `keras.Model`. A GAN, for example, keeps two optimizers as
            attributes, or in a list or dict.
    """
    found = [model.optimizer] if model.optimizer is not None else []
    parts = [*vars(model).values(), *model._flatten_layers(include_self=False)]
    found.extend(_optimizers_in(parts, model.distribute_strategy))
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _optimizers_in(value, strategy):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _optimizers_in(part, strategy)
    elif hasattr(value, "apply_gradients"):
        yield value
    else:
        # Of a submodel. One that was trained elsewhere does not matter here.
        optimizer = getattr(value, "optimizer", None)
        if hasattr(optimizer, "apply_gradients") and is_in_scope(
            optimizer, strategy
        ):
            yield optimizer


def compilation(model):
    """Returns an object that is another one after each `compile`."""
    return getattr(model, "_compile_config", None)


def has_only_defaults(optimizer):
    """Returns whether `compile` would make such a one of the name alone."""
    made_by_keras = type(optimizer).__module__.startswith("keras.")
    told_more = any(name.startswith("_exclude") for name in vars(optimizer))
    if not made_by_keras or told_more or hasattr(optimizer, "inner_optimizer"):
        return False
    configs = [optimizer.get_config(), type(optimizer)().get_config()]
    first, second = ({**config, "name": None} for config in configs)
    return first == second


def is_in_scope(optimizer, strategy):
    """Returns whether an optimizer was made in the scope of a strategy."""
    return replica_variables.strategy_of(optimizer._iterations) is strategy


def finalize(model):
    """Does what `fit` does to a model's weights at its end, for `use_ema`."""
    if hasattr(model.optimizer, "finalize_variable_values"):
        model.optimizer.finalize_variable_values(model.trainable_weights)


def gradient_accumulation_steps(optimizers):
    """Returns the steps after which no optimizer holds half a gradient."""
    return math.lcm(
        *(
            part.gradient_accumulation_steps or 1
            for optimizer in optimizers
            for part in parts(optimizer)
        )
    )


def holds_half_gradients(optimizers):
    """Returns whether an optimizer has gradients that wait for an update."""
    return any(
        int(part._iterations.numpy()) % part.gradient_accumulation_steps
        for optimizer in optimizers
        for part in parts(optimizer)
        if part.gradient_accumulation_steps
    )


def learning_rate(optimizers):
    """Returns the learning rate in force of the first optimizer, a float.

    NaN if there is none.
    """
    for optimizer in optimizers:
        for part in parts(optimizer):
            if not hasattr(part, "inner_optimizer"):
                return float(part.learning_rate)
    return math.nan


def per_step_settings(optimizer):
    """Returns the names of settings that need a step for each batch."""
    names = ("gradient_accumulation_steps", "use_ema", "loss_scale_factor")
    return [name for name in names if getattr(optimizer, name, None)]


def parts(optimizer):
    """Yields the optimizer and the optimizers that it wraps."""
    inner = [getattr(optimizer, "inner_optimizer", None)]
    inner.extend(getattr(optimizer, "_inner_optimizers", []))
    yield optimizer
    for part in inner:
        if part is not None:
            yield from parts(part)


def steps_made(optimizers):
    """Returns the training steps that optimizers have counted, 0 for none."""
    return max(
        (
            int(part._iterations.numpy())
            for o in optimizers
            for part in parts(o)
        ),
        default=0,
    )


def trainable_variables(optimizer):
    """Returns the variables that a built optimizer updates, in its order."""
    for part in parts(optimizer):
        if part._trainable_variables:
            return part._trainable_variables
    return []
