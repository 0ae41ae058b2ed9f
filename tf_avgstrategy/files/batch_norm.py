"""Statistics of BatchNormalization layers, counted again on data."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

__all__ = ["refresh"]


def refresh(model, dataset):
    """Gives BatchNormalization the statistics of a dataset.

    One pass with `training=True`: each moving mean becomes the mean over all
    rows, each moving variance the variance over all rows, of what reaches the
    layer when every batch is normalized by its own statistics, as in training.
    Everything else that the model holds keeps its bits.

    Args:
        model: Built `keras.Model`.
        dataset: Finite `tf.data.Dataset`, or another iterable, of batches as
            `fit` takes them. Their rows are counted in the first dimension.

    Raises:
        ValueError: If the dataset is empty or infinite, if a layer has
            `renorm`, or if a statistic is not finite.
    """
    if _is_infinite(dataset):
        raise ValueError(
            "`refresh_batch_norm` must end: the statistics are those of all "
            "its rows. Received: an infinite dataset. Add `.take(n)`."
        )
    found = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    if any(getattr(layer, "renorm", False) for layer in found):
        raise ValueError(
            "Statistics can be refreshed of layers without `renorm`, which has "
            "more of them. Received: a model with `renorm=True`. Train it for "
            "some steps with a learning rate of 0 instead."
        )
    moments = [_Moments(layer) for layer in found]
    with _restored(model, found), _taking_each_batch(found):
        total_rows = _pass_over(model, dataset, moments)
    if not total_rows:
        raise ValueError(
            "`refresh_batch_norm` must have rows. Received: an empty dataset. "
            "Pass rows of the training data."
        )
    for each in moments:
        each.assign()


def _is_infinite(dataset):
    cardinality = getattr(dataset, "cardinality", None)
    return cardinality is not None and (
        int(cardinality()) == tf.data.INFINITE_CARDINALITY
    )


class _Moments:
    """Mean and variance over the rows of all batches, of one layer."""

    def __init__(self, layer):
        self._layer = layer
        self._rows = 0
        # Around the first batch's mean, so that no digits cancel out.
        self._center = None
        self._first = self._second = 0.0

    def add(self, rows):
        mean = self._layer.moving_mean.numpy().astype("float64")
        variance = self._layer.moving_variance.numpy().astype("float64")
        if self._center is None:
            self._center = mean
        offset = mean - self._center
        self._rows += rows
        self._first += rows * offset
        self._second += rows * (variance + offset**2)

    def assign(self):
        offset = self._first / self._rows
        mean = self._center + offset
        variance = np.maximum(self._second / self._rows - offset**2, 0)
        if not np.all(np.isfinite(mean) & np.isfinite(variance)):
            raise ValueError(
                "Statistics must be finite. Received: values that are not, in "
                f"the layer {self._layer.name!r} while the rows of "
                "`refresh_batch_norm` passed. Check these rows."
            )
        self._layer.moving_mean.assign(mean)
        self._layer.moving_variance.assign(variance)


def _pass_over(model, dataset, moments):
    total_rows = 0
    for batch in dataset:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        rows = len(tf.nest.flatten(x)[0])
        if rows:
            model(x, training=True)
            total_rows += rows
            for each in moments:
                each.add(rows)
    return total_rows


@contextlib.contextmanager
def _restored(model, batch_norms):
    """Takes back what the pass changes beside statistics, such as seeds."""
    statistics = {
        id(variable)
        for layer in batch_norms
        for variable in (layer.moving_mean, layer.moving_variance)
    }
    # What a call cannot change is not copied.
    before = [
        (variable, variable.numpy())
        for variable in model.variables
        if id(variable) not in statistics and not variable.trainable
    ]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def _taking_each_batch(batch_norms):
    """Lets a call replace the statistics by those of the batch."""
    before = [(layer.momentum, layer.trainable) for layer in batch_norms]
    statistics = [
        (layer.moving_mean.numpy(), layer.moving_variance.numpy())
        for layer in batch_norms
    ]
    try:
        for layer in batch_norms:
            layer.momentum = 0.0
            # Frozen, a layer would use its statistics and keep them.
            layer.trainable = True
        yield
    finally:
        for layer, (momentum, trainable), (mean, variance) in zip(
            batch_norms, before, statistics
        ):
            layer.momentum = momentum
            layer.trainable = trainable
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(variance)
