"""Steps that took much longer than the baseline, why they did, and what they cost a run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from lightning_gputime._measurement.units import percent, unit_of

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
_MAX_KEPT = 1_000
"""Of more slow steps, those with the largest excess are kept; the others are only added up."""


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
    """What slow steps cost a run.

    The shares of causes are exact for up to 2,000 slow steps. With more, they are estimated from
    the 1,000 with the largest excess and a sample of the others.
    """

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

    def plus(self, steps: Iterable[SlowStep], weights: Iterable[float] = repeat(1.0)) -> "_Sums":
        """Return these sums with those over more steps, each of which stands for several."""
        n, excess_ms, unexplained_ms = 0, 0.0, 0.0
        kinds_ms, names_ms = defaultdict(float, self.kinds_ms), defaultdict(float, self.names_ms)
        lost_ms = defaultdict(float, self.lost_ms)
        for step, weight in zip(steps, weights, strict=False):
            n += 1
            excess_ms += weight * step.excess_ms
            unexplained_ms += weight * step.unexplained_ms
            for cause in step.causes:
                kinds_ms[cause.kind] += weight * cause.exposed_ms
                names_ms[cause.name] += weight * cause.exposed_ms
            for phase, causes_ms in step.lost_ms.items():
                for name, ms in causes_ms.items():
                    lost_ms[phase, name] += weight * ms
        return _Sums(
            self.n + n,
            self.excess_ms + excess_ms,
            self.unexplained_ms + unexplained_ms,
            kinds_ms,
            names_ms,
            lost_ms,
        )


class SlowEvidence:
    """A slow step that is explained when somebody asks for its causes, and only once."""

    __slots__ = ("_explain", "_explained", "excess_ms", "number")

    def __init__(self, excess_ms: float, number: int, explain: Callable[[], SlowStep]) -> None:
        self.excess_ms, self.number = excess_ms, number
        self._explain: Callable[[], SlowStep] | None = explain
        self._explained: SlowStep | None = None

    @property
    def is_explained(self) -> bool:
        return self._explain is None

    def explained(self) -> SlowStep:
        # Several threads may ask. Each reads first what the other one drops last.
        explain = self._explain
        if explain is not None:
            self._explained = explain()
            self._explain = None
        assert self._explained is not None
        return self._explained


class _Kept(NamedTuple):
    """The slow steps of a run, never changed: any thread may read them."""

    steps: Sequence[SlowEvidence] = ()  # In their order.
    # How many each stands for: others as slow were dropped before anybody asked for their causes.
    weights: Sequence[float] = ()
    others: _Sums = _Sums()  # Over those that were explained, and are not kept.
    n: int = 0  # Of all slow steps.
    excess_ms: float = 0.0

    def plus(self, steps: Sequence[SlowEvidence]) -> "_Kept":
        kept = _Kept(
            [*self.steps, *steps],
            [*self.weights, *repeat(1.0, len(steps))],
            self.others,
            self.n + len(steps),
            self.excess_ms + sum([step.excess_ms for step in steps]),
        )
        return kept if len(kept.steps) <= 2 * _MAX_KEPT else kept._thinned()

    def _thinned(self) -> "_Kept":
        """Keep the steps with the largest excess, and a sample of the others.

        Others that are explained are added up. Of the rest every second one is dropped, and the
        one that is a little slower stands for it.
        """
        each = [*zip(self.steps, self.weights, strict=True)]
        order = sorted(range(len(each)), key=lambda i: each[i][0].excess_ms, reverse=True)
        smaller = order[_MAX_KEPT:]
        known = [each[i] for i in sorted(smaller) if each[i][0].is_explained]
        unknown = [i for i in smaller if not each[i][0].is_explained]
        for i, dropped in zip(unknown[::2], unknown[1::2], strict=False):
            each[i] = each[i][0], each[i][1] + each[dropped][1]
        kept = [each[i] for i in sorted([*order[:_MAX_KEPT], *unknown[::2]])]
        return self._replace(
            steps=[step for step, _ in kept],
            weights=[weight for _, weight in kept],
            others=self.others.plus(
                [step.explained() for step, _ in known], [weight for _, weight in known]
            ),
        )

    def largest(self, n: int) -> list[SlowStep]:
        """Return the steps with the largest excess, the largest first."""
        ordered = sorted(self.steps, key=attrgetter("excess_ms"), reverse=True)
        return [step.explained() for step in ordered[: min(n, _MAX_KEPT)]]

    def sums(self) -> _Sums:
        """Return the sums over all slow steps. Where some were dropped, causes are estimates."""
        sums = self.others.plus([step.explained() for step in self.steps], self.weights)
        return replace(sums, n=self.n)


class SlowLog:
    """Keep the slow steps of a run: the worst one by one, all of them added up.

    One thread adds steps and logs; any may read. So what they read is replaced, and never changed.
    """

    def __init__(self) -> None:
        self.is_followed = False
        """True if logs or observers report slow steps during training."""
        self._is_known = False  # Whether any step was judged yet.
        self._kept = _Kept()
        # Those that are not logged yet: those that were added last, and the sums over the others.
        self._pending: Sequence[SlowStep] = ()
        self._before = _Sums()
        self._logged = -1  # The number of the last step that is in a log.
        # That were logged once: loggers such as CSV want a constant set.
        self._kinds: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # What is not explained may hold what cannot be pickled.
        self._kept.sums()
        return self.__dict__

    def follow(self) -> None:
        """Explain each slow step as it is added, as logs or observers report it."""
        self.is_followed = True

    def add(self, found: Sequence[SlowEvidence], *, is_known: bool) -> Sequence[SlowStep]:
        """Take the next slow steps, and whether any step was judged yet.

        Return them with their causes if somebody follows the log.
        """
        self._is_known = is_known
        if not found:
            return ()
        steps = [step.explained() for step in found] if self.is_followed else []
        self._kept = self._kept.plus(found)
        # A log that ends inside them is asked for before the next are added.
        self._before = self._before.plus(self._pending)
        # The first ten are judged late: a log of fewer is over, and the next is not theirs.
        self._pending = [step for step in steps if step.step >= self._logged]
        return steps

    def slow_steps(self, n: int) -> list[SlowStep]:
        """Return the steps with the largest excess, the largest first."""
        return self._kept.largest(n)

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
        """Return what they cost a run, whose steps took `all_ms`; None if there are none.

        Args:
            steps: Number of timed steps.
            all_ms: Time of these steps; more where timed steps are slow more often than others (in
                milliseconds).
        """
        kept = self._kept
        if not kept.n or not all_ms:
            return None
        sums = kept.sums()
        # The total is exact; its parts are estimates where steps were dropped.
        is_exact = len(kept.steps) + kept.others.n == kept.n
        whole_ms = all_ms if is_exact else all_ms * sums.excess_ms / kept.excess_ms
        causes = sorted(sums.names_ms.items(), key=lambda one: one[1], reverse=True)
        lost: dict[str, dict[str, float]] = defaultdict(dict)
        for (phase, name), ms in sums.lost_ms.items():
            lost[phase][name] = ms / whole_ms
        return SlowSummary(
            n=kept.n,
            steps=steps,
            share=kept.excess_ms / all_ms,
            cause_shares={name: ms / whole_ms for name, ms in causes},
            unexplained_share=sums.unexplained_ms / whole_ms,
            worst=kept.largest(1)[0],
            lost_shares=dict(lost),
        )
