"""Replicas that are not finite: they stop training, or do not count."""

import keras
import numpy as np
import pytest
import toys

import tf_avgstrategy as avg


def fit(y, *, on_non_finite, optimizer=toys.sgd, period=2, **options):
    """T1 on as many replicas as a batch has rows, with these targets."""
    y = np.array(y, "float32")
    strategy = toys.make_strategy(y.shape[1])
    with strategy.scope():
        model = toys.slope_model(optimizer())
    x = np.ones_like(y)
    # Row B on replica 1.
    x[:, 1] = 2
    callbacks = options.pop("callbacks", [])
    averaging = avg.PeriodicAveraging(
        period, on_non_finite=on_non_finite, **options
    )
    history = toys.fit(
        model,
        x.reshape(-1, 1),
        y.reshape(-1, 1),
        batch_size=y.shape[1],
        callbacks=[*callbacks, averaging],
    )
    return model, averaging, history.history


SICK = [[0, 16, 0], [0, 16, np.nan]]
ALL_SICK = [[0, 16], [np.nan, np.nan]]


def momentum():
    return toys.sgd(momentum=0.5)


@pytest.mark.core
def test_the_others_mean_is_adopted(caplog):
    model, averaging, logs = fit(SICK, on_non_finite="exclude")
    # The mean of 2.25 and 8, as without the third replica.
    assert toys.scalars(model.trainable_variables[0]) == [5.125] * 3
    assert averaging.averager.excluded == 1
    assert logs["excluded"] == [1]
    (message,) = [m for m in caplog.messages if "not finite" in m]
    assert "1 replicas of worker 0" in message
    assert "kernel" in message and "replica 2" in message
    assert "step 2" in message


def test_slots_are_adopted_too():
    model, averaging, _ = fit(SICK, on_non_finite="exclude", optimizer=momentum)
    (velocity,) = [v for v in model.optimizer.variables if "momentum" in v.path]
    # T2 after step 2.
    assert toys.scalars(model.trainable_variables[0]) == [5.875] * 3
    assert toys.scalars(velocity) == [0.375] * 3


def test_without_sick_replicas_logs_count_none():
    _, _, logs = fit([[0, 16], [0, 16]], on_non_finite="exclude")
    assert logs["excluded"] == [0]
    _, _, logs = fit([[0, 16], [0, 16]], on_non_finite="raise")
    assert "excluded" not in logs


def test_the_default_stops_and_names_the_replica():
    with pytest.raises(
        FloatingPointError, match="kernel.*replica 2 of.*step 2"
    ):
        fit(SICK, on_non_finite="raise")
    assert avg.PeriodicAveraging(2).on_non_finite == "raise"


def test_somebody_must_be_finite():
    with pytest.raises(FloatingPointError, match="needs a replica that is"):
        fit(ALL_SICK, on_non_finite="exclude")


def test_what_is_kept_local_can_adopt_nothing():
    with pytest.raises(FloatingPointError, match="momentum|kernel"):
        fit(
            SICK,
            on_non_finite="exclude",
            optimizer=momentum,
            slots="keep",
        )


@pytest.mark.parametrize("on_non_finite", ["raise", "exclude"])
def test_nothing_that_is_not_finite_is_saved(on_non_finite, tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{batch}.keras", save_freq=1
    )
    try:
        fit(
            SICK,
            on_non_finite=on_non_finite,
            period=8,
            callbacks=[checkpoint],
        )
    except FloatingPointError:
        assert on_non_finite == "raise"
    saved = sorted(path.name for path in tmp_path.iterdir())
    expected = (
        ["1.keras"] if on_non_finite == "raise" else ["1.keras", "2.keras"]
    )
    assert saved == expected
    for path in tmp_path.iterdir():
        assert np.isfinite(toys.weight(keras.models.load_model(path)))


def test_other_rules_are_refused():
    with pytest.raises(ValueError, match="on_non_finite='skip'"):
        avg.PeriodicAveraging(2, on_non_finite="skip")


def test_the_callback_is_made_of_its_config():
    config = {
        "period": 4,
        "warmup_steps": 2,
        "slots": "keep",
        "overrides": {"embedding": "keep"},
        "on_non_finite": "exclude",
    }
    averaging = avg.PeriodicAveraging.from_config(config)
    assert averaging.get_config().items() >= config.items()
    assert (
        avg.PeriodicAveraging(**config).get_config() == averaging.get_config()
    )
