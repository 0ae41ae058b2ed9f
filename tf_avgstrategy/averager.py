"""The averager: one recipe for every round, whoever asks for it."""

import json

import tensorflow as tf

from tf_avgstrategy import buckets
from tf_avgstrategy import communicators
from tf_avgstrategy import mean
from tf_avgstrategy import schedules
from tf_avgstrategy import state
from tf_avgstrategy import strategy as strategies

__all__ = ["ParameterAverager"]


class ParameterAverager(tf.train.experimental.PythonState):
    """Averages the replicas of a model every few steps of a training loop.

    A round replaces parameters and optimizer slots of every replica by their
    mean over all replicas, weighted by the rows that each has seen since the
    last round. All new values are computed before the first variable is
    written: a round that fails changes nothing.

    `fit` needs the `PeriodicAveraging` callback instead, which drives one of
    these. `tf.train.Checkpoint(averager=averager)` saves its counters.

    Args:
        strategy: `ParameterAveragingStrategy` in whose scope `variables` and
            `optimizers` were made.
        variables: List of the model's variables, `model.variables`.
        optimizers: A Keras optimizer or a list of them. A single one that is
            not built yet is built here on the trainable variables.
        period: Int >= 1, local steps between two rounds, see `Periodic`.
        warmup_steps: Int >= 0, opening steps each followed by a round.
        slots: What a round does to optimizer slots. "mean" averages them,
            "keep" leaves each replica its own, "reset" sets them to the value
            that they were created with.
        overrides: Dict from regular expression to rule, for single variables.
            `{"embedding": "keep"}` leaves each replica its own embeddings and
            their slots. `describe()` lists the paths.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range, or a variable was not
            made in the strategy's scope.

    Example:

    ```python
    strategy = tf_avgstrategy.ParameterAveragingStrategy()
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam()
    averager = tf_avgstrategy.ParameterAverager(
        strategy, model.variables, optimizer, period=16
    )
    for batch in strategy.experimental_distribute_dataset(dataset):
        train_step(batch)  # a tf.function that calls strategy.run
        averager.step()
    averager.average()
    ```
    """

    def __init__(
        self,
        strategy,
        variables,
        optimizers,
        *,
        period,
        warmup_steps=0,
        slots="mean",
        overrides=None,
    ):
        check_strategy(strategy)
        state.check_slots(slots)
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        self._schedule = schedules.Periodic(period, warmup_steps)
        self._strategy = strategy
        self._communicator = communicators.SingleWorkerCommunicator()
        self._variables = list(variables)
        self._optimizers = list(optimizers)
        self._slots = slots
        self._overrides = dict(overrides or {})
        _check_variables(self._variables)
        state.check_scope(self._variables, self._optimizers, strategy)
        self._build_optimizer()
        self._steps_per_update = state.gradient_accumulation_steps(
            self._optimizers
        )
        self._num_optimizer_variables = None
        self._refresh_rules()
        self._is_pending = False
        self._seen = strategy.training_progress()
        self.steps = 0
        self.rounds = 0

    @property
    def bytes_per_round(self):
        """Int, the bytes of a replica that one round exchanges."""
        self._refresh_rules()
        return sum(buckets.num_bytes(spec) for spec in self._specs())

    def step(self, num_steps=1):
        """Counts training steps and runs a round if one is due.

        Call it after each training step, outside of any `tf.function`. Where
        optimizers accumulate gradients, the schedule counts updates and a
        round waits for the next one.

        Args:
            num_steps: Int >= 0, training steps since the last call.

        Returns:
            Bool, whether a round was run.

        Raises:
            TypeError: If `num_steps` is not an integer.
            ValueError: If it is negative.
        """
        _check_eager()
        schedules.check_integer("num_steps", num_steps, at_least=0)
        before = self.steps // self._steps_per_update
        self.steps += num_steps
        after = self.steps // self._steps_per_update
        self._is_pending |= any(
            map(self._schedule.is_due, range(before + 1, after + 1))
        )
        if not self._is_pending or state.holds_half_gradients(self._optimizers):
            return False
        self.average()
        return True

    def average_if_stepped(self):
        """Runs a round if a training step came since the last one.

        Returns:
            Bool, whether a round was run.
        """
        steps = self._strategy.training_progress().steps
        if steps == self._seen.steps:
            return False
        self.average()
        return True

    def average(self, weights=None):
        """Runs a round now. The schedule's phase does not change.

        Args:
            weights: Sequence of numbers >= 0, one per local replica. `None`
                takes the rows that each has seen since the last round, or
                equal weights if none has seen any.

        Raises:
            ValueError: If weights are negative, not finite, or all 0.
        """
        _check_eager()
        progress = self._strategy.training_progress()
        if weights is None:
            rows = zip(progress.rows, self._seen.rows)
            weights = [now - before for now, before in rows]
            weights = weights if any(weights) else [1] * len(weights)
        self._check_weights(weights)
        shares = mean.shares(weights)
        self._refresh_rules()
        self._round(tf.constant(shares.ratios, tf.float64), shares.anchor)
        self._seen = progress
        self._is_pending = False
        self.rounds += 1

    def describe(self):
        """Returns a table, as a string, of what a round does to what."""
        self._refresh_rules()
        rows = [("variable", "kind", "rule", "dtype", "shape")]
        for rule in self._rules:
            dtype, shape = "", ""
            if rule.copies:
                dtype = rule.copies[0].dtype.name
                shape = str(tuple(rule.copies[0].shape))
            rows.append((rule.path, rule.kind, rule.rule, dtype, shape))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def is_for(self, variables, optimizers):
        """Returns whether it averages just these variables and optimizers."""
        ours = [*self._variables, *self._optimizers]
        theirs = [*variables, *optimizers]
        return [id(o) for o in ours] == [id(t) for t in theirs]

    def start_counting_rows(self):
        """Forgets rows that were seen before, perhaps by another model."""
        self._seen = self._strategy.training_progress()

    def keeps_local(self, kind):
        """Returns whether a variable of this kind stays local in rounds."""
        return any(r.rule == "keep" for r in self._rules if r.kind == kind)

    def serialize(self):
        """Returns the counters as a string, for `tf.train.Checkpoint`."""
        return json.dumps({"steps": self.steps, "rounds": self.rounds})

    def deserialize(self, string_value):
        """Takes the counters back from `serialize`."""
        counters = json.loads(string_value)
        self.steps = counters["steps"]
        self.rounds = counters["rounds"]
        self.start_counting_rows()

    def _build_optimizer(self):
        unbuilt = [o for o in self._optimizers if not o.built]
        if len(self._optimizers) == 1 and unbuilt:
            with self._strategy.scope():
                unbuilt[0].build([v for v in self._variables if v.trainable])

    def _check_weights(self, weights):
        num_replicas = len(self._seen.rows)
        if len(weights) != num_replicas:
            raise ValueError(
                "`weights` must hold one number per local replica, here "
                f"{num_replicas}. Received: weights={list(weights)}. Pass "
                "None to weigh replicas by the rows that they have seen."
            )

    def _refresh_rules(self):
        """Takes in slots that optimizers built since the last time."""
        num_variables = [len(o.variables) for o in self._optimizers]
        if num_variables == self._num_optimizer_variables:
            return
        self._rules = state.state_rules(
            self._variables,
            self._optimizers,
            slots=self._slots,
            overrides=self._overrides,
        )
        self._num_optimizer_variables = num_variables
        self._plan = buckets.plan_buckets(
            self._specs(), self._communicator.bucket_bytes
        )
        self._round = tf.function(self._run_round, autograph=False)

    def _specs(self):
        return [
            tf.TensorSpec(
                rule.copies[0].shape,
                mean.accumulation_dtype(rule.copies[0].dtype),
            )
            for rule in self._rules
            if rule.travels
        ]

    def _run_round(self, ratios, anchor):
        self._finish(*self._begin(ratios, anchor))

    def _begin(self, ratios, anchor):
        """Takes the snapshot that travels and sends it.

        Returns:
            The buffers summed over all workers, and a list of new values of
            the rules that do not travel.
        """
        travelling = [r for r in self._rules if r.travels]
        snapshot = [_mean_of_copies(r, ratios, anchor) for r in travelling]
        settled = [_local_value(r) for r in self._rules if not r.travels]
        buffers = buckets.pack(self._plan, snapshot)
        return self._communicator.all_reduce_sum(buffers), settled

    def _finish(self, buffers, settled):
        """Writes the mean to every replica, all of it or nothing."""
        averaged = iter(buckets.unpack(self._plan, buffers))
        settled = iter(settled)
        new_values = [
            next(averaged) if rule.travels else next(settled)
            for rule in self._rules
        ]
        computed = [value for value in new_values if value is not None]
        # Through one node: an edge from every value to every write would make
        # their number grow with the square of the number of variables.
        with tf.control_dependencies([tf.group(*computed)]):
            for rule, value in zip(self._rules, new_values):
                if rule.rule == "keep in step":
                    _empty(rule.copies, value)
                elif value is not None:
                    _write(rule.copies, value)


def check_strategy(strategy):
    """Raises a ValueError unless replicas of the strategy are independent."""
    if not isinstance(strategy, strategies.ParameterAveragingStrategy):
        raise ValueError(
            "Parameter averaging needs a `ParameterAveragingStrategy`: under "
            "any other strategy replicas are not independent, and averaging "
            "does nothing. Received: a model or averager under "
            f"{type(strategy).__name__}. Make model and optimizer inside "
            "`with tf_avgstrategy.ParameterAveragingStrategy().scope():`."
        )


def _check_variables(variables):
    if not variables:
        raise ValueError(
            "`variables` must hold the variables of a model that is built. "
            "Received: an empty list. Build the model before, by an `Input` "
            "layer or by calling it on data inside `strategy.scope()`."
        )


def _check_eager():
    if not tf.executing_eagerly():
        raise RuntimeError(
            "Rounds are decided in Python and must be called outside of any "
            "`tf.function`. Received: a call while a function was being "
            "traced. Call the averager after the traced training step."
        )


def _mean_of_copies(rule, ratios, anchor):
    values = [copy.read_value() for copy in rule.copies]
    with tf.device(rule.copies[anchor].device):
        if rule.rule == "mean":
            return mean.weighted_mean(values, ratios, anchor)
        means = [copy.read_value() for copy in rule.partner]
        center = mean.weighted_mean(means, ratios, anchor)
        return mean.pooled_variance(values, means, center, ratios, anchor)


def _local_value(rule):
    """The new value of a rule that needs no mean, None if it stays."""
    if rule.rule == "keep":
        return None
    if rule.rule == "keep in step":
        return _is_behind(rule.partner)
    first = rule.copies[0]
    with tf.device(first.device):
        if rule.rule == "reset":
            return tf.fill(
                first.shape, tf.cast(rule.initial_value, first.dtype)
            )
        values = tf.stack([copy.read_value() for copy in rule.copies])
        if rule.rule == "minimum":
            return tf.reduce_min(values, axis=0)
        if rule.rule == "maximum":
            return tf.reduce_max(values, axis=0)
        scales = tf.stack([copy.read_value() for copy in rule.partner])
        agree = tf.logical_and(
            tf.reduce_all(tf.equal(values, values[0])),
            tf.reduce_all(tf.equal(scales, scales[0])),
        )
        return tf.where(agree, values[0], tf.zeros_like(values[0]))


def _is_behind(iterations):
    """Which replicas a round moves on, a bool vector.

    They hold gradients of an update that has then been made without them.
    """
    with tf.device(iterations[0].device):
        counts = tf.stack([copy.read_value() for copy in iterations])
        return tf.less(counts, tf.reduce_max(counts))


def _empty(copies, is_behind):
    for replica, copy in enumerate(copies):
        with tf.device(copy.device):
            tf.cond(
                is_behind[replica],
                lambda copy=copy: tf.group(copy.assign(tf.zeros_like(copy))),
                tf.no_op,
            )


def _write(copies, value):
    for copy in copies:
        with tf.device(copy.device):
            copy.assign(tf.cast(value, copy.dtype), read_value=False)
