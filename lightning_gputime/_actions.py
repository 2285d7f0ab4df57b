"""What a trainer tells its profiler: where it is, also between two batches."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._untraced import untraced


class Actions:
    """Calls back when a trainer begins an action that somebody waits for.

    A Trainer tells its profiler of all that it begins, also where that profiler does nothing, and
    before any callback is called: so the order of the callbacks does not matter.

    Args:
        profiler: The profiler of the trainer.
        calls: What is called, by the name of the action.
        fail: Is called with an error of such a call.
        is_idle: Whether the profiler does nothing when it is told.
    """

    def __init__(
        self,
        profiler: Any,
        calls: Mapping[str, Callable[[], object]],
        fail: Callable[[Exception], None],
        *,
        is_idle: bool,
    ) -> None:
        self.calls = calls
        self.fail = fail
        self._profiler = profiler
        self._is_idle = is_idle
        self._stand_in = self._listen()

    def _listen(self) -> StandIn:
        # Who has put something there since must be called, too.
        is_idle = self._is_idle and "start" not in vars(self._profiler)
        announce = _announced_idle if is_idle else _announced
        stand_in = listen(self._profiler, "start", self, announce)
        stand_in.call.awaited.update(self.calls)
        return stand_in

    def rest(self) -> None:
        """Hears of nothing until `go_on`, and lets a step cost nothing."""
        self._stand_in.forget(self)

    def go_on(self) -> None:
        """Ends that."""
        self._stand_in.listeners.append(self)
        self._stand_in.stay_on()
        if not self._stand_in.is_on:
            # Somebody has put something else there meanwhile, which may not call it.
            self._stand_in.listeners.remove(self)
            self._stand_in = self._listen()

    def remove(self) -> None:
        """Takes it off the profiler. Safe to call twice."""
        self._stand_in.forget(self)


# A step has dozens of actions, of which a few are waited for: the others must cost next to nothing.


def _announced(call: Callable[..., Any], listeners: list[Actions]) -> Any:
    awaited: set[str] = set()

    @functools.wraps(call, updated=())
    def announced(action_name: str) -> Any:
        if action_name in awaited:
            _tell(listeners, action_name)
        return call(action_name)

    announced.awaited = awaited  # type: ignore[attr-defined]  # found by `Actions`
    return announced


def _announced_idle(call: Callable[..., Any], listeners: list[Actions]) -> Any:
    awaited: set[str] = set()

    @functools.wraps(call, updated=())
    def announced(action_name: str) -> None:
        if action_name in awaited:
            _tell(listeners, action_name)

    announced.awaited = awaited  # type: ignore[attr-defined]  # found by `Actions`
    return announced


@untraced
def _tell(listeners: list[Actions], action_name: str) -> None:
    # Over a copy, because a listener may be removed when it is told.
    for listener in [*listeners]:
        if action_name in listener.calls:
            try:
                listener.calls[action_name]()
            except Exception as error:
                listener.fail(error)


@untraced
class Begins:
    """Calls back when `owner.name` is called, as long as it is there.

    Args:
        owner: What has the method.
        name: The name of the method.
        call: What is called then, without arguments.
        fail: Is called with an error of that call.
    """

    def __init__(
        self, owner: Any, name: str, call: Callable[[], object], fail: Callable[[Exception], None]
    ) -> None:
        self._call, self._fail = call, fail
        self._stand_in = listen(owner, name, self)

    def call_begins(self, *_: Any, **__: Any) -> bool:
        """Is told of the call."""
        try:
            self._call()
        except Exception as error:
            self._fail(error)
        return False

    def call_ends(self, result: Any = None) -> None:
        """Is never told."""

    def remove(self) -> None:
        """Takes it off. Safe to call twice."""
        self._stand_in.forget(self)
