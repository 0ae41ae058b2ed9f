"""Averaging: a round, from who asks for it to what becomes of the mean.

Imports all of the folders below it: `strategy`, `schedules`, `workers`,
`input`, `state`, `telemetry`, `tensors`.
"""
