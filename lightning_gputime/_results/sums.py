"""Sums over steps, many at a time, for little; and the work per second that they show."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from math import nan
from operator import attrgetter

from lightning_gputime._phases import BACKWARD, FORWARD, StepRecord, resolve_labels
from lightning_gputime._results.table import percent


class Sums:
    """Sums over steps."""

    def __init__(self, steps: Iterable[StepRecord] = ()) -> None:
        self.phases = defaultdict[str, PhaseSum](PhaseSum)
        self.step = PhaseSum()
        self.each_ms: list[float] = []  # Device time of each step, without those merged.
        self.wait_ms = 0.0  # How long the host waited.
        self.skipped_updates = 0
        # Items where they are known, and the device time of these steps.
        self.items = self.items_ms = 0.0
        # FLOPs where they are known: of the model without what was computed again, and those that
        # ran in forward and in backward. Beside them the device time of the step and of both.
        self.flops: Sequence[float] = (0.0, 0.0, 0.0)
        self.flops_ms: Sequence[float] = (0.0, 0.0, 0.0)
        for labels, alike in groupby(steps, attrgetter("labels")):
            self._add_alike(labels, alike)

    def _add_alike(self, labels: tuple[str, ...], steps: Iterable[StepRecord]) -> None:
        # Without a loop over the steps, and without NumPy: its code is cold where this runs.
        _, _, device_ms, host_ns, waits_ms, _, skipped_updates, _, _, counts, _ = zip(
            *steps, strict=True
        )
        n = len(device_ms)
        phases_ms: dict[str, Sequence[float]] = {}
        marks_ms = [*zip(*device_ms, strict=True)]
        marked_ns = [*map(sum, zip(*host_ns, strict=True))]
        for name, marks in _marks_of(labels):
            if len(marks) == 1:
                of_steps_ms: Sequence[float] = marks_ms[marks[0]]
            else:
                of_marks_ms = [marks_ms[mark] for mark in marks]
                of_steps_ms = [*map(sum, zip(*of_marks_ms, strict=True))] or [0.0] * n
            took_ns = sum([marked_ns[mark + 1] - marked_ns[mark] for mark in marks])
            if name is None:
                self.each_ms += of_steps_ms
                self.add_work(counts, of_steps_ms, phases_ms)
            else:
                phases_ms[name] = of_steps_ms
            phase = self.step if name is None else self.phases[name]
            phase.n += n
            phase.device_ms += sum(of_steps_ms)
            phase.host_ms += took_ns / 1e6
            phase.max_ms = max(phase.max_ms, *of_steps_ms)
        self.wait_ms += sum(waits_ms)
        self.skipped_updates += sum(skipped_updates)

    def add_work(
        self,
        counts: Sequence[tuple[float, ...]],
        each_ms: Sequence[float],
        phases_ms: Mapping[str, Sequence[float]],
    ) -> None:
        """Add the work of steps, where it is counted, and their device time and phases."""
        items, items_ms = [count[0] if count else nan for count in counts], each_ms
        all_items = sum(items)
        if all_items != all_items:
            known = [i for i, n in enumerate(items) if n == n]
            all_items, items_ms = sum([items[i] for i in known]), [each_ms[i] for i in known]
        self.items += all_items
        self.items_ms += sum(items_ms)
        if not counts or len(counts[-1]) < 2:
            return
        known = [i for i, count in enumerate(counts) if len(count) > 1 and count[1] == count[1]]
        if known:
            columns_ms = (each_ms, phases_ms.get(FORWARD), phases_ms.get(BACKWARD))
            self._add_flops(
                [sum(of) for of in zip(*(counts[i][1:] for i in known), strict=True)],
                [sum([ms[i] for i in known]) if ms else 0.0 for ms in columns_ms],
            )

    def _add_flops(self, flops: Sequence[float], ms: Sequence[float]) -> None:
        self.flops = [a + b for a, b in zip(self.flops, flops, strict=True)]
        self.flops_ms = [a + b for a, b in zip(self.flops_ms, ms, strict=True)]

    def merge(self, other: "Sums") -> None:
        self.step.merge(other.step)
        for name, phase in other.phases.items():
            self.phases[name].merge(phase)
        self.wait_ms += other.wait_ms
        self.skipped_updates += other.skipped_updates
        self.items += other.items
        self.items_ms += other.items_ms
        if other.flops_ms[0]:
            self._add_flops(other.flops, other.flops_ms)

    def copy(self) -> "Sums":
        copied = Sums()
        copied.merge(self)
        return copied


class PhaseSum:
    """Sums of a phase over the `n` steps in which it ran (in milliseconds)."""

    __slots__ = ("device_ms", "host_ms", "max_ms", "n")

    def __init__(self) -> None:
        self.n = 0
        self.device_ms = self.host_ms = self.max_ms = 0.0

    @property
    def mean_ms(self) -> float:
        return self.device_ms / self.n if self.n else nan

    def merge(self, other: "PhaseSum") -> None:
        self.n += other.n
        self.device_ms += other.device_ms
        self.host_ms += other.host_ms
        self.max_ms = max(self.max_ms, other.max_ms)


@lru_cache(maxsize=256)
def _marks_of(labels: tuple[str, ...]) -> Sequence[tuple[str | None, Sequence[int]]]:
    """Return which marks count for each phase that ran, and, with None, for the step."""
    settled = resolve_labels(labels)
    names = list(dict.fromkeys(name for of_mark in settled for name in of_mark))
    marks_of: list[tuple[str | None, Sequence[int]]] = [
        (name, [mark for mark, of_mark in enumerate(settled) if name in of_mark]) for name in names
    ]
    return [*marks_of, (None, [mark for mark, of_mark in enumerate(settled) if of_mark])]


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
            **asdict(self),
            tflops=model_flops / sums.flops_ms[0] / 1e9 if sums.flops_ms[0] else None,
            mfu=mfu,
            hfu=metrics.get("hfu", mfu if sum(ran) == sum(ran) else None),
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
