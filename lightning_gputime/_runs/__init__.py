"""Saved runs: file format, saving, loading, comparing, and the environment of a run.

Everything that outlives a training run belongs here. Statistics of one run belong in
`_measurement`; tables and pages in `_output`.
"""
