"""Sessions: attaching a timer, the steps of its loop, evaluations, and removing the timer.

The start and end of steps, the choice of timed steps, and the schedule of logs belong here. Hooks
belong in `_instrumentation`, marks in `_record`, statistics in `_measurement`.
"""
