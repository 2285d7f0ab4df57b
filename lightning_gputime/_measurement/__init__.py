"""Statistics of step records: sums, history, wall clock, work rates, ranks, slow steps.

Each class owns its state and returns facts, in plain Python and NumPy, without torch or a clock.
Thresholds that lead to advice belong in `_diagnosis`, texts around numbers in `_output`.
"""
