"""What is told of the steps of a loop: results, logs, ranks, causes, a user's own output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning_gputime._messages import messages
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.sums import Sums
from lightning_gputime._results.table import Section


class ReadSteps:
    """Steps that were read together, in order. Iterate for all, those of the warm-up first."""

    def __init__(self, records: Sequence[StepRecord], warmup: int) -> None:
        self.records, self.warmup = records, warmup
        self._sums: Sums | None = None

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def measured(self) -> Sequence[StepRecord]:
        """Those that are no warm-up."""
        return self.records[self.warmup :] if self.warmup else self.records

    @property
    def sums(self) -> Sums:
        """The sums over all of them."""
        if self._sums is None:
            self._sums = Sums(self.records)
        return self._sums


class StepObserver(Protocol):
    """What a timer tells of its steps. Every method is optional.

    They are looked up once, when the timer is attached. An observer that raises is told no more,
    and a warning says so. All are called in the training thread.

    Example:
        >>> class Longest:
        ...     longest_ms = 0.0
        ...
        ...     def steps_read(self, steps):
        ...         self.longest_ms = max(self.longest_ms, *(one.times().step_ms for one in steps))
        ...
        ...     def metrics(self, newest, *, keep):
        ...         return {"longest_ms": self.longest_ms}
        >>> timer = GPUPhaseTimer(observers=[Longest()])
    """

    def attach(self) -> None:
        """Start: a measurement begins."""

    def step_ends(self, now_ns: int) -> None:
        """Take note that a step ends, just before its end is marked. Be quick: it is in the loop.

        It is also called for steps that are not timed, but not while the timer is off. To pair it
        with the steps of `steps_read`, compare `now_ns` with their `host_ns`.

        Args:
            now_ns: The host's time (in nanoseconds), from an arbitrary origin.
        """

    def steps_read(self, steps: ReadSteps) -> None:
        """Take the next steps whose times are known."""

    def metrics(self, newest: int, *, keep: bool) -> Mapping[str, float]:
        """Return what is logged beside the means since the last log, by name without prefix.

        Args:
            newest: Number of the last step that the log is of.
            keep: Whether the next log is of these steps, too: other callbacks read these values.
        """
        raise NotImplementedError

    def summary(self) -> Section | str | None:
        """Return what the summary says of it: a line, or a `Section`; None for nothing."""
        return None

    def remove(self) -> None:
        """End: the measurement is over. Safe to call twice."""


def sections_of(observers: Sequence[Any]) -> tuple[Section, ...]:
    """Return what observers add to a summary; one that raises adds nothing."""
    return tuple(
        Section(type(one).__name__, (found,)) if isinstance(found, str) else found
        for one, found in _ask(observers, "summary")
        if found is not None
    )


def metrics_of(observers: Sequence[Any], newest: int, *, keep: bool) -> dict[str, float]:
    """Return what observers add to a log; one that raises adds nothing."""
    metrics: dict[str, float] = {}
    for _, found in _ask(observers, "metrics", newest, keep=keep):
        metrics |= found
    return metrics


def _ask(observers: Sequence[Any], name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield each observer that has a method, and what it returns; a warning where it raises."""
    for one in observers:
        if hasattr(one, name):
            try:
                found = getattr(one, name)(*args, **kwargs)
            except Exception as error:
                messages.warning("%s.%s() failed: %r", type(one).__name__, name, error)
                continue
            yield one, found


def methods(observers: Sequence[Any], name: str) -> list[Callable[..., Any]]:
    """Return the methods of a name of those observers that have it, in their order."""
    found = [getattr(one, name, None) for one in observers]
    return [one for one in found if one is not None]


def call_safely(calls: list[Callable[..., Any]], *args: Any) -> None:
    """Call each of them; one that raises is left out from then on, and a warning says so."""
    # Over a copy, because one that fails is taken out.
    for call in [*calls]:
        try:
            call(*args)
        except Exception as error:
            name = getattr(call, "__qualname__", repr(call))
            messages.warning("%s is called no more, because it failed: %r", name, error)
            calls.remove(call)
