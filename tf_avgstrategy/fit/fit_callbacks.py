"""Callbacks of others in a `fit` of several workers: who writes, and when."""

import collections
import json
import os

import keras
import numpy as np
from absl import logging

from tf_avgstrategy.strategy import keras_hooks

__all__ = [
    "SaveMoments",
    "arrange_writers",
    "callback_states",
    "check_same_fit",
    "chief_only",
    "restore_callback_states",
]

# Callbacks that write files, and the attribute that says where.
_PLACES = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
}

# What callbacks remember from epoch to epoch.
_MEMORIES = {
    keras.callbacks.EarlyStopping: (
        "best",
        "wait",
        "stopped_epoch",
        "best_epoch",
        "best_weights",
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
}

_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_train_begin",
    "on_train_end",
)


class _ChiefOnly(keras.callbacks.Callback):
    """See `chief_only`."""

    def __init__(self, callback):
        super().__init__()
        self.callback = callback
        self._is_active = False

    def set_params(self, params):
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model):
        super().set_model(model)
        self._is_active = getattr(model.distribute_strategy, "is_chief", True)
        if self._is_active:
            self.callback.set_model(model)


def _passed_on(name):
    def hook(self, *args, **kwargs):
        if self._is_active:
            getattr(self.callback, name)(*args, **kwargs)

    return hook


for _name in _HOOKS:
    setattr(_ChiefOnly, _name, _passed_on(_name))


def chief_only(callback):
    """Returns a callback that runs on the chief and does nothing elsewhere.

    For callbacks that write files or print. `ModelCheckpoint`,
    `BackupAndRestore`, `CSVLogger` and `TensorBoard` need it not: of those that
    write to one place, that of the lowest rank runs in `fit`.

    Args:
        callback: `keras.callbacks.Callback` that exchanges nothing between
            workers.

    Raises:
        ValueError: If it is one that every worker needs.

    Example:

    ```python
    model.fit(
        dataset,
        callbacks=[
            tf_avgstrategy.PeriodicAveraging(period=16),
            tf_avgstrategy.chief_only(MyLogger("log.txt")),
        ],
    )
    ```
    """
    if isinstance(callback, keras_hooks.FitHooks):
        raise ValueError(
            "Averaging needs every worker. Received: a "
            f"{type(callback).__name__} in `chief_only`. Pass it to `fit` as "
            "it is."
        )
    return _ChiefOnly(callback)


def check_same_fit(arguments, gather_strings):
    """Raises a ValueError on every worker if a `fit` differs in what must not.

    Args:
        arguments: Dict, the arguments of this worker's `fit`.
        gather_strings: Function of a string, returns those of all workers.
    """
    validates = arguments.get("validation_data") is not None or bool(
        arguments.get("validation_split")
    )
    own = {
        "validation data": validates,
        "validation_freq": str(arguments.get("validation_freq", 1)),
        "initial_epoch": int(arguments.get("initial_epoch", 0)),
    }
    every = [json.loads(s) for s in gather_strings(json.dumps(own))]
    has = [r for r, other in enumerate(every) if other["validation data"]]
    lacks = [r for r, other in enumerate(every) if r not in has]
    if has and lacks:
        raise ValueError(
            "All workers evaluate together, each on its shard, so all need "
            f"validation data. Received: {_workers(has)} with validation data, "
            f"{_workers(lacks)} without. Pass the same `validation_data` to "
            "`fit` on every worker."
        )
    for other_rank, other in enumerate(every):
        for name, value in other.items():
            if value != every[0][name]:
                raise ValueError(
                    f"`fit` must have the same `{name}` on every worker. "
                    f"Received: {name}={every[0][name]} on worker 0 and "
                    f"{name}={value} on worker {other_rank}. Run the same "
                    "script with the same settings on every worker."
                )


def arrange_writers(callbacks, *, rank, gather_strings):
    """Leaves out callbacks that would write where another worker writes.

    Args:
        callbacks: List of `keras.callbacks.Callback` of this worker's `fit`.
        rank: Int, this worker's.
        gather_strings: Function of a string, returns those of all workers.

    Returns:
        The list of those that stay, and a list over all workers of the
        settings of those that save within epochs, see `SaveMoments`.

    Raises:
        ValueError: If a worker saves models and the chief does not.
    """
    kept = []
    for callback in callbacks:
        if not isinstance(callback, _ChiefOnly):
            kept.append(callback)
        elif rank == 0:
            kept.append(callback.callback)
    places = [_place(callback) for callback in kept]
    frequencies = [_save_counter(callback) for callback in kept]
    own = [[p for p in places if p], [f for f in frequencies if f]]
    every = [json.loads(s) for s in gather_strings(json.dumps(own))]
    _check_chief_saves(every)
    taken = {place for others, _ in every[:rank] for place in others}
    for place in sorted(taken.intersection(filter(None, places))):
        logging.info("Worker %d leaves %s to a lower rank.", rank, place)
    remaining = [
        callback
        for callback, place in zip(kept, places)
        if place is None or place not in taken
    ]
    counters = {tuple(pair) for _, pairs in every for pair in pairs}
    return remaining, sorted(counters)


class SaveMoments:
    """When callbacks save within an epoch, counted as these callbacks do.

    Args:
        counters: Iterable of pairs of ints: the batches between two saves, and
            those seen since the last one.
    """

    def __init__(self, counters):
        self.counters = [list(counter) for counter in counters]

    def restore(self, counters):
        """Takes over the counters of another run that saved as often."""
        if [c[0] for c in counters] == [c[0] for c in self.counters]:
            self.counters = [list(counter) for counter in counters]

    def advance(self, batches):
        """Counts batches and returns whether somebody saves now."""
        is_due = False
        for counter in self.counters:
            counter[1] += batches
            if counter[1] >= counter[0]:
                counter[1] = 0
                is_due = True
        return is_due


def callback_states(callbacks):
    """Returns what callbacks remember that a resumed `fit` needs.

    Args:
        callbacks: List of `keras.callbacks.Callback`.

    Returns:
        A dict that JSON can hold and a dict of arrays, both by the callback's
        place among those of its class.
    """
    values, arrays = {}, {}
    for key, callback, names in _with_memory(callbacks):
        for name in names:
            value = getattr(callback, name, None)
            if isinstance(value, (list, tuple)):
                values[f"{key}/{name}"] = {"arrays": len(value)}
                for place, array in enumerate(value):
                    arrays[f"{key}/{name}/{place}"] = array
            else:
                values[f"{key}/{name}"] = _plain(value)
    return values, arrays


def restore_callback_states(callbacks, values, arrays):
    """Gives callbacks back what `callback_states` returned."""
    for key, callback, names in _with_memory(callbacks):
        for name in names:
            if f"{key}/{name}" not in values:
                continue
            value = values[f"{key}/{name}"]
            if isinstance(value, dict):
                value = [
                    np.asarray(arrays[f"{key}/{name}/{place}"])
                    for place in range(value["arrays"])
                ]
            setattr(callback, name, value)


def _with_memory(callbacks):
    seen = collections.Counter()
    for callback in callbacks:
        for kind, names in _MEMORIES.items():
            if isinstance(callback, kind):
                yield f"{kind.__name__}/{seen[kind]}", callback, names
                seen[kind] += 1


def _plain(value):
    """A number of any kind as JSON can hold it; None stays None."""
    return value if value is None else np.asarray(value).item()


def _place(callback):
    for kind, attribute in _PLACES.items():
        if isinstance(callback, kind):
            place = os.fspath(getattr(callback, attribute))
            if "://" not in place:
                place = os.path.abspath(place)
            return f"{kind.__name__} {place}"
    return None


def _check_chief_saves(every):
    saving = [
        rank
        for rank, (places, _) in enumerate(every)
        if any(place.startswith("ModelCheckpoint ") for place in places)
    ]
    if saving and saving[0] > 0:
        raise ValueError(
            "The chief saves the model, which is the same on all workers. "
            f"Received: `ModelCheckpoint` on {_workers(saving)} and none on "
            "worker 0. Pass it to `fit` on every worker, or on worker 0."
        )


def _save_counter(callback):
    frequency = getattr(callback, "save_freq", None)
    is_saver = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if not is_saver or not isinstance(frequency, int):
        return None
    return frequency, getattr(callback, "_batches_seen_since_last_saving", 0)


def _workers(ranks):
    names = ", ".join(map(str, ranks))
    return f"worker {names}" if len(ranks) == 1 else f"workers {names}"
