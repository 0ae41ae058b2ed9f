"""State: what each replica holds, and what a round does to each kind of it.

Imports `tensors`.
"""
