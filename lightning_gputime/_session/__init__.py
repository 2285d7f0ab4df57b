"""Sessions: attaching a timer, the steps of its loop, evaluations, and removing the timer.

The start and end of steps, the choice of timed steps, and the schedule of logs belong here. Hooks
belong in `_instrumentation`, marks in `_record`, statistics in `_measurement`.

- `session` builds the parts, attaches and removes them. `null` is the session of a detached timer.
  `attached` lists the sessions of this process.
- `steps` starts and ends steps. `open_step` knows what the open step has done so far. `state` lists
  the states of a session, and `hooks_off` removes the hooks from untimed steps.
- `timing_plan` chooses the state of each step: `schedule` places timing windows, `timing_cost`
  decides how many, and `agreement` makes all ranks follow rank zero.
- `reading` passes steps to statistics, observers, `logs`, `rank_comparer` and `self_check`, once
  the times of their events have been read.
- `evaluation` times the evaluation loops of a trainer, without a session.
"""
