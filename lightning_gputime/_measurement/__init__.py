"""Step records as numbers: sums, history, samples, wall clock, work rates, ranks, slow steps.

Plain Python and NumPy, without a clock, a device or torch. Nothing here judges: `_diagnosis` does.
"""
