"""Times: the clock, the recorder of marks, and the steps that wait to be read.

Belongs here: what turns marks on a device's timeline into a `StepRecord`.
Does not: when steps are timed, where marks come from, and what the times mean.
"""
