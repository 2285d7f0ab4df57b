"""Saved runs: the file format, saving, loading and comparing, and the environment of a run.

Everything that outlives a training belongs here. Statistics of one run belong in `_measurement`,
and tables and pages in `_output`.
"""
