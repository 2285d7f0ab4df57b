"""Record marks on a timeline, and divide it into steps."""

from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from math import nan
from threading import get_ident, local
from typing import Any
from weakref import ref

import torch

from lightning_gputime._compat.torch_ import current_graph_task_id
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import (
    BACKWARD,
    COMM,
    CONTINUES,
    DATA,
    EVALUATION_IN_STEP,
    EXCLUDED,
    FOLLOWED_BY,
    LIKELY,
    OPTIMIZER,
    WAITS,
)
from lightning_gputime._record.clock import Clock, Mark
from lightning_gputime._record.pending_steps import (
    LEFT_OUT,
    Emit,
    LineMark,
    PendingSteps,
    StepMarks,
    Wait,
    is_fetch,
)

MAX_MARKS = 100_000
"""Maximum number of marks in a step. A step with more marks is dropped, to limit memory: it may be
the step of a loop that never ends a step."""

_IN_BACKWARD = (BACKWARD, OPTIMIZER)  # A backward pass may also run updates of an optimizer.

_NEVER_ENDS = (
    "A step with more than %d boundaries between phases is dropped: it is in no result. If no step"
    " ends, call step() at the end of the loop body or iterate over steps(loader), and remove() a"
    " timer that is no longer used. With manual optimization in Lightning, a step ends with the"
    " update of an optimizer that configure_optimizers returned."
)
_CAPTURES = (
    "Phases inside a captured graph cannot be timed. Its replays count for the phase that launches"
    ' them: name that phase, as in `with phase("forward"): graph.replay()`.'
)


class State(Enum):
    """State of a `Recorder`, whose docstring has the transitions."""

    IDLE = "no step is timed, only named phases are tracked"
    OPEN = "the time of a step is attributed to `Recorder.label`"
    PAUSED = "time is excluded from the step"
    LOST = "an error or a graph capture has spoiled the step"


# Globals, because every mark looks them up.
IDLE, OPEN, PAUSED, LOST = State


class Captures:
    """Captures of CUDA graphs in the timed thread. Recording an event would break a capture."""

    def __init__(self, clock: Clock, warn_once: WarnOnce) -> None:
        self._is_capturing, self._warn_once = clock.is_capturing, warn_once
        self.has_captured = False
        """True once a graph was captured. From then on, a step may be a replay without hooks."""

    def detect(self) -> bool:
        """Return True if a graph is being captured. If so, set `has_captured` and warn once."""
        if not self._is_capturing():
            return False
        self.has_captured = True
        self._warn_once(_CAPTURES)
        return True


class Annotator:
    """Show each phase in traces of torch.profiler, and as an NVTX range in traces of Nsight."""

    def __init__(self) -> None:
        self._ranges = ExitStack()
        self._has_nvtx = torch.cuda.is_available()

    def __call__(self, label: str | None) -> None:
        """End the range of the last label, and start a range for this label unless it is None."""
        self._ranges.close()
        if label is not None:
            name = f"phase/{LIKELY.get(label, label)}"
            self._ranges.enter_context(torch.autograd.profiler.record_function(name))
            if self._has_nvtx:
                # Unlike `nvtx.range`, ranges with a number may overlap with the user's ranges.
                number = torch.cuda.nvtx.range_start(name)
                self._ranges.callback(torch.cuda.nvtx.range_end, number)


class NamedPhases:
    """Phases that the user named and that are open, and the label of the time outside of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Open phases, outermost first. `EXCLUDED` is a pause, which overrides all others."""
        self._n_before_step = 0  # Number of open phases that started before the current step.
        self._base = DATA  # Label outside of the phases, which applies when the outermost ends.

    @property
    def label(self) -> str:
        """Label that the time is attributed to: the innermost phase, unless a pause is open."""
        if EXCLUDED in self.names:
            return EXCLUDED
        return self.names[-1] if self.names else self._base

    def enter(self, name: str, label: str) -> None:
        """Start a phase. `label` is the current label, which follows the outermost phase."""
        if not self.names:
            self._base = label
        self.names.append(name)

    def leave(self, name: str) -> bool:
        """End a phase if it is open. Return True if it was the innermost phase."""
        if name not in self.names:
            return False
        is_innermost = name == self.names[-1]
        # Phases may end out of order if a generator is suspended inside its phase.
        last = max(i for i, open_name in enumerate(self.names) if open_name == name)
        del self.names[last]
        self._n_before_step = min(self._n_before_step, len(self.names))
        if is_innermost and not self.names:
            # After a phase named "forward", the time is labeled as after the model's own forward.
            self._base = FOLLOWED_BY.get(name, self._base)
        return is_innermost

    def follow_with(self, label: str) -> None:
        """Use `label` when the outermost phase ends. In a pause, do nothing."""
        if EXCLUDED not in self.names:
            self._base = label

    def start_step(self, label: str) -> str:
        """Start a step. Return its first label: a phase that is still open, or else `label`."""
        self._base, self._n_before_step = label, len(self.names)
        return self.label

    def drop_phases_of_step(self) -> None:
        """End the phases that started in this step, when the loader has yielded its batch.

        A loader that is a generator may have yielded inside a phase, which would stay open.
        """
        del self.names[self._n_before_step :]


class TimedThread:
    """Thread of the training loop: the thread that last called `start` or `stop`.

    Its id is forgotten when the thread ends, because a new thread may get the same id.
    """

    def __init__(self) -> None:
        self.home = -1
        """Id of the thread; -1 before the first call, and after the thread has ended."""
        self.timed = -1
        """Equal to `home` while a step is timed; -1 between timed steps."""
        self.was_elsewhere = False
        """True once a hook was called in another thread while a step was timed."""
        self._local = local()
        self._end_watch: Any = None  # Weak reference that calls `forget` when the thread ends.

    def start(self) -> None:
        """Time the calling thread, which becomes the thread of the loop."""
        if get_ident() != self.home:
            self._follow_calling_thread()
        self.timed = self.home

    def stop(self) -> None:
        """Time no thread until `start`. The calling thread becomes the thread of the loop."""
        if get_ident() != self.home:
            self._follow_calling_thread()
        self.timed = -1

    def _follow_calling_thread(self) -> None:
        # Python deletes this thread-local set when the thread ends. That calls `forget`.
        alive = set[None]()
        vars(self._local)["alive"] = alive
        self._end_watch = ref(alive, self.forget)
        self.home = get_ident()

    def admit_untimed_call(self) -> bool:
        """Return True if a hook was called in the thread of the loop while no step is timed.

        Call it only where `timed` is not the calling thread. If another thread is timed, note that
        in `was_elsewhere`.
        """
        if self.timed == -1:
            return get_ident() == self.home
        self.was_elsewhere = True
        return False

    def forget(self, _: object = None) -> None:
        """Forget the thread, because it has ended, or because this process was forked."""
        self.timed = self.home = -1


class Recorder:
    """Record marks, divide them into steps, and emit the times of each step once it can be read.

    The time from a mark to the next mark belongs to the label of the first. The last mark of a step
    is also the first mark of the next step. `PendingSteps` reads the steps that have ended.

    | `state`    | event                                 | next     | test or case                |
    | ---------- | ------------------------------------- | -------- | --------------------------- |
    | any        | `begin`: drops an open step           | `OPEN`   | begin drops the marks of    |
    | any        | `stop`, `abandon`: drop an open step  | `IDLE`   | a phase named while idle    |
    | `OPEN`     | `end_step`, `end_at`: the next starts | `OPEN`   | host_waits_once_per_step    |
    | `OPEN`     | `pause`                               | `PAUSED` | paused time is not part of  |
    | `OPEN`     | `exclude_evaluation` up to now        | `PAUSED` | validation_in_the_body      |
    | `PAUSED`   | `resume`                              | `OPEN`   | paused time is not part of  |
    | `PAUSED`   | `end_step`, `end_at`: the next starts | `OPEN`   | step_can_end_at_its_update  |
    | `PAUSED`   | `end_step`: drops a step without time | `OPEN`   | steps_that_end_inside       |
    | not `IDLE` | error, graph capture, too many marks  | `LOST`   | failed_mark_stops_recording |
    | `LOST`     | `end_step`: drops the step            | `OPEN`   | failed_mark_stops_recording |

    In `IDLE` and `LOST`, the open step has no marks, and `label` is None. In `PAUSED`, `label` is
    `EXCLUDED` or `EVALUATION_IN_STEP`.

    Nothing here raises into the training loop: an error drops the step, with one warning. Only the
    thread that last called `begin` is timed; calls from other threads do nothing. There is no lock:
    the autograd thread calls `mark_in_backward` only while the timed thread waits for it.

    Args:
        clock: Source of events and host times.
        lag: Number of ended steps that may be pending.
        read_size: Number of finished steps that are read together.
        emit: Called with the steps that were read, in order, in the training thread.
        annotate: Called with each new label, and with None at the end.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        emit: Emit,
        read_size: int = 1,
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
        self.pending = PendingSteps(clock, lag=lag, read_size=read_size, emit=emit, fail=self._lose)
        self.warn_once = self.pending.warn_once
        self.captures = Captures(clock, self.warn_once)
        self._annotate = annotate
        # Aliases, because every mark needs them.
        self._host_ns, self._free = clock.host_ns, self.pending.free
        # Cheaper than `is_capturing`, so every mark calls it first. May return True without a
        # capture.
        self._may_capture = getattr(clock, "may_capture", clock.is_capturing)

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
            needs_record = self._annotate is not None or not self._free
            if needs_record or (self._may_capture() and self.clock.is_capturing()):
                self._record(label)
                return
            # The same as `_record` does in the most common case, without another call.
            event = self._free.pop()
            event.record()
            self.open.marks.append((label, event, self._host_ns()))
            self.label = label
        except Exception as error:
            self.pending.give_up(error)

    def mark_in_backward(self, label: str) -> None:
        """Mark from the thread that runs a backward pass while the timed thread waits for it.

        Do nothing if the current label does not belong to a backward pass.
        """
        # A named phase around the backward pass includes all of it, unless its name is "backward".
        if self.state is not OPEN or self.named.names not in ([], [BACKWARD]):
            return
        is_in_backward = self.label is not None and self.label.startswith(_IN_BACKWARD)
        if is_in_backward and label != self.label:
            # Ranges of profilers must start and end in the same thread.
            self._record(label, annotate=False)

    def mark_instead(self, label: str, *, of: str) -> None:
        """Mark `label`; but if the current label is `of`, replace the label of its mark instead.

        Then the time since that mark belongs to `label`, too.
        """
        if self.label == of and self.state is OPEN and get_ident() == self.threads.timed:
            self.open.relabel(label)
            self.label = label
        else:
            self.mark(label)

    # Waits for other ranks

    def begin_wait(self, label: str = WAITS) -> bool:
        """Start a wait for other ranks, which interrupts the current phase until `end_wait`.

        The wait is part of that phase, even if the phase is relabeled later. With the label
        `RECEIVES`, it is part of the next phase. Return False and do nothing if no step is timed in
        this thread, or during another wait.
        """
        if self.state is not OPEN or not self.is_here() or self.open.is_waiting:
            return False
        if self.label is None or self.label.endswith(f"/{COMM}"):
            return False  # The current phase, such as `data/comm`, is itself a wait.
        self._interrupt(label)
        return True

    def end_wait(self) -> None:
        """End a wait. The interrupted phase continues."""
        if self.state is OPEN and self.is_here() and self.open.is_waiting:
            self._interrupt(CONTINUES)

    def is_here(self) -> bool:
        """Return True if this thread is timed, or runs a backward pass for the timed thread."""
        if get_ident() == self.threads.timed:
            return True
        return current_graph_task_id() != -1 and (self.label or "").startswith(_IN_BACKWARD)

    def _interrupt(self, label: str) -> None:
        """Record a mark of a wait, but keep the label of the interrupted phase as `self.label`."""
        interrupted = self.label
        self._record(label, annotate=False)
        if self.state is OPEN:  # Otherwise the mark has failed.
            self.label = interrupted

    # Named phases

    def enter_phase(self, name: str) -> None:
        """Start a named phase, until `leave_phase`."""
        # Code inside a backward pass, such as recomputation by checkpointing, belongs to that pass.
        if get_ident() == self.threads.home and current_graph_task_id() == -1:
            label = self.label if self.state is OPEN else None
            self.named.enter(name, label or DATA)
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
            since: Exclude the time from the first mark of this label on. If the step has only
                fetched data before that mark, also exclude the fetch. Without `since`, or without
                such a mark, exclude the time from the last mark on.
            now: Exclude the time from now on instead.
        """
        if now:
            self.mark(EXCLUDED)
        if self.state is not OPEN or get_ident() != self.threads.timed:
            return
        labels = self.open.labels
        if since is not None and since in labels:
            first = labels.index(since)
            self.open.exclude(0 if is_fetch(labels[:first]) else first)
        else:
            self.open.relabel(EXCLUDED)  # With `now`, that is the mark just made.
        self.label = EXCLUDED
        self.state = PAUSED
        self._show(None)

    def resume(self, label: str = DATA) -> None:
        """End a `pause`, and attribute the time to `label` from now on."""
        if self.state is PAUSED and get_ident() == self.threads.timed:
            self.state = OPEN
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
        is_last = stop == len(marks)
        _, _, start_ns = marks[first]
        end_ns = self._host_ns() if is_last else marks[stop][2]
        first_excluded = 0 if is_fetch(self.open.labels[:first]) else first
        self.open.exclude(first_excluded, stop, label=EVALUATION_IN_STEP)
        if is_last:
            self.label = EVALUATION_IN_STEP
            self.state = PAUSED
            self._show(None)
        return end_ns - start_ns

    # Steps

    def begin(self, label: str = DATA) -> None:
        """Drop the open step, and start a step in the calling thread."""
        self.threads.start()
        self.pending.take_back(self._clear())
        self.state = OPEN
        self._record(self.named.start_step(label))

    def end_step(
        self,
        number: int,
        skipped_update: bool = False,
        read: bool = False,
        label: str = DATA,
        wait: Wait = Wait.FOR_EARLIER,
        index: int = -1,
        items: float = nan,
        ended_ns: int = 0,
    ) -> None:
        """End the open step, and start the next one with `label`.

        In a training loop, the host may wait for the device at the end of a step only: here, and in
        `PendingSteps.end_untimed`.

        Args:
            number: Number of the step that ends.
            skipped_update: See `StepRecord`.
            read: Read all finished steps now.
            label: First label of the next step.
            wait: Steps that the host may wait for.
            index: Index among all steps, timed or not; -1 if only timed steps are counted.
            items: Number of items of the step; NaN if unknown.
            ended_ns: Cumulative time of all steps (in nanoseconds).
        """
        if get_ident() != self.threads.timed:
            return
        names = self.named.names
        # `is_all_excluded` is slow, so read it only where it may be True: in a named phase, which
        # may be `paused()`, or in another state. It is also True for a lost step.
        may_be_excluded = bool(names) or self.state is not OPEN
        has_time = not (may_be_excluded and self.open.is_all_excluded)
        if has_time:
            first_label = DATA if self.state is PAUSED else label
            self.state = OPEN
            # One event ends this step and starts the next, so that no time is lost between them.
            self._record(self.named.start_step(first_label) if names else first_label)
        if not has_time or self.state is LOST:  # Lost if the mark has failed.
            self.begin(label)
            # Count the dropped step, so that all ranks compare the same steps.
            self.pending.end_untimed(read)
            return
        step = self.open
        self.open = StepMarks(step.marks[-1:])
        if self.captures.has_captured:
            skipped_update = False  # Graph replays do not call optimizer hooks.
            step.relabel_replay()
        self.pending.add(step, number, index, items, skipped_update, ended_ns, read=read, wait=wait)

    def end_at(
        self, label: str, number: int, index: int = -1, items: float = nan, ended_ns: int = 0
    ) -> bool:
        """End the open step now, without the time since its last mark of `label`. Do not wait.

        Return False and do nothing if no step is timed in this thread, if the step has no such
        mark, or if a model call or a backward pass follows that mark.
        """
        if get_ident() != self.threads.timed or not self.open.exclude_after(label):
            return False
        self.end_step(number, wait=Wait.NEVER, index=index, items=items, ended_ns=ended_ns)
        return True

    def stop(self) -> None:
        """Stop recording until the next `begin`. Named phases are still tracked."""
        self.threads.stop()
        if self.state is not IDLE:
            self.pending.take_back(self._clear())
            self.state = IDLE
            self._show(None)

    def examine(self, lines: list[LineMark]) -> None:
        """Keep the list of marks of lines with the open step, which has just started."""
        self.open.lines = lines

    def abandon(self) -> list[Any]:
        """End all recording in a forked process. Return the objects that refer to events.

        The caller must keep these objects: destroying an event would abort the process.
        """
        held = [self._clear(), self.pending.forget()]
        self.state = IDLE
        self.threads.forget()
        return held

    # Transitions

    def _record(self, label: str, *, annotate: bool = True) -> None:
        """Record a mark. While a graph is captured, or after an error, drop the step instead."""
        try:
            if self._may_capture() and self.captures.detect():
                self.pending.take_back(self._clear())
                self.state = LOST
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
        if annotate and self._annotate is not None:
            self._show(None if label == EXCLUDED else label)

    def _show(self, label: str | None) -> None:
        """Show the start of a label in other profilers; with None, the end of the last label."""
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate = None
                self.warn_once("Phases are no longer shown in other profilers: %r", error)

    def _lose(self, error: Exception | None = None) -> None:
        """Drop the open step after an error, with its events, which may be broken."""
        if error is not None:
            self.warn_once(LEFT_OUT, error)
        self._clear()
        if self.state is not IDLE:
            self.state = LOST

    def _clear(self) -> StepMarks:
        """Take the marks of the open step, and leave it without any."""
        step, self.open, self.label = self.open, StepMarks(), None
        return step
