"""Communicators: how tensors travel between workers."""

import abc
import hashlib
import re
import threading
import time

import numpy as np
import tensorflow as tf

__all__ = [
    "Communicator",
    "SingleWorkerCommunicator",
    "WorkerLostError",
]

# Every operation first exchanges one message of this many bytes: which
# operation it is, on what, and what of it fits into the rest.
_MESSAGE_BYTES = 256
_NUM_COUNT_BYTES = 8
_SIGNATURE_BYTES = 16
_INLINE_BYTES = _MESSAGE_BYTES - _NUM_COUNT_BYTES - _SIGNATURE_BYTES
_OPERATIONS = ("all_reduce_sum", "broadcast", "all_gather", "barrier")

# How often and at what distance the others are asked again whether they live.
_NUM_PROBES = 5
_PROBE_SECONDS = 0.4


class WorkerLostError(RuntimeError):
    """An exchange that failed because a worker is gone or does not answer.

    What the exchange would have written is as it was before. This process can
    still save its state, but cannot exchange anything any more.

    Attributes:
        lost: Tuple of ints, the ranks that did not answer afterwards.
    """

    def __init__(self, message, lost=()):
        super().__init__(message)
        self.lost = tuple(lost)


class Communicator(abc.ABC):
    """How the workers of a job exchange tensors.

    Its operations are collective: every worker makes the same calls in the
    same order, eagerly. Before anything of a call travels, the workers compare
    which operation it is and on what shapes and dtypes, so that calls in a
    different order are an error on all of them and never mix up tensors.

    A subclass implements `_gather`, `_reduce` and `_broadcast`.

    Args:
        rank: Int in `[0, size)`, this worker's index.
        size: Int >= 1, the number of workers.

    Attributes:
        rank: See above.
        size: See above.
        name: String, the transport's name.
        bucket_bytes: Int >= 0, the buffer size up to which it pays to fuse
            tensors into one message. 0: fusing only costs a copy.
    """

    name = ""
    bucket_bytes = 0
    # What the transport raises when an exchange fails.
    _errors = (tf.errors.OpError, OSError)

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size
        self._num_calls = 0
        self._failure = None
        self._lock = threading.Lock()

    @property
    def is_usable(self):
        """Bool, whether no exchange has failed and it was not closed."""
        return self._failure is None

    def all_reduce_sum(self, tensors, is_agreed=False):
        """Sums tensors over all workers.

        Args:
            tensors: List of floating point or integer tensors, on every worker
                the same number of them with the same shapes and dtypes.
            is_agreed: Bool, whether the call before, which was compared, has
                told every worker that this one follows, on which tensors. It
                is not compared then, which saves an exchange.

        Returns:
            List of the sums, with the tensors' shapes and dtypes, bit for bit
            the same on every worker. Float16 and bfloat16 may be added in
            float32 or in their own dtype.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if is_agreed:
            self._check_usable("all_reduce_sum")
        else:
            self._start("all_reduce_sum", _signature(tensors))
        return self._on_filled(tensors, self._reduce)

    def all_reduce_sum_in_graph(self, tensors, *, keys, tokens):
        """Sums tensors over all workers within a `tf.function`.

        Calls are not compared: what each worker's function calls at the same
        place must have the same keys, shapes and dtypes.

        Args:
            tensors: List of flat float32 or float64 tensors.
            keys: List of as many ints below 2**30, no two of them equal.
            tokens: List of as many resource handles. Calls with one token
                begin in their order.

        Returns:
            List of the sums.
        """
        raise ValueError(
            '`gradient_sync="global"` needs a communicator that exchanges '
            f"within a `tf.function`. Received: {type(self).__name__}. Use "
            "TensorFlow's collectives or Horovod."
        )

    def broadcast(self, tensors, root=0):
        """Gives every worker the tensors of one of them, bit for bit.

        Args:
            tensors: List of tensors of numbers or bools, on every worker the
                same number of them with the same shapes and dtypes.
            root: Int, the rank of the worker whose values count.

        Returns:
            List of the tensors of the worker with rank `root`.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self._start("broadcast", f"from {root}: {_signature(tensors)}")
        words = [_to_words(tensor) for tensor in tensors]
        words = self._on_filled(words, lambda w: self._broadcast(w, root))
        return [_from_words(w, t) for w, t in zip(words, tensors)]

    def all_gather(self, tensor, purpose=""):
        """Stacks one small tensor of each worker along a new axis 0, by rank.

        Args:
            tensor: NumPy array of numbers, on every worker of the same shape
                and dtype.
            purpose: String, on every worker the same. What it is for, so that
                calls for different ends never meet.

        Returns:
            NumPy array of shape `[size, *tensor.shape]`.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        array = np.asarray(tensor)
        parts = self._gather_bytes(
            array.tobytes(), f"{purpose}{array.shape} {array.dtype.name}"
        )
        rows = [
            np.frombuffer(p, array.dtype).reshape(array.shape) for p in parts
        ]
        return np.stack(rows)

    def all_gather_bytes(self, data, purpose=""):
        """Returns the list of each worker's bytes, by rank.

        Args:
            data: Bytes of any length, on each worker others.
            purpose: String, on every worker the same, see `all_gather`.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        return self._gather_bytes(data, f"{purpose}bytes")

    def all_gather_strings(self, text):
        """Returns the list of each worker's string, by rank.

        Args:
            text: String of any length, on each worker another one.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        parts = self._gather_bytes(text.encode(), "string")
        return [part.decode() for part in parts]

    def barrier(self):
        """Returns when every worker has called it.

        Raises:
            WorkerLostError: If a worker does not take part in time.
            RuntimeError: If workers make different calls.
        """
        self._start("barrier", "")

    def close(self):
        """Ends communication. Further calls of other operations fail."""
        if self._failure is None:
            self._failure = "it was closed"

    @abc.abstractmethod
    def _gather(self, array):
        """Stacks an int32 vector of each worker, as a NumPy array."""

    @abc.abstractmethod
    def _reduce(self, tensors):
        """Sums a list of flat tensors, none of them empty."""

    @abc.abstractmethod
    def _broadcast(self, tensors, root):
        """Broadcasts a list of flat int32 tensors, none of them empty."""

    def _lost_workers(self):
        """The ranks of other workers that do not answer, a list."""
        return []

    def _address(self, rank):
        """Where a worker is, for a message."""
        del rank
        return ""

    def _on_filled(self, tensors, operation):
        """Runs an operation on what has elements, flattened."""
        filled = [t for t in tensors if t.shape.num_elements()]
        flat = [tf.reshape(t, [-1]) for t in filled]
        done = iter(self._guarded(operation, flat) if flat else [])
        return [
            tf.reshape(next(done), t.shape) if t.shape.num_elements() else t
            for t in tensors
        ]

    def _gather_bytes(self, data, signature):
        """Gathers byte strings of any lengths, by rank."""
        head = len(data).to_bytes(8, "big") + data[: _INLINE_BYTES - 8]
        heads = self._start("all_gather", signature, head)
        lengths = [int.from_bytes(head[:8], "big") for head in heads]
        longest = max(lengths)
        if longest <= _INLINE_BYTES - 8:
            return [h[8 : 8 + n] for h, n in zip(heads, lengths)]
        # In words of 4 bytes, which every transport can carry.
        padded = data.ljust(longest + -longest % 4, b"\0")
        rows = self._guarded(self._gather, np.frombuffer(padded, np.int32))
        return [row.tobytes()[:n] for row, n in zip(rows, lengths)]

    def _start(self, operation, signature, inline=b""):
        """Compares the call with those of all workers, exchanges `inline`."""
        self._check_usable(operation)
        digest = hashlib.sha256(signature.encode()).digest()
        index = _OPERATIONS.index(operation)
        message = b"".join(
            [
                (self._num_calls * len(_OPERATIONS) + index).to_bytes(8, "big"),
                digest[:_SIGNATURE_BYTES],
                inline.ljust(_INLINE_BYTES, b"\0"),
            ]
        )
        self._num_calls += 1
        messages = [
            row.tobytes()
            for row in self._guarded(
                self._gather, np.frombuffer(message, np.int32)
            )
        ]
        self._check_same_call(messages, operation, signature)
        return [m[_NUM_COUNT_BYTES + _SIGNATURE_BYTES :] for m in messages]

    def _check_usable(self, operation):
        if self._failure is not None:
            raise WorkerLostError(
                f"This communicator cannot be used any more: {self._failure}. "
                f"Received: a call of `{operation}`. Save what is needed and "
                "start all workers of the job again."
            )

    def _check_same_call(self, messages, operation, signature):
        size = _NUM_COUNT_BYTES + _SIGNATURE_BYTES
        own = messages[self.rank][:size]
        for rank, message in enumerate(messages):
            if message[:size] == own:
                continue
            code = int.from_bytes(message[:_NUM_COUNT_BYTES], "big")
            calls, index = divmod(code, len(_OPERATIONS))
            self._failure = "workers made different calls"
            raise RuntimeError(
                "Every worker must make the same calls of a communicator, in "
                "the same order, on the same shapes and dtypes. Received: "
                f"worker {self.rank} makes call {self._num_calls}, "
                f"`{operation}` on [{signature}], worker {rank} makes call "
                f"{calls + 1}, `{_OPERATIONS[index]}`"
                + (
                    ""
                    if index != _OPERATIONS.index(operation)
                    else " on others"
                )
                + ". Run the same script on every worker, and make no call of "
                "`fit`, a round or an averager on some of them only."
            )

    def _guarded(self, exchange, *arguments):
        """Runs an exchange, and says who is lost if it fails."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "A communicator takes one call at a time, in the order that is "
                "the same on every worker. Received: a call from a second "
                "thread. Make all calls from one thread."
            )
        start = time.monotonic()
        try:
            return exchange(*arguments)
        except self._errors as error:
            self._failure = "an exchange has failed"
            raise self._lost_error(error, time.monotonic() - start) from error
        finally:
            self._lock.release()

    def lost_error(self, error):
        """Returns the `WorkerLostError` of an exchange in a graph that failed.

        No other exchange can follow.

        Args:
            error: `tf.errors.OpError`.
        """
        self._failure = "an exchange has failed"
        return self._lost_error(error)

    def _lost_error(self, error, seconds=None):
        lost = self._lost_workers()
        # Who leaves tells the others before it is gone.
        for _ in range(_NUM_PROBES):
            if lost:
                break
            time.sleep(_PROBE_SECONDS)
            lost = self._lost_workers()
        if lost:
            names = [f"worker {r}{self._address(r)}" for r in lost]
            finding = f"{', '.join(names)} did not answer"
        else:
            finding = (
                "all workers answer, so one of them is late or takes no part "
                "any more"
            )
        after = "" if seconds is None else f" after {seconds:.1f} s"
        return WorkerLostError(
            f"Worker {self.rank} lost the others in an exchange that every "
            f"worker takes part in: {finding}. Received: "
            f"{type(error).__name__}{after}: "
            f"{_first_words(error)}. Nothing was written. Look at the lost "
            "worker's output, save what is needed, and start all workers of "
            "the job again.",
            lost,
        )


class SingleWorkerCommunicator(Communicator):
    """The communicator of a job with one worker: nothing travels."""

    name = "none"

    def __init__(self):
        super().__init__(rank=0, size=1)

    def _gather(self, array):
        return array[None]

    def _reduce(self, tensors):
        return tensors

    def _broadcast(self, tensors, root):
        return tensors


def _first_words(error):
    """The first line of an error that says something, without its stop."""
    lines = re.sub(r"{{function_node .*?}} ", "", str(error)).splitlines()
    noise = ("Graph execution error", "Detected at node", "  File", "    ")
    said = [line.strip() for line in lines if not line.startswith(noise)]
    return next(filter(None, said), "no message").rstrip(".")


def _signature(tensors):
    return ", ".join(f"{tuple(t.shape)} {t.dtype.name}" for t in tensors)


def _to_words(tensor):
    """The bits of a tensor as a flat int32 tensor, filled up with zeros."""
    if tensor.dtype == tf.bool:
        return tf.cast(tf.reshape(tensor, [-1]), tf.int32)
    data = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    data = tf.pad(data, [[0, -data.shape[0] % 4]])
    return tf.bitcast(tf.reshape(data, [-1, 4]), tf.int32)


def _from_words(words, like):
    if like.dtype == tf.bool:
        return tf.reshape(tf.cast(words, tf.bool), like.shape)
    num_bytes = like.shape.num_elements() * like.dtype.size
    data = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[:num_bytes]
    if like.dtype.size == 1:
        return tf.reshape(tf.bitcast(data, like.dtype), like.shape)
    data = tf.reshape(data, [-1, like.dtype.size])
    return tf.reshape(tf.bitcast(data, like.dtype), like.shape)
