"""Tools: what `tf-avgstrategy` does on a command line.

Imports `files`, `telemetry`, `tensors` and `workers`.
"""
