"""The ledger of a run: who sets the pace of each millisecond of a step, and at which line."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import mean, stdev
from types import CodeType
from typing import Any

from lightning_gputime._ledger import FunctionKey, Line, Operations
from lightning_gputime._ledger.cells import (
    GPU,
    HOST,
    Cell,
    ExaminedStep,
    Span,
    examined_step,
    functions_around,
)
from lightning_gputime._ledger.pace import PaceSums
from lightning_gputime._ledger.rows import LineRow, Targets, line_rows
from lightning_gputime._ledger.watch import LineWatch
from lightning_gputime._phases import StepRecord

MIN_EXAMINED = 3
"""Number of examined steps from which on they are compared. Chosen: fewer have no useful error."""
# Examined steps lack something if a phase is shorter by these fractions: of the step, of the phase.
# Chosen: smaller ones examine more steps because of noise, larger ones miss periodic work.
_MIN_MISSING_OF_STEP, _MIN_MISSING_OF_PHASE = 0.1, 0.5

# Outside of steps
# Chosen, each: a smaller one knows less of the lines, a larger one slows the training down.
_FIRST = 3  # Each entry is examined this many times, and later at each power of two.
_MAX_SHARE = 0.03  # Marks may take this fraction of the time before frequent lines are ignored.
_MIN_EVENTS = 500  # Number of events at which lines may be ignored, however short the entry is.
_MAX_NS = 30e9  # An occurrence is examined for at most this long.
_EVENT_NS = 1_500  # Estimated cost of an event, with its mark.


class OutsideLines:
    """Host time of the lines that run while an entry of the wall clock outside of steps is open.

    Args:
        now_ns: The host's clock; None if nothing is examined.
        functions: Functions of libraries to name as the reason for time.
    """

    def __init__(
        self, now_ns: Callable[[], int] | None = None, functions: Sequence[CodeType] = ()
    ) -> None:
        self._now_ns, self.functions = now_ns, functions
        self.occurrences: list[ExaminedStep] = []
        """Examined occurrences of all entries. The phase of their cells is the entry."""
        self._n: Counter[str] = Counter()  # Number of occurrences by entry, examined or not.
        self._watch: LineWatch | None = None  # While an entry is examined.
        # About the occurrence that is examined.
        self._entry = ""
        self._start_ns = 0
        self._loops: frozenset[FunctionKey] = frozenset()  # Functions that ran at the start.
        self._line: Line | None = None  # Line that is running.
        self._marked_ns = 0  # Host time after the newest mark, from which `_line` has run.
        self._ms: dict[Line, float] = defaultdict(float)
        self._calls: Counter[Line] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        cleared = dict.fromkeys(("_now_ns", "_watch", "_line"))
        return {**self.__dict__, **cleared, "functions": ()}

    def switch_to(self, entry: str) -> None:
        """End the open entry, and open another, which may be examined; an empty entry is a step."""
        self._end()
        if not entry or self._now_ns is None:
            return
        self._n[entry] += 1
        n = self._n[entry]
        is_power_of_two = n & (n - 1) == 0
        if n <= _FIRST or is_power_of_two:
            self._start(entry)

    def stop(self) -> None:
        """Examine nothing any more. Safe to call twice."""
        self.switch_to("")
        self._now_ns = None

    def _start(self, entry: str) -> None:
        watch = LineWatch(self._mark, lambda _: None)
        watch.follow(self.functions)
        self._entry, self._line = entry, None
        self._ms, self._calls = defaultdict(float), Counter()
        assert self._now_ns is not None
        self._start_ns = self._now_ns()
        self._watch = watch  # Before it starts, so that `_end` stops it after Ctrl-C at any line.
        try:
            reason = watch.start(sys._getframe(1), self._more_events)
        except Exception as error:
            reason = repr(error)
        if reason:
            self._watch = None
            return
        self._line, self._loops = watch.line, functions_around(watch.line)
        self._marked_ns = self._now_ns()

    def _end(self) -> None:
        """End the examined occurrence, if any, and keep its times."""
        if self._watch is None:
            return
        self._watch.stop()
        self._watch = None
        if self._line is not None and self._now_ns is not None:
            self._ms[self._line] += (self._now_ns() - self._marked_ns) / 1e6
        cells = {Cell(line, self._entry, HOST): ms for line, ms in self._ms.items()}
        occurrence = ExaminedStep(self._n[self._entry], cells, dict(self._calls), self._loops)
        self.occurrences.append(occurrence)

    def _mark(self, line: Line, starts: bool) -> None:
        """End the time of the line before, because `line` runs from now on; see `LineWatch`."""
        assert self._now_ns is not None
        now_ns = self._now_ns()
        if self._line is not None:
            self._ms[self._line] += (now_ns - self._marked_ns) / 1e6
            self._calls[line] += starts
        self._line = line
        self._marked_ns = self._now_ns()
        if now_ns - self._start_ns > _MAX_NS:
            self._end()

    def _more_events(self, events: int) -> int:
        """Return how many more events may follow after this many; 0 to ignore frequent lines."""
        assert self._now_ns is not None
        elapsed_ns = self._now_ns() - self._start_ns
        max_events = int(_MAX_SHARE * elapsed_ns / _EVENT_NS)
        return max(max_events, _MIN_EVENTS) - events


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
        # Examined steps whose marks were not yet evaluated, which takes longer than many steps, and
        # when the timer waited in each.
        self._raw: list[tuple[StepRecord, list[Span]]] = []
        self._waits: list[Span] = []  # The newest waits of the timer.
        self._phases_ms: list[Mapping[str, float]] = []  # Of each examined step.
        self.operations: Mapping[Line, Operations] = {}
        """Differentiable operations of each line; set by the session."""
        self.trained_tensors: dict[int, int] = {}
        """Number of tensors whose gradients backward computed in each examined step, by the number
        that the step is logged under."""
        self.busy_functions: set[FunctionKey] = set()
        """Keys of functions with lines that run too often to be followed; set by the session."""
        self.unavailable = ""
        """Reason why lines cannot be followed; empty if they can. Set by the session."""

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add timed steps that were read, in order."""
        if not self._on_host_clock:
            self.pace.add(steps)
        for step in steps:
            # A step is read after the earlier steps that the timer waited for in it.
            if step.lines:
                start_ns, end_ns = step.host_ns[0], step.host_ns[-1]
                waits = [wait for wait in self._waits if start_ns <= wait[1] <= end_ns]
                self._raw.append((step, waits))
                self._phases_ms.append(step.times().phase_ms)
                self.n += 1
            if step.reached_ns:
                wait_ns = round(step.wait_ms * 1e6)
                self._waits = [*self._waits[-7:], (step.reached_ns - wait_ns, step.reached_ns)]

    def evaluate(self) -> list[ExaminedStep]:
        """Evaluate the marks of all examined steps, and return `steps`.

        It is slow, so do not call it in the loop; call it in one thread at a time.
        """
        while self._raw:
            try:
                step = examined_step(*self._raw[0], on_host_clock=self._on_host_clock)
                self.steps.append(step)
            finally:
                del self._raw[0]  # Also after an error, which would occur again.
        return self.steps

    def differs_from(self, phases_ms: Mapping[str, float], step_ms: float) -> bool:
        """Return True if the examined steps certainly lack work that the other steps do.

        Args:
            phases_ms: Mean time per step of each top-level phase, over the other steps.
            step_ms: Mean time of these steps.
        """
        for phase, ms in phases_ms.items():
            examined_ms = [phases.get(phase, 0.0) for phases in self._phases_ms]
            # Marks only lengthen a phase, so the examined steps lack something if it is short.
            missing_ms = ms - mean(examined_ms) - 2 * stdev(examined_ms)
            if missing_ms > max(_MIN_MISSING_OF_PHASE * ms, _MIN_MISSING_OF_STEP * step_ms):
                return True
        return False

    def host_shares(self) -> dict[str, float]:
        """Return the fraction of each phase in which the host set the pace.

        Empty on the host's clock, because there the host always sets the pace.
        """
        examined_host_ms: dict[str, float] = {}
        for step in self.steps:
            for cell, ms in step.cells_ms.items():
                host_ms = 0.0 if cell.pace == GPU else ms
                # The phase and its parents, such as `forward` and `forward/body`.
                for name in accumulate(cell.phase.split("/"), "{}/{}".format):
                    examined_host_ms[name] = examined_host_ms.get(name, 0.0) + host_ms
        # A copy, because the loop may add phases while another thread reads.
        phases = [*self.pace.phases]
        return {name: self.pace.share(name, examined_host_ms.get(name)) for name in phases}

    def busy_ms(self) -> float | None:
        """Return the host's time per examined step without waits for the GPU (in milliseconds).

        Return None if unknown, and on the host's clock.
        """
        steps_ms = [sum(step.busy_ms.values()) for step in self.steps if step.busy_ms]
        return mean(steps_ms) if steps_ms else None

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
        make_rows = partial(
            line_rows,
            trainer=self._trainer,
            outside=self._outside,
            modules=self._modules,
            operations=self.operations,
            busy_functions=self.busy_functions,
        )
        rows: tuple[LineRow, ...] = ()
        steps = [step for step in self.steps if step.step_ms > 0]
        if steps:
            targets = self._targets(phases_ms)
            rows = make_rows(steps, targets, median_ms=median_ms, long_share=long_share)
        occurrences: dict[str, list[ExaminedStep]] = {}  # By entry.
        evaluations = [step.evaluation(evaluation) for step in self.steps]
        for occurrence in (*self.outside_lines.occurrences, *filter(None, evaluations)):
            for entry in {cell.phase for cell in occurrence.cells_ms}:
                occurrences.setdefault(entry, []).append(occurrence)
        for entry, of_entry in occurrences.items():
            rows += make_rows(of_entry, entry=entry)
        return rows

    def _targets(self, phases_ms: Mapping[str, float]) -> Targets:
        """Divide the mean time of each phase, without its sub-phases, by who set the pace.

        Example: of 10 ms of `forward`, the host paces 3, and 4 of the 10 ms are `forward/body`, of
        which it paces 2. Without `forward/body`, it paces 3 - 2 = 1 of 10 - 4 = 6 ms.
        """
        host_shares = self.host_shares()
        gpu_ms, host_ms = {}, {}
        for phase, ms in phases_ms.items():
            inner = [name for name in phases_ms if name.rpartition("/")[0] == phase]
            own_ms = max(ms - sum(phases_ms[name] for name in inner), 0.0)
            if self._on_host_clock:
                own_host_ms = own_ms
            else:
                inner_host_ms = sum(host_shares.get(name, 1.0) * phases_ms[name] for name in inner)
                own_host_ms = host_shares.get(phase, 1.0) * ms - inner_host_ms
            # Both are estimates, so the difference may be outside of these limits.
            share = min(max(own_host_ms / own_ms, 0.0), 1.0) if own_ms else 0.0
            gpu_ms[phase], host_ms[phase] = (1 - share) * own_ms, share * own_ms
        return Targets(gpu_ms, host_ms)
