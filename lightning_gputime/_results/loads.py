"""Sums over what steps have worked on."""

from collections.abc import Mapping, Sequence
from math import nan

from lightning_gputime._phases import BACKWARD, FORWARD
from lightning_gputime._results.lost import COMPUTE


class WorkSums:
    """Sums of the work of steps, over those of which it is known.

    Attributes:
        items: Items.
        items_ms: The time of the steps whose items are known (in milliseconds).
        model_flops: FLOPs of the model, without what was computed again.
        flops_ms: The time of the steps whose FLOPs are known (in milliseconds).
        ran: For each FLOPs by phase, in the order of a load, see `StepRecord`.
        phase_ms: The time of each part of forward and backward in these steps (in milliseconds).
    """

    __slots__ = ("flops_ms", "items", "items_ms", "model_flops", "phase_ms", "ran")

    def __init__(self) -> None:
        self.items = self.items_ms = self.model_flops = self.flops_ms = 0.0
        self.ran: list[float] = []
        self.phase_ms: dict[str, float] = {}

    def add(
        self,
        loads: Sequence[tuple[float, ...]],
        each_ms: Sequence[float],
        phases_ms: Mapping[str, Sequence[float]],
    ) -> None:
        """Adds steps.

        Args:
            loads: What each has worked on, see `StepRecord`.
            each_ms: The time of each (in milliseconds).
            phases_ms: That of each phase.
        """
        if not all(loads):
            # Such as steps of tests, and of a metric: nobody has told what they worked on.
            told = [i for i, load in enumerate(loads) if load]
            each_ms = [each_ms[i] for i in told]
            phases_ms = {name: [ms[i] for i in told] for name, ms in phases_ms.items()}
            loads = [loads[i] for i in told]
        if not loads:
            return
        items = [load[0] for load in loads]
        all_items = sum(items)
        if all_items == all_items:
            self.items += all_items
            self.items_ms += sum(each_ms)
        else:
            known = [i for i, n in enumerate(items) if n == n]
            self.items += sum([items[i] for i in known])
            self.items_ms += sum([each_ms[i] for i in known])
        if len(loads[-1]) > 1:
            self._add_flops(loads, each_ms, phases_ms)

    def _add_flops(
        self,
        loads: Sequence[tuple[float, ...]],
        each_ms: Sequence[float],
        phases_ms: Mapping[str, Sequence[float]],
    ) -> None:
        known = [i for i, load in enumerate(loads) if len(load) > 1 and load[1] == load[1]]
        if not known:
            return
        self.model_flops += sum([loads[i][1] for i in known])
        self.flops_ms += sum([each_ms[i] for i in known])
        self._add_ran([sum(of) for of in zip(*(loads[i][2:] for i in known), strict=True)])
        for name, ms in phases_ms.items():
            if name.partition("/")[0] in COMPUTE:
                took_ms = self.phase_ms.get(name, 0.0) + sum([ms[i] for i in known])
                self.phase_ms[name] = took_ms

    def _add_ran(self, ran: Sequence[float]) -> None:
        self.ran = [a + b for a, b in zip(self.ran or [0.0] * len(ran), ran, strict=True)]

    def merge(self, other: "WorkSums") -> None:
        """Adds the sums over other steps."""
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
        """Items in a second; None if they are not known."""
        return 1e3 * self.items / self.items_ms if self.items_ms else None

    def tflops(self, parts: Sequence[str]) -> dict[str, float]:
        """Returns what each phase reaches in TFLOP/s, with what it computes again.

        Args:
            parts: The names of the modules that are timed apart, in the order of the load.
        """
        if not self.ran:
            return {}
        tops = {FORWARD: self.ran[0], BACKWARD: self.ran[1]}
        of_parts = {
            (top, part): self.ran[2 + 2 * i + j]
            for i, part in enumerate(parts)
            for j, top in enumerate(tops)
        }
        found = {}
        for name, ms in self.phase_ms.items():
            top, _, part = name.partition("/")
            flops = (
                of_parts.get((top, part.rpartition("/")[2]), nan) if part else tops.get(top, nan)
            )
            if ms > 0 and flops == flops:
                found[name] = flops / ms / 1e9
        return found
