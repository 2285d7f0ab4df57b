"""Boundaries of phases: hooks and patches in models, optimizers, autograd and collectives.

Belongs here: code that notices an event of the training loop, and calls the recorder.
Does not: which steps are timed (`_session`), what times mean, private names (`_compat`).
"""
