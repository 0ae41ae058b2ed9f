"""The version, for builds that must not import TensorFlow."""

__version__ = "0.1.0"
