"""Whose code calls: found on the stack, where a call alone does not tell."""

import sys
from types import FrameType

from lightning_gputime._untraced import untraced

_OWN = "lightning_gputime."


@untraced
def caller(*between: str) -> str:
    """Returns the name of the module whose code calls, with `between` and this package left out.

    Args:
        between: The first parts of the names of modules that only pass calls on.
    """
    frame: FrameType | None = sys._getframe(1)
    name: str = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith((_OWN, *between)):
            return name
        frame = frame.f_back
    return name


@untraced
def stage_that_runs() -> int | None:
    """Returns the stage of the pipeline's schedule that is running, as far as torch shows it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        schedule = frame.f_locals.get("self")
        stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        stage = getattr(stages[0], "stage_index", None)
        if isinstance(stage, int):
            return stage
        frame = frame.f_back
    return None
