"""What each option makes of training: paths worked out by hand, and simulated.

T1 is explained in `toys.py`: a step takes replica A from w to 0.75 w, replica
B to 8. Two steps take A to 0.5625 w.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import tf_avgstrategy as avg
from tf_avgstrategy import outer_optimizers as outers


class RoundSteps(keras.callbacks.Callback):
    """Notes after which batches there was a round."""

    def __init__(self, averaging):
        super().__init__()
        self.steps = []
        self._averaging = averaging
        self._rounds = 0

    def on_train_batch_end(self, batch, logs=None):
        rounds = self._averaging.averager.rounds
        if rounds > self._rounds:
            self.steps.append(batch + 1)
        self._rounds = rounds


def path(steps, period=None, *, make_optimizer=toys.sgd, **options):
    """The weight after `steps` steps of T1, and the steps of rounds."""
    with toys.make_strategy().scope():
        model = toys.slope_model(make_optimizer())
    averaging = avg.PeriodicAveraging(period, **options)
    noted = RoundSteps(averaging)
    x, y = toys.slope_rows(steps)
    toys.fit(model, x, y, batch_size=2, callbacks=[averaging, noted])
    toys.assert_replicas_equal(model)
    return toys.weight(model), noted.steps


class TestSchedules:
    def test_stagewise(self):
        # 5.5 and 6.0625 after steps 1 and 2. Then (0.5625 w + 8) / 2 twice:
        # 5.705078125 and 5.60455322265625.
        schedule = avg.Stagewise({0: 1, 2: 2})
        assert path(6, schedule=schedule) == (5.60455322265625, [1, 2, 4, 6])

    def test_quadratic_synchronization_rule(self):
        # (0.25 / 0.125) ** 2 = 4 steps: (0.75 ** 4 * 4 + 8) / 2 = 4.6328125,
        # and at the end of `fit` (0.5625 * 4.6328125 + 8) / 2.
        schedule = avg.QuadraticSynchronizationRule(1, 0.25)
        assert path(6, schedule=schedule) == (5.302978515625, [4])

    def test_it_sees_the_rate_in_force(self):
        # 0.125 for the updates of steps 1 and 2, then 0.0625: periods of 1, 1
        # and, from the round after step 2 on, 4.
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(
            [1], [0.125, 0.0625]
        )
        _, steps = path(
            8,
            schedule=avg.QuadraticSynchronizationRule(1, 0.125),
            make_optimizer=lambda: keras.optimizers.SGD(rate),
        )
        assert steps == [1, 2, 6]

    def test_it_sees_a_rate_that_a_callback_sets(self):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(
            schedule=avg.QuadraticSynchronizationRule(1, 0.125)
        )
        noted = RoundSteps(averaging)

        def halve(epoch, rate):
            return 0.0625 if epoch else 0.125

        x, y = toys.slope_rows(4)
        toys.fit(
            model,
            x,
            y,
            batch_size=2,
            epochs=2,
            callbacks=[
                averaging,
                noted,
                keras.callbacks.LearningRateScheduler(halve),
            ],
        )
        # In epoch 2 the first round is due one step after the last one, then
        # the period is 4.
        assert noted.steps == [1, 2, 3, 4, 1]

    def test_ada_comm(self):
        # The loss of T1 falls from step to step, but not below that of the
        # first two: the period is halved at step 2.
        assert path(5, schedule=avg.AdaComm(2, 2))[1] == [2, 3, 4, 5]

    def test_ada_comm_without_a_loss_says_so(self, caplog):
        with toys.make_strategy().scope():
            model = toys.CustomStep()
            model.compile(toys.sgd())
        averaging = avg.PeriodicAveraging(schedule=avg.AdaComm(2, 2))
        x, y = toys.slope_rows(4)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
        assert averaging.averager.rounds == 2
        assert caplog.text.count("AdaComm needs the loss") == 1

    def test_divergence_triggered(self):
        # From 4: A at 3, 2.25; B at 8. Mean distances over the last round's
        # value: (1 + 4) / 2 / 4 = 0.625, (1.75 + 4) / 2 / 4 = 0.71875. Then
        # from 5.125: A at 3.84375, 2.8828125, 2.162109375; B 2.875 away:
        # 0.4055, 0.4992, 0.5695.
        triggered = avg.DivergenceTriggered(0.7)
        assert path(2, schedule=triggered) == (5.125, [2])
        triggered = avg.DivergenceTriggered(0.55, check_every=2)
        assert path(6, schedule=triggered)[1] == [2, 6]

    def test_time_based(self):
        assert path(3, schedule=avg.TimeBased(1e-6))[1] == [1, 2, 3]
        assert path(3, schedule=avg.TimeBased(1e6))[1] == []


@pytest.mark.core
class TestOuterOptimizers:
    def test_half_of_the_way(self):
        # 4 + 0.5 * 1.125 = 4.5625; mean (0.5625 * 4.5625 + 8) / 2 =
        # 5.283203125; half of the way: 4.9228515625.
        optimizer = keras.optimizers.SGD(0.5)
        assert path(4, 2, outer_optimizer=optimizer)[0] == 4.9228515625

    @pytest.mark.parametrize(
        "optimizer",
        [outers.slow_momentum(0.5), outers.fed_avg_momentum(1.0, 0.5)],
    )
    def test_momentum(self, optimizer):
        # 5.125 with momentum 1.125. Mean 5.44140625, 0.31640625 further, plus
        # half of the momentum.
        assert path(4, 2, outer_optimizer=optimizer)[0] == 6.00390625

    def test_nesterov_momentum(self):
        # v = 0.5625, w = 4 + 0.5 * 0.5625 + 0.5625 = 4.84375; mean
        # 5.3623046875; v = 0.28125 + 0.25927734375, w another 0.5 * v +
        # 0.25927734375 further.
        optimizer = outers.diloco(0.5, 0.5)
        assert path(4, 2, outer_optimizer=optimizer)[0] == 5.373291015625

    def test_slots_are_means_and_no_outer_steps(self):
        # T2 of the cases: velocities -1.25 and 2.0, mean 0.375.
        model, _ = toys.fit_slope(
            2,
            2,
            optimizer=lambda: toys.sgd(momentum=0.5),
            outer_optimizer=keras.optimizers.SGD(0.5),
        )
        assert toys.weight(model) == 4 + 0.5 * (5.875 - 4)
        (velocity,) = toys.copies(model.optimizer.momentums[0])[:1]
        assert velocity.ravel().tolist() == [0.375]

    def test_statistics_are_means(self):
        with toys.make_strategy().scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((1,)),
                    keras.layers.BatchNormalization(momentum=0.5),
                    toys.slope_layer(),
                ]
            )
            model.compile(toys.sgd(), "mse")
        averaging = avg.PeriodicAveraging(
            1, outer_optimizer=keras.optimizers.SGD(0.5)
        )
        x = np.array([[2.0], [2.0], [6.0], [6.0]], "float32")
        toys.fit(model, x, x, batch_size=4, callbacks=[averaging])
        bn = model.layers[0]
        assert toys.scalars(bn.moving_mean) == [2.0] * 2
        # 0.5 on each, plus the variance of the means 1 and 3.
        assert toys.scalars(bn.moving_variance) == [1.5] * 2


@pytest.mark.core
class TestFragments:
    """Two weights of T1 side by side."""

    def path(self, steps, **options):
        with toys.make_strategy().scope():
            inputs = keras.layers.Input((1,))
            outputs = keras.layers.Concatenate()(
                [
                    toys.slope_layer(name="one")(inputs),
                    toys.slope_layer(name="two")(inputs),
                ]
            )
            model = keras.Model(inputs, outputs)
            # The loss is the mean over two outputs.
            model.compile(keras.optimizers.SGD(0.25), "mse")
        averaging = avg.PeriodicAveraging(**options)
        x, y = toys.slope_rows(steps)
        y = np.repeat(y, 2, axis=1)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
        toys.assert_replicas_equal(model)
        weights = [float(w.numpy().item()) for w in model.trainable_variables]
        return weights, averaging.averager.rounds

    def test_one_travels_at_a_time(self):
        # The first after steps 1 and 3 (5.5, 5.546875) and the end of `fit`:
        # (0.75 * 5.546875 + 8) / 2. The second after steps 2 and 4.
        assert self.path(4, period=2, fragments=2) == (
            [6.080078125, 5.44140625],
            5,
        )

    def test_each_has_an_outer_state_of_its_own(self):
        # With momentum 0.5. First: 4 -> 5.5 (v 1.5); mean 5.546875, v
        # 0.796875, 6.296875. Second: as without fragments.
        weights, _ = self.path(
            3,
            period=2,
            fragments=2,
            outer_optimizer=outers.fed_avg_momentum(1.0, 0.5),
        )
        # The end of `fit` moves the second from 5.125 (v 1.125): A 3.84375,
        # mean 5.921875, v 0.5625 + 0.796875.
        assert weights == [6.296875, 6.484375]

    def test_a_period_of_its_own(self):
        # The first every 4 steps: 4.6328125.
        assert self.path(4, period=2, periods={"one": 4}) == (
            [4.6328125, 5.44140625],
            2,
        )

    def test_warm_up_moves_everything(self):
        assert self.path(2, period=4, warmup_steps=2, fragments=4) == (
            [6.0625, 6.0625],
            2,
        )


class TestTwoLevels:
    def test_replicas_of_a_worker_meet_more_often(self):
        # 5.125 after step 2, without a round of all workers.
        assert path(4, 4, local_period=2) == (5.44140625, [4])

    def test_what_does_not_travel_meets_locally(self):
        two_slopes = TestFragments().path
        # As with a period of 2. The end of `fit` adds a round.
        assert two_slopes(4, period=4, fragments=2, local_period=2) == (
            [5.44140625, 5.44140625],
            3,
        )

    def test_rows_are_counted_on_after_a_restart(self, tmp_path):
        averaging = {"period": 4, "local_period": 2}
        strategy = toys.make_strategy()

        def batch(number, counts):
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.fill(
                    [counts[context.replica_id_in_sync_group], 1],
                    (toys.ROW_A, toys.ROW_B)[context.replica_id_in_sync_group][
                        number
                    ],
                )
            )

        def make():
            with strategy.scope():
                model = toys.slope_model()
            averager = avg.ParameterAverager(
                strategy, model.variables, model.optimizer, **averaging
            )
            return model, averager

        def train(model, averager, counts):
            data = batch(0, counts), batch(1, counts)
            strategy.run(model.train_step, args=(data,))
            averager.step()

        model, averager = make()
        train(model, averager, [5, 1])
        saved = tf.train.Checkpoint(model=model, averager=averager)
        path = saved.save(str(tmp_path / "of-step-1"))
        model, averager = make()
        tf.train.Checkpoint(model=model, averager=averager).restore(path)
        train(model, averager, [1, 1])
        # 2.25 of 6 rows and 8 of 2.
        assert toys.scalars(model.trainable_variables[0]) == [3.6875] * 2

    def test_local_averaging_waits_for_finite_replicas(self):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(4, local_period=2)
        x, y = toys.slope_rows(4)
        y[2] = np.nan  # Replica A in step 2.
        with pytest.raises(FloatingPointError, match="replica 0 .* step 4"):
            toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
        assert toys.scalars(model.trainable_variables[0])[1] == 8.0


@pytest.mark.core
class TestElasticAveraging:
    def test_half_of_the_way(self):
        # A 2.25, B 8, mean 5.125: A 3.6875, B 6.5625. Then A 2.07421875, B 8,
        # and whoever looks sees the mean.
        assert path(4, 2, elastic_alpha=0.5)[0] == 5.037109375

    def test_replicas_stay_apart(self):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(2, elastic_alpha=0.25)
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        x, y = toys.slope_rows(2)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        assert seen == [[3.0, 8.0], [2.96875, 7.28125]]
        assert toys.weight(model) == 5.125


PLAIN = [
    {"outer_optimizer": keras.optimizers.SGD(1.0)},
    {"elastic_alpha": 1},
    {"fragments": 1},
    {"schedule": avg.Periodic(2)},
    {"schedule": avg.Stagewise({0: 2})},
    {"schedule": avg.QuadraticSynchronizationRule(2, 1e-9)},
    {"local_period": 2},
]


@pytest.mark.parametrize("options", PLAIN, ids=lambda o: str(*o))
def test_reduces_to_plain_averaging_bit_for_bit(options):
    if "schedule" not in options:
        options = {"period": 2, **options}
    for expected, weights in zip(plain_weights(), three_replicas(**options)):
        np.testing.assert_array_equal(expected, weights)


@functools.cache
def plain_weights():
    return three_replicas(period=2)


def three_replicas(**options):
    """Weights after numbers that are not exact, with Adam."""
    keras.utils.set_random_seed(1)
    with toys.make_strategy(3).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype("float32")
    averaging = avg.PeriodicAveraging(**options)
    toys.fit(model, x, x[:, :1], batch_size=6, callbacks=[averaging])
    return model.get_weights()


class Problem:
    """Ten problems at once: replicas that walk towards targets of their own.

    A step of replica r takes x to x - rate * pull_r * (x - target_r). Rounds
    treat each number alone, so problems in one variable do not mix.
    """

    RATE = 0.25

    def __init__(self, seed, replicas):
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.start = rng.normal(size=(10, 3))
        self.targets = rng.normal(size=(replicas, 10, 3)) * 2
        self.pulls = rng.uniform(0.5, 2, size=(replicas, 10, 1))
        self.num_steps = int(rng.integers(4, 14))

    def steps(self, x, count=1):
        for _ in range(count):
            x = x - self.RATE * self.pulls * (x - self.targets)
        return x


class Machine:
    """Runs problems with the library, on variables of 2 and of 1 number."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.strategy = toys.make_strategy(replicas)
        with self.strategy.scope():
            self.a = tf.Variable(tf.zeros([10, 2]), name="a")
            self.b = tf.Variable(tf.zeros([10, 1]), name="b")
            self.optimizer = keras.optimizers.SGD(Problem.RATE)
            self.optimizer.build([self.a, self.b])

        def step(target, pull):
            gradients = [
                pull[0] * (self.a - target[0, :, :2]),
                pull[0] * (self.b - target[0, :, 2:]),
            ]
            self.optimizer.apply(gradients, [self.a, self.b])

        self._run = tf.function(
            lambda *args: self.strategy.run(step, args=args)
        )

    def solve(self, problem, **options):
        self.a.assign(problem.start[:, :2].astype("float32"))
        self.b.assign(problem.start[:, 2:].astype("float32"))
        self.optimizer.iterations.assign(0)
        averager = avg.ParameterAverager(
            self.strategy, [self.a, self.b], self.optimizer, **options
        )

        def spread(rows):
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(
                    rows[context.replica_id_in_sync_group][None], tf.float32
                )
            )

        targets, pulls = spread(problem.targets), spread(problem.pulls)
        for _ in range(problem.num_steps):
            self._run(targets, pulls)
            averager.step()
        averager.end_epoch()
        for variable in (self.a, self.b):
            first, *others = toys.copies(variable)
            for other in others:
                np.testing.assert_array_equal(first, other)
        return np.concatenate([self.a.numpy(), self.b.numpy()], axis=1)


MACHINES = {}


def machine(replicas):
    if replicas not in MACHINES:
        MACHINES[replicas] = Machine(replicas)
    return MACHINES[replicas]


class Sgd:
    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.settings = rate, momentum, nesterov
        self.v = 0.0

    def step(self, x, gradient):
        rate, momentum, nesterov = self.settings
        self.v = momentum * self.v - rate * gradient
        move = momentum * self.v - rate * gradient if nesterov else self.v
        return x + move


class Adam:
    def __init__(self, rate, beta_1, beta_2, epsilon):
        self.settings = rate, beta_1, beta_2, epsilon
        self.m = self.v = self.t = 0

    def step(self, x, gradient):
        rate, beta_1, beta_2, epsilon = self.settings
        self.t += 1
        self.m = beta_1 * self.m + (1 - beta_1) * gradient
        self.v = beta_2 * self.v + (1 - beta_2) * gradient**2
        rate *= np.sqrt(1 - beta_2**self.t) / (1 - beta_1**self.t)
        return x - rate * self.m / (np.sqrt(self.v) + epsilon)


def simulate(problem, due, *, parts=None, outer=None, alpha=1.0):
    """An independent account of the same training, in float64.

    Args:
        problem: `Problem`.
        due: Function of the step that returns the places of the parts that
            travel after it.
        parts: List of slices of the 3 numbers.
        outer: Function that returns an optimizer.
        alpha: How far replicas move.
    """
    parts = parts or [slice(0, 3)]
    optimizers = [outer() if outer else Sgd(1.0) for _ in parts]
    left = problem.start.copy()
    x = np.tile(problem.start, (len(problem.targets), 1, 1))
    since = [0] * len(parts)

    def travel(place, alpha):
        part = parts[place]
        gradient = left[..., part] - x[..., part].mean(0)
        left[..., part] = optimizers[place].step(left[..., part], gradient)
        x[..., part] += alpha * (left[..., part] - x[..., part])
        if alpha == 1:
            since[place] = 0

    for step in range(1, problem.num_steps + 1):
        x = problem.steps(x)
        since = [count + 1 for count in since]
        for place in due(step):
            travel(place, alpha)
    for place, count in enumerate(since):
        if count:
            travel(place, 1.0)
    return left


def every(period):
    return lambda step: [] if step % period else [0]


def check(problem, simulated, **options):
    solved = machine(len(problem.targets)).solve(problem, **options)
    # Up to 13 steps in float32, which each round by 6e-8 of numbers near 1.
    np.testing.assert_allclose(solved, simulated, rtol=1e-5, atol=3e-6)


OUTERS = [
    (lambda: keras.optimizers.SGD(0.5), lambda: Sgd(0.5)),
    (outers.diloco, lambda: Sgd(0.7, 0.9, nesterov=True)),
    (lambda: outers.slow_momentum(0.6, 0.8), lambda: Sgd(0.8, 0.6)),
    (outers.fed_avg_momentum, lambda: Sgd(1.0, 0.9)),
    (lambda: outers.fed_adam(0.1), lambda: Adam(0.1, 0.9, 0.99, 1e-3)),
]


@pytest.mark.parametrize("seed", range(5))
class TestFiftyProblems:
    def problem(self, seed):
        return Problem(seed, replicas=2 + seed % 2)

    def test_schedules(self, seed):
        problem = self.problem(seed)
        first, second, start = problem.rng.integers(1, 5, size=3).tolist()
        schedule = avg.Stagewise({0: first, start: second})

        def due(step):
            if step <= start:
                return [0] if step == start or not step % first else []
            return [] if (step - start) % second else [0]

        check(problem, simulate(problem, due), schedule=schedule)

    def test_outer_optimizers(self, seed):
        problem = self.problem(seed)
        period = int(problem.rng.integers(1, 5))
        real, own = OUTERS[seed % len(OUTERS)]
        check(
            problem,
            simulate(problem, every(period), outer=own),
            period=period,
            outer_optimizer=real(),
        )

    def test_fragments(self, seed):
        problem = self.problem(seed)
        period = 2 * int(problem.rng.integers(1, 4))
        real, own = OUTERS[seed % len(OUTERS)] if seed % 2 else (None, None)

        def due(step):
            tick, rest = divmod(step, period // 2)
            return [] if rest else [(tick - 1) % 2]

        check(
            problem,
            simulate(problem, due, parts=[slice(0, 2), slice(2, 3)], outer=own),
            period=period,
            fragments=2,
            outer_optimizer=real and real(),
        )

    def test_single_periods(self, seed):
        problem = self.problem(seed)
        period, multiple = problem.rng.integers(1, 4, size=2).tolist()

        def due(step):
            slow = [] if step % (period * multiple) else [0]
            return slow + ([] if step % period else [1])

        check(
            problem,
            simulate(problem, due, parts=[slice(0, 2), slice(2, 3)]),
            period=period,
            periods={"^a": period * multiple},
        )

    def test_elastic_averaging(self, seed):
        problem = self.problem(seed)
        period = int(problem.rng.integers(1, 5))
        alpha = float(problem.rng.uniform(0.1, 0.9))
        check(
            problem,
            simulate(problem, every(period), alpha=alpha),
            period=period,
            elastic_alpha=alpha,
        )

    def test_two_levels(self, seed):
        problem = self.problem(seed)
        local, multiple = problem.rng.integers(1, 4, size=2).tolist()
        # In one worker every averaging is one of all replicas.
        check(
            problem,
            simulate(problem, every(local)),
            period=local * multiple,
            local_period=local,
        )


@pytest.mark.core
class _Loop:
    """A training loop on T1."""

    def make(self, num_slopes=1, **options):
        self.strategy = toys.make_strategy()
        with self.strategy.scope():
            inputs = keras.layers.Input((1,))
            slopes = [
                toys.slope_layer(name=f"slope_{place}")(inputs)
                for place in range(num_slopes)
            ]
            outputs = slopes[0]
            if num_slopes > 1:
                outputs = keras.layers.Concatenate()(slopes)
            model = keras.Model(inputs, outputs)
            # The loss is the mean over outputs.
            model.compile(keras.optimizers.SGD(0.125 * num_slopes), "mse")
        averager = avg.ParameterAverager(
            self.strategy, model.variables, model.optimizer, **options
        )
        return model, averager

    def train(self, model, averager, steps):
        width = len(model.trainable_variables)

        def row(number):
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.repeat(
                    [
                        [
                            (toys.ROW_A, toys.ROW_B)[
                                context.replica_id_in_sync_group
                            ][number]
                        ]
                    ],
                    width if number else 1,
                    axis=1,
                )
            )

        data = row(0), row(1)
        for _ in range(steps):
            self.strategy.run(model.train_step, args=(data,))
            averager.step()

    def weights(self, model):
        return [toys.scalars(variable) for variable in model.variables]


class TestRestarts(_Loop):
    """It goes on from a `tf.train.Checkpoint`."""

    def restarted(self, folder, steps, then, options, other_options=None):
        """The weights after a restart between the two numbers of steps."""
        num_slopes = 2 if "fragments" in options else 1
        model, averager = self.make(num_slopes, **options)
        self.train(model, averager, steps)
        saved = tf.train.Checkpoint(model=model, averager=averager)
        path = saved.save(str(folder / "file"))
        self.train(model, averager, then)
        whole = self.weights(model)
        model, averager = self.make(num_slopes, **(other_options or options))
        tf.train.Checkpoint(model=model, averager=averager).restore(path)
        self.train(model, averager, then)
        return whole, self.weights(model)

    @pytest.mark.parametrize("steps", [2, 3, 4])
    @pytest.mark.parametrize(
        "options",
        [
            {"outer_optimizer": outers.diloco(0.5, 0.5)},
            {"outer_optimizer": outers.slow_momentum(0.5)},
            {"elastic_alpha": 0.5},
            {"outer_optimizer": outers.diloco(0.5, 0.5), "fragments": 2},
            {
                "period": None,
                "schedule": avg.DivergenceTriggered(0.05, 2),
            },
        ],
        ids=lambda options: "-".join(options),
    )
    def test_goes_on_bit_for_bit(self, tmp_path, options, steps):
        whole, restarted = self.restarted(
            tmp_path, steps, 4, {"period": 2, **options}
        )
        assert restarted == whole

    @pytest.mark.parametrize(
        "options", [{"period": 4}, {"schedule": avg.AdaComm(4, 4)}], ids=str
    )
    def test_of_another_class_or_settings(self, tmp_path, options):
        path = self.restarted(
            tmp_path, 3, 2, options, {"schedule": avg.AdaComm(2, 2)}
        )[1]
        # Five local steps: the saved period of 4 no longer ends at step 4.
        assert path == [[(0.75**5 * 4 + 8) / 2] * 2]

    def test_of_another_schedule(self, tmp_path):
        """The new one begins at the step that was saved."""
        path = self.restarted(
            tmp_path,
            3,
            2,
            {"schedule": avg.AdaComm(2, 2)},
            {"period": 5},
        )[1]
        # 5.125 after step 2; of three steps more the last one ends a period.
        assert path == [[(0.75**3 * 5.125 + 8) / 2] * 2]

    def test_momentum_stays_with_its_variable(self, tmp_path):
        """Though fragments are others after the restart."""
        outer = {"outer_optimizer": outers.fed_avg_momentum(1.0, 0.5)}
        whole, restarted = self.restarted(
            tmp_path,
            4,
            4,
            {"period": 4, "fragments": 2, **outer},
            {"period": 4, "fragments": 1, **outer},
        )
        # The second slope alone travelled after step 4 as in the first run.
        # 4 -> 4.6328125, v 0.6328125; then the mean of 0.75 ** 4 of that and
        # 8 is 4.732..., and half of v comes on top.
        mean = (0.75**4 * 4.6328125 + 8) / 2
        v = 0.5 * 0.6328125 + (mean - 4.6328125)
        assert whole[1] == [4.6328125 + v] * 2
        assert restarted[1] == pytest.approx([4.6328125 + v] * 2, rel=1e-6)


class TestLazyOptimizers(_Loop):
    """Slots of a second optimizer appear while T1 is trained by the first."""

    def built_after(self, steps, **options):
        model, _ = self.make(period=2)
        with self.strategy.scope():
            other = toys.sgd(momentum=0.5)
        averager = avg.ParameterAverager(
            self.strategy, model.variables, [model.optimizer, other], **options
        )
        self.train(model, averager, steps)
        with self.strategy.scope():
            other.build(model.trainable_variables)
        self.train(model, averager, 6 - steps)
        return self.weights(model)

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"period": 2, "outer_optimizer": outers.diloco(0.5, 0.5)},
            # Drift is 0.72 of 4 after step 2, and would be 0.56 of the mean.
            {"schedule": avg.DivergenceTriggered(0.6, 2)},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_change_nothing(self, options, steps):
        seldom = self.built_after(6, **options)
        assert self.built_after(steps, **options) == seldom

    def test_leave_the_outer_parameters(self):
        outer = {"outer_optimizer": keras.optimizers.SGD(0.5)}
        # Half of the way from 4 to the mean of 2.25 and 8, 5.125, thrice: what
        # a round leaves is x, and the next mean (0.5625 * x + 8) / 2.
        x = 4.0
        for _ in range(3):
            x += 0.5 * ((0.5625 * x + 8) / 2 - x)
        assert self.built_after(1, period=2, **outer) == [[x, x]]


def test_steps_before_a_rate_of_zero_count():
    with toys.make_strategy().scope():
        # Step 4 is the last one at 0.125, so that its round sees 0.
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(
            [3], [toys.T1_LEARNING_RATE, 0.0]
        )
        model = toys.slope_model(keras.optimizers.SGD(rate))
    averaging = avg.PeriodicAveraging(
        4, outer_optimizer=outers.slow_momentum(0.5)
    )
    x, y = toys.slope_rows(8)
    toys.fit(model, x, y, batch_size=2, callbacks=[averaging])
    assert toys.weight(model) == toys.T1_WEIGHTS[4, 4]


class TestElasticExceptions:
    def test_a_warm_up_leaves_replicas_equal(self):
        assert path(1, 4, warmup_steps=1, elastic_alpha=0.5)[0] == 5.5
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(4, warmup_steps=2, elastic_alpha=0.5)
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        x, y = toys.slope_rows(2)
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        assert seen == [[5.5, 5.5], [6.0625, 6.0625]]

    def test_a_replica_that_is_not_finite_moves_onto_the_mean(self):
        with toys.make_strategy().scope():
            model = toys.slope_model()
        averaging = avg.PeriodicAveraging(
            2, elastic_alpha=0.5, on_non_finite="exclude"
        )
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(toys.scalars(model.trainable_variables[0]))

        x, y = toys.slope_rows(2)
        y[2] = np.nan  # Replica A in step 2.
        toys.fit(model, x, y, batch_size=2, callbacks=[averaging, Look()])
        assert seen[1] == [8.0, 8.0]


class Listens(avg.AdaComm):
    """Notes the loss that it is told at each look."""

    told = []

    def is_due(self, facts, memory):
        self.told.append((facts.step, facts.loss))
        return super().is_due(facts, memory)


@pytest.mark.parametrize("at", [5, 7])
def test_losses_count_on_after_an_interruption(tmp_path, at):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == at:
                raise KeyboardInterrupt

    def train(*callbacks):
        Listens.told.clear()
        with toys.make_strategy().scope():
            model = toys.slope_model(keras.optimizers.SGD(2.0**-6))
        averaging = avg.PeriodicAveraging(schedule=Listens(4, 4))
        x, y = toys.slope_rows(16)
        toys.fit(
            model,
            x,
            y,
            batch_size=2,
            epochs=2,
            callbacks=[averaging, *callbacks],
        )
        return toys.weight(model), dict(Listens.told)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, save_freq=3)

    weight, losses = train(backup())
    with pytest.raises(KeyboardInterrupt):
        train(backup(), Interrupt())
    weight_again, losses_again = train(backup())
    assert weight_again == weight
    assert losses_again
    for step, loss in losses_again.items():
        # The sum of what came before the restart is rounded once more.
        assert loss == pytest.approx(losses[step], rel=1e-6)
