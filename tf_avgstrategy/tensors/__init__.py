"""Tensors: their mean, packed into messages, and as bytes in files.

Imports nothing else of this library.
"""
