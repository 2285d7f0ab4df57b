"""Times: clocks, the recorder of marks, and steps that wait for the device to finish them.

Everything from a mark on a device's timeline to a `StepRecord` belongs here. The choice of timed
steps belongs in `_session`, hooks in `_instrumentation`, and statistics in `_measurement`.
"""
