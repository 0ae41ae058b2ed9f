"""The strategy: replicas, one step of them, and what Keras does under it.

Imports `input`, `state`, `tensors` and `workers`.
"""
