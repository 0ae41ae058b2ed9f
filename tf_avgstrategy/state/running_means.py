"""Running means: the mean over time of what rounds leave of a model."""

import contextlib

import tensorflow as tf

from tf_avgstrategy.state import variables
from tf_avgstrategy.tensors import mean

__all__ = ["RunningMean", "check_decay"]

_KINDS = ("weight", "statistic", "variance", "iterate", "ema")


class RunningMean:
    """The mean over rounds of a model's averaged variables, on the host.

    Without a `decay` each round counts the same (stochastic weight averaging).
    With one it is an exponential moving average that begins at the first
    round. A variable that does not travel in a round stays as it is.

    Args:
        rules: List of `StateRule` of a model.
        decay: Float in (0, 1), what is kept of the mean at a round, or None.

    References:
        Izmailov et al., Averaging Weights Leads to Wider Optima and Better
        Generalization, UAI 2018, https://arxiv.org/abs/1803.05407.
    """

    def __init__(self, rules, decay=None):
        check_decay(decay)
        self.decay = decay
        self._rules = [
            rule for rule in rules if rule.travels and rule.kind in _KINDS
        ]
        self._places = {
            id(rule.copies[0]): place for place, rule in enumerate(self._rules)
        }
        with tf.init_scope(), tf.device("CPU:0"):
            self._means = [
                tf.Variable(
                    tf.zeros(
                        rule.copies[0].shape,
                        mean.accumulation_dtype(rule.copies[0].dtype),
                    ),
                    trainable=False,
                )
                for rule in self._rules
            ]
            self._counts = tf.Variable(
                tf.zeros([len(self._rules)], tf.int64), trainable=False
            )

    def update(self, rules, left):
        """Takes in what a round has left.

        Args:
            rules: List of the `StateRule` of what travelled.
            left: Function of a `StateRule` that returns a tensor.
        """
        counts = self._counts.numpy()
        for rule in rules:
            place = self._places.get(id(rule.copies[0]))
            if place is None:
                continue
            counts[place] += 1
            variable = self._means[place]
            with tf.device("CPU:0"):
                value = tf.cast(left(rule), variable.dtype)
                variable.assign_add(
                    (value - variable) * self._share(int(counts[place]))
                )
        self._counts.assign(counts)

    def _share(self, count):
        if count == 1 or self.decay is None:
            return 1 / count
        return 1 - self.decay

    @contextlib.contextmanager
    def in_place(self):
        """Gives every replica the mean, and back what it had, bit for bit."""
        held = [
            (rule.copies, [copy.read_value() for copy in rule.copies], average)
            for rule, average, count in zip(
                self._rules, self._means, self._counts.numpy()
            )
            if count
        ]
        try:
            for copies, _, average in held:
                values = [average.read_value()] * len(copies)
                variables.assign_copies(copies, values)
            yield
        finally:
            for copies, values, _ in held:
                variables.assign_copies(copies, values)

    def tensors(self):
        """Returns all of it, a dict from string to tensor."""
        named = {str(p): m.read_value() for p, m in enumerate(self._means)}
        return {**named, "counts": self._counts.read_value()}

    def restore(self, tensors):
        """Takes back what `tensors` returned, of the same model."""
        if {k: t.shape for k, t in tensors.items()} != {
            k: t.shape for k, t in self.tensors().items()
        }:
            return
        for place, variable in enumerate(self._means):
            variable.assign(tensors[str(place)])
        self._counts.assign(tensors["counts"])


def check_decay(decay):
    """Raises a ValueError unless it is a decay of a moving average, or None."""
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if decay is not None and not (is_number and 0 < decay < 1):
        raise ValueError(
            "`decay` must be in (0, 1), what a moving average keeps at a "
            f"round. Received: decay={decay!r}. Pass None for the mean of all "
            "rounds."
        )
