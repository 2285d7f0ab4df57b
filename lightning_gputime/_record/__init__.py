"""Times: clocks, the recorder of marks, and steps that are pending until the device is done.

Everything from a mark on a device's timeline to a `StepRecord` belongs here. Choosing the
timed steps belongs in `_session`, hooks in `_instrumentation`, and statistics in `_measurement`.
"""
