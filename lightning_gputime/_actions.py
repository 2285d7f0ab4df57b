"""What a trainer tells its profiler: where it is, also between two batches."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._boundaries.attach import listen
from lightning_gputime._untraced import untraced


@untraced
class Actions:
    """Calls back when the trainer begins an action that somebody waits for.

    A Trainer tells its profiler of all that it begins, also where that profiler does nothing, and
    before any callback is called: so the order of the callbacks does not matter.

    Args:
        profiler: The profiler of the trainer.
        calls: What is called, by the name of the action. It must not raise.
    """

    def __init__(self, profiler: Any, calls: Mapping[str, Callable[[], object]]) -> None:
        self._calls = calls
        self._stand_in = listen(profiler, "start", self)

    def call_begins(self, action_name: str = "", *_: Any, **__: Any) -> bool:
        """Is told what the trainer begins."""
        call = self._calls.get(action_name)
        if call is not None:
            call()
        return False

    def call_ends(self) -> None:
        """Is never told."""

    def remove(self) -> None:
        """Takes it off the profiler. Safe to call twice."""
        self._stand_in.forget(self)
