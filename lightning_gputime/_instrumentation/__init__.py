"""Boundaries of phases: hooks and patches in models, optimizers, autograd and collectives.

Code that notices an event of the training loop and calls the recorder belongs here. The choice of
timed steps belongs in `_session`, statistics in `_measurement`, private names in `_compat`.

`boundaries` attaches all boundaries of the training loop that `loop` describes. Each boundary calls
`Recorder.mark` from hooks (`traced`) and patched functions (`patching`).
"""
