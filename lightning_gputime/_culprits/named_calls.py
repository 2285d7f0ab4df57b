"""Calls of hooks, loggers and metrics, summed by name."""

from collections.abc import Callable
from typing import Any

from lightning_gputime._culprits.places import source_of
from lightning_gputime._instrumentation.patching import Subscription
from lightning_gputime._measurement.culprits import CulpritSums, Source
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._phases import OTHER, likely_phase


class NamedCalls:
    """Timer of calls in the training thread.

    In a step, the time of a call is added to the phase in which it runs; outside of steps, to the
    entry of the wall clock, such as "validation".

    Args:
        sums: Sums that the time is added to.
        wall_clock: Provides the open entry outside of steps.
        now_ns: The host's clock.
        label_now: Function that returns the current label in a timed step, else None.
    """

    def __init__(
        self,
        sums: CulpritSums,
        wall_clock: WallClock,
        now_ns: Callable[[], int],
        label_now: Callable[[], str | None],
    ) -> None:
        self.sums, self._wall_clock = sums, wall_clock
        self._now_ns, self._label_now = now_ns, label_now
        self._open: list[tuple[str, int, str]] = []  # Name, start and entry; innermost last.
        self._phases: dict[str, str] = {}  # Phase of each name in the last timed step.

    def subscription(self, owner: Any, function: str, name: str) -> Subscription:
        """Return a subscription that times the calls of `owner.function` as `name`."""
        found = source_of(getattr(owner, function, None))
        return Subscription(owner, function, _NamedCall(self, name, found))

    def start(self, name: str) -> bool:
        """Start a call. Return False in another thread, where it is not timed."""
        if not self._wall_clock.is_here:
            return False
        entry = self._wall_clock.entry_outside or self._phase_of(name)
        self._open.append((name, self._now_ns(), entry))
        return True

    def end(self, name: str, source: Source | None) -> None:
        """End the innermost call with this name, and drop unfinished calls inside it."""
        while self._open:
            open_name, start_ns, entry = self._open.pop()
            if open_name == name:
                caller = self._open[-1][0] if self._open else ""
                ns = self._now_ns() - start_ns
                self.sums.add(entry, name, ns, source=source, caller=caller)
                return

    def _phase_of(self, name: str) -> str:
        """Return the current phase; in an untimed step, the phase of the last call of `name`."""
        label = self._label_now()
        if label is not None:
            self._phases[name] = likely_phase(label)
        return self._phases.get(name, OTHER)


class _NamedCall:
    """Listener of the calls of a function, see `patching.Calls`."""

    __slots__ = ("_calls", "_name", "_source")

    def __init__(self, calls: NamedCalls, name: str, source: Source | None) -> None:
        self._calls, self._name, self._source = calls, name, source

    def on_call_start(self, *_: Any, **__: Any) -> bool:
        return self._calls.start(self._name)

    def on_call_end(self, _: Any) -> None:
        self._calls.end(self._name, self._source)
