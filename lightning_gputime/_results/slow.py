"""Steps that took much longer than the baseline, why they did, and what they cost a run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_gputime._results.table import percent, unit_of

CauseKind = Literal[
    "garbage_collection", "compilation", "allocator", "off_cpu", "dataloader", "callback", "ranks"
]

UNEXPLAINED = "unexplained"
OFF_CPU = "off-CPU"
# Whose time is that of phases of their own: `data`, `callbacks` and `comm`.
HAVE_PHASES: tuple[CauseKind, ...] = ("dataloader", "callback", "ranks")

# What a kind of cause is called in a sentence, where that is not its name.
_WORDS: Mapping[str, str] = {
    "garbage_collection": "garbage collection",
    "allocator": "the allocator",
    "dataloader": "the loader",
    "off_cpu": OFF_CPU,
    "ranks": "other ranks",
}

_MAX_SHARE = 0.25  # Of more of the steps none is called slow: that is how much they vary.
_MAX_KEPT = 1_000  # Of more, those with the largest excess are kept; the others are only added up.


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a step was slow.

    Attributes:
        kind: What it was: "garbage_collection" (of Python), "compilation" (by `torch.compile`),
            "allocator" (of the device's memory), "off_cpu" (the loop's thread was not running),
            "dataloader", "callback" (or a logger, or a phase that was named by hand) or "ranks" (a
            wait for others).
        host_ms: How long it held up the host (in milliseconds).
        exposed_ms: How much of that the device had to wait (in milliseconds): what run-ahead
            did not hide.
        detail: More, for a person.
    """

    kind: CauseKind
    host_ms: float
    exposed_ms: float
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
        baseline_ms: The median of the steps around it (in milliseconds).
        phase: The phase, or the part of one, with the largest excess.
        causes: Why, the largest first.
        unexplained_ms: What of its excess has no known cause (in milliseconds).
        phase_excess_ms: How much of its excess is in that phase (in milliseconds).
        lost_ms: What of its excess is not that of `data`, `callbacks` or a wait for other ranks, by
            phase and cause (in milliseconds).
        phase_ms: Device time of each phase that ran, without sub-phases (in milliseconds).
        host_ms: Host time between the same marks (in milliseconds).
    """

    step: int
    step_ms: float
    baseline_ms: float
    phase: str
    causes: tuple[Cause, ...]
    unexplained_ms: float
    phase_excess_ms: float = 0.0
    lost_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    phase_ms: Mapping[str, float] = field(default_factory=dict)
    host_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def excess_ms(self) -> float:
        """How much longer than the baseline it took (in milliseconds)."""
        return self.step_ms - self.baseline_ms

    @property
    def why(self) -> str:
        """What its excess is made of, the largest part first."""
        unit, grounds = unit_of(self.baseline_ms), []
        for cause in self.causes:
            detail = f" ({cause.detail})" if cause.detail and cause.kind != "callback" else ""
            grounds.append(f"{unit.of(cause.exposed_ms)} {cause.name}{detail}")
        if self.unexplained_ms >= 0.05 * self.excess_ms:
            grounds.append(f"{unit.of(self.unexplained_ms)} unexplained")
        return ", ".join(grounds)

    def __str__(self) -> str:
        unit = unit_of(self.baseline_ms)
        here_ms, excess = self.phase_excess_ms, unit.of(self.excess_ms)
        here = "most of it" if 2 * here_ms > self.excess_ms else f"{unit.of(here_ms)} of {excess}"
        return (
            f"step {self.step} took {unit.of(self.step_ms)} (baseline {unit.of(self.baseline_ms)}),"
            f" +{excess}: {self.why}; {here} in `{self.phase}`"
        )


@dataclass(frozen=True, slots=True)
class SlowSummary:
    """What slow steps cost a run."""

    n: int  # How many there were,
    steps: int  # among how many.
    share: float  # The part of the time of all steps that was their excess, from 0 to 1.
    cause_shares: Mapping[str, float]  # Of that time, by the name of the cause, the largest first.
    unexplained_share: float  # Of that time, without a known cause.
    worst: SlowStep  # The one with the largest excess.
    # Of that time, by phase and cause, what is not that of a phase such as `data` anyway.
    lost_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a person should know: what they cost, and the worst."""
        # Of the excess, not of the time: the losses have that, without what is `data` anyway.
        shares = {**self.cause_shares, UNEXPLAINED: self.unexplained_share}
        known = [f"{percent(one / self.share)} {name}" for name, one in shares.items() if one > 0]
        was = "was slow, and cost" if self.n == 1 else "were slow, and cost"
        if self.n > _MAX_SHARE * self.steps:
            was = "took longer than their baseline (step times vary), and cost"
        return (
            f"{self.n:,} of {self.steps:,} steps {was} {percent(self.share)} of the time;"
            f" of that {', '.join(known)}",
            f"largest excess: {self.worst}",
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over slow steps, never changed: any thread may read them."""

    n: int = 0
    excess_ms: float = 0.0
    unexplained_ms: float = 0.0
    kinds_ms: Mapping[str, float] = field(default_factory=dict)
    names_ms: Mapping[str, float] = field(default_factory=dict)  # Of causes.
    lost_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)  # By phase and cause.

    def plus(self, steps: Sequence[SlowStep]) -> "_Sums":
        """Return these sums with those over more steps."""
        kinds_ms, names_ms = defaultdict(float, self.kinds_ms), defaultdict(float, self.names_ms)
        lost_ms = defaultdict(float, self.lost_ms)
        for step in steps:
            for cause in step.causes:
                kinds_ms[cause.kind] += cause.exposed_ms
                names_ms[cause.name] += cause.exposed_ms
            for phase, causes_ms in step.lost_ms.items():
                for name, ms in causes_ms.items():
                    lost_ms[phase, name] += ms
        return _Sums(
            self.n + len(steps),
            self.excess_ms + sum(step.excess_ms for step in steps),
            self.unexplained_ms + sum(step.unexplained_ms for step in steps),
            kinds_ms,
            names_ms,
            lost_ms,
        )


class SlowLog:
    """Keep the slow steps of a run: the worst one by one, all of them added up.

    One thread adds steps and logs; any may read. So what they read is replaced, and never changed.
    """

    def __init__(self) -> None:
        self._is_known = False  # Whether any step was judged yet.
        self._worst: Sequence[SlowStep] = ()
        self._sums = _Sums()
        # Those that are not logged yet: those that were added last, and the sums over the others.
        self._pending: Sequence[SlowStep] = ()
        self._before = _Sums()
        self._logged = -1  # The number of the last step that is in a log.
        # That were logged once: loggers such as CSV want a constant set.
        self._kinds: tuple[str, ...] = ()

    def add(self, steps: Sequence[SlowStep], *, is_known: bool) -> None:
        """Take the next slow steps, and whether any step was judged yet."""
        self._is_known = is_known
        if not steps:
            return
        worst = [*self._worst, *steps]
        self._worst = worst if len(worst) <= 2 * _MAX_KEPT else _largest(worst)[:_MAX_KEPT]
        self._sums = self._sums.plus(steps)
        # A log that ends inside them is asked for before the next are added.
        self._before = self._before.plus(self._pending)
        # The first ten are judged late: a log of fewer is over, and the next is not theirs.
        self._pending = [step for step in steps if step.step >= self._logged]

    def slow_steps(self, n: int) -> list[SlowStep]:
        """Return the steps with the largest excess, the largest first."""
        return _largest(self._worst)[: min(n, _MAX_KEPT)]

    def metrics(self, newest: int, n: int, *, keep: bool = False) -> dict[str, float]:
        """Return their excess per step since the last log, of `n` timed steps, and by kind."""
        sums = self._before.plus([step for step in self._pending if step.step <= newest])
        if not keep:
            self._logged, self._before = newest, _Sums()
            self._pending = [step for step in self._pending if step.step > newest]
        if not self._is_known:
            return {}
        self._kinds += tuple(kind for kind in sums.kinds_ms if kind not in self._kinds)
        kinds = {f"slow/{kind}": sums.kinds_ms.get(kind, 0.0) / n for kind in self._kinds}
        return {"slow_excess": sums.excess_ms / n, **kinds}

    def summary(self, steps: int, all_ms: float) -> SlowSummary | None:
        """Return what they cost a run, whose steps took `all_ms`; None if there are none."""
        sums = self._sums
        if not sums.n or not all_ms:
            return None
        causes = sorted(sums.names_ms.items(), key=lambda one: one[1], reverse=True)
        lost: dict[str, dict[str, float]] = defaultdict(dict)
        for (phase, name), ms in sums.lost_ms.items():
            lost[phase][name] = ms / all_ms
        return SlowSummary(
            n=sums.n,
            steps=steps,
            share=sums.excess_ms / all_ms,
            cause_shares={name: ms / all_ms for name, ms in causes},
            unexplained_share=sums.unexplained_ms / all_ms,
            worst=_largest(self._worst)[0],
            lost_shares=dict(lost),
        )


def _largest(steps: Sequence[SlowStep]) -> list[SlowStep]:
    return sorted(steps, key=lambda step: step.excess_ms, reverse=True)
