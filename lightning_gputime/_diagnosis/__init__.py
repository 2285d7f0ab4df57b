"""Diagnosis of a training run, with advice: pure functions of a `Measurement`.

`diagnose` returns the `Diagnosis` that every output renders. Thresholds, verdict codes and advice
belong here. Statistics belong in `_measurement`; tables and the text around them in `_output`.
"""
