"""Saved variables: what a mean over finished models does to each of them."""

import dataclasses
import re

import numpy as np
import tensorflow as tf

__all__ = ["SavedVariable", "by_name", "of_group"]

# How Keras names a batch normalization that the user did not name.
_BATCH_NORM = re.compile(r"batch_normalization(_\d+)?")
# gamma, beta, moving mean, moving variance, and three more of `renorm`.
_RENORM_EXTRA = 3


@dataclasses.dataclass(frozen=True)
class SavedVariable:
    """A variable of a file or model, and what averaging does to it.

    Attributes:
        shape: Tuple of ints.
        dtype: NumPy dtype.
        rule: String. "mean"; "pooled" (a variance, around its mean);
            "maximum" (a counter); "minimum" (a loss scale); "restart" (to 0
            where the loss scales differ, else the maximum); "first".
        partner: String or None, the name of the moving mean of a "pooled", of
            the loss scale of a "restart".
    """

    shape: tuple
    dtype: np.dtype
    rule: str
    partner: str | None = None

    @property
    def is_floating(self):
        """Whether values are floating point numbers."""
        return tf.as_dtype(self.dtype).is_floating


def by_name(found):
    """Decides by the names of variables, as checkpoints and models have them.

    Args:
        found: Dict from key to a tuple of path, shape and NumPy dtype. The
            path's last part is the variable's own name. Keys may be paths as
            well, of attributes.

    Returns:
        Dict from key to `SavedVariable`.
    """
    partners = _moving_means(found)
    variables = {}
    for key, (path, shape, dtype) in found.items():
        names = {path.rpartition("/")[2], key.rpartition("/")[2].lstrip("_")}
        variable = SavedVariable(shape, dtype, _default_rule(shape, dtype))
        if key in partners:
            variable = dataclasses.replace(
                variable, rule="pooled", partner=partners[key]
            )
        elif variable.is_floating and shape == ():
            if "learning_rate" in names:
                variable = dataclasses.replace(variable, rule="first")
            elif "dynamic_scale" in names:
                variable = dataclasses.replace(variable, rule="minimum")
        elif "step_counter" in names and variable.rule == "maximum":
            scale = key.replace("step_counter", "dynamic_scale")
            if scale != key and scale in found:
                variable = dataclasses.replace(
                    variable, rule="restart", partner=scale
                )
        variables[key] = variable
    return variables


def _default_rule(shape, dtype):
    kind = tf.as_dtype(dtype)
    if kind.is_floating:
        return "mean"
    # Arrays of integers may be the state of a random generator.
    return "maximum" if kind.is_integer and shape == () else "first"


def _moving_means(found):
    """Maps the key of each moving variance to that of its moving mean."""
    means, partners = {}, {}
    for key, (path, shape, dtype) in found.items():
        if tf.as_dtype(dtype).is_floating:
            for place in _places(key, path, "moving_mean"):
                means.setdefault((place, shape), key)
    for key, (path, shape, _) in found.items():
        for place in _places(key, path, "moving_variance"):
            if (place, shape) in means:
                partners.setdefault(key, means[place, shape])
    return partners


def _places(key, path, name):
    """Where a variable of that name is: by its key, and by its path."""
    folder, _, last = key.rpartition("/")
    if last == name:
        yield "attribute", folder
    owner, _, own_name = path.rpartition("/")
    if own_name == name:
        # Lists may hold one variable each, under the same path.
        yield "path", folder if last.isdigit() else "", owner


def of_group(path, name, found, batch_norms):
    """Decides for the variables of one object in a Keras HDF5 file.

    There they have numbers in place of names.

    Args:
        path: String, the object's path in the file, such as "layers/dense".
        name: String, the object's own name, or "".
        found: Dict from number, as a string, to shape and NumPy dtype.
        batch_norms: Set of strings, names of the layers that are known to be
            batch normalizations.

    Returns:
        Dict from number to `SavedVariable`, whose partners are numbers.
    """
    variables = {
        number: SavedVariable(shape, dtype, _default_rule(shape, dtype))
        for number, (shape, dtype) in found.items()
    }
    is_batch_norm = name in batch_norms or any(
        _BATCH_NORM.fullmatch(part) for part in (name, path.rpartition("/")[2])
    )
    if is_batch_norm:
        _pool(variables)
    elif "optimizer" in path:
        _keep_learning_rates(variables, is_scaling="loss_scale" in name)
    return variables


def _pool(variables):
    count = len(variables)
    place = count - 2 - (_RENORM_EXTRA if count > 4 else 0)
    pair = [variables.get(str(place + offset)) for offset in (0, 1)]
    if None in pair or pair[0].shape != pair[1].shape:
        return
    if all(v.is_floating and len(v.shape) == 1 for v in pair):
        variables[str(place + 1)] = dataclasses.replace(
            pair[1], rule="pooled", partner=str(place)
        )


def _keep_learning_rates(variables, is_scaling):
    """A learning rate follows the counter of steps, unless it is a schedule.

    A loss scale holds its own counter and rate, a second counter and the scale,
    and then what the optimizer within holds.
    """
    for number, variable in list(variables.items()):
        if not number.isdigit() or not variable.is_floating or variable.shape:
            continue
        before = str(int(number) - 1)
        if before in variables and variables[before].rule == "maximum":
            if is_scaling and number == "3":
                variables[number] = dataclasses.replace(
                    variable, rule="minimum"
                )
                variables[before] = dataclasses.replace(
                    variables[before], rule="restart", partner=number
                )
            else:
                variables[number] = dataclasses.replace(variable, rule="first")
