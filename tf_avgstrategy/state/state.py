"""State rules: what a round does to each variable.

With `optimizer_parts.py` the only reader of Keras optimizer internals.
"""

import re
from typing import NamedTuple

import tensorflow as tf

from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.state import variables as replica_variables

__all__ = [
    "SLOT_RULES",
    "StateRule",
    "check_scope",
    "check_slots",
    "state_rules",
    "travelling_rules",
]

SLOT_RULES = ("mean", "keep", "reset")

# What a pattern of `overrides` may ask for, by kind of variable. The first one
# is the rule of the kind where `slots` does not say otherwise.
_RULES = {
    "weight": ("mean", "keep"),
    "statistic": ("mean", "keep"),
    "variance": ("pooled", "mean", "keep"),
    "slot": SLOT_RULES,
    "iterate": ("mean", "keep"),
    "ema": ("mean", "keep"),
    "scalar": ("mean", "keep"),
    "accumulator": ("keep in step",),
    "loss scale": ("minimum",),
    "loss scale counter": ("restart",),
    "counter": ("maximum", "keep"),
    "iterations": ("maximum",),
    "learning rate": ("keep",),
    "other": ("keep",),
}


class StateRule(NamedTuple):
    """One variable and what a round does to it.

    Attributes:
        path: String, the variable's path or, for a `tf.Variable`, its name.
        kind: String, what the variable is, such as "weight" or "slot".
        rule: String. "mean"; "pooled" (a variance, around its mean); "keep";
            "reset" (to the initial value); "minimum"; "maximum"; "restart"
            (to 0, where the replicas do not agree); "keep in step" (to 0 on
            replicas that are behind the partner's maximum).
        copies: Tuple of `tf.Variable`, one per local replica, or () for a
            metric's variable, which is never touched.
        partner: Tuple of `tf.Variable`: the copies of the moving mean of a
            "variance", of the scale of a "loss scale counter", of the
            iterations of an "accumulator". Else ().
        initial_value: Float, what "reset" assigns.
        variable: The `tf.Variable` that all copies are of.
        owner: Of a slot the first copy of the weight that it belongs to, else
            None.
    """

    path: str
    kind: str
    rule: str
    copies: tuple
    partner: tuple = ()
    initial_value: float = 0.0
    variable: object = None
    owner: object = None

    @property
    def travels(self):
        """Whether workers exchange the variable's elements in a round."""
        return self.rule in ("mean", "pooled")


class _Found(NamedTuple):
    variable: object
    kind: str
    owner: object = None
    partner: object = None
    initial_value: float = 0.0


def state_rules(variables, optimizers, *, slots, overrides):
    """Decides what a round does to each variable of a model.

    Args:
        variables: List of `keras.Variable` or `tf.Variable`, the model's.
        optimizers: List of built `keras.optimizers.Optimizer`.
        slots: "mean", "keep" or "reset", the rule of optimizer slots.
        overrides: Dict from regular expression, searched in the path, to rule.

    Returns:
        List of `StateRule`, each variable once, in a fixed order.

    Raises:
        ValueError: If a pattern matches no variable that can have the rule, or
            if two patterns disagree.
    """
    found = _find(variables, optimizers)
    asked = _asked_rules(found, overrides)
    return [
        StateRule(
            path=_path(item.variable),
            kind=item.kind,
            rule=asked.get(id(item), slots if item.kind == "slot" else None)
            or _RULES[item.kind][0],
            copies=replica_variables.replica_copies(item.variable) or (),
            partner=replica_variables.replica_copies(item.partner) or (),
            initial_value=item.initial_value,
            variable=replica_variables.raw(item.variable),
            owner=_first_copy(item.owner),
        )
        for item in found
    ]


def _first_copy(variable):
    return (replica_variables.replica_copies(variable) or (None,))[0]


def travelling_rules(rules):
    """Returns the rules of what workers exchange in a round.

    Moving means are among them even where they are kept local, since the
    variances that belong to them are taken around the mean of all.

    Args:
        rules: List of `StateRule`.
    """
    travelling = [rule for rule in rules if rule.travels]
    known = {id(rule.copies[0]) for rule in travelling}
    partners = [
        StateRule(rule.path, "statistic", "keep", rule.partner)
        for rule in travelling
        if rule.rule == "pooled" and id(rule.partner[0]) not in known
    ]
    return travelling + partners


def check_scope(variables, optimizers, strategy):
    """Raises a ValueError if a variable was made outside the scope.

    Also if Horovod has wrapped an optimizer.

    Args:
        variables: List of `keras.Variable` or `tf.Variable`, the model's.
        optimizers: List of `keras.optimizers.Optimizer`.
        strategy: The strategy in whose scope all of them must be made.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("horovod"):
            raise ValueError(
                "An optimizer must be Keras' own: `DistributedOptimizer` of "
                "Horovod exchanges nothing on Keras 3. Received: a "
                f"{type(optimizer).__name__} that Horovod has wrapped. Pass "
                "the optimizer as it is; averaging needs no wrapper."
            )
    for item in _find(variables, optimizers):
        if replica_variables.strategy_of(item.variable) is not strategy:
            raise ValueError(
                "Model and optimizer must be made inside `strategy.scope()`, "
                "where every replica gets its own copy of each variable. "
                f"Received: variable {_path(item.variable)!r} that was made "
                "outside. Move the line that makes it under `with "
                "strategy.scope():`."
            )


def check_slots(slots):
    """Raises a ValueError unless `slots` is a rule for slots."""
    if slots not in SLOT_RULES:
        raise ValueError(
            f"`slots` must be one of {', '.join(map(repr, SLOT_RULES))}, what "
            f"a round does to optimizer slots. Received: slots={slots!r}. Pass "
            'slots="mean" to average them with the parameters.'
        )


def _find(variables, optimizers):
    found = list(_model_state(variables))
    for optimizer in optimizers:
        found.extend(_optimizer_state(optimizer))
    return _unique(found)


def _model_state(variables):
    moving_means = {}
    for variable in variables:
        path = _path(variable)
        prefix, _, name = path.rpartition("/")
        shape = tuple(variable.shape)
        is_metric = replica_variables.replica_copies(variable) is None
        if is_metric or not _is_floating(variable):
            yield _Found(variable, _kind_of_discrete(variable, is_metric))
        elif name == "moving_variance" and (prefix, shape) in moving_means:
            partner = moving_means[prefix, shape]
            yield _Found(variable, "variance", partner=partner)
        else:
            if name == "moving_mean":
                moving_means[prefix, shape] = variable
            trainable = getattr(variable, "trainable", True)
            yield _Found(variable, "weight" if trainable else "statistic")


def _kind_of_discrete(variable, is_metric):
    # Arrays of integers may be the state of a random generator.
    is_scalar = len(variable.shape) == 0
    is_integer = tf.as_dtype(variable.dtype).is_integer
    return "counter" if is_scalar and is_integer and not is_metric else "other"


def _optimizer_state(optimizer):
    for part in optimizer_parts.parts(optimizer):
        yield _Found(part._iterations, "iterations")
        if _is_variable(part._learning_rate):
            yield _Found(part._learning_rate, "learning rate")
        if hasattr(part, "dynamic_scale"):
            scale = part.dynamic_scale
            # First the counter: it is judged by the scales before the round.
            yield _Found(part.step_counter, "loss scale counter", None, scale)
            yield _Found(scale, "loss scale")
        yield from _slots(part)


def _slots(optimizer):
    owners = optimizer._trainable_variables
    kinds = {
        "_accumulated_gradients": "accumulator",
        "_model_variables_moving_average": "ema",
    }
    classes = {cls.__name__ for cls in type(optimizer).__mro__}
    if "ScheduleFreeAdamW" in classes:
        # Keras keeps the sequence z of the paper in it: parameters.
        kinds["_momentums"] = "iterate"
    initial_values = {
        "_accumulators": getattr(optimizer, "initial_accumulator_value", 0.0)
    }
    partners = {"_accumulated_gradients": optimizer._iterations}
    owned = {}
    for name, value in vars(optimizer).items():
        # A list as long as the list of variables is a slot of each of them.
        is_list = isinstance(value, (list, tuple))
        is_own = name in ("_variables", "_trainable_variables")
        if is_own or not is_list or len(value) != len(owners):
            continue
        for slot, owner in zip(value, owners):
            if _is_variable(slot):
                owned[id(slot)] = _Found(
                    slot,
                    kinds.get(name, "slot"),
                    owner=owner,
                    partner=partners.get(name),
                    initial_value=initial_values.get(name, 0.0),
                )
    for variable in optimizer._variables:
        if not _is_floating(variable):
            yield _Found(variable, "other")
        elif id(variable) in owned:
            yield owned[id(variable)]
        else:
            is_scalar = len(variable.shape) == 0
            yield _Found(variable, "scalar" if is_scalar else "slot")


def _asked_rules(found, overrides):
    """Maps the id of a `_Found` to the rule that a pattern asks for it."""
    rules = {}
    asked_by = {}
    for pattern, rule in overrides.items():
        matches = [f for f in found if re.search(pattern, _path(f.variable))]
        if not matches:
            raise ValueError(
                "Each pattern of `overrides` must match the path of a "
                f"variable. Received: pattern {pattern!r}. Paths: "
                f"{[_path(f.variable) for f in found]}. `describe()` shows "
                "them as a table."
            )
        matches = [f for f in matches if len(_RULES[f.kind]) > 1]
        for item in matches:
            if rule not in _RULES[item.kind]:
                allowed = ", ".join(map(repr, _RULES[item.kind]))
                raise ValueError(
                    f"The rule of a {item.kind} must be one of {allowed}. "
                    f"Received: {rule!r} for {_path(item.variable)!r} through "
                    f"the pattern {pattern!r} of `overrides`. Change the rule "
                    "or narrow the pattern."
                )
            if rules.setdefault(id(item), rule) != rule:
                raise ValueError(
                    "Two patterns of `overrides` must not ask different rules "
                    f"of one variable. Received: {asked_by[id(item)]!r} and "
                    f"{pattern!r} for {_path(item.variable)!r}. Narrow one of "
                    "them."
                )
            asked_by[id(item)] = pattern
        if not matches:
            raise ValueError(
                "A pattern of `overrides` must match a variable whose rule can "
                f"be chosen. Received: pattern {pattern!r}, which matches "
                "integers, seeds or counters only. Remove it."
            )
    return _with_slots_of_kept_weights(found, rules)


def _with_slots_of_kept_weights(found, rules):
    """Slots stay with a weight that stays local, unless asked otherwise."""
    kept = {
        id(replica_variables.raw(f.variable))
        for f in found
        if rules.get(id(f)) == "keep"
    }
    for item in found:
        if (
            item.owner is not None
            and id(replica_variables.raw(item.owner)) in kept
        ):
            rules.setdefault(id(item), "keep")
    return rules


def _unique(found):
    """Tied variables travel once."""
    by_id = {}
    for item in found:
        by_id.setdefault(id(replica_variables.raw(item.variable)), item)
    return list(by_id.values())


def _path(variable):
    return getattr(variable, "path", None) or variable.name


def _is_variable(value):
    return hasattr(value, "assign") and hasattr(value, "dtype")


def _is_floating(variable):
    return tf.as_dtype(variable.dtype).is_floating
