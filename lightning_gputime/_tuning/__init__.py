"""The command `tune`: try changes that the advice suggests, and prove them by alternating runs.

A change to try is one file in `changes`. `child` applies it inside the script's process. What the
advice says belongs to `_diagnosis`; a change that cannot be applied from outside stays advice.
"""
