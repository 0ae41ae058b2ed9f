"""A worker of a pool: runs functions of `scenarios` until it is left."""

import faulthandler
import gc
import importlib
import os
import sys
import traceback


def main(connection, environment, output):
    """Runs what comes through the connection, and sends back what came of it.

    Args:
        connection: Of it, (function, arguments, keywords) come, and to it go
            (text of an error or None, value). The function is a name in
            `scenarios`, or "module:name".
        environment: Dict, this process' environment.
        output: String, the file that takes what is printed.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    print_to(output)
    faulthandler.enable()
    # Keras collects garbage after each function. Then what was imported, and
    # what TensorFlow keeps of functions before, is not looked at again.
    gc.disable()
    gc.freeze()
    _make_devices()
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except EOFError:
            return
        connection.send(_answer(function, arguments, keywords))


def print_to(path):
    """Lets this process print into a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


def _make_devices():
    """Two, of which a scenario takes what it needs."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )


def _answer(function, arguments, keywords):
    import keras

    module, _, name = function.rpartition(":")

    keras.utils.set_random_seed(0)
    try:
        # Here, because it must come after the environment.
        scenarios = importlib.import_module(module or "scenarios")
        return None, getattr(scenarios, name)(*arguments, **keywords)
    except Exception:  # noqa: BLE001 - the test raises it.
        return traceback.format_exc(), None
    finally:
        keras.backend.clear_session()
        gc.freeze()
