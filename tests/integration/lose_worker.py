"""Trains T1 slowly on several workers, of which the last one is lost.

python lose_worker.py HOW FILE [GRADIENT_SYNC]

How it is lost: "first" (before the first round), "between" rounds, "inside" a
round, "stop" (it no longer runs, but is there), "raise" (an exception),
"early" (it ends well before the others), "never".
"""

import os
import signal
import sys
import time

import numpy as np
import toys

import tf_avgstrategy as avg

PERIOD, STEPS = 2, 12


def lose_oneself(how):
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("on purpose")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main(how, path, gradient_sync="none"):
    strategy = avg.ParameterAveragingStrategy(
        timeout_seconds=10,
        start_timeout_seconds=60,
        gradient_sync=gradient_sync,
    )
    communicator = strategy.communicator
    is_last = communicator.rank == communicator.size - 1
    with strategy.scope():
        model = toys.slope_model(toys.sgd(momentum=0.5))
    state = []

    def on_step(step):
        print(f"step {step}", flush=True)
        state[:] = [v.numpy() for v in model.variables]
        if strategy.is_chief:
            model.save(path)
        if is_last and step == {"first": 1}.get(how, 3):
            if how in ("first", "between", "stop", "raise"):
                lose_oneself(how)
            if how == "inside":
                # The next exchange has begun when it comes to this.
                communicator._reduce = lambda tensors: lose_oneself(how)
        time.sleep(0.05)

    class Averaging(avg.PeriodicAveraging):
        def on_train_batch_end(self, batch, logs=None):
            on_step(batch + 1)
            super().on_train_batch_end(batch, logs)

    x, y = toys.slope_rows(
        STEPS, (toys.ROW_A, toys.ROW_B, toys.ROW_B)[: communicator.size]
    )
    try:
        toys.fit(
            model,
            x,
            y,
            batch_size=communicator.size,
            # What it does comes before the round of the step.
            callbacks=[Averaging(PERIOD if gradient_sync == "none" else STEPS)],
        )
    except avg.WorkerLostError as error:
        for variable, value in zip(model.variables, state):
            np.testing.assert_array_equal(variable.numpy(), value)
        print(f"as before the round; lost: {error.lost}", flush=True)
        raise
    print(f"done {toys.weight(model)}", flush=True)
    if how == "early" and not is_last:
        time.sleep(5)


if __name__ == "__main__":
    main(*sys.argv[1:])
