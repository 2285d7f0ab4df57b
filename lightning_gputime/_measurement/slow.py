"""Slow steps: their causes, and their cost for a run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple

from lightning_gputime._messages import percent, unit_of

CauseKind = Literal[
    "garbage_collection", "compilation", "allocator", "dataloader", "callback", "ranks", "off_cpu"
]

# A step is slow if its excess is larger than each of these. Chosen: smaller ones call noise slow,
# larger ones miss short causes. 12 of 13 planted causes are found (`results/outside_cpu.json`).
MIN_EXCESS_DEVIATIONS = 5.0  # As a multiple of the median absolute deviation.
MIN_EXCESS_SHARE = 0.1  # As a fraction of the median.
MIN_EXCESS_MS = 0.5

UNEXPLAINED = "unexplained"
# Causes whose time belongs to a phase: `data`, `callbacks` and `comm`.
HAVE_PHASES: tuple[CauseKind, ...] = ("dataloader", "callback", "ranks")

# Names of causes in sentences, if they differ from the kind.
_WORDS: Mapping[str, str] = {
    "garbage_collection": "garbage collection",
    "allocator": "the allocator",
    "dataloader": "the loader",
    "ranks": "other ranks",
    "off_cpu": "off-CPU",  # In files of earlier versions.
}

_MAX_KEPT = 1_000
"""Once more than twice as many slow steps are stored, keep this many with the largest excess, and
every second of the others."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a slow step.

    Attributes:
        kind: "garbage_collection" (of Python), "compilation" (by `torch.compile`), "allocator" (of
            GPU memory), "dataloader", "callback" (also a logger or a named phase) or "ranks"
            (waiting for other ranks). In older files also "off_cpu": the loop's thread did not run.
        host_ms: Delay of the host (in milliseconds).
        exposed_ms: Part of the delay that reached the GPU, because queued work did not hide it (in
            milliseconds).
        detail: Details, such as the name of a callback.
    """

    kind: CauseKind
    host_ms: float
    exposed_ms: float
    detail: str

    @property
    def name(self) -> str:
        """Name for sentences; for a callback, the name of that callback."""
        return self.detail if self.kind == "callback" else _WORDS.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Step that took much longer than the steps before it.

    Attributes:
        step: Step number.
        step_ms: Step time (in milliseconds).
        baseline_ms: Median time of the steps before it (in milliseconds).
        phase: Phase or sub-phase with the largest excess.
        causes: Causes, the largest first.
        unexplained_ms: Part of the excess without a known cause (in milliseconds).
        phase_excess_ms: Part of the excess in `phase` (in milliseconds).
        lost_ms: Excess by phase and cause (in milliseconds). It excludes causes that have a phase
            themselves: the loader, callbacks and waiting for other ranks.
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
        """Step time minus baseline (in milliseconds)."""
        return self.step_ms - self.baseline_ms

    @property
    def why(self) -> str:
        """Causes and their parts of the excess, the largest first; the unexplained part is last."""
        unit = unit_of(self.baseline_ms)
        parts = []
        for cause in self.causes:
            detail = f" ({cause.detail})" if cause.detail and cause.kind != "callback" else ""
            parts.append(f"{unit.of(cause.exposed_ms)} {cause.name}{detail}")
        if self.unexplained_ms >= 0.05 * self.excess_ms:
            parts.append(f"{unit.of(self.unexplained_ms)} unexplained")
        return ", ".join(parts)

    def __str__(self) -> str:
        unit = unit_of(self.baseline_ms)
        excess = unit.of(self.excess_ms)
        part = f"{unit.of(self.phase_excess_ms)} of {excess}"
        if self.phase_excess_ms > 0.5 * self.excess_ms:
            part = "most of it"
        return (
            f"step {self.step} took {unit.of(self.step_ms)} (baseline {unit.of(self.baseline_ms)}),"
            f" +{excess}: {self.why}; {part} in `{self.phase}`"
        )


@dataclass(frozen=True, slots=True)
class SlowSummary:
    """Cost of slow steps for a run.

    The shares of causes are exact for up to 2,000 slow steps. With more slow steps, they are
    estimated from the 1,000 steps with the largest excess and a sample of the others.
    """

    n: int  # Number of slow steps.
    steps: int  # Number of timed steps.
    share: float  # Excess as a fraction of the time of all steps, from 0 to 1.
    cause_shares: Mapping[str, float]  # Excess share by cause, the largest first.
    unexplained_share: float  # Excess share without a known cause.
    worst: SlowStep  # Slow step with the largest excess.
    # Excess share by phase and cause, without causes that have a phase themselves.
    lost_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Cost of all slow steps, and the worst of them."""
        # Show fractions of the excess. The time breakdown shows fractions of the total time.
        shares = {**self.cause_shares, UNEXPLAINED: self.unexplained_share}
        parts = [
            f"{percent(part / self.share)} {name}" for name, part in shares.items() if part > 0
        ]
        was = "was slow, and cost" if self.n == 1 else "were slow, and cost"
        if self.n > 0.25 * self.steps:  # Call no step slow.
            was = "took longer than their baseline (step times vary), and cost"
        return (
            f"{self.n:,} of {self.steps:,} steps {was} {percent(self.share)} of the time;"
            f" causes: {', '.join(parts)}",
            f"largest excess: {self.worst}",
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over slow steps. Immutable, so that any thread may read them."""

    excess_ms: float = 0.0
    unexplained_ms: float = 0.0
    kinds_ms: Mapping[str, float] = field(default_factory=dict)  # By kind of cause.
    names_ms: Mapping[str, float] = field(default_factory=dict)  # By name of cause.
    lost_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)  # By phase and cause.

    def plus(self, steps: Iterable[tuple[SlowStep, float]]) -> "_Sums":
        """Return the sums including more steps, each with a weight."""
        excess_ms, unexplained_ms = self.excess_ms, self.unexplained_ms
        kinds_ms, names_ms, lost_ms = (
            defaultdict[Any, float](float, sums_ms)
            for sums_ms in (self.kinds_ms, self.names_ms, self.lost_ms)
        )
        for step, weight in steps:
            excess_ms += weight * step.excess_ms
            unexplained_ms += weight * step.unexplained_ms
            for cause in step.causes:
                kinds_ms[cause.kind] += weight * cause.exposed_ms
                names_ms[cause.name] += weight * cause.exposed_ms
            for phase, causes_ms in step.lost_ms.items():
                for name, ms in causes_ms.items():
                    lost_ms[phase, name] += weight * ms
        return _Sums(excess_ms, unexplained_ms, kinds_ms, names_ms, lost_ms)


class SlowEvidence:
    """Slow step whose causes are computed once, on request."""

    __slots__ = ("_step", "excess_ms")

    def __init__(self, excess_ms: float, explain: Callable[[], SlowStep]) -> None:
        self.excess_ms = excess_ms
        self._step: SlowStep | Callable[[], SlowStep] = explain

    def explained(self) -> SlowStep:
        step = self._step  # Read it once, because several threads may call this.
        if not isinstance(step, SlowStep):
            step = self._step = step()
        return step


class _Kept(NamedTuple):
    """Slow steps of a run. Immutable, so that any thread may read them."""

    # In order, each with the number of slow steps that it represents, including dropped steps.
    steps: Sequence[tuple[SlowEvidence, float]] = ()
    n: int = 0  # Number of all slow steps.
    excess_ms: float = 0.0  # Excess of all slow steps.

    def sums(self) -> _Sums:
        """Return the sums over all slow steps. Causes are estimates if steps were dropped."""
        return _Sums().plus((step.explained(), weight) for step, weight in self.steps)


class SlowLog:
    """Slow steps of a run: the worst steps, and sums over all of them.

    One thread adds steps and logs, while any thread may read. So the containers are never modified
    in place, but replaced.
    """

    def __init__(self) -> None:
        self.is_followed = False
        """True if logs or observers report slow steps during training."""
        self._has_baseline = False  # True once steps were compared with a baseline.
        self._kept = _Kept()
        self._pending: Sequence[SlowStep] = ()  # Unlogged steps of the last call of `add`.
        self._unlogged = _Sums()  # Sums over unlogged steps of earlier calls.
        self._logged = -1  # Number of the last logged step.
        # Kinds that were logged before, because loggers such as CSV require a constant set of keys.
        self._kinds: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Computing the sums explains all steps. This drops their evidence, which may not be
        # picklable.
        self._kept.sums()
        return self.__dict__

    def follow(self) -> None:
        """Explain each slow step as it is added, as logs or observers report it."""
        self.is_followed = True

    def add(self, found: Sequence[SlowEvidence], *, has_baseline: bool) -> Sequence[SlowStep]:
        """Add the next slow steps. Return them with their causes if the log is followed.

        `has_baseline` is True once steps were compared with a baseline.
        """
        self._has_baseline = has_baseline
        if not found:
            return ()
        # For logs
        explained = [step.explained() for step in found] if self.is_followed else []
        # Logs that exclude some of the pending steps have been written by now, so the next log
        # includes all of them.
        self._unlogged = self._unlogged.plus(zip(self._pending, repeat(1.0)))
        # The first steps are compared late. Drop steps that an earlier log has already covered.
        self._pending = [step for step in explained if step.step > self._logged]

        # For the summary, in bounded memory, see `_MAX_KEPT`
        kept = self._kept
        steps = [*kept.steps, *zip(found, repeat(1.0))]
        if len(steps) > 2 * _MAX_KEPT:
            # Indices of steps, the largest excess first.
            order = sorted(range(len(steps)), key=lambda i: steps[i][0].excess_ms, reverse=True)
            largest, smaller = order[:_MAX_KEPT], order[_MAX_KEPT:]
            for i, dropped in zip(smaller[::2], smaller[1::2], strict=False):
                # Add its weight to the step with the next larger excess.
                steps[i] = steps[i][0], steps[i][1] + steps[dropped][1]
            steps = [steps[i] for i in sorted([*largest, *smaller[::2]])]
        excess_ms = kept.excess_ms + sum([step.excess_ms for step in found])
        self._kept = _Kept(steps, kept.n + len(found), excess_ms)
        return explained

    @property
    def excess_ms(self) -> float:
        """Excess of all slow steps (in milliseconds)."""
        return self._kept.excess_ms

    def unexplained_ms(self) -> dict[int, float]:
        """Return the unexplained excess of the slow steps by number, without dropped steps."""
        steps = [evidence.explained() for evidence, _ in self._kept.steps]
        return {step.step: step.unexplained_ms for step in steps}

    def slow_steps(self, n: int) -> list[SlowStep]:
        """Return the steps with the largest excess, the largest first."""
        ordered = sorted(self._kept.steps, key=lambda kept: kept[0].excess_ms, reverse=True)
        return [step.explained() for step, _ in ordered[: min(n, _MAX_KEPT)]]

    def metrics(self, newest: int, n: int, *, keep: bool = False) -> dict[str, float]:
        """Return the excess per step of the `n` timed steps since the last log, also by kind.

        `newest` is the number of the newest step to include. With `keep`, the next log includes
        these steps, too.
        """
        included = [step for step in self._pending if step.step <= newest]
        sums = self._unlogged.plus(zip(included, repeat(1.0)))
        if not keep:
            self._logged, self._unlogged = newest, _Sums()
            self._pending = [step for step in self._pending if step.step > newest]
        if not self._has_baseline:
            return {}
        self._kinds += tuple(kind for kind in sums.kinds_ms if kind not in self._kinds)
        kinds = {f"slow/{kind}": sums.kinds_ms.get(kind, 0.0) / n for kind in self._kinds}
        return {"slow_excess": sums.excess_ms / n, **kinds}

    def summary(self, steps: int, all_ms: float) -> SlowSummary | None:
        """Return the cost of slow steps; None if no step was slow.

        `all_ms` is the time of all timed steps, increased if they are slow more often than untimed
        steps.
        """
        kept = self._kept
        if not kept.n or not all_ms:
            return None
        sums = kept.sums()
        # If steps were dropped, the parts by cause are estimates. Scale them to add up to the total
        # excess, which is exact.
        scale = 1.0 if len(kept.steps) == kept.n else kept.excess_ms / sums.excess_ms
        causes = sorted(sums.names_ms.items(), key=lambda item: item[1], reverse=True)
        lost: dict[str, dict[str, float]] = defaultdict(dict)
        for (phase, name), ms in sums.lost_ms.items():
            lost[phase][name] = scale * ms / all_ms
        return SlowSummary(
            n=kept.n,
            steps=steps,
            share=kept.excess_ms / all_ms,
            cause_shares={name: scale * ms / all_ms for name, ms in causes},
            unexplained_share=scale * sums.unexplained_ms / all_ms,
            worst=max(kept.steps, key=lambda step: step[0].excess_ms)[0].explained(),
            lost_shares=dict(lost),
        )
