"""Keras callbacks: rounds, backups and other callbacks in `model.fit`.

Imports `averaging` and what is below it.
"""
