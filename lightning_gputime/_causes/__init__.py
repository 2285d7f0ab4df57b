"""Slow steps and their causes: a running baseline, evidence from the loop, attribution of time.

The baseline, detectors of causes and the attribution of the excess belong here. Sums and texts of
slow steps belong in `_measurement`, advice in `_diagnosis`, the code to blame in `_culprits`.
"""
