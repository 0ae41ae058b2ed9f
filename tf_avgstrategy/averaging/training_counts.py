"""Training counts: what replicas have done since each fragment's last round."""

import numpy as np

__all__ = ["TrainingCounts"]


class TrainingCounts:
    """Steps and rows of the local replicas since an event of each fragment.

    Args:
        strategy: `ParameterAveragingStrategy`.
        num_fragments: Int >= 1.
    """

    def __init__(self, strategy, num_fragments):
        self._strategy = strategy
        self._seen = [strategy.training_progress()] * num_fragments

    def now(self):
        """Returns the `TrainingProgress` of the local replicas."""
        return self._strategy.training_progress()

    def begin(self):
        """Forgets what was before, perhaps of another model."""
        self._seen = [self.now()] * len(self._seen)

    def fit_to(self, num_fragments):
        """Goes on with another number of fragments."""
        if num_fragments != len(self._seen):
            stalest = min(self._seen, key=lambda seen: seen.steps)
            self._seen = [stalest] * num_fragments

    @property
    def num_replicas(self):
        """Int, the local replicas."""
        return len(self._seen[0].rows)

    def since(self):
        """Returns what was done since the event of each fragment.

        Returns:
            List of ints, the training steps, and list of lists of ints, the
            rows of each replica.
        """
        now = self.now()
        return (
            [now.steps - seen.steps for seen in self._seen],
            [np.subtract(now.rows, seen.rows).tolist() for seen in self._seen],
        )

    def note(self, places, progress):
        """Remembers that it was the event of these, with this progress."""
        for place in places:
            self._seen[place] = progress

    def restore(self, stepped, rows):
        """Takes back what `since` returned."""
        now = self.now()
        if len(stepped) != len(self._seen):
            # Cut in another way: as what has waited for longest.
            place = int(np.argmax(stepped))
            stepped = [stepped[place]] * len(self._seen)
            rows = [rows[place]] * len(self._seen)
        self._seen = [
            type(now)(
                steps=now.steps - own_steps,
                rows=tuple(np.subtract(now.rows, own_rows).tolist()),
            )
            for own_steps, own_rows in zip(stepped, rows)
        ]
