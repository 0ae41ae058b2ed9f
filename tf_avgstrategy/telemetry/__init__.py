"""Telemetry: what happened in rounds, as records, files and pictures.

Imports nothing else of this library.
"""
