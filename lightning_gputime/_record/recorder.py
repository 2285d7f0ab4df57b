"""Marks on a timeline, cut into steps."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from math import nan
from threading import get_ident, local
from typing import Any
from weakref import ref

import torch

from lightning_gputime._compat.torch_ import current_graph_task_id
from lightning_gputime._phases import (
    BACKWARD,
    COMM,
    DATA,
    EVALUATED,
    EXCLUDED,
    FOLLOWED_BY,
    FORWARD,
    GOES_ON,
    INTERRUPTIONS,
    LEFT,
    LIKELY,
    LOSS,
    OPTIMIZER,
    OTHER,
    RECEIVES,
    WAITS,
    StepRecord,
)
from lightning_gputime._record.clock import Clock, Mark
from lightning_gputime._record.pending_steps import LEFT_OUT, PendingStep, PendingSteps

MOST_MARKS = 100_000
"""A step with more marks is dropped, and the user is told: perhaps none ever ends."""

# What the time goes to while a backward runs; an optimizer may run its updates there.
_IN_BACKWARD = (BACKWARD, OPTIMIZER)

_NEVER_ENDS = (
    "A step with more than %d boundaries is dropped. If no step ends, call step() at the end of the"
    " loop's body or iterate over steps(loader), and remove() a timer that is not used any more;"
    " where Lightning optimizes by hand, a step ends with the update of an optimizer that"
    " configure_optimizers returned."
)

_CAPTURES = (
    "No phase is seen inside a captured graph. Its replays count for the phase that they are"
    ' launched in: name that, as in `with phase("forward"): graph.replay()`.'
)


class State(Enum):
    """What a recorder does with the time."""

    # It belongs to nobody, until `begin`.
    AT_REST = 0
    # It belongs to `label`, until `pause`, `rest` or an error.
    OPEN = 1
    # It belongs to no step, until `resume`, `rest`, or `end_step`, which drops a step that has
    # nothing else.
    PAUSED = 2
    # After an error, or while a graph is captured, it belongs to nobody, until `rest`, or
    # `end_step`, which drops the step.
    LOST = 3


# As globals: they are looked up at every mark.
AT_REST, OPEN, PAUSED, LOST = State


FIRST_LOCATED, LOCATED = (3, 48, 98), 5
"""From each of these timed steps on, 5 steps are located. 50 is the most common period of loggers,
checks and checkpoints. Locating a mark takes some 3 us."""


def is_fetch(labels: Sequence[str]) -> bool:
    """Return whether these are the labels of a fetch, and of nothing else in a step."""
    return {*labels} <= {DATA, EXCLUDED, EVALUATED, *INTERRUPTIONS}


class Annotator:
    """Put each phase into torch.profiler's trace, and as an NVTX range into that of Nsight."""

    def __init__(self) -> None:
        self._ranges = ExitStack()
        self._has_nvtx = torch.cuda.is_available()

    def __call__(self, label: str | None) -> None:
        """End the range of the last label, and begin one for this label unless it is None."""
        self._ranges.close()
        if label is not None:
            name = f"phase/{LIKELY.get(label, label)}"
            self._ranges.enter_context(torch.autograd.profiler.record_function(name))
            if self._has_nvtx:
                # By number, not `range`: ranges of the user's may cross these.
                number = torch.cuda.nvtx.range_start(name)
                self._ranges.callback(torch.cuda.nvtx.range_end, number)


class Recorder:
    """Records marks, cuts them into steps, and emits the times of each step once it can be read.

    A mark says: from here on the time belongs to this label. The end of a step is the first mark of
    the next. When more than `lag` steps are pending, the host waits for the oldest of them, unless
    the device has finished it. Steps that are finished are read together, `batch` at a time.

    Nothing here raises into the training loop: after an error the step is dropped, and a logger
    says so once. Calls from any thread but the one that last called `begin` do nothing. There is no
    lock: autograd's thread marks (`mark_in_backward`) only while the timed one waits for it.

    Args:
        clock: Where events and host times come from.
        lag: How many ended steps may be pending.
        batch: How many finished steps are read together.
        emit: Called with the steps that were read, in order, in the training thread.
        annotate: Called with each new label, and with None at the end.
        locate: Called at the marks of some steps, whose records then hold what it returns.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        emit: Callable[[list[StepRecord]], object],
        batch: int = 1,
        annotate: Callable[[str | None], None] | None = None,
        locate: Callable[[], Any] | None = None,
    ) -> None:
        self._host_ns, self._is_capturing = clock.host_ns, clock.is_capturing
        # Asked first, at every mark: it is cheaper, and nearly always enough.
        self._may_capture = getattr(clock, "may_capture", clock.is_capturing)
        self.streams: Any = getattr(clock, "streams", None)
        """Those of the device, if it has some, see `DeviceClock`."""
        self._clock = clock
        self.has_captured = False
        """Whether a graph was captured: its replays may run a step without a call that is seen."""
        self.pending = PendingSteps(clock, lag=lag, batch=batch, emit=emit, fail=self._fail)
        # Bound, not wrapped: it is all that a step without times calls.
        self.end_untimed = self.pending.end_untimed
        self.flush, self.drain = self.pending.flush, self.pending.drain
        self.warn_once = self.pending.warn_once
        self._free = self.pending.free
        self._annotate = annotate
        self._locate_mark = locate
        self.is_located = False
        """True while the marks of the open step are located."""
        self._to_locate = 0  # Number of the next steps that are located.
        self.state = AT_REST
        self.thread = -1
        """The thread that is timed; -1 at rest."""
        self.home = -1
        """The same, at rest, too; -1 when it has ended: a new thread may get its number."""
        self._of_home = local()
        self._home_end: Any = None
        self.was_elsewhere = False
        """Whether a boundary was seen in another thread."""
        self.label: str | None = None
        """The label that time is going to now; None while no step is timed."""
        # The open step: its place among the timed ones, its marks, the index of the one behind a
        # spin.
        self._index = 0
        self._open: list[Mark] = []
        # The phases of its first marks, and how many these are; -1 to look at all again.
        self._phases: set[str] = set()
        self._n_looked_at = 0
        self._post_spin_index = 0
        # Whether a mark is shown or located.
        self._is_watched = annotate is not None
        self.named: list[str] = []
        """Phases that were named by hand and are not left yet. `EXCLUDED` is a pause: it wins over
        all others."""
        # How many of them began before the open step, and what follows the outermost.
        self._n_outer = 0
        self._base = DATA

    # Marks

    def mark(self, label: str) -> None:
        """Attribute time to `label` from now on.

        Inside a phase that was named by hand that name wins, and `label` is what follows it.
        """
        # The label first: a boundary that changes nothing must cost no event, and next to no time.
        if label == self.label or self.state is not OPEN or get_ident() != self.thread:
            return
        if self.named:
            self._follow(label)
            return
        try:
            # What `_record` does in most cases, without another call.
            is_rare = self._is_watched or not self._free
            if is_rare or (self._may_capture() and self._is_capturing()):
                self._record(label)
                return
            event = self._free.pop()
            event.record()
            self._open.append((label, event, self._host_ns()))
            self.label = label
        except Exception as error:
            self.pending.give_up(error)

    def mark_in_backward(self, label: str) -> None:
        """As `mark`, from the thread that runs a backward while the timed one waits for it."""
        # Any other name that was given by hand wins over what is seen.
        is_open = self.state is OPEN and self.named in ([], [BACKWARD])
        if is_open and (self.label or "").startswith(_IN_BACKWARD) and label != self.label:
            # A profiler's range must not begin here and end in the other thread.
            self._record(label, annotate=False)

    def mark_instead(self, of: str, label: str) -> None:
        """Mark `label`. If time is going to `of`, `label` takes its place from its mark on."""
        if self.label == of and self.state is OPEN and get_ident() == self.thread:
            self._relabel(label)
        else:
            self.mark(label)

    def rename_before(self, of: str, label: str) -> None:
        """Give the time of the mark before the last one, if it went to `of`, to `label`."""
        place = self._uninterrupted(len(self._open) - 2)
        if place >= 0 and self._open[place][0] == of:
            self._rename(place, label)

    @property
    def labels(self) -> list[str]:
        """The labels of the open step's marks."""
        return [label for label, *_ in self._open]

    @property
    def phases(self) -> set[str]:
        """The phases that the open step has marks of, also where they are of their parts."""
        # Looks at each mark once: batches that are passed over ask again and again, in one step.
        # Labels of the last two marks may still change.
        n, last = self._n_looked_at, max(len(self._open) - 2, 0)
        if not 0 <= n <= last:
            self._phases, n = set(), 0
        self._phases.update(label.partition("/")[0] for label, *_ in self._open[n:last])
        self._n_looked_at = last
        return self._phases.union(label.partition("/")[0] for label, *_ in self._open[last:])

    # Phases that are named by hand

    def enter_phase(self, name: str) -> None:
        """Begin a phase that was named by hand; `leave_phase` ends it."""
        # What runs inside a backward, as checkpointed code does again, is the backward's.
        if get_ident() != self.home or current_graph_task_id() != -1:
            return
        if not self.named:
            self._base = self.label if self.label and self.state is OPEN else DATA
        self.named.append(name)
        self._go_on()

    def leave_phase(self, name: str) -> None:
        """End a phase that `enter_phase` began: time goes back to where it went before."""
        is_here = get_ident() == self.home and current_graph_task_id() == -1
        if not is_here or name not in self.named:
            return
        is_inner = name == self.named[-1]
        # Left out of order, as by a generator that suspends inside its phase.
        del self.named[len(self.named) - 1 - self.named[::-1].index(name)]
        self._n_outer = min(self._n_outer, len(self.named))
        if not is_inner:
            return
        if not self.named:
            self._base = FOLLOWED_BY.get(name, self._base)
        self._go_on()

    def end_fetch(self) -> None:
        """Leave the phases that began in the fetch: a loader may yield a batch inside of one."""
        del self.named[self._n_outer :]

    def _go_on(self) -> None:
        """Mark the phase that was named by hand, or what follows it."""
        if self.state is OPEN and self._name != self.label:
            self._record(self._name)

    @property
    def _name(self) -> str:
        if EXCLUDED in self.named:
            return EXCLUDED
        return self.named[-1] if self.named else self._base

    def _follow(self, label: str) -> None:
        # What runs in a pause does not change what goes on behind it.
        if EXCLUDED not in self.named:
            self._base = label

    # Pauses

    def pause(self, since: str | None = None) -> None:
        """Exclude the time from the last mark, or from the first one of `since`, until `resume`.

        If only the fetch was before that, it was not the fetch of this step: it is excluded, too.
        """
        if self.state is not OPEN or get_ident() != self.thread:
            return
        labels = self.labels if since else []
        if since not in labels:
            self._relabel(EXCLUDED)
        else:
            first = labels.index(since)
            self._exclude_from(0 if is_fetch(labels[:first]) else first)
        self.state = PAUSED
        self._show(None)

    def exclude_evaluation(self, first: int, stop: int) -> int:
        """Exclude an evaluation that ended before; return its host time (in nanoseconds).

        If only the fetch was before it, it was not the fetch of this step: it is excluded, too.
        Where the last mark is excluded, this is a pause.

        Args:
            first: Index of its first mark in the open step.
            stop: Index after its last mark.
        """
        marks = self._open
        end_ns = marks[stop][2] if stop < len(marks) else self._host_ns()
        ns = end_ns - marks[first][2]
        if is_fetch(self.labels[:first]):
            first = 0
        # A pause inside is no evaluation.
        marks[first:stop] = [
            mark if mark[0] == EXCLUDED else (EVALUATED, *mark[1:]) for mark in marks[first:stop]
        ]
        self._n_looked_at = -1
        if stop == len(marks):
            self.label, self.state = EVALUATED, PAUSED
            self._show(None)
        return ns

    def pause_now(self) -> None:
        """Exclude the time from now until `resume`. Safe to call again."""
        # A pause takes all since the last mark, so that needs one here.
        self.mark(EXCLUDED)
        self.pause()

    def resume(self, label: str = DATA) -> None:
        """End a `pause`: attribute time to `label` from now on."""
        if self.state is PAUSED and get_ident() == self.thread:
            self.state = OPEN
            self._follow(label)
            self._record(self._name)

    def resume_or_mark(self, label: str) -> None:
        if self.state is PAUSED:
            self.resume(label)
        else:
            self.mark(label)

    # Waits

    def wait_begins(self, label: str = WAITS) -> bool:
        """Interrupt the label that time goes to by a wait for other ranks, until `wait_ends`.

        It is part of that label, whatever that is renamed to later; with `RECEIVES` it is for what
        follows. Return False where time goes to a wait already, or to no step.
        """
        if self.state is not OPEN or not self.is_here() or self.is_waiting:
            return False
        if self.label is None or self.label.endswith(f"/{COMM}"):
            return False
        self._interrupt(label)
        return True

    def wait_ends(self) -> None:
        if self.state is OPEN and self.is_here() and self.is_waiting:
            self._interrupt(GOES_ON)

    @property
    def is_waiting(self) -> bool:
        """Whether time goes to a wait that `wait_begins` began."""
        return bool(self._open) and self._open[-1][0] in (WAITS, RECEIVES)

    # Threads and captures

    def is_here(self) -> bool:
        """Return whether this thread is timed, or runs a backward while the timed one waits."""
        if get_ident() == self.thread:
            return True
        return current_graph_task_id() != -1 and (self.label or "").startswith(_IN_BACKWARD)

    def is_resting_here(self) -> bool:
        """Return whether the calling thread is timed in some steps, but not now."""
        if self.thread == -1:
            return get_ident() == self.home
        self.was_elsewhere = True
        return False

    def note_capture(self) -> None:
        """Note if a graph is captured now: nothing can be recorded."""
        if self._is_capturing():
            self.has_captured = True
            self.warn_once(_CAPTURES)

    # Steps

    def begin(self, label: str = DATA) -> None:
        """Start a step here, in the calling thread. What the open step held is dropped."""
        self._move_here()
        self.thread = self.home
        self._drop()
        self.state = OPEN
        if self._to_locate:
            self._to_locate -= 1
            self._is_watched = self.is_located = True
        self._record(self._first_label(label))

    def end_step(
        self,
        number: int,
        skipped_update: bool = False,
        read: bool = False,
        label: str = DATA,
        may_wait: bool = True,
        index: int = -1,
        items: float = nan,
    ) -> None:
        """End the open step under `number`, and begin the next.

        This is the only place where the host may wait in a training loop. With `read` the finished
        steps are read now. The next one starts with `label`. `index` and `items` are those of
        `StepRecord`.
        """
        if get_ident() != self.thread:
            return
        self._index += 1
        if self._index in FIRST_LOCATED:
            self.locate_next(LOCATED)
        is_located = self.is_located
        # The end of this step is the first mark of the next.
        if self._to_locate:
            self._is_watched = self.is_located = True
        is_paused = bool(self.named) and self._is_empty()
        if self.state is OPEN and not is_paused:
            self._base, self._n_outer = label, len(self.named)
            self._record(self._name if self.named else label)
        # Once more: that mark may have failed, or a graph may be captured.
        if is_paused or (self.state is not OPEN and not self._ends_paused()):
            self.begin(label)
            # A step that is dropped has ended all the same: else ranks would compare different
            # steps.
            self.end_untimed(read)
            return
        # One event is the end of this step and the begin of the next: no time is lost between them.
        marks, self._open = self._open, self._open[-1:]
        self._n_looked_at = -1
        if self.has_captured:
            # A replay calls no hook of the optimizer, and none of the model's, which end `data`.
            skipped_update = False
            if len(marks) == 2 and marks[0][0] == DATA:
                marks[0] = (OTHER, *marks[0][1:])
        step = PendingStep(marks, number, skipped_update, items, index, is_located)
        if self.is_located and self._to_locate:
            self._to_locate -= 1
        elif self.is_located:
            self._stop_locating()
        if self._post_spin_index:
            step.post_spin_index, self._post_spin_index = self._post_spin_index, 0
        self.pending.add(step, read, may_wait)

    def end_at(self, label: str, number: int, index: int = -1, items: float = nan) -> bool:
        """End the open step at its last mark of `label`, without a wait, and begin the next.

        Return False if there is no such mark, or a model or a backward after it.
        """
        is_open = self.state in (OPEN, PAUSED)
        if not is_open or get_ident() != self.thread or not self._cut_after(label):
            return False
        self.state = OPEN
        self.end_step(number, may_wait=False, index=index, items=items)
        return True

    def rest(self) -> None:
        """End recording until the next `begin`; until then only named phases are noted."""
        self._move_here()
        if self.thread != -1:
            self._drop()
            self.state, self.thread = AT_REST, -1
            self._show(None)

    def start_probe(self, spin: Callable[[], None]) -> None:
        """Queue `spin`, which keeps the device busy, and exclude the open step's time so far.

        Then `end_step` waits for its end, and reads all.
        """
        label = self.label
        if label is None or self.state is not OPEN:
            return
        self._stop_locating()  # It would delay the marks.
        self._exclude_from(0)
        self._show(None)
        # A mark of its own before the spin: how long it took sets the length of the next one. What
        # came before it, such as logging, must not count for it.
        self._record(EXCLUDED, annotate=False)
        spin()
        self._record(label)
        self._post_spin_index = len(self._open) - 1

    def abandon(self) -> list[Any]:
        """End all recording, in a process that was forked off; return what holds its events."""
        self.state, self.thread, self.home = AT_REST, -1, -1
        return [self._forget_open(), self.pending.forget()]

    # How a mark is recorded

    def _record(self, label: str, *, annotate: bool = True) -> None:
        try:
            if self._may_capture() and self._is_capturing():
                self.note_capture()
                self._drop()
                self.state = LOST
                return
            if not self._free and len(self._open) >= MOST_MARKS:
                self.warn_once(_NEVER_ENDS, MOST_MARKS)
                self._lose_step()
                return
            event = self._free.pop() if self._free else self._clock.event()
            event.record()
            self._open.append((label, event, self._host_ns()))
        except Exception as error:
            self.pending.give_up(error)
            return
        self.label = label
        if self._is_watched:
            if self.is_located:
                self._locate()
            if annotate and self._annotate is not None:
                self._show(None if label == EXCLUDED else label)

    def _interrupt(self, label: str) -> None:
        interrupted = self.label
        self._record(label, annotate=False)
        if self.state is OPEN:  # Else the mark has failed.
            self.label = interrupted

    def _relabel(self, label: str) -> None:
        """Give the time since the last mark to `label`, waits inside included."""
        self._rename(self._uninterrupted(len(self._open) - 1), label)
        self.label = label

    def _rename(self, place: int, label: str) -> None:
        self._open[place] = (label, *self._open[place][1:])
        if place < self._n_looked_at:
            self._n_looked_at = -1

    def _uninterrupted(self, place: int) -> int:
        """Return the index of a mark, or of the one that it interrupts."""
        while place > 0 and self._open[place][0] in INTERRUPTIONS:
            place -= 1
        return place

    def _exclude_from(self, first: int) -> None:
        self._open[first:] = [
            mark if mark[0] == EVALUATED else (EXCLUDED, *mark[1:]) for mark in self._open[first:]
        ]
        self._n_looked_at = -1
        self.label = EXCLUDED

    def _first_label(self, label: str = DATA) -> str:
        # A phase that was named by hand reaches across steps.
        self._base, self._n_outer = label, len(self.named)
        return self._name

    # What else is done at a mark

    def _show(self, label: str | None) -> None:
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate = None
                self.warn_once("Phases are no longer shown in other profilers: %r", error)

    def locate_next(self, steps: int) -> None:
        """Note the place in the code at each mark of the next timed steps."""
        if self._locate_mark is not None:
            self._to_locate = steps

    def _locate(self) -> None:
        if self._locate_mark is not None:
            try:
                self._open[-1] = (*self._open[-1][:3], self._locate_mark())
            except Exception as error:
                self._locate_mark, self._to_locate = None, 0
                self._stop_locating()
                self.warn_once("Phases are no longer located in the code: %r", error)

    def _stop_locating(self) -> None:
        self.is_located, self._is_watched = False, self._annotate is not None

    # How a step ends, or is lost

    def _ends_paused(self) -> bool:
        """End a step inside a pause, if some of its time was before. Return whether it did."""
        if self.state is not PAUSED or self._is_empty():
            return False
        self.state = OPEN
        self._record(self._first_label())
        return self.state is OPEN

    def _is_empty(self) -> bool:
        """Return whether all time of the open step is in pauses."""
        return {*self.labels} <= {EXCLUDED, EVALUATED, *INTERRUPTIONS}

    def _cut_after(self, label: str) -> bool:
        """Exclude what follows the last mark of `label`. Return False if that is more work."""
        labels = self.labels
        if label not in labels:
            return False
        last = len(labels) - 1 - labels[::-1].index(label)
        if {name.partition("/")[0] for name in labels[last:]} & {FORWARD, LOSS, BACKWARD}:
            return False
        self._exclude_from(last)
        # Excluded, too, but what came before led to an update.
        self._open[last] = (LEFT, *self._open[last][1:])
        return True

    def _drop(self) -> None:
        """Forget the open step, and use its events again."""
        self.pending.take_back(self._forget_open())

    def _forget_open(self) -> list[Mark]:
        marks, self._open, self.label, self._post_spin_index = self._open, [], None, 0
        self._n_looked_at = -1
        self._stop_locating()
        return marks

    def _fail(self, error: Exception) -> None:
        self.warn_once(LEFT_OUT, error)
        self._lose_step()

    def _move_here(self) -> None:
        if get_ident() == self.home:
            return
        # It goes with its thread, or when the next one is put there.
        self._of_home.alive = alive = set[None]()
        self._home_end = ref(alive, self._lose_thread)
        self.home = get_ident()

    def _lose_thread(self, _: object) -> None:
        self.thread = self.home = -1

    def _lose_step(self) -> None:
        # After an error of the device its events cannot be trusted: they are not used again.
        self._forget_open()
        if self.state is not AT_REST:
            self.state = LOST
