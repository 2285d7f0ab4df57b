"""Work per second: items, FLOPs, and what they are of what the GPU could do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_gputime._phases import (
    BACKWARD,
    BETWEEN_BATCHES,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TRAINING_STEP,
    is_wait,
)
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.sums import Sums

KERNELS = "kernels below the peak"
GAPS = "launch gaps"
COMMUNICATION = "communication"

Rows = Mapping[str, PhaseStats]


@dataclass(slots=True)
class ThroughputReference:
    """What work per second is relative to, as in `WorkSummary`; the first steps fill it in."""

    items_by: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    note: str = ""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return what is logged of some steps."""
        metrics = {"items_per_s": 1e3 * sums.items / sums.items_ms} if sums.items_ms else {}
        metrics |= {f"{name}_tflops": one for name, one in tflops_of_phases(sums).items()}
        model_flops, *ran = sums.flops
        if sums.flops_ms[0] and self.peak_tflops is not None:
            peak = self.peak_tflops * 1e9 * sums.flops_ms[0]
            metrics["mfu"] = model_flops / peak
            # By more than what rounding leaves of sums over many steps.
            if sum(ran) > model_flops * (1 + 1e-9):
                metrics["hfu"] = sum(ran) / peak
        return metrics

    def summary(self, sums: Sums, rows: Rows, step: PhaseStats, probed: bool) -> "WorkSummary":
        """Return the work of a run, some of whose steps may have been probed."""
        metrics = self.metrics(sums)
        mfu = metrics.get("mfu")
        model_flops, *ran = sums.flops
        return WorkSummary(
            items_per_s=metrics.get("items_per_s"),
            items_by=self.items_by,
            tflops=model_flops / sums.flops_ms[0] / 1e9 if sums.flops_ms[0] else None,
            mfu=mfu,
            hfu=metrics.get("hfu", mfu if sum(ran) == sum(ran) else None),
            precision=self.precision,
            peak_tflops=self.peak_tflops,
            lost=break_down_mfu(mfu, rows, step) if probed and mfu is not None else {},
            note=self.note,
        )


def tflops_of_phases(sums: Sums) -> dict[str, float]:
    """Return the TFLOP/s of forward and backward, with what is computed again."""
    phases = zip((FORWARD, BACKWARD), sums.flops[1:], sums.flops_ms[1:], strict=True)
    return {name: flops / ms / 1e9 for name, flops, ms in phases if ms > 0 and flops == flops}


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """Work per second. What is not known is None."""

    items_per_s: float | None = None  # In a second of the time of the steps, without pauses.
    items_by: str = ""  # What the items are.
    tflops: float | None = None  # FLOPs of the model in a second, without what is computed again.
    mfu: float | None = None  # That as a part of the peak of the data sheet, from 0 to 1.
    hfu: float | None = None  # The same with what is computed again.
    precision: str = ""  # In what the model computes.
    peak_tflops: float | None = None  # The dense peak of the data sheet in that precision.
    lost: Mapping[str, float] | None = None  # From probed steps: with `mfu` they add up to 1.
    note: str = ""  # Why something is not known.

    @property
    def sentences(self) -> Iterator[str]:
        """Sentences on the items, the FLOPs, and what is lost."""
        n, mfu, hfu = self.items_per_s, self.mfu, self.hfu
        if n is not None:
            amount = f"{n:,.0f}" if n >= 100 else f"{n:.3g}"
            yield f"{amount} items a second (items: {self.items_by})"
        if self.tflops is not None and (mfu is None or self.peak_tflops is None):
            yield f"{self.tflops:.3g} TFLOP/s of the model's work"
        elif mfu is not None:
            wrong = ", which cannot be: FLOPs or precision are not those of this training"
            again = f"; with what is computed again {_percent(hfu)}" if hfu and hfu > mfu else ""
            peak = f"{self.peak_tflops:.4g} dense {self.precision} TFLOP/s"
            yield f"MFU {_percent(mfu)} (of {peak}){wrong if mfu > 1 else ''}{again}"
        # Not one of the shares that are rounded up to 100: it was said above, rounded for itself.
        points = in_points(self.lost or {})
        parts = [f"{name} {n}" for name, n in sorted(points.items(), key=lambda one: -one[1]) if n]
        if parts:
            whole = 100 - sum(points.values())
            yield f"MFU {whole} %; lost: {', '.join([f'{parts[0]} points', *parts[1:]])}"
        yield self.note


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def break_down_mfu(mfu: float, rows: Rows, step: PhaseStats) -> dict[str, float]:
    """Return what the rest of the peak is lost to; with `mfu` it adds up to 1, else it is empty."""
    whole_ms = step.n * step.mean_ms
    lost = dict.fromkeys((GAPS, *BETWEEN_BATCHES, COMMUNICATION, OPTIMIZER, OTHER), 0.0)
    waits = dict.fromkeys(rows, 0.0)
    for name, row in rows.items():
        if is_wait(name):
            lost[COMMUNICATION] += row.n * row.mean_ms
            waits[name.partition("/")[0]] = row.n * row.mean_ms
    for name, row in rows.items():
        if "/" in name:
            continue
        own_ms = row.n * row.mean_ms - waits[name]
        if name in BETWEEN_BATCHES:
            lost[name] += own_ms
            continue
        # What a probe has not seen is taken for work.
        busy_ms = own_ms if row.busy_mean_ms is None else row.n * row.busy_mean_ms
        lost[GAPS] += own_ms - busy_ms
        if name not in (FORWARD, BACKWARD, TRAINING_STEP):
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
