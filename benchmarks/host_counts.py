"""Counts what Python runs of this package in a step: exact, where times are not."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning_gputime

PACKAGE = os.path.dirname(lightning_gputime.__file__)


class Counter:
    """Counts the instructions and the functions of the package, as a function of `sys.settrace`."""

    def __init__(self) -> None:
        self.instructions = self.functions = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Counts one event."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "call":
            self.functions += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self


def count(train: Callable[[int], None], steps: int = 400) -> dict[str, float]:
    """Returns what the package runs in a step.

    Args:
        train: Trains so many steps.
        steps: How many.
    """
    counter = Counter()
    train(50)
    sys.settrace(counter)
    try:
        train(steps)
    finally:
        sys.settrace(None)
    return {"instructions": counter.instructions / steps, "functions": counter.functions / steps}
