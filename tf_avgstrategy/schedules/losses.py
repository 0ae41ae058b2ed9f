"""Losses: the mean loss of a worker's rows since workers met."""

__all__ = ["LossMeter"]


class LossMeter:
    """Adds up losses, or reads the sums of who does."""

    def __init__(self):
        self._total = 0.0
        self._weight = 0.0
        self._read = None
        self._before = (0.0, 0.0)

    def add(self, loss, weight):
        """Adds a mean loss.

        Args:
            loss: Float.
            weight: Float >= 0, the rows or steps that it is of.
        """
        self._total += loss * weight
        self._weight += weight

    def read_from(self, function):
        """Reads sums in place of adding up.

        Args:
            function: Function without arguments that returns two floats, the
                sum of losses and that of weights so far in this epoch. None
                if there are none.
        """
        self._read = function
        self._before = (0.0, 0.0)

    def since_last_look(self):
        """Returns the mean loss since the last look and its weight."""
        total, weight = self._total, self._weight
        now = self._read and self._read()
        if now is not None:
            total += now[0] - self._before[0]
            weight += now[1] - self._before[1]
        return (total / weight if weight else 0.0, weight)

    def look(self):
        """Begins a new mean."""
        now = self._read and self._read()
        self._before = now or (0.0, 0.0)
        self._total = self._weight = 0.0

    def hold(self):
        """Adds up what is read, before something else is read for a time."""
        now = self._read and self._read()
        if now is not None:
            self._total += now[0] - self._before[0]
            self._weight += now[1] - self._before[1]

    def resume(self):
        """Goes on reading from what there is now."""
        now = self._read and self._read()
        self._before = now or (0.0, 0.0)

    def begin_epoch(self):
        """Is told that what is read has begun anew from zero."""
        self._before = (0.0, 0.0)

    def restore(self, mean):
        """Begins with what `since_last_look` has returned."""
        self.look()
        loss, weight = mean
        self.add(loss, weight)
