"""Steps that took much longer than the usual one, why they did, and what they cost a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, overload

from lightning_gputime._results.table import Table, Tabular
from lightning_gputime._results.units import Unit, unit_of

Kind = Literal[
    "garbage",
    "compilation",
    "allocator",
    "preemption",
    "loader",
    "callback",
    "ranks",
    "clocks",
]

_WORDS: Mapping[str, str] = {
    "garbage": "garbage collection",
    "allocator": "the allocator",
    "loader": "the loader",
    "ranks": "other ranks",
    "clocks": "the GPU's clocks",
}
"""What a kind of cause is called in a sentence, where that is not its name."""

# So many slow steps are kept, those with the largest excess; the others are only added up.
_MOST = 1_000

NOT_JUDGED = "No step was judged yet: that takes ten that were timed after the warm-up."
"""What `slowest` says then."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a step was slow.

    Attributes:
        kind: What it was: "garbage" (Python's collection), "compilation" (by `torch.compile`),
            "allocator" (of the device's memory), "preemption" (the loop's thread had no processor),
            "loader", "callback" (or a logger, or a phase that was named by hand), "ranks" (a wait
            for others) or "clocks" (the device's own were lowered).
        host_ms: How long it held up the host (in milliseconds).
        reached_ms: How much of that the device had to wait (in milliseconds): what the host's lead
            did not hide.
        detail: More, for a person.
    """

    kind: Kind
    host_ms: float
    reached_ms: float
    detail: str

    @property
    def name(self) -> str:
        """What it is called in a sentence; a callback by its own name."""
        return self.detail if self.kind == "callback" else _WORDS.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took much longer than those around it.

    Attributes:
        step: Its number.
        step_ms: How long it took (in milliseconds).
        usual_ms: The median of the steps around it (in milliseconds).
        phase: The phase, or the part of one, that grew most; empty for a step that was not timed,
            which is known by the host's clock alone.
        causes: Why, the largest first.
        unexplained_ms: What of its excess has no known cause (in milliseconds).
    """

    step: int
    step_ms: float
    usual_ms: float
    phase: str
    causes: tuple[Cause, ...]
    unexplained_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts, ready for JSON, with the names of the causes and the sentence."""
        causes = [{**asdict(cause), "name": cause.name} for cause in self.causes]
        return {**asdict(self), "causes": causes, "text": str(self)}

    @property
    def excess_ms(self) -> float:
        """How much longer than usual it took (in milliseconds)."""
        return self.step_ms - self.usual_ms

    def __str__(self) -> str:
        unit = unit_of(self.usual_ms)
        grounds = [_of_cause(cause, unit) for cause in self.causes]
        if self.unexplained_ms >= 0.05 * self.excess_ms:
            grounds.append(f"{unit.of(self.unexplained_ms)} unexplained")
        where = f"and grew in `{self.phase}`" if self.phase else "by the host's clock"
        return (
            f"step {self.step} took {unit.of(self.step_ms)}, usually {unit.number(self.usual_ms)},"
            f" {where}: {', '.join(grounds)}"
        )


def _of_cause(cause: Cause, unit: Unit) -> str:
    detail = f" ({cause.detail})" if cause.detail and cause.kind != "callback" else ""
    return f"{unit.of(cause.reached_ms)} {cause.name}{detail}"


class SlowSteps(Tabular, Sequence[SlowStep]):
    """Slow steps, which `print` shows as a table.

    Args:
        steps: The steps, in the order in which they are shown.
        hint: Why there are none, where that is known.
    """

    def __init__(self, steps: Sequence[SlowStep], hint: str = "") -> None:
        self._steps = tuple(steps)
        self._hint = hint

    @overload
    def __getitem__(self, index: int) -> SlowStep: ...

    @overload
    def __getitem__(self, index: slice) -> "SlowSteps": ...

    def __getitem__(self, index: int | slice) -> "SlowStep | SlowSteps":
        if isinstance(index, slice):
            return SlowSteps(self._steps[index], self._hint)
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"SlowSteps({list(self._steps)!r})"

    def _table(self) -> Table:
        if not self._steps:
            return Table(self._hint or "No step was slow.", [], [])
        header = ("step", "took", "usual", "phase", "cause", "host", "reached", "detail")
        lines = [line for step in self._steps for line in _lines(step)]
        took, usual, unexplained = (
            f"{sum(getattr(step, name) for step in self._steps):.3f}"
            for name in ("step_ms", "usual_ms", "unexplained_ms")
        )
        whole = ("all", took, usual, "", "unexplained", "", unexplained, "")
        return Table("Slow steps, times in ms", [header, *lines, whole], [], left=(0, 3, 4, 7))


def _lines(step: SlowStep) -> Iterator[tuple[str, ...]]:
    """Returns a line for each cause of a step, and one for what has none."""
    first = (str(step.step), f"{step.step_ms:.3f}", f"{step.usual_ms:.3f}", step.phase)
    for cause in step.causes:
        yield (*first, cause.kind, f"{cause.host_ms:.3f}", f"{cause.reached_ms:.3f}", cause.detail)
        first = ("", "", "", "")
    if not step.causes or step.unexplained_ms >= 0.05 * step.excess_ms:
        yield (*first, "unexplained", "", f"{step.unexplained_ms:.3f}", "")


class Passed:
    """Steps that were not timed, and judged by the host's clock.

    Attributes:
        n: How many there were.
        ns: What they took together (in nanoseconds).
    """

    __slots__ = ("n", "ns")

    def __init__(self, n: int = 0, ns: int = 0) -> None:
        self.n, self.ns = n, ns


@dataclass(frozen=True, slots=True)
class SlowSummary:
    """What slow steps cost a run.

    Attributes:
        n: How many there were.
        steps: Among how many.
        share: The part of the time of all steps that was their excess, from 0 to 1.
        cause_shares: How much of that each cause has, by its name, the largest first.
        unexplained_share: How much of that has no known cause.
        worst: The slow step with the largest excess.
    """

    n: int
    steps: int
    share: float
    cause_shares: Mapping[str, float]
    unexplained_share: float
    worst: SlowStep

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a person should know: what they cost, and the worst."""
        known = self.cause_shares.items()
        shares = [f"{name} {share:.1%}" for name, share in known if share >= 0.0005]
        if not shares or self.unexplained_share >= 0.0005:
            shares.append(f"unexplained {self.unexplained_share:.1%}")
        was = "was" if self.n == 1 else "were"
        return (
            f"{self.n:,} of {self.steps:,} steps {was} slow and cost {self.share:.1%} of the time:"
            f" {', '.join(shares)}",
            f"the worst: {self.worst}",
        )


class SlowLog:
    """Keeps the slow steps of a run: the worst one by one, all of them added up."""

    def __init__(self) -> None:
        self.n = 0
        self.is_known = False
        """Whether any step was judged yet."""
        self.passed = Passed()
        """The steps that were judged, and not timed."""
        self._excess_ms = self._unexplained_ms = 0.0
        self._cause_ms: dict[str, float] = {}
        self._worst: list[SlowStep] = []

    def add(self, steps: Sequence[SlowStep]) -> None:
        """Takes slow steps."""
        for step in steps:
            self.n += 1
            self._excess_ms += step.excess_ms
            self._unexplained_ms += step.unexplained_ms
            for cause in step.causes:
                ms = self._cause_ms.get(cause.name, 0.0)
                self._cause_ms[cause.name] = ms + cause.reached_ms
        self._worst.extend(steps)
        if len(self._worst) > 2 * _MOST:
            self._worst = _largest(self._worst)[:_MOST]

    def copy(self) -> "SlowLog":
        """Returns what there is now."""
        copied = SlowLog()
        copied.__dict__.update(self.__dict__, _cause_ms={**self._cause_ms}, _worst=[*self._worst])
        copied.passed = Passed(self.passed.n, self.passed.ns)
        return copied

    def slowest(self, n: int) -> list[SlowStep]:
        """Returns those with the largest excess, the largest first."""
        return _largest(self._worst)[: min(n, _MOST)]

    def summary(self, steps: int, all_ms: float) -> SlowSummary | None:
        """Returns what they cost a run; None if there are none.

        Args:
            steps: How many steps were timed.
            all_ms: What these took together (in milliseconds).
        """
        steps, all_ms = steps + self.passed.n, all_ms + self.passed.ns / 1e6
        if not self.n or not all_ms:
            return None
        causes = sorted(self._cause_ms.items(), key=lambda one: one[1], reverse=True)
        return SlowSummary(
            n=self.n,
            steps=steps,
            share=self._excess_ms / all_ms,
            cause_shares={name: ms / all_ms for name, ms in causes},
            unexplained_share=self._unexplained_ms / all_ms,
            worst=_largest(self._worst)[0],
        )


def _largest(steps: Sequence[SlowStep]) -> list[SlowStep]:
    return sorted(steps, key=lambda step: step.excess_ms, reverse=True)
