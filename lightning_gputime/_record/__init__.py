"""Times: clocks, the recorder of marks, and steps that wait for the device to finish them.

Everything from a mark on a device's timeline to a `StepRecord` belongs here. The choice of timed
steps belongs in `_session`, hooks in `_instrumentation`, and statistics in `_measurement`.

- `recorder` takes marks and divides them into steps.
- `pending_steps` has the marks of the open step, and keeps the steps that have ended until the
  device has finished them. It reads them with a `clock`.
"""
