"""Work per second: items, FLOPs, and what they are of what the GPU could do."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gputime._phases import BACKWARD, FORWARD
from lightning_gputime._results.sums import Sums
from lightning_gputime._results.table import percent


@dataclass(slots=True)
class ThroughputReference:
    """What work per second is relative to, as in `WorkSummary`; the first steps fill it in."""

    items_by: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    note: str = ""

    def metrics(self, sums: Sums) -> dict[str, float]:
        metrics = {"items_per_sec": 1e3 * sums.items / sums.items_ms} if sums.items_ms else {}
        metrics |= {f"{name}_tflops": one for name, one in tflops_of_phases(sums).items()}
        model_flops, *ran = sums.flops
        if sums.flops_ms[0] and self.peak_tflops is not None:
            peak = self.peak_tflops * 1e9 * sums.flops_ms[0]
            metrics["mfu"] = model_flops / peak
            # By more than what rounding leaves of sums over many steps.
            if sum(ran) > model_flops * (1 + 1e-9):
                metrics["hfu"] = sum(ran) / peak
        return metrics

    def summary(self, sums: Sums) -> "WorkSummary":
        metrics = self.metrics(sums)
        mfu = metrics.get("mfu")
        model_flops, *ran = sums.flops
        return WorkSummary(
            items_per_sec=metrics.get("items_per_sec"),
            items_by=self.items_by,
            tflops=model_flops / sums.flops_ms[0] / 1e9 if sums.flops_ms[0] else None,
            mfu=mfu,
            hfu=metrics.get("hfu", mfu if sum(ran) == sum(ran) else None),
            precision=self.precision,
            peak_tflops=self.peak_tflops,
            note=self.note,
        )


def tflops_of_phases(sums: Sums) -> dict[str, float]:
    """Return the TFLOP/s of forward and backward, with what is computed again."""
    phases = zip((FORWARD, BACKWARD), sums.flops[1:], sums.flops_ms[1:], strict=True)
    return {name: flops / ms / 1e9 for name, flops, ms in phases if ms > 0 and flops == flops}


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """Work per second. What is not known is None."""

    items_per_sec: float | None = None  # In a second of the time of the steps, without pauses.
    items_by: str = ""  # What the items are.
    tflops: float | None = None  # FLOPs of the model in a second, without what is computed again.
    mfu: float | None = None  # That as a part of the peak of the data sheet, from 0 to 1.
    hfu: float | None = None  # The same with what is computed again.
    precision: str = ""  # In what the model computes.
    peak_tflops: float | None = None  # The dense peak of the data sheet in that precision.
    note: str = ""  # Why something is not known.

    @property
    def sentences(self) -> Iterator[str]:
        """Sentences on the items, the FLOPs, and what is lost."""
        n, mfu, hfu = self.items_per_sec, self.mfu, self.hfu
        if n is not None:
            amount = f"{n:,.0f}" if n >= 100 else f"{n:.3g}"
            yield f"{amount} items per second, counted by {self.items_by}"
        if self.tflops is not None and (mfu is None or self.peak_tflops is None):
            yield f"{self.tflops:.3g} TFLOP/s of the model's work"
        elif mfu is not None:
            wrong = ", which is impossible: check flops and the precision"
            again = f"; HFU {percent(hfu)} (includes recomputation)" if hfu and hfu > mfu else ""
            peak = f"{self.peak_tflops:.4g} dense {self.precision} TFLOP/s"
            yield f"MFU {percent(mfu)} (of {peak}){wrong if mfu > 1 else ''}{again}"
        yield self.note
