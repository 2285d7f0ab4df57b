"""Work per second: items, FLOPs, and what they are of what the GPU could do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TRAINING_STEP,
    is_wait,
)
from lightning_gputime._results.stats import PhaseStats

KERNELS = "kernels below the peak"
GAPS = "launch gaps"
COMMUNICATION = "communication"

# The phases that the FLOPs of the model are in.
_COMPUTE = (FORWARD, BACKWARD, TRAINING_STEP)

Rows = Mapping[str, PhaseStats]
Loads = Sequence[tuple[float, ...]]
PhasesMs = Mapping[str, Sequence[float]]


class WorkSums:
    """Sums of the work of steps, over those whose items, or whose FLOPs, are known.

    Attributes:
        model_flops: FLOPs of the model, without what was computed again.
        ran: FLOPs that ran by phase, in the order of `StepRecord.load`.
        phase_ms: The time of each part of forward and backward where FLOPs are known.
    """

    __slots__ = ("flops_ms", "items", "items_ms", "model_flops", "phase_ms", "ran")

    def __init__(self) -> None:
        self.items = self.items_ms = self.model_flops = self.flops_ms = 0.0
        self.ran: list[float] = []
        self.phase_ms: dict[str, float] = {}

    def add(self, loads: Loads, each_ms: Sequence[float], phases_ms: PhasesMs) -> None:
        """Add steps: the work of each, empty if nobody counts it, its time, and its phases'."""
        items, items_ms = [load[0] if load else nan for load in loads], each_ms
        all_items = sum(items)
        if all_items != all_items:
            known = [i for i, n in enumerate(items) if n == n]
            all_items, items_ms = sum([items[i] for i in known]), [each_ms[i] for i in known]
        self.items += all_items
        self.items_ms += sum(items_ms)
        if loads and len(loads[-1]) > 1:
            self._add_flops(loads, each_ms, phases_ms)

    def _add_flops(self, loads: Loads, each_ms: Sequence[float], phases_ms: PhasesMs) -> None:
        known = [i for i, load in enumerate(loads) if len(load) > 1 and load[1] == load[1]]
        if not known:
            return
        self.model_flops += sum([loads[i][1] for i in known])
        self.flops_ms += sum([each_ms[i] for i in known])
        self._add_ran([sum(of) for of in zip(*(loads[i][2:] for i in known), strict=True)])
        for name, ms in phases_ms.items():
            if name.partition("/")[0] in _COMPUTE:
                took_ms = self.phase_ms.get(name, 0.0) + sum([ms[i] for i in known])
                self.phase_ms[name] = took_ms

    def _add_ran(self, ran: Sequence[float]) -> None:
        self.ran = [a + b for a, b in zip(self.ran or [0.0] * len(ran), ran, strict=True)]

    def merge(self, other: "WorkSums") -> None:
        """Add the sums over other steps."""
        self.items += other.items
        self.items_ms += other.items_ms
        if other.flops_ms:
            self.model_flops += other.model_flops
            self.flops_ms += other.flops_ms
            self._add_ran(other.ran)
            for name, ms in other.phase_ms.items():
                self.phase_ms[name] = self.phase_ms.get(name, 0.0) + ms

    @property
    def items_per_s(self) -> float | None:
        """Items per second; None if they are not known."""
        return 1e3 * self.items / self.items_ms if self.items_ms else None

    def tflops(self, parts: Sequence[str]) -> dict[str, float]:
        """Return the TFLOP/s of each phase, with what it computes again; `parts` in their order."""
        names = [(top, part) for part in ("", *parts) for top in (FORWARD, BACKWARD)]
        ran = dict(zip(names, self.ran, strict=False))
        found = {}
        for name, ms in self.phase_ms.items():
            top, _, part = name.partition("/")
            flops = ran.get((top, part.rpartition("/")[2]), nan)
            if ms > 0 and flops == flops:
                found[name] = flops / ms / 1e9
        return found


@dataclass(slots=True)
class ThroughputReference:
    """What work per second is relative to: peaks, precision, and their sources.

    It is filled in while the first steps run, and read whenever work per second is shown.

    Attributes:
        items_by: What the items are.
        parts: The modules that are timed apart.
        precision: The precision that the model computes in.
        peak_tflops: The peak of the data sheet (in TFLOP/s).
        matmul_tflops: What the GPU reaches in a large matmul (in TFLOP/s).
        note: Why something is not known.
    """

    items_by: str = ""
    parts: tuple[str, ...] = ()
    precision: str = ""
    peak_tflops: float | None = None
    matmul_tflops: float | None = None
    note: str = ""

    def metrics(self, sums: WorkSums) -> dict[str, float]:
        """Return what is logged of some steps."""
        metrics = {} if sums.items_per_s is None else {"items_per_s": sums.items_per_s}
        metrics |= {f"{name}_tflops": one for name, one in sums.tflops(self.parts).items()}
        if sums.flops_ms and self.peak_tflops is not None:
            peak = self.peak_tflops * 1e9 * sums.flops_ms
            metrics["mfu"] = sums.model_flops / peak
            # By more than what rounding leaves of sums over many steps.
            if sum(sums.ran[:2]) > sums.model_flops * (1 + 1e-9):
                metrics["hfu"] = sum(sums.ran[:2]) / peak
        return metrics

    def summary(self, sums: WorkSums, rows: Rows, step: PhaseStats, probed: bool) -> "WorkSummary":
        """Return the work of a run, some of whose steps may have been probed."""
        metrics = self.metrics(sums)
        mfu, ran = metrics.get("mfu"), sum(sums.ran[:2])
        return WorkSummary(
            items_per_s=sums.items_per_s,
            items_by=self.items_by,
            tflops=sums.model_flops / sums.flops_ms / 1e9 if sums.flops_ms else None,
            mfu=mfu,
            hfu=metrics.get("hfu", mfu if ran == ran else None),
            precision=self.precision,
            peak_tflops=self.peak_tflops,
            matmul_tflops=self.matmul_tflops,
            lost=break_down_mfu(mfu, rows, step) if probed and mfu is not None else {},
            note=self.note,
        )


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """Work per second. What is not known is None.

    Attributes:
        items_per_s: Items in a second of the time of the steps, in which pauses are none.
        items_by: What the items are.
        tflops: FLOPs of the model in a second (in TFLOP/s), without what is computed again.
        mfu: That as a part of the peak of the data sheet, from 0 to 1.
        hfu: The same with what is computed again.
        precision: In what the model computes.
        peak_tflops: The dense peak of the data sheet in that precision (in TFLOP/s).
        matmul_tflops: What this GPU reaches in a large matmul in it (in TFLOP/s).
        lost: What stands between `mfu` and 1, where steps were probed; with it they add up to 1.
        note: Why something is not known.
    """

    items_per_s: float | None = None
    items_by: str = ""
    tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    precision: str = ""
    peak_tflops: float | None = None
    matmul_tflops: float | None = None
    lost: Mapping[str, float] | None = None
    note: str = ""

    @property
    def sentences(self) -> list[str]:
        """Sentences on the items, the FLOPs, and what is lost."""
        return [one for one in (self._items(), self._flops(), self._lost(), self.note) if one]

    def _items(self) -> str:
        if self.items_per_s is None:
            return ""
        return f"{_amount(self.items_per_s)} items a second (items: {self.items_by})"

    def _flops(self) -> str:
        if self.tflops is None:
            return ""
        if self.mfu is None or self.peak_tflops is None:
            told = f"{self.tflops:.3g} TFLOP/s of the model's work"
        else:
            peak = f"{self.peak_tflops:.4g} dense {self.precision} TFLOP/s"
            told = f"MFU {_percent(self.mfu)} (of {peak})"
            if self.mfu > 1:
                told += ", which cannot be: FLOPs or precision are not those of this training"
        if self.matmul_tflops:
            part = _percent(self.tflops / self.matmul_tflops)
            told += f", {part} of what this GPU reaches in a large matmul"
        if self.hfu is not None and self.mfu is not None and self.hfu > self.mfu:
            told += f"; with what is computed again {_percent(self.hfu)}"
        return told

    def _lost(self) -> str:
        if not self.lost or self.mfu is None:
            return ""
        # Not one of the shares that are rounded up to 100: it was said above, rounded for itself.
        points = in_points(self.lost)
        mfu = 100 - sum(points.values())
        parts = [f"{name} {n}" for name, n in sorted(points.items(), key=lambda one: -one[1]) if n]
        if not parts:
            return ""
        parts[0] += " points"
        return f"MFU {mfu} %; lost: {', '.join(parts)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def break_down_mfu(mfu: float, rows: Rows, step: PhaseStats) -> dict[str, float]:
    """Return what the rest of the peak is lost to; with `mfu` it adds up to 1, else it is empty."""
    whole_ms = step.n * step.mean_ms
    lost = dict.fromkeys((GAPS, DATA, COMMUNICATION, OPTIMIZER, OTHER), 0.0)
    waits = dict.fromkeys(rows, 0.0)
    for name, row in rows.items():
        if is_wait(name):
            lost[COMMUNICATION] += row.n * row.mean_ms
            waits[name.partition("/")[0]] = row.n * row.mean_ms
    for name, row in rows.items():
        if "/" in name:
            continue
        own_ms = row.n * row.mean_ms - waits[name]
        if name == DATA:
            lost[DATA] += own_ms
            continue
        # What a probe has not seen is taken for work.
        busy_ms = own_ms if row.busy_mean_ms is None else row.n * row.busy_mean_ms
        lost[GAPS] += own_ms - busy_ms
        if name not in _COMPUTE:
            lost[OPTIMIZER if name == OPTIMIZER else OTHER] += busy_ms
    # Below zero only by chance: the probed steps are others.
    shares = {name: max(ms / whole_ms, 0.0) for name, ms in lost.items()}
    below_peak = 1.0 - mfu - sum(shares.values())
    # More than all: the FLOPs, or the peak, are not those of this training.
    return {KERNELS: below_peak, **shares} if below_peak >= 0 else {}


def in_points(shares: Mapping[str, float]) -> dict[str, int]:
    """Return shares as whole percents that add up to their sum, rounded."""
    floors = {name: int(100 * share // 1) for name, share in shares.items()}
    rest = {name: 100 * share - floors[name] for name, share in shares.items()}
    # The largest remainders are rounded up.
    up = sorted(rest, key=lambda name: -rest[name])[: round(sum(rest.values()))]
    return {name: n + (name in up) for name, n in floors.items()}
