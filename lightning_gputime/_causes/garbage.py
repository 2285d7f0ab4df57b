"""Python's garbage collection, in whichever thread: the loop's waits for it."""

import gc
from collections.abc import Callable
from typing import Any

from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.witness import Spans
from lightning_gputime._untraced import untraced


@untraced
class Garbage:
    """Sees each collection, by `gc.callbacks`.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans(now_ns)

    def attach(self) -> None:
        gc.callbacks.append(self._told)

    def remove(self) -> None:
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def testify(self, scene: Scene) -> None:
        scene.claim_spans("garbage", self._spans.within(scene))

    def _told(self, phase: str, info: dict[str, Any]) -> None:
        # It holds no reference to the timer, and allocates nothing that a collection would see.
        if phase == "start":
            self._spans.begin()
        else:
            self._spans.end(f"generation {info['generation']}")
