"""A kept mean: the running mean that an averager may have been asked for."""

from tf_avgstrategy.state import running_means

__all__ = ["KeptMean"]


class KeptMean:
    """A running mean over rounds, or none, and what is to be restored to it.

    Attributes:
        counts_rounds: Bool, whether rounds count for it.
    """

    def __init__(self):
        self.counts_rounds = True
        self._mean = None
        self._restored = {}

    def keep(self, rules, decay):
        """Begins to keep one, or goes on with that of the same decay.

        Args:
            rules: List of `StateRule`.
            decay: Float in (0, 1) or None, see
                `ParameterAverager.keep_running_mean`.
        """
        if self._mean is None:
            self._mean = running_means.RunningMean(rules, decay)
            self._mean.restore(self._restored)
        elif self._mean.decay != decay:
            raise ValueError(
                "There can be one running mean of a model. Received: decay="
                f"{decay!r} where one of decay={self._mean.decay!r} is kept. "
                "Pass the same, or make another averager."
            )

    def in_place(self):
        """Returns a context in which every replica holds the mean."""
        if self._mean is None:
            raise RuntimeError(
                "There must be a running mean to put into the model. Received: "
                "an averager that keeps none. Call `keep_running_mean` before "
                "training, or pass `AveragedModelCheckpoint` to `fit`."
            )
        return self._mean.in_place()

    def note(self, rules, left_by_round):
        """Takes in what a round has made of variables, if rounds count."""
        if self._mean is not None and self.counts_rounds:
            self._mean.update(rules, left_by_round)

    def tensors(self):
        """Returns all of it, a dict from string to tensor, empty if none."""
        return {} if self._mean is None else self._mean.tensors()

    def restore(self, tensors):
        """Takes back what `tensors` returned, now or when one is kept."""
        self._restored = tensors
        if self._mean is not None:
            self._mean.restore(tensors)

    def take_chiefs(self, communicator):
        """Gives every worker the chief's."""
        if self._mean is not None and communicator.size > 1:
            tensors = self._mean.tensors()
            values = communicator.broadcast(list(tensors.values()))
            self._mean.restore(dict(zip(tensors, values)))
