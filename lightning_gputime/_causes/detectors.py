"""Detectors of causes that were seen while they happened, or that have a phase of their own."""

import gc
import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lightning_gputime._causes.attribution import ExcessAttribution, Span
from lightning_gputime._causes.baseline import Baseline
from lightning_gputime._phases import (
    CALLBACKS,
    DATA,
    FETCH,
    PHASES,
    TRAINING_STEP,
    is_wait,
    of_one_callback,
)
from lightning_gputime._results.slow import Kind
from lightning_gputime._untraced import untraced

_MAX_SPANS = 500
"""Number of spans to remember: those of steps that are not judged yet, and more."""

_SHORTEST_NS = 50_000
"""A shorter span explains no slow step, and is forgotten at once."""


class CauseDetector(Protocol):
    """Detects one kind of cause, and nothing where its source is missing.

    It may also have these, none of which may cost more than a step can bear:

    - `attach()` and `remove()`, which is safe to call twice, and in a process that was forked;
    - `loop_begins(now_ns)`, called in the loop's thread where a loop starts;
    - `step_ends(now_ns)`, called just before the end of each timed step is marked;
    - `read_counters(now_ns)`, called after a step that took the host long, and every 50 steps;
    - `baseline_changed(baseline)`, called every 25 steps.
    """

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute what it has seen of a slow step to its cause."""


@untraced
class Spans:
    """Remembers the newest times at which something started and ended.

    Args:
        kind: The kind of cause that it is.
        now_ns: Returns the host time (in nanoseconds).
    """

    def __init__(self, kind: Kind, now_ns: Callable[[], int]) -> None:
        self._kind = kind
        self._now_ns = now_ns
        self._newest: deque[Span] = deque(maxlen=_MAX_SPANS)
        self.started_ns = 0
        """When the open span started (in nanoseconds); 0 without one."""

    def start(self) -> None:
        """Start a span."""
        self.started_ns = self._now_ns()

    def end(self, detail: str) -> None:
        """End the span, and say what it was."""
        now = self._now_ns()
        if self.started_ns and now - self.started_ns >= _SHORTEST_NS:
            self._newest.append(Span(self.started_ns, now, detail))
        self.started_ns = 0

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the spans of which at least a part is in the step."""
        start_ns, end_ns = attribution.start_ns, attribution.end_ns
        spans = [one for one in [*self._newest] if one.end_ns > start_ns and one.start_ns < end_ns]
        attribution.attribute_spans(self._kind, spans)


@untraced
class Garbage:
    """Sees Python's garbage collections in any thread, by `gc.callbacks`: the loop waits for them.

    Args:
        now_ns: Returns the host time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans("garbage", now_ns)
        self.detect = self._spans.detect

    def attach(self) -> None:
        gc.callbacks.append(self._on_collection)

    def remove(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        # It holds no reference to the timer, and allocates nothing that a collection would see.
        if phase == "start":
            self._spans.start()
        else:
            self._spans.end(f"generation {info['generation']}")


@untraced
class Compilation:
    """Sees from when to when dynamo compiles, with all that this needs (Inductor, Triton).

    That is by `torch.compile`, also for a new shape, and for a backward at its first run. It does
    not import dynamo: until other code has, nothing is compiled.

    Args:
        now_ns: Returns the host time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans("compilation", now_ns)
        self.detect = self._spans.detect
        self._is_attached = False

    def attach(self) -> None:
        self._is_attached = True
        self._register()

    def remove(self) -> None:
        self._is_attached = False
        for callbacks, own in self._callbacks():
            if own in callbacks:
                callbacks.remove(own)

    def baseline_changed(self, baseline: Baseline) -> None:
        """Register again: dynamo may have been loaded, or reset, since."""
        if self._is_attached:
            self._register()

    def _register(self) -> None:
        for callbacks, own in self._callbacks():
            if own not in callbacks:
                callbacks.append(own)

    def _callbacks(self) -> list[tuple[list[Any], Any]]:
        """Return dynamo's lists of callbacks, each with the one of ours."""
        module = sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)
        if handler is None:
            return []
        return [(handler.start_callbacks, self._on_start), (handler.end_callbacks, self._on_end)]

    def _on_start(self, *_: Any) -> None:
        self._spans.start()

    def _on_end(self, *about: Any) -> None:
        trigger = getattr(getattr(about[0], "callback_trigger", None), "name", "") if about else ""
        self._spans.end("of a backward" if trigger == "LAZY_BACKWARD" else "")


@untraced
class Loader:
    """Sees fetches that took long.

    Args:
        now_ns: Returns the host time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._loops_ns: deque[int] = deque(maxlen=100)
        # The starts of fetches, where `data` holds other things, too.
        self._fetches_ns: deque[int] = deque(maxlen=500)
        self._phase = FETCH
        self._workers = 0

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Take the loader of the next loop.

        Args:
            loader: The loader, or any iterable.
            in_data: Whether its fetches are not a phase of their own, but in `data`.
        """
        self._phase = DATA if in_data else FETCH
        workers = attribute(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0
        if in_data:
            self.fetch_starts()

    def fetch_starts(self) -> None:
        """Call just before each fetch that is no phase of its own."""
        self._fetches_ns.append(self._now_ns())

    def loop_begins(self, now_ns: int) -> None:
        """Remember when: loaders start their workers there."""
        self._loops_ns.append(now_ns)

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the host's excess in fetches."""
        most_ms = math.inf
        if self._phase == DATA:
            start_ns, end_ns = attribution.start_ns, attribution.end_ns
            fetches_ns = [ns for ns in [*self._fetches_ns] if start_ns <= ns < end_ns]
            most_ms = attribution.host_excess_since(DATA, fetches_ns)
        detail = self._detail(attribution)
        attribution.attribute_host_excess("loader", detail, most_ms, self._phase.__eq__)

    def _detail(self, attribution: ExcessAttribution) -> str:
        start_ns, end_ns = attribution.start_ns - 1_000_000, attribution.end_ns
        if any(start_ns <= ns <= end_ns for ns in self._loops_ns):
            return "its first batch, for which its workers start" if self._workers else "its start"
        if self._workers:
            return f"none of its {self._workers} workers had a batch ready"
        return "it loads in the loop's own process"


class Callbacks:
    """Sees callbacks that took long, and phases that were named by hand."""

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the host's excess in each of these phases."""
        for part in attribution.parts:
            if detail := _callback(part.name):
                attribution.attribute_host_excess("callback", detail, math.inf, part.name.__eq__)


class Ranks:
    """Sees waits for other ranks that took long."""

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the device's excess in waits."""
        for part in attribution.parts:
            if is_wait(part.name) and part.device_excess_ms:
                attribution.attribute_device_excess("ranks", part, f"in {part.name}")


def _callback(name: str) -> str:
    """Return what a phase runs besides the training itself; empty for a phase of the training."""
    if name == CALLBACKS:
        return "logging, a checkpoint or a hook"
    if name.partition("/")[0] in (*PHASES, TRAINING_STEP):
        return of_one_callback(name)
    return f"phase {name}"


def attribute(one: object, name: str) -> Any:
    """Return an attribute of an object of the user's; None if it has none, or raises."""
    try:
        return getattr(one, name, None)
    except Exception:
        return None
