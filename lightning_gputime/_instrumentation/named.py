"""`phase(name)`: phases that users name in their code. It does nothing while no timer runs."""

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

import torch

from lightning_gputime._messages import messages
from lightning_gputime._phases import EXCLUDED, check_name
from lightning_gputime._record.recorder import Recorder

# Recorders of all attached timers. Module state, so that `phase` finds them from anywhere.
_active: list[Recorder] = []


def abandon_all() -> list[Any]:
    """End all recording in a forked process.

    Return the events, which must be kept: the child process must not free events of its parent.
    """
    held = [recorder.abandon() for recorder in _active]
    _active.clear()
    return held


F = TypeVar("F", bound=Callable[..., Any])


class NamedPhase(ContextDecorator):
    """Context manager and decorator for a phase. The name `EXCLUDED` pauses the timer."""

    __slots__ = ("_name", "_recorders")

    def __init__(self, name: str, recorders: Sequence[Any]) -> None:
        # A phase inside compiled code must not cause a graph break, so skip all work there.
        if name != EXCLUDED and not torch.compiler.is_compiling():
            check_name(name)
        self._name = name
        self._recorders = recorders

    def __call__(self, func: F) -> F:
        if isgeneratorfunction(func) or iscoroutinefunction(func) or isasyncgenfunction(func):
            messages.warning(
                "A call of %s only creates a generator or coroutine. Its code runs later and is not"
                " timed as %r: write `with phase(%r)` inside it instead of @phase.",
                func.__qualname__,
                self._name,
                self._name,
            )
        return super().__call__(func)

    # Methods of `Calls`, so that a phase can listen to a patched function.

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
    """Return a context manager and decorator that attributes the time of its code to `name`.

    When it exits, the previous phase continues. It applies to each timer that is timing the current
    step in this thread. Without a timer, or while the code is being compiled, it does nothing, so
    it can stay in the code of a model.

    It overrides the automatic phases inside it. Standard names work, too: `with phase("loss")` in a
    model that computes its loss inside `forward` separates the two.

    Args:
        name: A name such as "augment". "forward/body" is a sub-phase: its time is also part of
            `forward`.

    Raises:
        ValueError: If the name is empty, contains "<", ">", control characters or an empty part, or
            if its first part is taken by a key: "step", "host_wait", "slow", "slow_excess",
            "lasting_change" or "local".

    Examples:
        >>> with phase("augment"):
        ...     x = augment(x)
        >>> @phase("loss")
        ... def loss_of(outputs, targets): ...
    """
    # Pass the list itself, so that a phase also acts on timers that are attached later.
    return NamedPhase(name, _active)


def activate(recorder: Recorder) -> None:
    if recorder not in _active:
        _active.append(recorder)


def deactivate(recorder: Recorder) -> None:
    if recorder in _active:
        _active.remove(recorder)
