"""The command `tune`: try changes that the advice suggests, and verify them by alternating runs.

Each file in `changes` proposes one kind of change. `child` applies it inside the script's process.
The advice itself belongs to `_diagnosis`. A change that cannot be applied from outside stays
advice.
"""
