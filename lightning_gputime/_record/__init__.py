"""Times: clocks, the recorder of marks, and steps that wait for the device to finish them.

Everything from a mark on a device's timeline to a `StepRecord` belongs here. The choice of timed
steps belongs in `_session`, hooks in `_instrumentation`, and statistics in `_measurement`.

- `recorder` takes marks and divides them into steps; `state` lists its states. `step_marks` has
  the marks of the open step, and `named_phases` the phases that the user has named.
- `pending_steps` keeps the steps that have ended until the device has finished them, and reads
  them with a `clock`.
- `timed_thread`, `captures`, `waits` and `watcher` are the special cases of a mark: other threads,
  CUDA graphs, waits for other ranks, and other profilers.
"""
