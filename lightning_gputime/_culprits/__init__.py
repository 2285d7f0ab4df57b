"""Culprits: calls by name, places in the user's code, stages of a loader, blocking calls.

The modules here only add to the sums of `_measurement.culprits`: they mark no phases, and draw no
conclusions.
"""
