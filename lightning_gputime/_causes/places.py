"""Causes that are where the time went: the loader, callbacks and loggers, other ranks."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from types import ModuleType
from typing import Any

from lightning_gputime._boundaries.attach import StandIn, listen_uncopied
from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.witness import Spans
from lightning_gputime._phases import (
    CALLBACKS,
    DATA,
    FETCH,
    PHASES,
    TRAINING_STEP,
    is_wait,
    of_one_callback,
)
from lightning_gputime._untraced import untraced


@untraced
class Loader:
    """Sees fetches that took long.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._begins: deque[int] = deque(maxlen=100)
        # When it was asked for batches, where `data` holds other things than fetches, too.
        self._asked: deque[int] = deque(maxlen=500)
        self._phase = FETCH
        self._workers = 0

    def attach(self) -> None:
        """Does nothing, as there is nothing to put on."""

    def remove(self) -> None:
        """Does nothing."""

    def loads(self, loader: object, in_data: bool) -> None:
        """Must be told the loader, and whether `data` has no part for its fetches."""
        self._phase = DATA if in_data else FETCH
        workers = attribute(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0
        if in_data:
            self.is_asked()

    def is_asked(self) -> None:
        """Must be called, where `data` has no such part, just before each fetch."""
        self._asked.append(self._now_ns())

    def loop_begins(self) -> None:
        """Remembers when: loaders start their workers there."""
        self._begins.append(self._now_ns())

    def testify(self, scene: Scene) -> None:
        most_ms = math.inf
        if self._phase == DATA:
            asked = [ns for ns in [*self._asked] if scene.begin_ns <= ns < scene.end_ns]
            most_ms = scene.grown_since(DATA, asked)
        scene.claim_growth("loader", self._detail(scene), most_ms, self._phase.__eq__)

    def _detail(self, scene: Scene) -> str:
        if any(scene.begin_ns - 1_000_000 <= begin <= scene.end_ns for begin in self._begins):
            return "its first batch, for which its workers start" if self._workers else "its start"
        if self._workers:
            return f"none of its {self._workers} workers had a batch ready"
        return "it loads in the loop's own process"


class Logger:
    """Sees the calls of loggers, and which one it was.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
        loggers: The loggers, with their method `log_metrics`.
    """

    def __init__(self, now_ns: Callable[[], int], loggers: Sequence[Any]) -> None:
        self._calls = [_Calls(Spans(now_ns), one) for one in loggers]
        self.own = Spans(now_ns)
        """When the timer has called functions of the user's."""

    def attach(self) -> None:
        for one in self._calls:
            one.attach()

    def remove(self) -> None:
        for one in self._calls:
            one.remove()

    def loop_begins(self) -> None:
        """Begins to look at the calling thread."""
        for one in self._calls:
            one.thread = get_ident()

    def testify(self, scene: Scene) -> None:
        for spans in (self.own, *(one.spans for one in self._calls)):
            scene.claim_spans("callback", spans.within(scene))


@untraced
class _Calls:
    """The calls of one logger, as a listener of its stand-in."""

    def __init__(self, spans: Spans, logger: Any) -> None:
        self.spans = spans
        self._logger = logger
        # `mlflow` is a module.
        owner = logger.__name__ if isinstance(logger, ModuleType) else type(logger).__name__
        self._name = f"{owner}.log_metrics"
        self._stand_in: StandIn | None = None
        self._is_running = False
        self.thread = -1
        """The thread that is timed."""

    def attach(self) -> None:
        # One may have no attributes of its own, or refuse them.
        with contextlib.suppress(Exception):
            self._stand_in = listen_uncopied(self._logger, "log_metrics", self)

    def remove(self) -> None:
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None:
            stand_in.forget(self)

    def call_begins(self, *_: Any, **__: Any) -> bool:
        # Another thread, or a call inside this one.
        if get_ident() != self.thread or self._is_running:
            return False
        self._is_running = True
        self.spans.begin()
        return True

    def call_ends(self, result: Any = None) -> None:
        self._is_running = False
        self.spans.end(self._name)


class Callbacks:
    """Sees callbacks that took long, and phases that were named by hand."""

    def attach(self) -> None:
        """Does nothing, as there is nothing to put on."""

    def remove(self) -> None:
        """Does nothing."""

    def testify(self, scene: Scene) -> None:
        for part in scene.parts:
            if detail := _callback(part.name):
                scene.claim_growth("callback", detail, math.inf, part.name.__eq__)


class Ranks:
    """Sees waits for other ranks that took long."""

    def attach(self) -> None:
        """Does nothing, as there is nothing to put on."""

    def remove(self) -> None:
        """Does nothing."""

    def testify(self, scene: Scene) -> None:
        for part in scene.parts:
            if is_wait(part.name) and part.growth_ms:
                scene.claim_device("ranks", part, f"in {part.name}")


def _callback(name: str) -> str:
    """Returns what a phase runs that the training itself does not; empty if it is a part of it."""
    if name == CALLBACKS:
        return "logging, a checkpoint or a hook"
    if name.partition("/")[0] in (*PHASES, TRAINING_STEP):
        return of_one_callback(name)
    return f"phase {name}"


def attribute(one: object, name: str) -> Any:
    """Returns an attribute of what is a user's own; None where it has none, or raises."""
    try:
        return getattr(one, name, None)
    except Exception:
        return None
