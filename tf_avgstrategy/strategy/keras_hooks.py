"""Hooks in Keras: what `fit` and `evaluate` do under this library's strategy.

Keras has no callback that sees the arguments of `fit`, nor one that comes
before an epoch's metrics are computed, a script that saves at its end does so
on every worker, and `evaluate` within an epoch of `fit` looks like its
validation. Methods of `keras.Model` are wrapped for that, once. Models under
any other strategy go straight through.
"""

import functools
import inspect
import pathlib

import keras
import tensorflow as tf
from absl import logging

from tf_avgstrategy.strategy import independent_replicas
from tf_avgstrategy.strategy import worker_metrics
from tf_avgstrategy.tensors import snapshots

__all__ = ["FitHooks", "install"]

_FILE_SUFFIXES = (".keras", ".h5", ".hdf5")
# What an exchange within a step raises if a worker is gone.
_EXCHANGE_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_WRAPPED = "_tf_avgstrategy_wrapped"


class FitHooks(keras.callbacks.Callback):
    """What a `fit` under the strategy asks of the callback that averages."""

    def arrange(self, model, callbacks, arguments):
        """Returns the callbacks of a `fit` in the order to call them."""
        raise NotImplementedError

    def leave(self):
        """Is told that the `fit` has ended, or failed."""
        raise NotImplementedError

    def close_epoch(self):
        """Is told that an epoch's metrics are about to be computed."""
        raise NotImplementedError

    def gather_metrics(self, data):
        """Returns the bytes of all workers, by rank."""
        raise NotImplementedError

    def gather_plans(self, data):
        """Returns the bytes of all workers, in the middle of an epoch."""
        raise NotImplementedError

    def hold_losses(self):
        """Is told that the model's metrics are used for something else."""
        raise NotImplementedError

    def resume_losses(self):
        """Is told that they are the epoch's again."""
        raise NotImplementedError


def install():
    """Wraps methods of `keras.Model`, once."""
    _wrap("save", _save)
    _wrap("save_weights", _save)
    _wrap("export", _on_chief)
    _wrap("fit", _fit)
    _wrap("evaluate", _evaluate)
    _wrap("predict", _predict)
    _wrap("test_on_batch", _observe)
    _wrap("predict_on_batch", _predict_on_batch)
    _wrap("_get_metrics_result_or_logs", _metrics_or_logs)


def _wrap(name, hook):
    original = getattr(keras.Model, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        extended = getattr(self.distribute_strategy, "extended", None)
        if isinstance(extended, independent_replicas.IndependentReplicas):
            return hook(original, extended, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(wrapper, _WRAPPED, True)
    setattr(keras.Model, name, wrapper)


def _fit(original, extended, model, *args, **kwargs):
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given = bound.arguments.get("callbacks")
    is_list = isinstance(given, keras.callbacks.CallbackList)
    callbacks = given.callbacks if is_list else tf.nest.flatten(given or [])
    averaging = [c for c in callbacks if isinstance(c, FitHooks)]
    if not averaging:
        _warn_without_averaging(extended)
        return original(*bound.args, **bound.kwargs)
    arranged = averaging[0].arrange(model, callbacks, bound.arguments)
    if is_list:
        for callback in arranged:
            if callback not in callbacks:
                callback.set_model(model)
                callback.set_params(getattr(given, "params", None))
        given.callbacks = arranged
    else:
        bound.arguments["callbacks"] = arranged
    try:
        return original(*bound.args, **bound.kwargs)
    except _EXCHANGE_ERRORS as error:
        exchange = extended.exchange
        if exchange is None or not exchange.spans_workers:
            raise
        raise extended.communicator.lost_error(error) from error
    finally:
        extended.end_fit()
        averaging[0].leave()
        if is_list:
            given.callbacks = callbacks


def _evaluate(original, extended, model, *args, **kwargs):
    is_validation = kwargs.get("_use_cached_eval_dataset")
    try:
        if is_validation:  # It is a part of `fit`.
            return original(model, *args, **kwargs)
        return _observe(original, extended, model, *args, **kwargs)
    finally:
        extended.mean_reads.free()


def _predict(original, extended, model, *args, **kwargs):
    try:
        with extended.observed(is_alone=True):
            return original(model, *args, **kwargs)
    finally:
        extended.mean_reads.free()


def _predict_on_batch(original, extended, model, x):
    with extended.observed(is_alone=True):
        return original(model, extended.split_rows(x))


def _observe(original, extended, model, *args, **kwargs):
    with extended.observed():
        return original(model, *args, **kwargs)


def _saves_here(extended):
    """Whether this worker saves the model, which is the same on all."""
    communicator = extended.communicator
    # A worker that has lost the others saves what there is.
    return communicator.rank == 0 or not communicator.is_usable


def _on_chief(original, extended, model, *args, **kwargs):
    if _saves_here(extended):
        return original(model, *args, **kwargs)
    if not extended.has_said_who_saves:
        extended.has_said_who_saves = True
        logging.warning(
            "Worker %d saves nothing: the chief saves the model, which is the "
            "same on all workers. `keras.saving.save_model` saves here, too.",
            extended.communicator.rank,
        )
    return None


def _save(original, extended, model, filepath, overwrite=True, *args, **kwargs):
    is_plain = not args and set(kwargs.values()) <= {None, True}
    is_one_file = is_plain and _is_replaceable(filepath, overwrite)
    if is_one_file and _saves_here(extended):
        with snapshots.whole_file(filepath) as unfinished:
            return original(model, str(unfinished), overwrite, **kwargs)
    return _on_chief(
        original, extended, model, filepath, overwrite, *args, **kwargs
    )


def _is_replaceable(filepath, overwrite):
    """Whether what is written elsewhere can take the place of the file."""
    path = pathlib.Path(filepath)
    return (
        path.suffix in _FILE_SUFFIXES
        and "://" not in str(filepath)
        and path.parent.is_dir()
        # Else Keras asks.
        and (overwrite or not path.exists())
    )


def _warn_without_averaging(extended):
    if extended.num_replicas > 1 and not extended.has_warned_of_no_averaging:
        extended.has_warned_of_no_averaging = True
        logging.warning(
            "This `fit` under a `ParameterAveragingStrategy` with %d replicas "
            "averages nothing: each replica trains a model of its own. Pass "
            "`callbacks=[tf_avgstrategy.PeriodicAveraging(period=...)]`.",
            extended.num_replicas,
        )


def _metrics_or_logs(original, extended, model, logs):
    in_fit = extended.fit_in_progress
    if in_fit is not None and not extended.is_observed:
        in_fit.close_epoch()
    if extended.communicator.size == 1 and worker_metrics.reads_sums(model):
        return original(model, logs)
    gather = extended.communicator.all_gather_bytes
    return worker_metrics.over_workers(
        model,
        logs,
        functools.partial(original, model),
        gather=gather if in_fit is None else in_fit.gather_metrics,
        is_chief=extended.communicator.rank == 0,
    )
