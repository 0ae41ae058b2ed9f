"""Rounds: what one averaging reads, sends and writes."""

import math

import tensorflow as tf

from tf_avgstrategy.state import state
from tf_avgstrategy.state import variables
from tf_avgstrategy.tensors import buckets
from tf_avgstrategy.tensors import mean

__all__ = ["Round", "outer_rules", "specs"]

_AGREEING = ("minimum", "maximum", "restart")


class Round:
    """One averaging of the variables of a fixed list of rules.

    With one worker means are taken around the replica with the largest share.
    With several, the replicas of other workers are not at hand. So each keeps
    references, which are the same on all of them: the values that the last
    round left. What travels is how far the replicas are from their reference.

    Args:
        rules: List of `StateRule`, on every worker the same.
        exchange: `Exchange`. `None`: no other worker takes part.
        references: List of `tf.Variable`, one for each of the rules that
            travel, bit for bit the same on every worker. May be empty with one
            worker.
        outer: Object with the methods of `outer_step.OuterStep`, whose
            parameters are the references of the `outer_rules`. `None`: the
            mean is taken as it is.
        elastic_alpha: Float in (0, 1], how far towards the mean the replicas
            move in an elastic round.
        measures: Bool, whether to find out how far replicas are from the mean.
    """

    def __init__(
        self,
        rules,
        exchange=None,
        references=(),
        outer=None,
        elastic_alpha=1.0,
        measures=False,
    ):
        self._exchange = exchange
        self._rules = rules
        self._agreeing = [rule for rule in rules if rule.rule in _AGREEING]
        self._travelling = state.travelling_rules(rules)
        # Of what stays local, NaN does not spread. But it must not be saved.
        known = {id(rule.copies[0]) for rule in self._travelling}
        self._kept = [
            rule
            for rule in rules
            if rule.rule == "keep"
            and rule.copies
            and rule.copies[0].dtype.is_floating
            and id(rule.copies[0]) not in known
        ]
        self._places = {
            id(rule.copies[0]): place
            for place, rule in enumerate(self._travelling)
        }
        self._references = list(references)
        self._outer = outer
        self._elastic_alpha = elastic_alpha
        with tf.init_scope(), tf.device("CPU:0"):
            # Squares of the local replicas' distances, and of the mean's norm.
            self._squares = (
                tf.Variable(tf.zeros([2], tf.float64), trainable=False)
                if measures
                else None
            )
        self._variances = [r for r in self._travelling if r.rule == "pooled"]
        self._means = [r for r in self._travelling if r.rule != "pooled"]
        self._mean_plan, self._variance_plan = (
            buckets.plan_buckets(
                specs(part), exchange.bucket_bytes if exchange else 0
            )
            for part in (self._means, self._variances)
        )
        self._read_state = tf.function(self._state, autograph=False)
        self._take_means = tf.function(self._mean_offsets, autograph=False)
        self._take_variances = tf.function(
            self._variance_offsets, autograph=False
        )
        self._write = tf.function(self._write_all, autograph=False)
        self._whole = tf.function(self._run_alone, autograph=False)
        self._distances = tf.function(self._drift, autograph=False)

    @property
    def travelling(self):
        """List of the `StateRule` of the variables that travel."""
        return self._travelling

    @property
    def checked(self):
        """List of the `StateRule` of what must be finite: also what is kept."""
        return self._travelling + self._kept

    @property
    def references(self):
        """List of tensors, what the last round left of what travels."""
        return [reference.read_value() for reference in self._references]

    @property
    def agrees_on_floats(self):
        """List of A bools: which of those variables are floating point."""
        return [rule.copies[0].dtype.is_floating for rule in self._agreeing]

    def replica_state(self):
        """Returns what workers must know of each other before a round.

        Returns:
            Two NumPy arrays. Bool of shape `[R, T]`: whether each of the T
            variables of `checked` is finite on each of the R local replicas.
            Int64 of shape `[A, 2]`: the smallest and the largest value on the
            local replicas of the A variables that replicas agree on. Those of
            floating point variables are float64 numbers of which int64 is
            only the container, see `agrees_on_floats`.
        """
        is_finite, extremes = self._read_state()
        return is_finite.numpy(), extremes.numpy()

    @property
    def squares(self):
        """Two floats, what the last round has found out of weights.

        The mean square of the local replicas' distances from the mean of all,
        and the square of the norm of that.
        """
        return self._squares.numpy().tolist()

    def drift(self):
        """Returns how far replicas are from the references, a float.

        The L2 distance of all weights, by the norm of the references. Mean
        over the local replicas.
        """
        return float(self._distances())

    def run(self, shares, extremes, is_elastic=False, inner_rate=math.nan):
        """Replaces the variables of every replica by their mean.

        Args:
            shares: `Shares` of the local replicas.
            extremes: Int64 array of shape `[A, 2]`, like those of
                `replica_state` but over all replicas of all workers.
            is_elastic: Bool, whether replicas move towards the mean as far as
                `elastic_alpha` says, or onto it.
            inner_rate: Float, the learning rate of the replicas.
        """
        sums = self.receive(self.begin(shares), shares)
        self.write(sums, shares, extremes, is_elastic, inner_rate)

    def begin(self, shares):
        """Takes the snapshot that travels and begins to exchange it.

        Workers must have agreed on this round just before.

        Args:
            shares: `Shares` of the local replicas.

        Returns:
            What `receive` takes. `None` with one worker, where nothing travels.
        """
        if self._exchange is None:
            return None
        ratios = tf.constant(shares.ratios, tf.float64)
        return self._exchange.begin(self._take_means(ratios, shares.anchor))

    def receive(self, handle, shares):
        """Waits for the sums, and exchanges what needs the means.

        Args:
            handle: What `begin` returned.
            shares: See `begin`.

        Returns:
            Two lists of buffers, summed over all workers: of what has a mean,
            and of the variances, which need these means. `None` with one
            worker.
        """
        if self._exchange is None:
            return None
        sums = self._exchange.finish(handle)
        if not self._variances:
            return sums, []
        ratios = tf.constant(shares.ratios, tf.float64)
        offsets = self._take_variances(sums, ratios, shares.anchor)
        return sums, self._exchange.finish(self._exchange.begin(offsets))

    def write(self, sums, shares, extremes, is_elastic, inner_rate):
        """Writes what came of `receive` to every replica, all or nothing.

        Args:
            sums: What `receive` returned.
            shares: See `run`.
            extremes: See `run`.
            is_elastic: See `run`.
            inner_rate: See `run`.
        """
        ratios = tf.constant(shares.ratios, tf.float64)
        extremes = tf.constant(extremes, tf.int64)
        is_elastic = is_elastic and self._elastic_alpha < 1
        inner_rate = tf.constant(inner_rate, tf.float32)

        def write():
            if sums is None:
                self._whole(
                    ratios, extremes, shares.anchor, is_elastic, inner_rate
                )
            else:
                self._write(*sums, extremes, 0, is_elastic, inner_rate)

        # An outer optimizer would take the step of all replicas in their scope.
        if self._outer is None:
            write()
        else:
            variables.outside_of_scopes(write)
        if self._travelling:
            variables.note_writes(self._travelling[0].copies)

    def _run_alone(self, ratios, extremes, anchor, is_elastic, inner_rate):
        sums = self._mean_offsets(ratios, anchor)
        variance_sums = self._variance_offsets(sums, ratios, anchor)
        self._write_all(
            sums, variance_sums, extremes, anchor, is_elastic, inner_rate
        )

    def _state(self):
        is_finite = [
            tf.stack([_is_finite(copy) for copy in rule.copies])
            for rule in self.checked
        ]
        extremes = [_extremes(rule.copies) for rule in self._agreeing]
        return (
            tf.stack(is_finite, axis=1)
            if is_finite
            else tf.zeros([1, 0], tf.bool),
            tf.stack(extremes) if extremes else tf.zeros([0, 2], tf.int64),
        )

    def _mean_offsets(self, ratios, anchor):
        offsets = [
            self._offset(rule, _read(rule.copies), ratios, anchor)
            for rule in self._means
        ]
        return buckets.pack(self._mean_plan, offsets)

    def _variance_offsets(self, sums, ratios, anchor):
        means = self._new_means(sums, anchor)
        offsets = []
        for rule in self._variances:
            with tf.device(rule.copies[anchor].device):
                totals = mean.total_variances(
                    _read(rule.copies),
                    _read(rule.partner),
                    means[id(rule.partner[0])],
                )
            offsets.append(self._offset(rule, totals, ratios, anchor))
        return buckets.pack(self._variance_plan, offsets)

    def _offset(self, rule, values, ratios, anchor):
        """How far the local replicas take the mean from the rule's center."""
        shares = tf.unstack(ratios, len(values))
        with tf.device(rule.copies[anchor].device):
            center = self._center(rule, anchor)
            if not self._references and rule.rule != "pooled":
                # The anchor's distance from itself.
                del values[anchor], shares[anchor]
            return mean.weighted_offset(values, center, shares)

    def _center(self, rule, anchor):
        if self._references:
            place = self._places[id(rule.copies[0])]
            return self._references[place].read_value()
        return rule.copies[anchor].read_value()

    def _new_means(self, sums, anchor):
        return self._moved(self._means, self._mean_plan, sums, anchor)

    def _moved(self, rules, plan, sums, anchor):
        """New values of what travels, by the id of the first copy."""
        moved = {}
        for rule, offset in zip(rules, buckets.unpack(plan, sums)):
            with tf.device(rule.copies[anchor].device):
                value = tf.cast(self._center(rule, anchor), offset.dtype)
                if self._references or len(rule.copies) > 1:
                    # Else nothing is added, or -0.0 would become 0.0.
                    value = value + offset
                moved[id(rule.copies[0])] = value
        return moved

    def _write_all(
        self, sums, variance_sums, extremes, anchor, is_elastic, inner_rate
    ):
        moved = {
            **self._new_means(sums, anchor),
            **self._moved(
                self._variances, self._variance_plan, variance_sums, anchor
            ),
        }
        agreed = {
            id(rule.copies[0]): _from_container(rule, extremes[place])
            for place, rule in enumerate(self._agreeing)
        }
        new_values = [
            (rule, _new_value(rule, moved, agreed)) for rule in self._rules
        ]
        computed = [v for _, v in new_values if v is not None]
        if self._squares is not None:
            squares = self._measure(moved)
            computed.append(squares)
        # Through one node: an edge from every value to every write would make
        # their number grow with the square of the number of variables.
        with tf.control_dependencies([tf.group(*computed, *moved.values())]):
            if self._squares is not None:
                self._squares.assign(squares)
            outer = self._outer_values(sums, inner_rate)
            for rule, value in new_values:
                value = outer.get(
                    id(rule.copies[0]) if rule.copies else 0, value
                )
                if rule.rule == "keep in step":
                    _empty(rule.copies, value)
                elif value is not None and is_elastic and rule.travels:
                    _move(rule.copies, value, self._elastic_alpha)
                elif value is not None:
                    _write(rule.copies, value)
            for rule, reference in zip(self._travelling, self._references):
                key = id(rule.copies[0])
                # As the replicas hold it, whatever the reference's dtype.
                value = tf.cast(
                    outer.get(key, moved[key]), rule.copies[0].dtype
                )
                _write([reference], value)

    def _measure(self, moved):
        weights = [rule for rule in self._means if rule.kind == "weight"]
        means = [moved[id(rule.copies[0])] for rule in weights]
        copies = zip(*(rule.copies for rule in weights))
        squares = [mean.distance(_read(own), means) ** 2 for own in copies]
        norm = mean.norm(means)
        if not squares:
            return tf.zeros([2], tf.float64)
        return tf.stack([tf.add_n(squares) / len(squares), norm**2])

    def _outer_values(self, sums, inner_rate):
        """Where an outer optimizer takes weights, by the first copy's id."""
        if self._outer is None:
            return {}
        offsets = dict(
            zip(
                [id(rule.copies[0]) for rule in self._means],
                buckets.unpack(self._mean_plan, sums),
            )
        )
        keys = [id(rule.copies[0]) for rule in outer_rules(self._travelling)]
        # Offsets are means minus outer parameters.
        self._outer.take([-offsets[key] for key in keys], inner_rate)
        return {
            key: parameter.read_value()
            for key, parameter in zip(keys, self._outer.parameters)
        }

    def _drift(self):
        pairs = [
            (rule, reference.read_value())
            for rule, reference in zip(self._travelling, self._references)
            if rule.kind == "weight"
        ]
        references = [reference for _, reference in pairs]
        copies = zip(*(rule.copies for rule, _ in pairs))
        distances = [mean.distance(_read(own), references) for own in copies]
        norm = mean.norm(references)
        drift = tf.add_n(distances) / len(distances)
        # From zeros any step is far.
        return tf.where(drift > 0, drift / norm, 0.0)


def outer_rules(rules):
    """Returns the rules of what an outer optimizer takes its step on.

    That is weights alone: a step beyond the mean of variances or of squared
    gradients could make them negative.

    Args:
        rules: List of `StateRule`.
    """
    return [r for r in rules if r.kind == "weight" and r.rule == "mean"]


def specs(rules):
    """Returns the `tf.TensorSpec` of what travels for each of these rules."""
    return [
        tf.TensorSpec(
            rule.copies[0].shape, mean.accumulation_dtype(rule.copies[0].dtype)
        )
        for rule in rules
    ]


def _read(copies):
    return [copy.read_value() for copy in copies]


def _is_finite(copy):
    with tf.device(copy.device):
        return tf.reduce_all(tf.math.is_finite(copy.read_value()))


def _extremes(copies):
    """The smallest and the largest value in an int64 container."""
    is_floating = copies[0].dtype.is_floating
    dtype = tf.float64 if is_floating else tf.int64
    values = tf.stack([tf.cast(v, dtype) for v in _read(copies)])
    extremes = tf.stack([tf.reduce_min(values), tf.reduce_max(values)])
    return tf.bitcast(extremes, tf.int64) if is_floating else extremes


def _from_container(rule, extremes):
    if rule.copies[0].dtype.is_floating:
        extremes = tf.bitcast(extremes, tf.float64)
    return tuple(tf.unstack(extremes, 2))


def _new_value(rule, moved, agreed):
    """What a round makes of a variable, None if it stays as it is."""
    if rule.travels:
        return moved[id(rule.copies[0])]
    if rule.rule == "keep":
        return None
    first = rule.copies[0]
    with tf.device(first.device):
        if rule.rule == "keep in step":
            return _is_behind(rule.partner, agreed)
        if rule.rule == "reset":
            return tf.fill(
                first.shape, tf.cast(rule.initial_value, first.dtype)
            )
        least, most = agreed[id(first)]
        if rule.rule == "minimum":
            return least
        if rule.rule == "maximum":
            return most
        least_scale, most_scale = agreed[id(rule.partner[0])]
        agree = tf.logical_and(least == most, least_scale == most_scale)
        return tf.where(agree, most, tf.zeros_like(most))


def _is_behind(iterations, agreed):
    """Which replicas a round moves on, a bool vector.

    They hold gradients of an update that has then been made without them.
    """
    counts = tf.stack([tf.cast(v, tf.int64) for v in _read(iterations)])
    return tf.less(counts, agreed[id(iterations[0])][1])


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


def _move(copies, value, alpha):
    """Moves each copy a part of the way to a value."""
    for copy in copies:
        with tf.device(copy.device):
            before = tf.cast(copy.read_value(), value.dtype)
            moved = before + alpha * (value - before)
            copy.assign(tf.cast(moved, copy.dtype), read_value=False)
