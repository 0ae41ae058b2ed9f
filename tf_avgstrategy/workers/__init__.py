"""Workers: how processes find each other, exchange, and notice a loss.

Imports nothing else of this library. Alone imports Horovod.
"""
