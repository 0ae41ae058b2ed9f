"""State of replicas: what one reader sees of it, and what each holds alone."""

import numpy as np
import tensorflow as tf

from tf_avgstrategy.state import variables
from tf_avgstrategy.tensors import mean

__all__ = [
    "as_read",
    "assign_copies",
    "assign_shared",
    "is_given_by_chief",
    "layout",
    "local_keys",
    "own_copies",
    "shared_values",
    "stacked",
]

# What replicas hold in common after a round.
_COMMON = ("mean", "pooled", "reset", "minimum", "maximum", "restart")


def layout(rules):
    """Returns a string for each variable: its name, dtype and shape.

    Without the names of models, which Keras numbers, so that two equal models
    have different ones. A slot's name has one in it.
    """
    return [_describe(rule) for rule in rules]


def _describe(rule):
    is_of_model = rule.kind in ("weight", "statistic", "variance")
    name = rule.path.rpartition("/")[2] if is_of_model else rule.kind
    variable = rule.variable
    dtype = tf.as_dtype(variable.dtype).name
    return f"{name} ({dtype}, {tuple(variable.shape)})"


def as_read(rule):
    """Returns a variable's value as a round or a start sees it."""
    if not rule.travels:
        return rule.copies[0].read_value()
    first, *others = [copy.read_value() for copy in rule.copies]
    share = 1 / len(rule.copies)
    offset = mean.weighted_offset(others, first, [share] * len(others))
    return tf.cast(tf.cast(first, offset.dtype) + offset, first.dtype)


def is_given_by_chief(rule, is_first):
    """Returns whether a start replaces a variable by the chief's.

    Args:
        rule: `StateRule`.
        is_first: Bool, whether it is the first start. What stays local in
            rounds is made equal once, not in a second `fit`.
    """
    if not rule.copies or rule.kind == "other":
        return False
    return is_first or rule.rule != "keep" or rule.kind == "learning rate"


def local_keys(rules):
    """Returns the keys of `shared_values` that a start does not send."""
    return {
        str(place)
        for place, rule in enumerate(rules)
        if not is_given_by_chief(rule, is_first=False)
    }


def shared_values(rules, kinds=None):
    """Returns what a file holds of each variable, as any model has it.

    Args:
        rules: List of `StateRule`.
        kinds: Tuple of strings, the kinds of variables. `None` for all.

    Returns:
        Dict from the rule's place, as a string, to tensor.
    """
    return {
        str(place): rule.variable.read_value()
        for place, rule in enumerate(rules)
        if rule.copies and (kinds is None or rule.kind in kinds)
    }


def assign_shared(rules, values):
    """Gives every replica what `shared_values` returned, as far as it is."""
    for place, rule in enumerate(rules):
        if str(place) in values:
            rule.variable.assign(values[str(place)])


def own_copies(rules, everything):
    """Returns the copies of variables that replicas may not have in common.

    Args:
        rules: List of `StateRule`.
        everything: Bool, whether replicas have trained since the last round.

    Returns:
        Dict from the rule's place, as a string, to a tuple of `tf.Variable`.
    """
    return {
        str(place): rule.copies
        for place, rule in enumerate(rules)
        if rule.copies and (everything or rule.rule not in _COMMON)
    }


def assign_copies(copies, values):
    """Assigns each copy its part of a value.

    Args:
        copies: Dict from string to tuple of `tf.Variable`.
        values: Dict from string to tensor of shape `[R, ...]`.
    """
    for key, of_one in copies.items():
        if key in values:
            own = tf.unstack(values[key], len(of_one))
            variables.assign_copies(of_one, own)


def stacked(copies):
    """Returns copies as one array of shape `[R, ...]`."""
    return np.stack([copy.numpy() for copy in copies])
