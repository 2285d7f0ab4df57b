"""Sessions: attaching a timer, the steps of its loop, evaluations, and removing the timer.

The start and end of steps, the choice of timed steps, and the schedule of logs belong here. Hooks
belong in `_instrumentation`, marks in `_record`, statistics in `_measurement`.

- `session` attaches and removes the parts of a timer, starts and ends steps, and passes the steps
  that were read to statistics, observers and loggers.
- `schedule` chooses the timed steps: it places timing windows, and measures the cost of timing,
  which decides how many there are. `_ledger.examiner` chooses the examined steps.
- `self_check` warns if the steps lack what each step of a loop must contain.
- `evaluation` times the evaluation loops of a trainer, without a session.
"""
