"""Files of finished models: their variables, and the mean of several.

Imports `tensors`.
"""
