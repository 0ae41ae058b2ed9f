"""Seeds: how Python and NumPy come to draw the same numbers on all workers."""

import json
import random
import weakref

import numpy as np

__all__ = ["agree_on_seeds"]

# Communicators whose workers have agreed.
_agreed = weakref.WeakSet()


def agree_on_seeds(communicator):
    """Gives Python's and NumPy's global generators the chief's state.

    A script that shuffles with them, and does not seed them, would shuffle in
    another order on each worker. Keras draws seeds of layers and of shuffled
    folders from them, too. Nothing changes on the chief, and nowhere if all
    workers have seeded them alike. Later seeds are the script's own.

    Every worker calls it. It exchanges one message, the first time.

    Args:
        communicator: `Communicator`.
    """
    if communicator.size == 1 or communicator in _agreed:
        return
    _agreed.add(communicator)
    own = _state()
    chiefs = communicator.all_gather_bytes(own, "random numbers: ")[0]
    if chiefs != own:
        _restore(chiefs)


def _state():
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpys = [kind, keys.tolist(), position, has_gauss, gauss]
    return json.dumps([random.getstate(), numpys]).encode()


def _restore(state):
    (version, numbers, gauss), numpys = json.loads(state)
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
