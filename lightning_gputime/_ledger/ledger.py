"""The ledger of a run: who sets the pace of each millisecond of a step, and at which line."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import mean, stdev
from types import CodeType

from lightning_gputime._ledger.cells import GPU, ExaminedStep, examined_step
from lightning_gputime._ledger.outside import OutsideLines
from lightning_gputime._ledger.pace import PaceSums
from lightning_gputime._ledger.places import Line, Operations
from lightning_gputime._ledger.rows import LineRow, Targets, line_rows
from lightning_gputime._phases import StepRecord

_MIN_STEPS = 3  # Number of examined steps that are compared with the others.
_MIN_PHASE, _MAX_DIFFERENCE = 0.1, 0.5  # Fraction of the step, and of the phase.


class Ledger:
    """Facts of the examined steps, and the pace of all timed steps.

    Args:
        on_host_clock: True if all times are from the host's clock, which then sets the pace.
        trainer: Name of the trainer; "the loop's libraries" for a plain loop.
        outside: File and name of the functions around the training.
        forwards: Modules by the code of their forward, see `forwards_of`.
        outside_lines: Lines that ran outside of steps.
    """

    def __init__(
        self,
        *,
        on_host_clock: bool = False,
        trainer: str = "",
        outside: frozenset[tuple[str, str]] = frozenset(),
        forwards: Mapping[CodeType, str] | None = None,
        outside_lines: OutsideLines | None = None,
    ) -> None:
        self._on_host_clock = on_host_clock
        self.outside_lines = outside_lines or OutsideLines()
        self._trainer, self._outside = trainer, outside
        self._modules = {
            (code.co_filename, code.co_firstlineno): text for code, text in (forwards or {}).items()
        }
        self.pace = PaceSums()
        self.n = 0
        """Number of examined steps."""
        self.steps: list[ExaminedStep] = []
        """Examined steps whose marks were evaluated."""
        # Examined steps whose marks were not yet evaluated: this takes longer than many steps.
        self._raw: list[StepRecord] = []
        self._phases_ms: list[Mapping[str, float]] = []  # Of each examined step.
        self.operations: Mapping[Line, Operations] = {}
        """Differentiable operations of each line; set by the session."""
        self.trained_tensors: dict[int, int] = {}
        """Number of tensors whose gradients backward computes, by the number of examined steps."""
        self.busy_functions: set[tuple[str, str, int]] = set()
        """Keys of functions with lines that run too often to be followed; set by the session."""
        self.unavailable = ""
        """Reason why lines cannot be followed; empty if they can. Set by the session."""

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add timed steps that were read, in order."""
        if not self._on_host_clock:
            self.pace.add(steps)
        examined = [step for step in steps if step.lines]
        self._raw += examined
        self._phases_ms += [step.times().phase_ms for step in examined]
        self.n += len(examined)

    def evaluate(self) -> list[ExaminedStep]:
        """Return the examined steps. Not in the loop, and in one thread at a time."""
        while self._raw:
            step = examined_step(self._raw[0], on_host_clock=self._on_host_clock)
            self.steps.append(step)
            del self._raw[0]
        return self.steps

    def differs_from(self, phases_ms: Mapping[str, float], step_ms: float) -> bool:
        """Return True if the examined steps are certainly not like the other steps.

        Args:
            phases_ms: Mean time per step of each top-level phase, over the other steps.
            step_ms: Mean time of these steps.
        """
        if self.n < _MIN_STEPS:
            return False
        for phase, ms in phases_ms.items():
            each = [phases.get(phase, 0.0) for phases in self._phases_ms]
            # Marks only lengthen a phase, so the examined steps lack something if it is short.
            missing_ms = ms - mean(each) - 2 * stdev(each)
            if missing_ms > max(_MAX_DIFFERENCE * ms, _MIN_PHASE * step_ms):
                return True
        return False

    def host_shares(self) -> dict[str, float]:
        """Return the fraction of each phase in which the host set the pace; empty on the host."""
        host_ms: dict[str, float] = {}
        for step in self.steps:
            for cell, ms in step.cells_ms.items():
                # A sub-phase is part of its parents.
                for name in accumulate(cell.phase.split("/"), "{}/{}".format):
                    host_ms[name] = host_ms.get(name, 0.0) + ms * (cell.kind != GPU)
        # A copy, because the loop may add phases while another thread reads.
        phases = [*self.pace.phases]
        return {name: self.pace.share(name, host_ms.get(name)) for name in phases}

    def rows(
        self,
        phases_ms: Mapping[str, float],
        *,
        median_ms: float,
        long_share: float,
        evaluation: str,
    ) -> tuple[LineRow, ...]:
        """Return the lines and functions with their times: per step, or per occurrence of an entry.

        Args:
            phases_ms: Mean time per step of each phase and sub-phase, over all steps.
            median_ms: Median time of a step.
            long_share: Fraction of all steps that take at least 1.5 times the median.
            evaluation: Entry of the time breakdown for evaluations inside steps.
        """
        host_shares = self.host_shares()
        gpu_ms, host_ms = {}, {}
        for phase, ms in phases_ms.items():
            # Without its sub-phases, which are separate.
            inner = [name for name in phases_ms if name.rpartition("/")[0] == phase]
            own_ms = max(ms - sum(phases_ms[name] for name in inner), 0.0)
            if self._on_host_clock:
                share = 1.0
            else:
                own_share = host_shares.get(phase, 1.0) * ms - sum(
                    host_shares.get(name, 1.0) * phases_ms[name] for name in inner
                )
                share = min(max(own_share / own_ms, 0.0), 1.0) if own_ms else 0.0
            gpu_ms[phase], host_ms[phase] = (1 - share) * own_ms, share * own_ms
        make_rows = partial(
            line_rows,
            trainer=self._trainer,
            outside=self._outside,
            modules=self._modules,
            operations=self.operations,
            busy_functions=self.busy_functions,
        )
        steps = [step for step in self.steps if step.step_ms > 0]
        targets = Targets(gpu_ms, host_ms)
        rows: tuple[LineRow, ...] = ()
        if steps:
            rows = make_rows(steps, targets, median_ms=median_ms, long_share=long_share)
        occurrences: dict[str, list[ExaminedStep]] = {}
        evaluations = [step.evaluation(evaluation) for step in self.steps]
        for occurrence in (*self.outside_lines.occurrences, *filter(None, evaluations)):
            for entry in {cell.phase for cell in occurrence.cells_ms}:
                occurrences.setdefault(entry, []).append(occurrence)
        for entry, found in occurrences.items():
            rows += make_rows(found, entry=entry)
        return rows
