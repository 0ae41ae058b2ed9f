"""When workers average, and what they do with the mean, on T1.

Every worker of a pool runs the same function.
"""

import keras
import numpy as np
import scenarios
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers

SCHEMES = {
    "half of the way": lambda: {
        "period": 2,
        "outer_optimizer": keras.optimizers.SGD(0.5),
    },
    "nesterov": lambda: {
        "period": 2,
        "outer_optimizer": outer_optimizers.diloco(0.5, 0.5),
    },
    "nesterov in a fragment": lambda: {
        "period": 2,
        "fragments": 2,
        "outer_optimizer": outer_optimizers.diloco(0.5, 0.5),
    },
    "elastic": lambda: {"period": 2, "elastic_alpha": 0.5},
    "stages": lambda: {"schedule": avg.Stagewise({0: 1, 2: 2})},
    "growing": lambda: {"schedule": avg.QuadraticSynchronizationRule(1, 0.25)},
    "apart": lambda: {"schedule": avg.DivergenceTriggered(0.55, check_every=2)},
    "loss": lambda: {"schedule": avg.AdaComm(2, 2)},
    "time": lambda: {"schedule": avg.TimeBased(1e-6)},
    "two levels": lambda: {"period": 4, "local_period": 2},
}


def path(scheme, steps, rows, replicas=1):
    """Weights and rounds after T1 with a row for each replica of all."""
    strategy = scenarios.make_strategy(replicas)
    with strategy.scope():
        model = toys.slope_model()
    averaging = avg.PeriodicAveraging(**SCHEMES[scheme]())
    data = toys.dataset(toys.slope_rows(steps, rows), len(rows))
    scenarios.toys_fit(model, data, callbacks=[averaging])
    weights = toys.scalars(model.trainable_variables[0])
    return weights, averaging.averager.rounds


def uneven(scheme, steps):
    """A custom loop in which workers have other losses and amounts of data."""
    strategy = scenarios.make_strategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, **SCHEMES[scheme]()
    )
    rng = np.random.default_rng(rank)
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    for epoch in range(2):
        for _ in range(steps[rank]):
            strategy.run(scenarios.train, args=(model, x, y))
            averager.step(loss=rng.uniform(0.1, 2.0 - epoch))
        averager.end_epoch()
    averager.end_training()
    return {
        "weight": toys.weight(model),
        "steps": averager.steps,
        "rounds": averager.rounds,
    }


def other_learning_rates():
    """Rounds where each worker has a learning rate of its own."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy,
        model.variables,
        model.optimizer,
        schedule=avg.QuadraticSynchronizationRule(1, 0.25),
    )
    rank = strategy.communicator.rank
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    rounds = []
    for step in range(1, 13):
        # The chief's is 0.125, for which the period is 4.
        model.optimizer.learning_rate = 0.125 / (1 + rank)
        strategy.run(scenarios.train, args=(model, x, y))
        if averager.step():
            rounds.append(step)
    averager.end_training()
    return rounds


def other_settings():
    """The error of workers that do not want the same."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    rate = 0.5 + 0.25 * strategy.communicator.rank
    try:
        avg.ParameterAverager(
            strategy,
            model.variables,
            model.optimizer,
            period=2,
            outer_optimizer=keras.optimizers.SGD(rate, momentum=rate),
        )
    except ValueError as error:
        return str(error)
    return None


def running_mean():
    """The mean over rounds, on each worker, and what is there after it."""
    strategy = scenarios.make_strategy()
    with strategy.scope():
        model = toys.slope_model()
    averager = avg.ParameterAverager(
        strategy, model.variables, model.optimizer, period=2
    )
    averager.keep_running_mean()
    rank = strategy.communicator.rank
    x, y = (tf.constant([[number]]) for number in scenarios.ROWS[rank])
    for _ in range(4):
        strategy.run(scenarios.train, args=(model, x, y))
        averager.step()
    averager.end_training()
    with averager.averaged_weights():
        inside = toys.weight(model)
    return inside, toys.weight(model)
