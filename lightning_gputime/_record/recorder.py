"""Record marks on a timeline, and divide it into steps."""

from collections.abc import Callable
from math import nan
from threading import get_ident
from typing import Any

from lightning_gputime._compat.torch_ import current_graph_task_id
from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    EVALUATED,
    EXCLUDED,
    OPTIMIZER,
)
from lightning_gputime._record.annotator import Annotations
from lightning_gputime._record.captures import Captures
from lightning_gputime._record.clock import Clock, Mark
from lightning_gputime._record.named_phases import NamedPhases
from lightning_gputime._record.pending_steps import LEFT_OUT, Emit, PendingSteps
from lightning_gputime._record.state import IDLE, LOST, OPEN, PAUSED, TRANSITIONS, State
from lightning_gputime._record.step_marks import LineMark, StepMarks, is_fetch
from lightning_gputime._record.timed_thread import TimedThread

MAX_MARKS = 100_000
"""Maximum number of marks in a step. A step with more marks is dropped, to limit memory: it may be
the step of a loop that never ends a step."""

IN_BACKWARD = (BACKWARD, OPTIMIZER)
"""Phases during a backward pass, which may also run updates of an optimizer."""

_NEVER_ENDS = (
    "A step with more than %d boundaries between phases is dropped: it is in no result. If no step"
    " ends, call step() at the end of the loop body or iterate over steps(loader), and remove() a"
    " timer that is no longer used. With manual optimization in Lightning, a step ends with the"
    " update of an optimizer that configure_optimizers returned."
)


class Recorder:
    """Record marks, divide them into steps, and emit the times of each step once it can be read.

    The time from a mark to the next mark belongs to the label of the first. The last mark of a step
    is also the first mark of the next step. `PendingSteps` reads the steps that have ended. `state`
    determines how time is attributed, and changes only by the transitions of `_record.state`.

    Nothing here raises into the training loop: an error drops the step, with one warning. Only the
    thread that last called `begin` is timed; calls from other threads do nothing. There is no lock:
    the autograd thread calls `mark_in_backward` only while the timed thread waits for it.

    Args:
        clock: Source of events and host times.
        lag: Number of ended steps that may be pending.
        batch: Number of finished steps that are read together.
        emit: Called with the steps that were read, in order, in the training thread.
        annotate: Called with each new label, and with None at the end.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        emit: Emit,
        batch: int = 1,
        annotate: Callable[[str | None], None] | None = None,
    ) -> None:
        self.clock = clock
        self.state = IDLE
        self.label: str | None = None
        """Label that the time is attributed to; None while no step is timed."""
        self.open = StepMarks()
        """Marks of the open step: the step that is being recorded."""
        self.named = NamedPhases()
        self.threads = TimedThread()
        self.pending = PendingSteps(clock, lag=lag, batch=batch, emit=emit, fail=self._lose)
        self.warn_once = self.pending.warn_once
        self.captures = Captures(clock, self.warn_once)
        self._annotations = Annotations(annotate, self.warn_once)
        # Aliases, because every mark needs them.
        self._host_ns, self._may_capture = clock.host_ns, self.captures.may_run
        self._free = self.pending.free

    # Marks

    def mark(self, label: str) -> None:
        """Attribute the time to `label` from now on.

        Inside a named phase, `label` takes effect when that phase ends.
        """
        # A boundary that does not change the label records no event.
        if label == self.label or self.state is not OPEN or get_ident() != self.threads.timed:
            return
        if self.named.names:
            self.named.follow_with(label)
            return
        try:
            # Same as `_record` in the most common case, without another call.
            is_rare = self._annotations.are_shown or not self._free
            if is_rare or (self._may_capture() and self.clock.is_capturing()):
                self._record(label)
                return
            event = self._free.pop() if self._free else self.clock.event()
            event.record()
            self.open.marks.append((label, event, self._host_ns()))
            self.label = label
        except Exception as error:
            self.pending.give_up(error)

    def mark_in_backward(self, label: str) -> None:
        """Mark from the thread that runs a backward pass while the timed thread waits for it."""
        # A named phase around the backward pass includes all of it, unless its name is "backward".
        may_mark = self.state is OPEN and self.named.names in ([], [BACKWARD])
        if may_mark and (self.label or "").startswith(IN_BACKWARD) and label != self.label:
            # Ranges of profilers must start and end in the same thread.
            self._record(label, annotate=False)

    def mark_instead(self, old: str, label: str) -> None:
        """Mark `label`. If the current label is `old`, replace the label of its mark instead."""
        if self.label == old and self.state is OPEN and get_ident() == self.threads.timed:
            self.open.relabel(label)
            self.label = label
        else:
            self.mark(label)

    def interrupt(self, label: str) -> None:
        """Record a mark of a wait, but keep the label of the interrupted phase."""
        interrupted = self.label
        self._record(label, annotate=False)
        if self.state is OPEN:  # Otherwise the mark has failed.
            self.label = interrupted

    # Named phases

    def enter_phase(self, name: str) -> None:
        """Start a named phase, until `leave_phase`."""
        # Code inside a backward pass, such as recomputation by checkpointing, belongs to that pass.
        if get_ident() == self.threads.home and current_graph_task_id() == -1:
            self.named.enter(name, self.label if self.label and self.state is OPEN else DATA)
            if self.state is OPEN and self.named.label != self.label:
                self._record(self.named.label)

    def leave_phase(self, name: str) -> None:
        """End a named phase. The phase around it continues."""
        is_here = get_ident() == self.threads.home and current_graph_task_id() == -1
        has_ended = is_here and self.named.leave(name)
        if has_ended and self.state is OPEN and self.named.label != self.label:
            self._record(self.named.label)

    # Pauses

    def pause(self, since: str | None = None, *, now: bool = False) -> None:
        """Exclude the time until `resume`. Safe to call again.

        Args:
            since: Exclude the time from the first mark of this label on; by default, from the last
                mark on. If the step has only fetched data before that mark, the fetch is also
                excluded.
            now: Exclude the time from now on instead.
        """
        if now:
            self.mark(EXCLUDED)
        if self.state is not OPEN or get_ident() != self.threads.timed:
            return
        labels = self.open.labels if since else []
        if since in labels:
            first = labels.index(since)
            self.open.exclude(0 if is_fetch(labels[:first]) else first)
        else:
            self.open.relabel(EXCLUDED)
        self.label = EXCLUDED
        self._go_to(PAUSED)
        self._annotations.show(None)

    def resume(self, label: str = DATA) -> None:
        """End a `pause`, and attribute the time to `label` from now on."""
        if self.state is PAUSED and get_ident() == self.threads.timed:
            self._go_to(OPEN)
            self.named.follow_with(label)
            self._record(self.named.label)

    def exclude_evaluation(self, first: int, stop: int) -> int:
        """Exclude an evaluation from the open step; return its host time (in nanoseconds).

        If the step has only fetched data before the evaluation, the fetch is also excluded. If the
        evaluation includes the last mark, recording pauses.

        Args:
            first: Index of the first mark of the evaluation in the open step.
            stop: Index after the last mark of the evaluation.
        """
        marks = self.open.marks
        end_ns = marks[stop][2] if stop < len(marks) else self._host_ns()
        ns = end_ns - marks[first][2]
        begin = 0 if is_fetch(self.open.labels[:first]) else first
        self.open.exclude(begin, stop, label=EVALUATED)
        if stop == len(marks):
            self.label = EVALUATED
            self._go_to(PAUSED)
            self._annotations.show(None)
        return ns

    # Steps

    def begin(self, label: str = DATA) -> None:
        """Drop the open step, and start a step in the calling thread."""
        self.threads.start()
        self.pending.take_back(self._clear())
        self._go_to(OPEN)
        self._record(self.named.start_step(label))

    def end_step(
        self,
        number: int,
        skipped_update: bool = False,
        read: bool = False,
        label: str = DATA,
        may_wait: bool = True,
        index: int = -1,
        items: float = nan,
        waits_now: bool = False,
    ) -> None:
        """End the open step, and start the next one with `label`.

        Inside a training loop, this is the only method in which the host may wait for the device.

        Args:
            number: Number of the step that ends.
            skipped_update: See `StepRecord`.
            read: Read all finished steps now.
            label: First label of the next step.
            may_wait: True if the host may wait for the device.
            index: Index among all steps, timed or not; -1 if only timed steps are counted.
            items: Number of items of the step; NaN if unknown.
            waits_now: Wait for the device to finish this step, to set the clocks side by side.
        """
        if get_ident() != self.threads.timed:
            return
        names = self.named.names
        # Drop a step whose time is all excluded. `is_empty` is slow, so read it only where time may
        # be excluded: in a named phase, such as `paused()`, in a pause, or after an error.
        is_dropped = bool(names or self.state is not OPEN) and self.open.is_empty
        if not is_dropped:
            first_label = label
            if self.state is PAUSED:
                self._go_to(OPEN)
                first_label = DATA
            # One event ends this step and starts the next, so that no time is lost between them.
            self._record(self.named.start_step(first_label) if names else first_label)
        if is_dropped or self.state is not OPEN:  # If not open, the mark has failed.
            self.begin(label)
            # Count the dropped step, so that all ranks compare the same steps.
            self.pending.end_untimed(read)
            return
        step = self.open
        self.open = StepMarks(step.marks[-1:])
        if self.captures.has_captured:
            skipped_update = False  # Graph replays do not call optimizer hooks.
            step.name_replay()
        self.pending.add(
            step,
            number=number,
            skipped_update=skipped_update,
            items=items,
            step_index=index,
            read=read,
            may_wait=may_wait,
            waits_now=waits_now,
        )

    def end_at(self, label: str, number: int, index: int = -1, items: float = nan) -> bool:
        """End the open step now, without the time since its last mark of `label`. Do not wait.

        Return False and do nothing if no step is timed in this thread, if the step has no such
        mark, or if a model call or a backward pass follows that mark.
        """
        if self.state not in (OPEN, PAUSED) or get_ident() != self.threads.timed:
            return False
        has_excluded = self.open.exclude_after(label)
        if not has_excluded:
            return False
        self.label = EXCLUDED
        self._go_to(OPEN)
        self.end_step(number, may_wait=False, index=index, items=items)
        return True

    def stop(self) -> None:
        """Stop recording until the next `begin`. Named phases are still tracked."""
        self.threads.stop()
        if self.state is not IDLE:
            self.pending.take_back(self._clear())
            self._go_to(IDLE)
            self._annotations.show(None)

    def examine(self, lines: list[LineMark]) -> None:
        """Keep the list of marks of lines with the open step, which has just started."""
        self.open.lines = lines

    def abandon(self) -> list[Any]:
        """End all recording in a forked process. Return the objects that refer to events.

        The caller must keep these objects: destroying an event would abort the process.
        """
        held = [self._clear(), self.pending.forget()]
        self._go_to(IDLE)
        self.threads.forget()
        return held

    # Transitions

    def _record(self, label: str, *, annotate: bool = True) -> None:
        """Record a mark; without `annotate`, do not show it in other profilers."""
        try:
            if self._may_capture() and self.captures.detect():
                self.pending.take_back(self._clear())
                self._go_to(LOST)
                return
            if not self._free and len(self.open.marks) >= MAX_MARKS:
                self.warn_once(_NEVER_ENDS, MAX_MARKS)
                self._lose()
                return
            event = self._free.pop() if self._free else self.clock.event()
            event.record()
            mark: Mark = (label, event, self._host_ns())
        except Exception as error:
            self.pending.give_up(error)
            return
        self.open.marks.append(mark)
        self.label = label
        if annotate and self._annotations.are_shown:
            self._annotations.show(None if label == EXCLUDED else label)

    def _go_to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"A recorder cannot go from {self.state.name} to {state.name}.")
        self.state = state

    def _lose(self, error: Exception | None = None) -> None:
        """Drop the open step after an error, with its events, which may be broken."""
        if error is not None:
            self.warn_once(LEFT_OUT, error)
        self._clear()
        if self.state is not IDLE:
            self._go_to(LOST)

    def _clear(self) -> StepMarks:
        """Remove the open step, and return it."""
        step, self.open, self.label = self.open, StepMarks(), None
        return step
