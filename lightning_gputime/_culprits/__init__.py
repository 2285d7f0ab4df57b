"""Who takes the time: calls by name, places in the user's code, and stages of a loader.

What is found goes to the sums of `_measurement.culprits`. Nothing here marks a phase or judges.
"""
