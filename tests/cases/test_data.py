"""DATA-03: a last batch that is smaller than the number of replicas."""

import keras
import numpy as np
import pytest
import toys
from keras import layers

import tf_avgstrategy as avg

X = np.arange(1, 6, dtype="float32").reshape(-1, 1)


@pytest.mark.core
def test_data_03_rows_and_not_replicas_have_equal_weight():
    with toys.make_strategy(4).scope():
        model = toys.slope_model(toys.sgd(momentum=0.5))
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(toys.weight(model))

    toys.fit(
        model,
        X,
        np.zeros_like(X),
        batch_size=4,
        callbacks=[avg.PeriodicAveraging(1, slots="reset"), Look()],
    )
    # Row 5 alone: -3.5 * (1 - 0.125 * 2 * 25) = 18.375. With equal weights
    # for replicas that saw nothing it would be 1.96875.
    assert seen == [-3.5, 18.375]


@pytest.mark.parametrize("period", [1, 10])
def test_data_03_batch_normalization_stays_finite(period):
    with toys.make_strategy(4).scope():
        model = keras.Sequential(
            [
                layers.Input((1,)),
                layers.BatchNormalization(),
                toys.slope_layer(),
            ]
        )
        model.compile(toys.sgd(), "mse")
    toys.fit(
        model,
        X,
        np.zeros_like(X),
        batch_size=4,
        callbacks=[avg.PeriodicAveraging(period)],
    )
    for value in model.get_weights():
        assert np.isfinite(value).all()
    assert (model.layers[0].moving_variance.numpy() > 0).all()
