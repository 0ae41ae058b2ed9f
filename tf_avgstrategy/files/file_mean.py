"""The mean of variables of several files, one part of one at a time."""

import functools

import numpy as np
import tensorflow as tf

__all__ = ["check_same_variables", "write_mean"]

# How many elements are computed at once, which bounds the memory for it.
_BLOCK_ELEMENTS = 2**18


def check_same_variables(files):
    """Raises a ValueError that names the first difference of several files.

    Args:
        files: List of what `model_files` and `checkpoint_files` read.
    """
    first = files[0]
    for file in files:
        if not file.variables:
            raise ValueError(
                "Each model must have variables. Received: none in "
                f"{file.path!r}. Build the model before saving it."
            )
    for file in files[1:]:
        for name in [*first.variables, *file.variables]:
            ours, theirs = (
                _described(each.variables.get(name)) for each in (first, file)
            )
            if ours != theirs:
                raise ValueError(
                    "All models must have the same variables. Received: "
                    f"{name!r} is {ours} in {first.path!r} and {theirs} in "
                    f"{file.path!r}. Save all of one architecture, all with or "
                    "all without the state of one optimizer."
                )
        _check_same_optimizer(first, file)


def _check_same_optimizer(first, file):
    for name, maker in first.makers.items():
        if file.makers.get(name) != maker:
            raise ValueError(
                "All models must have the same optimizer, or their slots "
                f"mean different things. Received: {maker!r} in "
                f"{first.path!r} and {file.makers.get(name)!r} in "
                f"{file.path!r}. Save them without, or give the optimizers "
                "one name."
            )


def _described(variable):
    if variable is None:
        return "missing"
    dtype = tf.as_dtype(variable.dtype).name
    if variable.rule in ("maximum", "restart"):
        # Backends of Keras count in different ones.
        dtype = "integer"
    return f"{dtype} of shape {variable.shape}"


def write_mean(files, weights, copy):
    """Writes the mean of all variables.

    Args:
        files: List of what `model_files` and `checkpoint_files` read, of the
            same variables.
        weights: List of as many floats >= 0. A file of weight 0 is not read,
            but for what is taken from the first file.
        copy: Object with `write(name, part, value)`, and `holds_first`, whether
            it has the values of the first file already.

    Raises:
        ValueError: If a value is not finite.
    """
    weighted = [
        (file, weight) for file, weight in zip(files, weights) if weight
    ]
    for name, variable in files[0].variables.items():
        if variable.rule == "first":
            _check_is_not_quantized(weighted, name, variable)
            value = _read(files[0], name)
            if not copy.holds_first:
                copy.write(name, (), value)
            continue
        for part in files[0].parts(name):
            value = _RULES[variable.rule](weighted, name, part)
            if not np.all(np.isfinite(value)):
                raise ValueError(
                    "A mean must be finite. Received: values of "
                    f"{name!r} that lie too far apart for "
                    f"{_described(variable)}, in "
                    f"{[file.path for file, _ in weighted]}. Leave one out."
                )
            copy.write(name, part, np.asarray(value, variable.dtype))


def _check_is_not_quantized(weighted, name, variable):
    """Refuses integers in place of weights: they have no mean."""
    if variable.dtype != np.int8 or variable.shape == ():
        return
    first, *others = [file for file, _ in weighted]
    for file in others:
        if np.any(file.read(name) != first.read(name)):
            raise ValueError(
                "Quantized weights cannot be averaged: integers have no mean. "
                f"Received: different int8 values of {name!r} in "
                f"{first.path!r} and {file.path!r}. Average the models before "
                "they are quantized."
            )


def _read(file, name, part=()):
    value = file.read(name, part)
    is_floating = file.variables[name].is_floating
    if is_floating and not np.all(np.isfinite(value)):
        raise ValueError(
            "Every value must be finite. Received: a NaN or infinity in "
            f"{name!r} of {file.path!r}. Leave this model out, or give it the "
            "weight 0."
        )
    return value


def _mean(weighted, name, part):
    variable = weighted[0][0].variables[name]
    reads = [
        (functools.partial(_read, file, name, part), weight)
        for file, weight in weighted
    ]
    return _weighted_mean(reads, variable.dtype)


def _weighted_mean(reads, dtype):
    """Returns the mean of arrays of one shape, computed in float64.

    Around the first one: what equals it in all arrays keeps its bits.

    Args:
        reads: List of pairs of a function without arguments that returns an
            array, which is held while it is added and no longer, and a weight
            > 0.
        dtype: NumPy dtype of the mean.
    """
    (read, total), *others = reads
    first = read()
    center = np.asarray(first).reshape(-1)
    offset = np.zeros(center.shape)
    # What is too far apart overflows, and the mean is seen not to be finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for read, weight in others:
            _add_difference(offset, read(), center, weight)
            total += weight
        mean = np.empty(center.shape, dtype)
        for block in _blocks(len(center)):
            moved = center[block].astype("float64") + offset[block] / total
            # Zero plus zero would lose the sign of -0.
            mean[block] = np.where(offset[block] == 0, center[block], moved)
    return mean.reshape(np.shape(first))


def _add_difference(offset, value, center, weight):
    flat = np.asarray(value).reshape(-1)
    for block in _blocks(len(flat)):
        difference = flat[block].astype("float64") - center[block]
        offset[block] += weight * difference


def _blocks(size):
    for start in range(0, size, _BLOCK_ELEMENTS):
        yield slice(start, start + _BLOCK_ELEMENTS)


def _pooled(weighted, name, part):
    """By the law of total variance, see `mean.total_variances`."""
    variable = weighted[0][0].variables[name]
    reads_of_means = [
        (functools.partial(_read, file, variable.partner, part), weight)
        for file, weight in weighted
    ]
    center = _weighted_mean(reads_of_means, np.dtype("float64"))

    def read(file):
        moved = _read(file, variable.partner, part).astype("float64") - center
        return _read(file, name, part) + np.square(moved)

    reads = [
        (functools.partial(read, file), weight) for file, weight in weighted
    ]
    return _weighted_mean(reads, variable.dtype)


def _largest(weighted, name, part):
    return np.max([_read(file, name, part) for file, _ in weighted])


def _smallest(weighted, name, part):
    return np.min([_read(file, name, part) for file, _ in weighted])


def _largest_or_restart(weighted, name, part):
    scale = weighted[0][0].variables[name].partner
    largest = _largest(weighted, name, part)
    scales = {float(_read(file, scale, part)) for file, _ in weighted}
    return largest if len(scales) == 1 else np.zeros_like(largest)


_RULES = {
    "mean": _mean,
    "pooled": _pooled,
    "maximum": _largest,
    "minimum": _smallest,
    "restart": _largest_or_restart,
}
