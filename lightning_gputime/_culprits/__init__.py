"""Culprits: calls by name, places in the user's code, stages of a loader, blocking calls.

Everything here adds to the sums of `_measurement.culprits`. It marks no phase and judges nothing.
"""
