"""The command `tf-avgstrategy`."""

import importlib.metadata
import platform
import sys

import keras
import tensorflow as tf
from absl import app
from absl import flags

from tf_avgstrategy import _version

__all__ = ["main"]

_USAGE = """Usage: tf-avgstrategy COMMAND

Commands:
  doctor  prints versions, whether they are supported, and devices
"""
# As in setup.cfg: at least the first, below the second.
_SUPPORTED = {"tensorflow": ((2, 16), (2, 22)), "keras": ((3, 5), (4, 0))}


def main():
    """Runs the command line and exits with its status."""
    app.run(_run, flags_parser=_leave_to_commands)


def _leave_to_commands(argv):
    flags.FLAGS(argv[:1])
    return argv


def _run(argv):
    commands = {"doctor": _doctor}
    if len(argv) != 2 or argv[1] not in commands:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    return commands[argv[1]]()


def _doctor():
    print(f"tf_avgstrategy {_version.__version__}")
    print(f"Python {platform.python_version()}")
    is_supported = True
    for name in _SUPPORTED:
        version = importlib.metadata.version(name)
        verdict = _verdict(name, version)
        is_supported &= verdict == "supported"
        print(f"{name} {version}: {verdict}")
    print(f"Keras backend: {keras.backend.backend()}")
    for device in tf.config.list_logical_devices():
        print(f"device {device.name}")
    return 0 if is_supported else 1


def _verdict(name, version):
    oldest, beyond = _SUPPORTED[name]
    number = tuple(map(int, version.split(".")[:2]))
    if oldest <= number < beyond:
        return "supported"
    oldest, beyond = (".".join(map(str, bound)) for bound in (oldest, beyond))
    return f"not supported, needs >= {oldest}, < {beyond}"
