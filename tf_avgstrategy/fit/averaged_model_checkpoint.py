"""A callback that saves the mean of a model over the rounds of its training."""

import os

import keras

from tf_avgstrategy.state import running_means

__all__ = ["AveragedModelCheckpoint"]


class AveragedModelCheckpoint(keras.callbacks.Callback):
    """Saves the mean over rounds of the averaged model, beside the model.

    The mean of weights and BatchNormalization's statistics is kept in the
    host's memory and does not touch the model in training. It is in backups
    and in checkpoints of the averager. `averager.averaged_weights()` puts it
    into the model for a while, for example to evaluate it.

    It needs `PeriodicAveraging` in the same `fit`. Where there are several
    workers the chief saves.

    Args:
        filepath: String, as of `keras.callbacks.ModelCheckpoint`. May contain
            `{epoch}` and names of logs.
        decay: Float in (0, 1), an exponential moving average that keeps so
            much at a round. `None`: the mean of all rounds (stochastic weight
            averaging).
        start_from_epoch: Int >= 0, the first epoch whose rounds count.
        save_weights_only: Bool, whether to save the weights alone.

    Raises:
        ValueError: If an argument is out of its range, or at the start of
            `fit` if there is no `PeriodicAveraging`.

    Example:

    ```python
    callbacks = [
        tf_avgstrategy.PeriodicAveraging(period=16),
        tf_avgstrategy.AveragedModelCheckpoint("mean.keras", decay=0.99),
    ]
    ```

    References:
        Izmailov et al., Averaging Weights Leads to Wider Optima and Better
        Generalization, UAI 2018, https://arxiv.org/abs/1803.05407.
    """

    def __init__(
        self,
        filepath,
        decay=None,
        start_from_epoch=0,
        save_weights_only=False,
    ):
        super().__init__()
        running_means.check_decay(decay)
        is_integer = isinstance(start_from_epoch, int)
        if not is_integer or start_from_epoch < 0:
            raise ValueError(
                "`start_from_epoch` must be an integer >= 0, the number of an "
                f"epoch. Received: start_from_epoch={start_from_epoch!r}. Pass "
                "0 to count all rounds."
            )
        self.filepath = os.fspath(filepath)
        suffix = ".weights.h5" if save_weights_only else ".keras"
        if not self.filepath.endswith(suffix):
            raise ValueError(
                f"`filepath` must end in {suffix!r} with save_weights_only="
                f"{save_weights_only}. Received: filepath={self.filepath!r}. "
                "Change the one or the other."
            )
        self.decay = decay
        self.start_from_epoch = start_from_epoch
        self.save_weights_only = save_weights_only
        self._averager = None

    def on_averaging_begin(self, averager):
        """Is told by `PeriodicAveraging` which averager drives the `fit`."""
        self._averager = averager
        averager.keep_running_mean(self.decay)

    def on_train_begin(self, logs=None):
        extended = getattr(self.model.distribute_strategy, "extended", None)
        if getattr(extended, "fit_in_progress", None) is None:
            raise ValueError(
                "`AveragedModelCheckpoint` needs rounds to average over. "
                "Received: a `fit` without `PeriodicAveraging`, or under "
                f"{type(self.model.distribute_strategy).__name__}. Add "
                "`tf_avgstrategy.PeriodicAveraging(...)` to `callbacks`."
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._averager.count_rounds(epoch >= self.start_from_epoch)

    def on_epoch_end(self, epoch, logs=None):
        if epoch < self.start_from_epoch:
            return
        path = self.filepath.format(epoch=epoch + 1, **(logs or {}))
        if not self.model.distribute_strategy.is_chief:
            return
        with self._averager.averaged_weights():
            if self.save_weights_only:
                self.model.save_weights(path, overwrite=True)
            else:
                self.model.save(path, overwrite=True)

    def on_train_end(self, logs=None):
        self._averager.count_rounds(False)
