"""Diagnosis of a training and advice, as pure functions of a `Measurement`.

`diagnose` returns a `Diagnosis`, and every output shows this object. Thresholds, verdict codes and
advice belong here. Statistics belong in `_measurement`, tables and texts around them in `_output`.
"""
