"""Renderers of a `Measurement` and its `Diagnosis`: tables, notebooks, JSON, pages, loggers.

Layout and wording belong here. A new output is one file that reads a `PhaseSummary`. Statistics
belong in `_measurement`, verdicts and advice in `_diagnosis`.
"""
