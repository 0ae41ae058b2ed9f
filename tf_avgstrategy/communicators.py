"""Communicators: how buffers travel between workers."""

import tensorflow as tf

__all__ = ["SingleWorkerCommunicator"]


class SingleWorkerCommunicator:
    """The communicator of a job with one worker: nothing travels.

    It defines what a communicator is. Its operations are calls that every
    worker makes in the same order, usable eagerly and in a `tf.function`.

    Attributes:
        rank: Int in `[0, size)`, this worker's index.
        size: Int >= 1, the number of workers.
        bucket_bytes: Int >= 0, the buffer size up to which it pays to fuse
            tensors into one message. 0: fusing only costs a copy here.
    """

    rank = 0
    size = 1
    bucket_bytes = 0

    def all_reduce_sum(self, tensors):
        """Sums tensors over all workers.

        Args:
            tensors: List of tensors, on every worker the same number of them
                with the same shapes and dtypes.

        Returns:
            List of the sums, on every worker the same.
        """
        return list(tensors)

    def broadcast(self, tensors, root=0):
        """Returns the list of `tensors` of the worker with rank `root`."""
        del root
        return list(tensors)

    def all_gather(self, tensor):
        """Stacks one tensor of each worker along a new axis 0, by rank."""
        return tf.expand_dims(tensor, axis=0)

    def barrier(self):
        """Returns when every worker has called it."""

    def close(self):
        """Ends communication. Further calls of other operations fail."""
