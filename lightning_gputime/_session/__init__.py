"""When: attaching a timer, the steps of its loop, evaluations, and its removal.

What belongs here: where steps start and end, which are timed or probed, which logs are due.
What does not: hooks (`_instrumentation`), marks (`_record`), statistics (`_measurement`).
"""
