"""Statistics of step records: sums, history, wall clock, work rates, ranks, slow steps.

Each class owns its state and returns facts. The code is plain Python and NumPy: no module imports
torch, and clocks are passed in. Thresholds that lead to advice belong in `_diagnosis`, and text
around numbers in `_output`.
"""
