"""Culprits: stages of a loader, collections of garbage, compilations, and other threads.

The modules here only add to the sums of `_measurement.culprits`: they mark no phases, and draw no
conclusions.
"""
