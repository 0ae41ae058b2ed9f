"""Schedules: after which steps a round takes place.

Imports nothing else of this library.
"""
