"""Phases named by hand, in code that does not know whether it is timed."""

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

import torch

from lightning_gputime._messages import messages
from lightning_gputime._phases import EXCLUDED, check_name
from lightning_gputime._record.recorder import Recorder

# The recorders that are attached now. Module state, because `phase` must find them from anywhere.
_active: list[Recorder] = []


def abandon_all() -> list[Any]:
    """End all recording in a process that was forked off; return what holds the events."""
    held = [recorder.abandon() for recorder in _active]
    _active.clear()
    return held


F = TypeVar("F", bound=Callable[..., Any])


class NamedPhase(ContextDecorator):
    """The context manager, or decorator, of a phase; of a pause where it is called `EXCLUDED`."""

    __slots__ = ("_name", "_recorders")

    def __init__(self, name: str, recorders: Sequence[Any]) -> None:
        # Compiled code may carry a phase: neither the check nor a recorder may break its graph.
        if name != EXCLUDED and not torch.compiler.is_compiling():
            check_name(name)
        self._name = name
        self._recorders = recorders

    def __call__(self, func: F) -> F:
        if isgeneratorfunction(func) or iscoroutinefunction(func) or isasyncgenfunction(func):
            messages.warning(
                "A call of %s only makes what runs later, and that is not timed as %r: write"
                " `with phase(%r)` inside of it, in place of @phase.",
                func.__qualname__,
                self._name,
                self._name,
            )
        return super().__call__(func)

    # As a listener of a patched function, see `Calls`.

    def on_call_start(self, *_: Any, **__: Any) -> None:
        self.__enter__()

    def on_call_end(self, result: Any) -> None:
        self.__exit__()

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            for recorder in self._recorders:
                recorder.enter_phase(self._name)

    def __exit__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for recorder in self._recorders:
                recorder.leave_phase(self._name)


def phase(name: str) -> NamedPhase:
    """Return a context manager, or decorator: its code's time is `name`, then the phase before.

    It acts on each timer that is timing the current step in this thread. Without one, or while the
    code is being compiled, it does nothing: so the code of a model can carry it for ever.

    Inside it the automatic boundaries do not count: what the name says, wins. The timer's own names
    can be given too: `with phase("loss")` in a model that computes its loss inside `forward` splits
    the two.

    Args:
        name: A name such as "augment". "forward/body" is a sub-phase: its time is also part of
            `forward`.

    Raises:
        ValueError: If the name is empty, begins with "step", "host_wait", "slow" or "local", or has
            "<", ">" or control characters.

    Examples:
        >>> with phase("augment"):
        ...     x = augment(x)
        >>> @phase("loss")
        ... def loss_of(outputs, targets): ...
    """
    # The list itself: a phase that was made before its timer was attached acts on that, too.
    return NamedPhase(name, _active)


def activate(recorder: Recorder) -> None:
    if recorder not in _active:
        _active.append(recorder)


def deactivate(recorder: Recorder) -> None:
    if recorder in _active:
        _active.remove(recorder)
