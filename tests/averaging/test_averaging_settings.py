import json

import keras
import pytest
import toys

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers


class TestErrors:
    """The same for the callback and for the averager."""

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, TypeError, "`period` must be an integer.*period=None"),
            (
                {"period": 4, "schedule": avg.Periodic(4)},
                ValueError,
                "one schedule. Received: period=4",
            ),
            (
                {"warmup_steps": 2, "schedule": avg.Periodic(4)},
                ValueError,
                "one schedule.*warmup_steps=2",
            ),
            (
                {"schedule": avg.Periodic(4), "warmup": "gradients"},
                ValueError,
                "one schedule.*warmup='gradients'.*arguments of `Periodic`",
            ),
            (
                {"period": 4, "outer_device": "the host"},
                ValueError,
                "`outer_device` must be .*outer_device='the host'",
            ),
            (
                {"period": 4, "outer_device": None},
                ValueError,
                "`outer_device` must be .*outer_device=None",
            ),
            (
                {"period": 4, "periods": [4]},
                TypeError,
                "`periods` must be a dict.*periods=.4. of type list",
            ),
            (
                {"schedule": 16},
                TypeError,
                "`Schedule`.*schedule=16 of type int",
            ),
            ({"period": 4, "elastic_alpha": 0}, ValueError, "> 0 and <= 1.*=0"),
            (
                {"period": 4, "elastic_alpha": 1.5},
                ValueError,
                "`elastic_alpha` must be .* > 0 and <= 1.*=1.5",
            ),
            (
                {"period": 4, "local_period": 0},
                ValueError,
                "`local_period` .*=0",
            ),
            (
                {"period": 6, "local_period": 4},
                ValueError,
                "`local_period` must divide.*=4 with a period of 6.*period=8",
            ),
            (
                {"period": 4, "fragments": 3},
                ValueError,
                "fragments=3.*period=6",
            ),
            (
                {"period": 4, "slots": "sum"},
                ValueError,
                "`slots` must be one of",
            ),
            (
                {"period": 4, "on_non_finite": "skip"},
                ValueError,
                "`on_non_finite` must be one of",
            ),
            (
                {"period": 4, "outer_optimizer": "sgd"},
                TypeError,
                "`outer_optimizer` must be",
            ),
        ],
    )
    def test_arguments(self, options, error, message):
        with pytest.raises(error, match=message):
            avg.PeriodicAveraging(**options)


class TestConfig:
    def test_a_callback_is_made_of_its_config(self):
        averaging = avg.PeriodicAveraging(
            schedule=avg.Stagewise({0: 4, 100: 16}),
            outer_optimizer=outer_optimizers.slow_momentum(0.6),
            fragments=2,
            local_period=2,
            elastic_alpha=0.5,
        )
        config = json.loads(json.dumps(averaging.get_config()))
        again = avg.PeriodicAveraging.from_config(config)
        assert again.get_config() == averaging.get_config()
        assert again.schedule == avg.Stagewise({0: 2, 100: 8})

    def test_a_period_for_single_variables(self):
        averaging = avg.PeriodicAveraging(4, periods={"embedding": 8})
        again = avg.PeriodicAveraging.from_config(averaging.get_config())
        assert again.get_config() == averaging.get_config()


def test_several_steps_an_execution_need_a_period_of_as_many():

    for schedule, is_refused in [
        (avg.Stagewise({0: 4, 8: 3}), True),
        (avg.Stagewise({0: 4, 10: 8}), True),
        (avg.Stagewise({0: 4, 8: 8}), False),
        (avg.DivergenceTriggered(0.5, check_every=2), True),
        (avg.QuadraticSynchronizationRule(1, 0.25), False),
    ]:
        with toys.make_strategy().scope():
            model = toys.slope_model(steps_per_execution=4)
        x, y = toys.slope_rows(8)
        averaging = avg.PeriodicAveraging(schedule=schedule)
        if is_refused:
            with pytest.raises(ValueError, match="steps_per_execution=4"):
                toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
        else:
            toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
            assert averaging.averager.rounds >= 1


def test_an_optimizer_of_the_callback_may_be_used_for_several_models():

    averaging = avg.PeriodicAveraging(
        2, outer_optimizer=keras.optimizers.SGD(0.5)
    )
    for _ in range(2):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        x, y = toys.slope_rows(4)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
        assert toys.weight(model) == 4.9228515625
