"""Starts one worker in the way that is asked for, and says what came of it.

python start_worker.py HOW [COMMUNICATOR]

"plain"; "devices" (virtual devices before the strategy); "tensor" or
"list_devices" (which start TensorFlow) before the strategy.
"""

import sys

import numpy as np
import tensorflow as tf

import tf_avgstrategy as avg


def main(how, communicator="auto"):
    if how == "devices":
        cpu = tf.config.list_physical_devices("CPU")[0]
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, devices)
    elif how == "tensor":
        tf.constant(1.0)
    elif how == "list_devices":
        tf.config.list_logical_devices()
    strategy = avg.ParameterAveragingStrategy(
        communicator=communicator,
        timeout_seconds=10,
        start_timeout_seconds=10,
    )
    print(strategy.describe())
    ranks = strategy.communicator.all_gather(
        np.int64(strategy.communicator.rank)
    )
    print(f"met {ranks.tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
