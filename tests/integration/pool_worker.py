"""A worker of a pool: runs functions of `scenarios` until its input ends."""

import faulthandler
import os
import pickle
import sys
import traceback

import keras
import tensorflow as tf

# Two devices, of which a scenario takes what it needs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)

import scenarios  # noqa: E402


def main():
    faulthandler.enable()
    answers = os.fdopen(int(os.environ["POOL_ANSWERS"]), "wb")
    for line in sys.stdin.buffer:
        function, arguments, keywords = pickle.loads(
            bytes.fromhex(line.decode().strip())
        )
        keras.utils.set_random_seed(0)
        text = value = None
        try:
            value = getattr(scenarios, function)(*arguments, **keywords)
        except Exception:  # noqa: BLE001 - the test raises it.
            text = traceback.format_exc()
        keras.backend.clear_session()
        answers.write(pickle.dumps((text, value)).hex().encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
