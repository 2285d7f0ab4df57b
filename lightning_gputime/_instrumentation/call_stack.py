"""The running calls of modules that have hooks, and the recursion limit of these calls."""

import sys
from collections.abc import Sequence

from torch import nn

from lightning_gputime._compat.torch_ import modules_on_stack

_MAX_HOOK_FRAMES = 50
"""Upper bound of the stack frames that one hook needs."""


class CallStack:
    """The running calls of modules that have hooks.

    Each hooked call needs additional stack frames, so a module that calls itself would reach
    Python's recursion limit earlier than without a timer. The limit is raised for such calls.
    """

    def __init__(self) -> None:
        self.running: list[int] = []
        """Ids of modules whose calls have begun and not ended, outermost first."""
        self.is_redirected = False
        """True if a wrapper is about to call the model to run the training step."""
        self.is_recursive = False
        """True after a module was called inside its own call: the recursion limit is raised."""
        self.was_in_backward = False
        """True once a module was called inside a backward, as activation checkpointing does."""
        # Recursion limits before and after the last raise; used only while `is_recursive`.
        self._original_limit = 0
        self._raised_limit = 0

    def note_backward(self) -> None:
        """Remember that a module was called inside a backward."""
        self.was_in_backward = True

    def redirect(self, *_: object) -> None:
        """Expect a wrapper to call the model to run the training step."""
        self.is_redirected = True

    def end_redirect(self) -> None:
        self.is_redirected = False

    def remove_ended(self, module: nn.Module) -> None:
        """Remove the calls that raised: their exit hooks did not run.

        `module` is being called. If it is inside its own call, raise the recursion limit.
        """
        self.running[:] = _callers_among(self.running, module)
        if id(module) in self.running:
            self._raise_limit()

    def clear(self) -> None:
        """Forget all calls."""
        self.running.clear()
        if self.is_recursive:
            self.end_recursion()

    def end_recursion(self) -> None:
        """Restore the recursion limit, unless other code has changed it."""
        if sys.getrecursionlimit() == self._raised_limit:
            sys.setrecursionlimit(self._original_limit)  # Raises if the stack is still too deep.
        self.is_recursive = False

    def _raise_limit(self) -> None:
        if not self.is_recursive:
            self.is_recursive, self._original_limit = True, sys.getrecursionlimit()
        # Each running call needs one more frame, because torch calls modules with hooks in an inner
        # function. In addition, a hook may be running.
        self._raised_limit = self._original_limit + _MAX_HOOK_FRAMES + len(self.running)
        sys.setrecursionlimit(self._raised_limit)


def _callers_among(ids: Sequence[int], module: nn.Module) -> list[int]:
    """Return the ids of modules that are still running while `module` is being called."""
    on_stack = modules_on_stack()
    if id(module) not in on_stack:
        # It is not called through `nn.Module.__call__`, so the stack does not show its callers.
        return list(ids)
    callers = {*on_stack[on_stack.index(id(module)) + 1 :]}
    return [key for key in ids if key in callers]
