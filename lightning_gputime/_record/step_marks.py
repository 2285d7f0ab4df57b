"""Marks of the step that is being recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    EVALUATED,
    EXCLUDED,
    FORWARD,
    INTERRUPTIONS,
    LEFT,
    LOSS,
    OTHER,
    RECEIVES,
    WAITS,
)
from lightning_gputime._record.clock import Mark, TimingEvent

_IN_NO_STEP = {EXCLUDED, EVALUATED, *INTERRUPTIONS}


def is_fetch(labels: Sequence[str]) -> bool:
    """Return True if a step with these labels has only fetched data so far."""
    return {*labels} <= {DATA, *_IN_NO_STEP}


class LineMark(NamedTuple):
    """Mark of a line of the user's code, in an examined step.

    Attributes:
        start_ns: Host time at which the mark started.
        end_ns: Host time at which it ended. The line runs from then on.
        event: Event between the two; None on the host's clock.
        line: Line that runs after the mark.
        starts: False if the line continues, or if its backward runs.
    """

    start_ns: int
    end_ns: int
    event: TimingEvent | None
    line: Any
    starts: bool


@dataclass(slots=True)
class StepMarks:
    """Marks of a step until it ends.

    Attributes:
        marks: All marks so far, in order.
        lines: Marks of lines, if the step is examined; else None.
    """

    marks: list[Mark] = field(default_factory=list)
    lines: list[LineMark] | None = None
    _phases: set[str] = field(default_factory=set)  # Phases of the first marks.
    _n_cached: int = 0  # Number of marks in `_phases`; -1 if it is outdated.

    @property
    def labels(self) -> list[str]:
        return [label for label, _, _ in self.marks]

    @property
    def phases(self) -> set[str]:
        """Top-level phases of the marks."""
        # Cached, because loops that skip batches read this many times per step. The labels of the
        # last two marks may still change.
        marks, n = self.marks, self._n_cached
        last = max(len(marks) - 2, 0)
        if not 0 <= n <= last:
            self._phases, n = set(), 0
        self._phases.update(label.partition("/")[0] for label, _, _ in marks[n:last])
        self._n_cached = last
        return self._phases.union(label.partition("/")[0] for label, _, _ in marks[last:])

    @property
    def is_empty(self) -> bool:
        """True if all time is in pauses and evaluations."""
        return {*self.labels} <= _IN_NO_STEP

    @property
    def is_waiting(self) -> bool:
        """True during a wait for other ranks."""
        return bool(self.marks) and self.marks[-1][0] in (WAITS, RECEIVES)

    def relabel(self, label: str) -> None:
        """Replace the label of the last mark that is not part of a wait."""
        self._rename(self._uninterrupted(len(self.marks) - 1), label)

    def rename_before(self, old: str, label: str) -> None:
        """Replace the label of the mark before the last mark, skipping waits, if it is `old`."""
        place = self._uninterrupted(len(self.marks) - 2)
        if place >= 0 and self.marks[place][0] == old:
            self._rename(place, label)

    def exclude(self, first: int, stop: int | None = None, *, label: str = EXCLUDED) -> None:
        """Attribute the marks from `first` to `stop` to a pause or an evaluation.

        Marks that already belong to a pause or an evaluation keep their label.
        """
        self.marks[first:stop] = [
            mark if mark[0] in (EXCLUDED, EVALUATED) else (label, *mark[1:])
            for mark in self.marks[first:stop]
        ]
        self._n_cached = -1

    def exclude_after(self, label: str) -> bool:
        """Exclude the time from the last mark of `label` on.

        Return False, without any change, if there is no such mark or if that time includes work.
        """
        labels = self.labels
        if label not in labels:
            return False
        last = len(labels) - 1 - labels[::-1].index(label)
        if {name.partition("/")[0] for name in labels[last:]} & {FORWARD, LOSS, BACKWARD}:
            return False
        self.exclude(last)
        # `LEFT` is also excluded, but shows that an update precedes it.
        self.marks[last] = (LEFT, *self.marks[last][1:])
        return True

    def name_replay(self) -> None:
        """Relabel a step without inner marks: a replay of a CUDA graph, which calls no hooks."""
        if len(self.marks) == 2 and self.marks[0][0] == DATA:
            self._rename(0, OTHER)

    def _rename(self, place: int, label: str) -> None:
        self.marks[place] = (label, *self.marks[place][1:])
        if place < self._n_cached:
            self._n_cached = -1

    def _uninterrupted(self, place: int) -> int:
        """Return `place`, or if its mark is part of a wait, the place of the interrupted mark."""
        while place > 0 and self.marks[place][0] in INTERRUPTIONS:
            place -= 1
        return place
