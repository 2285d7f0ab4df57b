"""What gets the steps of a loop: results, logs, ranks, causes, observers of the user's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._phases import StepRecord, StepTimes, is_metric


@dataclass(frozen=True, slots=True)
class Section:
    """Text and numbers that an observer adds to a summary, its page and the saved run.

    Attributes:
        name: Key in the saved run.
        sentences: Text below the table, one sentence per line.
        values: Numbers, or other values that JSON can store.
    """

    name: str
    sentences: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


class ReadSteps:
    """Steps that were read together, in order. Iterate over all of them, warm-up first.

    Args:
        records: The steps.
        warmup: Number of first steps that are warm-up.
        since_ns: Start of reading them, by the host clock.
    """

    def __init__(self, records: Sequence[StepRecord], warmup: int, since_ns: int = 0) -> None:
        self.records, self.warmup, self.since_ns = records, warmup, since_ns

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def measured(self) -> Sequence[StepRecord]:
        return self.records[self.warmup :] if self.warmup else self.records

    @cached_property
    def sums(self) -> Sums:
        return Sums(self.records)


class StepObserver(Protocol):
    """What `observers=` takes beside functions and metrics. Every method is optional.

    They are called in the training thread. One that raises is no longer called, and a warning says
    so; but `metrics` and `summary` are asked again.

    Examples:
        >>> class Longest:
        ...     longest_ms = 0.0
        ...
        ...     def on_step(self, times):
        ...         self.longest_ms = max(self.longest_ms, times.step_ms)
        ...
        ...     def metrics(self, means):
        ...         return {"longest_ms": self.longest_ms}
        >>> timer = GPUPhaseTimer(observers=[Longest()])
    """

    def attach(self) -> None:
        """Start: a measurement begins."""

    def on_step(self, times: StepTimes) -> None:
        """Take a step that was timed, as soon as it is read. Probed steps are left out."""

    def on_slow_step(self, step: SlowStep) -> None:
        """Take a step that took much longer than those before it, with its causes."""

    def on_slowdown(self, change: Slowdown) -> None:
        """Take the first slowdown that was found, once it has lasted for a tenth of the run."""

    def metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return what is logged beside the means since the last log, by name without prefix.

        Args:
            means: These means, by name without prefix, such as `step_ms` and `items_per_sec`.
        """
        raise NotImplementedError

    def summary(self) -> Section | str | None:
        """Return what the summary says of it: a line, or a `Section`; None for nothing."""
        return None

    def remove(self) -> None:
        """End: the measurement is over. Safe to call twice."""


def is_observer(one: object) -> bool:
    """Return whether `observers=` takes it."""
    names = (name for name in vars(StepObserver) if not name.startswith("_"))
    has_method = any(callable(getattr(one, name, None)) for name in names)
    return not isinstance(one, type) and (callable(one) or has_method)


def step_calls(observers: Sequence[Any]) -> list[Callable[[StepTimes], object]]:
    """Return what is called with each step: metrics are updated, others may be functions."""
    # To call a metric would also compute it. Others may have an `update` that is none.
    found = (
        one.update if is_metric(one) else getattr(one, "on_step", one if callable(one) else None)
        for one in observers
    )
    return [call for call in found if call is not None]


def sections_of(observers: Sequence[Any]) -> tuple[Section, ...]:
    """Return what observers add to a summary; one that raises adds nothing."""
    return tuple(_ask(observers, "summary", _section))


def _section(one: object, found: object) -> Section:
    if isinstance(found, str):
        return Section(type(one).__name__, (found,))
    if not isinstance(found, Section):
        raise TypeError(f"return a str, a Section or None, not {found!r:.60}")
    return found


def metrics_of(observers: Sequence[Any], means: Mapping[str, float]) -> dict[str, float]:
    """Return what observers add to a log; one that raises adds nothing."""
    metrics: dict[str, float] = {}
    for found in _ask(observers, "metrics", lambda _, found: dict(found), means):
        metrics |= found
    return metrics


def _ask(
    observers: Sequence[Any], name: str, convert: Callable[[object, Any], Any], *args: Any
) -> list[Any]:
    """Return what observers say that have a method; a warning where one raises."""
    answers = []
    for one in observers:
        if hasattr(one, name):
            try:
                found = getattr(one, name)(*args)
                if found is not None:
                    answers.append(convert(one, found))
            except Exception as error:
                messages.warning("%s.%s() failed: %r", type(one).__name__, name, error)
    return answers


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
            name = getattr(getattr(call, "func", call), "__qualname__", type(call).__name__)
            messages.warning("%s failed, and is no longer called: %r", name, error)
            calls.remove(call)
