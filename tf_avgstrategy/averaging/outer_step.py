"""Outer steps: outer parameters, and the optimizer that moves them."""

import re

import keras
import tensorflow as tf

from tf_avgstrategy.state import optimizer_parts
from tf_avgstrategy.state import variables
from tf_avgstrategy.tensors import mean

__all__ = ["OuterStep", "check", "is_onto_mean"]

_SLOT = re.compile(r"outer_(\d+)_(.+)")


def check(optimizer):
    """Raises a TypeError or ValueError unless rounds can use an optimizer."""
    if optimizer is None:
        return
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`outer_optimizer` must be a `keras.optimizers.Optimizer`. "
            f"Received: outer_optimizer={optimizer!r} of type "
            f"{type(optimizer).__name__}. Pass for example "
            "`tf_avgstrategy.outer_optimizers.diloco()`."
        )
    refused = optimizer_parts.per_step_settings(optimizer)
    if refused:
        raise ValueError(
            "`outer_optimizer` must take one step at each round. Received: "
            f"{type(optimizer).__name__} with {', '.join(refused)}. Leave "
            "that out."
        )


def is_onto_mean(optimizer):
    """Returns whether a step of the optimizer ends exactly at the mean."""
    if optimizer is None:
        return True
    config = optimizer.get_config()
    plain = keras.optimizers.SGD(1.0).get_config()
    return type(optimizer) is keras.optimizers.SGD and (
        {**config, "name": None} == {**plain, "name": None}
    )


class OuterStep:
    """Outer parameters and an optimizer of their own.

    Args:
        optimizer: `keras.optimizers.Optimizer`, of which only the settings are
            taken.
        values: Dict from int to floating point tensor, the outer parameters by
            a number that each keeps however variables are cut into fragments.
        device: String, the device that holds them, "CPU:0" is the host.

    Attributes:
        parameters: List of `tf.Variable`, in the dtype that means have.
    """

    def __init__(self, optimizer, values, device):

        def make():
            with tf.init_scope(), tf.device(device):
                self._optimizer = type(optimizer).from_config(
                    optimizer.get_config()
                )
                self._keras_variables = [
                    keras.Variable(
                        tf.cast(value, mean.accumulation_dtype(value.dtype)),
                        dtype=mean.accumulation_dtype(value.dtype).name,
                        name=f"outer_{number}",
                    )
                    for number, value in values.items()
                ]
                self._optimizer.build(self._keras_variables)

        self._numbers = list(values)
        variables.outside_of_scopes(make)
        self.parameters = [variables.raw(v) for v in self._keras_variables]

    def slots(self):
        """Returns what the optimizer holds, a dict from string to variable.

        The key is the number of a parameter and the name of what belongs to
        it. What belongs to all of them, such as the count of steps, is there
        for each.
        """
        found = {}
        for variable in self._optimizer.variables:
            own = _SLOT.fullmatch(variable.name)
            if own is not None:
                found["/".join(own.groups())] = variables.raw(variable)
                continue
            for number in self._numbers:
                found[f"{number}/{variable.name}"] = variables.raw(variable)
        return found

    def take(self, pseudo_gradients, inner_learning_rate):
        """Moves the parameters by one step, in a graph or eagerly.

        Args:
            pseudo_gradients: List of tensors, outer parameters minus means.
            inner_learning_rate: Float32 scalar tensor, that of the replicas'
                optimizer. NaN: unknown.
        """
        if not hasattr(self._optimizer, "follow"):
            self._optimizer.apply(pseudo_gradients, self._keras_variables)
            return

        def follow():
            self._optimizer.follow(inner_learning_rate)
            self._optimizer.apply(pseudo_gradients, self._keras_variables)
            return True

        def approach():
            rate = self._optimizer.learning_rate
            for parameter, gradient in zip(self.parameters, pseudo_gradients):
                with tf.device(parameter.device):
                    parameter.assign_sub(
                        tf.cast(rate, parameter.dtype) * gradient
                    )
            return False

        tf.cond(tf.equal(inner_learning_rate, 0), approach, follow)
