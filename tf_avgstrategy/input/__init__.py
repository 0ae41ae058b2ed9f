"""Input: which rows go to which worker and replica, in one order.

Imports nothing else of this library.
"""
