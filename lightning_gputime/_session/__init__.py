"""Sessions: attaching a timer, the steps of its loop, evaluations, and removing the timer.

Where steps start and end, which steps are timed or probed, and which logs are due belongs here.
Hooks belong in `_instrumentation`, marks in `_record`, statistics in `_measurement`.
"""
