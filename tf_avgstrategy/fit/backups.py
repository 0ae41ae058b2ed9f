"""Backups: `BackupAndRestore` under this library's strategy.

Keras' own callback keeps the weights as one reader sees them, restarts an
interrupted epoch from its first batch with the weights of a later one, and can
be killed halfway through a file. This one keeps all that training needs in one
file, of which there is the old or the new one.
"""

import json
import pathlib
import shutil

import keras
import numpy as np
from absl import logging

from tf_avgstrategy.averaging import agreement
from tf_avgstrategy.fit import fit_callbacks
from tf_avgstrategy.state import replica_state
from tf_avgstrategy.tensors import snapshots

__all__ = ["AfterOthers", "Backup", "take_out"]

_FILE_NAME = "latest.averaging.npz"


class Backup:
    """What a `keras.callbacks.BackupAndRestore` asks for.

    Args:
        callback: `keras.callbacks.BackupAndRestore`.
    """

    def __init__(self, callback):
        self._callback = callback
        self._folder = pathlib.Path(callback.backup_dir)
        self.save_freq = callback.save_freq

    def read(self):
        """Returns the header and tensors of the last backup, or None."""
        return snapshots.read(self._folder / _FILE_NAME)

    def write(self, header, tensors):
        """Replaces the last backup."""
        snapshots.write(self._folder / _FILE_NAME, header, tensors)

    def restore_of_keras(self, model):
        """Restores what plain Keras has left, if it has."""
        self._callback.set_model(model)
        self._callback.on_train_begin()

    def end(self):
        """Removes the backup of a training that came to its end."""
        if getattr(self._callback, "delete_checkpoint", True):
            shutil.rmtree(self._folder, ignore_errors=True)


def take_out(callbacks, *, rank, gather_strings):
    """Takes `BackupAndRestore` out of the callbacks of a `fit`.

    Args:
        callbacks: List of `keras.callbacks.Callback` of this worker's `fit`.
        rank: Int, this worker's.
        gather_strings: Function of a string, returns those of all workers.

    Returns:
        The list of the others, the chief's `Backup` (on other workers None),
        and its `save_freq`, None if there is none.

    Raises:
        ValueError: If a worker has one and the chief has not.
    """
    backups = [
        c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)
    ]
    others = [c for c in callbacks if c not in backups]
    own = backups[0].save_freq if backups else None
    every = [json.loads(s) for s in gather_strings(json.dumps(own))]
    if every[0] is None and any(freq is not None for freq in every):
        ranks = [r for r, freq in enumerate(every) if freq is not None]
        raise ValueError(
            "The chief writes and reads the backup of all workers. Received: "
            f"`BackupAndRestore` on worker {ranks[0]} and none on worker 0. "
            "Pass it to `fit` on every worker, or on worker 0."
        )
    backup = Backup(backups[0]) if backups and rank == 0 else None
    return others, backup, every[0]


class AfterOthers(keras.callbacks.Callback):
    """What `PeriodicAveraging` does after all other callbacks of a `fit`.

    Args:
        averaging: `PeriodicAveraging`.
        others: List of the other `keras.callbacks.Callback`.
        backup: `Backup`, or None.
        save_freq: "epoch", int, or None if there is no backup on any worker.
    """

    def __init__(self, averaging, others, backup, save_freq):
        super().__init__()
        self._averaging = averaging
        self._others = others
        self._backup = backup
        self._save_freq = save_freq
        in_epoch = [] if save_freq in (None, "epoch") else [(save_freq, 0)]
        self._moments = fit_callbacks.SaveMoments(in_epoch)
        self._epoch = 0
        self._states_at_epoch_begin = {}, {}
        self._skipped = None

    @property
    def _averager(self):
        return self._averaging.averager

    def on_train_begin(self, logs=None):
        self._averaging.begin()
        header, tensors = self._agree_on_start()
        if header["is_restored"]:
            self._averager.start()
        if "layout" in header:
            self._resume(header, tensors)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._states_at_epoch_begin = fit_callbacks.callback_states(
            self._others
        )

    def on_train_batch_end(self, batch, logs=None):
        if self._moments.advance(self._averaging.batch_steps):
            self._save(self._epoch, self._states_at_epoch_begin)

    def end_skipping(self):
        """Makes sure that all is restored, before an epoch's metrics are read.

        Others may have had more batches, in whose steps this worker took part.
        """
        if self._skipped is not None:
            self._skipped.end()
            self._skipped = None

    def on_epoch_end(self, epoch, logs=None):
        extended = self.model.distribute_strategy.extended
        if extended.exchange is not None and extended.exchange.spans_workers:
            # No worker can go on without the gradients of the others.
            self._agree_on_stop()
        if self._save_freq == "epoch":
            states = fit_callbacks.callback_states(self._others)
            self._save(epoch + 1, states)

    def _agree_on_stop(self):
        flag = b"stop" if self.model.stop_training else b""
        flags = self._averager.gather(flag, agreement.METRICS)
        self.model.stop_training = any(flags)

    def on_train_end(self, logs=None):
        self.model._initial_epoch = None
        if self._backup is not None:
            self._backup.end()

    def _save(self, epoch, states):
        averager = self._averager
        parts = averager.gather_replica_states()
        if self._backup is None:
            return
        values, arrays = states
        header = {
            "epoch": epoch,
            "layout": replica_state.layout(averager.rules),
            "replicas": self.model.distribute_strategy.extended.all_replicas,
            "callbacks": values,
            "moments": self._averaging.moments.counters,
        }
        tensors = {
            **{
                f"shared/{k}": v
                for k, v in replica_state.shared_values(averager.rules).items()
            },
            **{f"part/{r}": _as_array(p) for r, p in enumerate(parts)},
            **{f"callback/{k}": v for k, v in arrays.items()},
        }
        self._backup.write(header, tensors)

    def _agree_on_start(self):
        """Restores on the chief and tells all workers what was restored.

        Returns:
            Header and tensors of the backup, less what the start of training
            broadcasts. The header has no "layout" if there is none.
        """
        communicator = self.model.distribute_strategy.communicator
        header, tensors = {}, {}
        if communicator.rank == 0:
            try:
                header, tensors = self._restore_on_chief()
            except Exception as error:  # noqa: BLE001 - raised on all workers.
                if communicator.size == 1:
                    raise
                header = {"error": f"{type(error).__name__}: {error}"}
            header.setdefault("is_restored", "layout" in header)
            header["initial_epoch"] = self.model._initial_epoch
        data = snapshots.pack(header, tensors) if header else b""
        header, tensors = snapshots.unpack(
            communicator.all_gather_bytes(data, "a start: ")[0]
        )
        if "error" in header:
            raise ValueError(f"Worker 0 could not resume: {header['error']}")
        self.model._initial_epoch = header["initial_epoch"]
        return header, tensors

    def _restore_on_chief(self):
        if self._backup is None:
            return {}, {}
        saved = self._backup.read()
        if saved is None:
            self._backup.restore_of_keras(self.model)
            return {"is_restored": True}, {}
        header, tensors = saved
        _check_layout(
            header["layout"], replica_state.layout(self._averager.rules)
        )
        rules = self._averager.rules
        replica_state.assign_shared(
            rules, snapshots.with_prefix(tensors, "shared/")
        )
        local = replica_state.local_keys(rules)
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("shared/") or name.partition("/")[2] in local
        }
        self.model._initial_epoch = header["epoch"]
        return header, tensors

    def _resume(self, header, tensors):
        strategy = self.model.distribute_strategy
        averager = self._averager
        replica_state.assign_shared(
            averager.rules, snapshots.with_prefix(tensors, "shared/")
        )
        parts = snapshots.with_prefix(tensors, "part/")
        is_same = header["replicas"] == strategy.extended.all_replicas
        rank = strategy.communicator.rank if is_same else 0
        restored = averager.restore_replica_state(
            parts[str(rank)].numpy().tobytes(),
            parts["0"].numpy().tobytes(),
            is_own=is_same,
        )
        fit_callbacks.restore_callback_states(
            self._others,
            header["callbacks"],
            snapshots.with_prefix(tensors, "callback/"),
        )
        self._averaging.moments.restore(header["moments"])
        logging.info(
            "Resumed from the backup at epoch %d, batch %d, step %d.",
            header["epoch"],
            averager.steps_in_epoch,
            averager.steps,
        )
        if averager.steps_in_epoch:
            self._skipped = _SkippedBatches(
                self.model, averager.steps_in_epoch, restored
            )


class _SkippedBatches:
    """Takes the place of a step until the batches of a backup are through.

    They are drawn from the data and not trained on. Callbacks see them with
    empty logs.

    Args:
        model: `keras.Model` in `fit`.
        batches: Int, how many.
        then: Function without arguments, called after the last.
    """

    def __init__(self, model, batches, then):
        self._model = model
        self._train_function = model.train_function
        self._left = batches
        self._then = then
        model.train_function = self

    def __call__(self, iterator):
        batches = min(self._model.steps_per_execution, self._left)
        for _ in range(batches):
            next(iterator)
        self._left -= batches
        if not self._left:
            self.end()
        return {}

    def end(self):
        """Lets training begin, once."""
        if self._model.train_function is self:
            self._model.train_function = self._train_function
            self._then()


def _as_array(data):
    return np.frombuffer(data, np.uint8)


def _check_layout(saved, own):
    if saved == own:
        return
    longest = max(len(saved), len(own))
    pairs = [
        [*paths, *["nothing"] * (longest - len(paths))]
        for paths in (saved, own)
    ]
    theirs, ours = next(pair for pair in zip(*pairs) if pair[0] != pair[1])
    raise ValueError(
        "A backup must be of the same model and optimizer. Received: one with "
        f"{theirs!r} where the model has {ours!r}. Remove `backup_dir`, or "
        "make the model as it was."
    )
