"""Compilations by `torch.compile`, also of a new shape, and of a backward at its first run."""

import sys
from collections.abc import Callable
from typing import Any

from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.usual import Usual
from lightning_gputime._causes.witness import Spans
from lightning_gputime._untraced import untraced

_MODULE = "torch._dynamo.callback"


@untraced
class Compilation:
    """Sees when dynamo begins to compile, and when all that this needs (Inductor, Triton) is done.

    It does not import dynamo: until somebody else has, nothing is compiled.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans(now_ns)
        self._is_on = False

    def attach(self) -> None:
        self._is_on = True
        self._register()

    def remove(self) -> None:
        self._is_on = False
        handler = _handler()
        if handler is not None:
            for callbacks, own in _lists(handler, self._begins, self._ends):
                if own in callbacks:
                    callbacks.remove(own)

    def steps_were_read(self, usual: Usual) -> None:
        """Looks again: dynamo may have been loaded, or reset, since."""
        if self._is_on:
            self._register()

    def testify(self, scene: Scene) -> None:
        scene.claim_spans("compilation", self._spans.within(scene))

    def _register(self) -> None:
        handler = _handler()
        if handler is not None:
            for callbacks, own in _lists(handler, self._begins, self._ends):
                if own not in callbacks:
                    callbacks.append(own)

    def _begins(self, *_: Any) -> None:
        self._spans.begin()

    def _ends(self, *about: Any) -> None:
        trigger = getattr(getattr(about[0], "callback_trigger", None), "name", "") if about else ""
        self._spans.end("of a backward" if trigger == "LAZY_BACKWARD" else "")


def _handler() -> Any:
    return getattr(sys.modules.get(_MODULE), "callback_handler", None)


def _lists(handler: Any, begins: Any, ends: Any) -> list[tuple[list[Any], Any]]:
    return [(handler.start_callbacks, begins), (handler.end_callbacks, ends)]
