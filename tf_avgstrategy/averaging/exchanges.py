"""Exchanges: how what replicas have done becomes a sum over all workers."""

import abc

__all__ = ["AllReduce", "Exchange"]


class Exchange(abc.ABC):
    """How the workers that take part in a round add up their buffers.

    A round packs how far its replicas are from what the last round left into
    buffers, each weighted by its share. It begins the exchange of these, later
    finishes it, and makes new values of the sums. What happens in between, on
    which way and to which others, is for the exchange to decide. All workers
    begin and finish the same exchanges in the same order, after they have told
    each other that a round takes place.

    Args:
        communicator: `Communicator` of more than one worker.
    """

    def __init__(self, communicator):
        self.communicator = communicator

    @property
    def bucket_bytes(self):
        """Int >= 0, the size up to which tensors are packed into one buffer."""
        return self.communicator.bucket_bytes

    @abc.abstractmethod
    def begin(self, offsets):
        """Takes the buffers of this worker and begins to send them.

        Args:
            offsets: List of flat floating point tensors, on every worker of
                the same shapes and dtypes. They are the caller's to keep: what
                is sent must not change if they do.

        Returns:
            What `finish` takes.
        """

    @abc.abstractmethod
    def finish(self, handle):
        """Waits for what `begin` has begun.

        Args:
            handle: What `begin` returned.

        Returns:
            List of tensors with the shapes and dtypes of the buffers: their
            sums over all workers, bit for bit the same on every worker.

        Raises:
            WorkerLostError: If a worker does not take part in time.
        """


class AllReduce(Exchange):
    """One all-reduce, for which every worker waits."""

    def begin(self, offsets):
        """See `Exchange.begin`."""
        return self.communicator.all_reduce_sum(offsets, is_agreed=True)

    def finish(self, handle):
        """See `Exchange.finish`."""
        return handle
