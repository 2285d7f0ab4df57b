"""Lines that run outside of steps, such as in a validation or between two loops."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from lightning_gputime._ledger.cells import HOST, Cell, ExaminedStep, base_of
from lightning_gputime._ledger.places import Line
from lightning_gputime._ledger.watch import LineWatch

_FIRST = 3  # Each entry is examined this many times, and later at each power of two.
_MAX_SHARE = 0.03  # Marks may take this fraction of the time before frequent lines are ignored.
_MIN_MARKS = 500
_MAX_NS = 30e9  # An occurrence is examined for at most this long.
_MARK_NS = 1_500  # Estimated cost of a mark and its events.


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
        self._n: Counter[str] = Counter()  # Number of occurrences by entry.
        self._watch: LineWatch | None = None  # While an entry is examined.
        self._entry = ""
        self._since_ns = 0  # Host time after the newest mark.
        self._line: Line | None = None  # Line that has run since.
        self._first: Line | None = None  # Line that ran at the start.
        self._ms: dict[Line, float] = defaultdict(float)
        self._calls: Counter[Line] = Counter()
        self._start_ns = 0

    def __getstate__(self) -> dict[str, Any]:
        cleared = {"_now_ns": None, "_watch": None, "_line": None, "_first": None, "functions": ()}
        return {**self.__dict__, **cleared}

    def switch_to(self, entry: str) -> None:
        """End the open entry, and examine another; an empty entry is a step."""
        if self._watch is not None:
            self._end()
        if not entry or self._now_ns is None:
            return
        self._n[entry] += 1
        n = self._n[entry]
        if n <= _FIRST or n & (n - 1) == 0:
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
        self._watch = watch  # Ctrl-C may come at any line.
        try:
            reason = watch.start(sys._getframe(1), self._more_events)
        except Exception as error:
            reason = repr(error)
        if reason:
            self._watch = None
            return
        self._line = self._first = watch.line
        self._since_ns = self._now_ns()

    def _end(self) -> None:
        if self._watch is None:
            return
        self._watch.stop()
        self._watch = None
        if self._line is not None and self._now_ns is not None:
            self._ms[self._line] += (self._now_ns() - self._since_ns) / 1e6
        cells = {Cell(line, self._entry, HOST): ms for line, ms in self._ms.items()}
        number, base = self._n[self._entry], base_of(self._first)
        self.occurrences.append(ExaminedStep(number, cells, dict(self._calls), base))

    def _mark(self, line: Line, starts: bool) -> None:
        assert self._now_ns is not None
        now_ns = self._now_ns()
        if self._line is not None:
            self._ms[self._line] += (now_ns - self._since_ns) / 1e6
            self._calls[line] += starts
        self._line = line
        self._since_ns = self._now_ns()
        if now_ns - self._start_ns > _MAX_NS:
            self._end()

    def _more_events(self, events: int) -> int:
        """Return how many more events may follow after this many; 0 to ignore frequent lines."""
        assert self._now_ns is not None
        elapsed_ns = self._now_ns() - self._start_ns
        return max(int(_MAX_SHARE * elapsed_ns / _MARK_NS), _MIN_MARKS) - events
