"""Observers: their interface, and functions to call them."""

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


@dataclass(eq=False)
class ReadSteps:
    """Steps that were read together, in order; warm-up steps come first."""

    records: Sequence[StepRecord]
    warmup: int  # Number of first steps that are warm-up.
    since_ns: int = 0  # Host time at which reading them started.

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def measured(self) -> Sequence[StepRecord]:
        """Steps after the warm-up."""
        return self.records[self.warmup :] if self.warmup else self.records

    @cached_property
    def sums(self) -> Sums:
        """Sums over all steps, including the warm-up."""
        return Sums(self.records)


class StepObserver(Protocol):
    """Interface of objects for `observers=`, which also accepts functions and metrics.

    Every method is optional. `summary` is called in the thread that asks for a summary, all other
    methods in the training thread. If a method raises, a warning reports it, and the method is not
    called again. `metrics` and `summary` are still called.

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
        """Start a measurement."""

    def on_step(self, times: StepTimes) -> None:
        """Receive a timed step as soon as it is read; examined steps are excluded."""

    def on_slow_step(self, step: SlowStep) -> None:
        """Receive a step that took much longer than the steps before it, with its causes."""

    def on_slowdown(self, change: Slowdown) -> None:
        """Receive the first slowdown, once it has lasted for a tenth of the run."""

    def metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return further values to log, by name without prefix.

        Args:
            means: Means since the last log, such as `step_ms` and `items_per_sec`.
        """
        raise NotImplementedError

    def summary(self) -> Section | str | None:
        """Return a line or a `Section` for the summary, or None."""
        return None

    def remove(self) -> None:
        """End the measurement. Safe to call twice."""


def is_observer(candidate: object) -> bool:
    """Return True if `observers=` accepts the object."""
    names = (name for name in vars(StepObserver) if not name.startswith("_"))
    has_method = any(callable(getattr(candidate, name, None)) for name in names)
    return not isinstance(candidate, type) and (callable(candidate) or has_method)


def step_calls(observers: Sequence[Any]) -> list[Callable[[StepTimes], object]]:
    """Return the function of each observer that takes the times of a step, if it has one."""
    calls = []
    for observer in observers:
        call = getattr(observer, "on_step", observer if callable(observer) else None)
        if is_metric(observer):
            call = observer.update  # Calling the metric itself would also compute it.
        if call is not None:
            calls.append(call)
    return calls


def sections_of(observers: Sequence[Any]) -> tuple[Section, ...]:
    """Return the sections that observers add to a summary. Skip observers that raise."""

    def to_section(observer: object, found: object) -> Section:
        if isinstance(found, str):
            return Section(type(observer).__name__, (found,))
        if not isinstance(found, Section):
            raise TypeError(f"return a str, a Section or None, not {found!r:.60}")
        return found

    return tuple(_ask(observers, "summary", to_section))


def metrics_of(observers: Sequence[Any], means: Mapping[str, float]) -> dict[str, float]:
    """Return the values that observers add to a log. Skip observers that raise."""
    metrics: dict[str, float] = {}
    for found in _ask(observers, "metrics", lambda _, found: dict(found), means):
        metrics |= found
    return metrics


def _ask(
    observers: Sequence[Any], name: str, convert: Callable[[object, Any], Any], *args: Any
) -> list[Any]:
    """Call a method of all observers that have it. Return its results, converted, without None.

    Warn about observers that raise, and skip them.
    """
    answers = []
    for observer in observers:
        try:
            ask = getattr(observer, name, None)
            if ask is not None and (found := ask(*args)) is not None:
                answers.append(convert(observer, found))
        except Exception as error:
            messages.warning("%s.%s() failed: %r", type(observer).__name__, name, error)
    return answers


def methods(observers: Sequence[Any], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of all observers that have it, in order."""
    found = [getattr(observer, name, None) for observer in observers]
    return [method for method in found if method is not None]


def call_safely(calls: list[Callable[..., Any]], *args: Any) -> None:
    """Call each function. If a function raises, warn and remove it from the list."""
    for call in [*calls]:
        try:
            call(*args)
        except Exception as error:
            name = getattr(getattr(call, "func", call), "__qualname__", type(call).__name__)
            messages.warning("%s failed, and is no longer called: %r", name, error)
            calls.remove(call)
