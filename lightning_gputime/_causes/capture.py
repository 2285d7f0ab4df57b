"""Traces of slow steps: where some have been, the next ones are caught with `torch.profiler`."""

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_gputime._causes.cutting import cut
from lightning_gputime._causes.files import MOST_BYTES, exported, written
from lightning_gputime._causes.inquiry import Inquiry
from lightning_gputime._causes.tracer import Tracer
from lightning_gputime._causes.window import Window
from lightning_gputime._messages import TellOnce
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import OPEN
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._results.sums import Sums
from lightning_gputime._untraced import untraced

_RECUR, _WITHIN = 2, 500
"""So many slow steps within so many steps let it catch the next ones."""

_WINDOW = 30
"""For so many steps."""

_LEAD_IN = 2
"""The first of them still feel that the profiler has started, and are not judged."""

_COOL_DOWN, _LONGEST_COOL_DOWN = 300, 10_000
"""For so many steps after that it rests, and twice as long after each window without a trace."""

_AT_ONCE, _FILES = 2, 5
"""It keeps so many traces of a window, and of a fit."""

_PATIENCE = 100
"""So many steps after a window its own must have been read."""

_RANGE = "lightning_gputime step"

_NO_FILE = (
    "Slow steps are no longer traced: %s. Make room in %s and in the folder for temporary files,"
    " and let both be written to; or name another folder by trace_slow_steps."
)


@untraced
class Capture:
    """Profiles some steps, and keeps the traces of the slow ones alone.

    A step under the profiler takes longer, and so does the one after it: they are in no statistics,
    and are judged by each other. Nothing here raises: after an error no step is traced any more.

    Args:
        folder: Where the traces go.
        clock: That of the steps.
        inquiry: Says which steps were slow, and why.
        deliver: Gets the slow steps that have a trace.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        clock: Clock,
        inquiry: Inquiry,
        deliver: Callable[[Sequence[SlowStep]], None],
    ) -> None:
        self._folder = Path(folder)
        self._now_ns, self._is_capturing = clock.host_ns, clock.is_capturing
        self._inquiry = inquiry
        self._deliver = deliver
        self._tracer = Tracer(getattr(clock, "device", None))
        self._tell_once = TellOnce()
        self.is_due = False
        """Whether `turn` must be called between two steps."""
        self._turns = False
        self._is_over = False
        self._window: Window | None = None
        # When the profiler ran, and when it was started, stopped or exported: from and to.
        self._spoiled_ns: deque[tuple[int, int]] = deque()
        self._slow: list[SlowStep] = []
        self._rests_until = -1
        self._cool_down = _COOL_DOWN
        self._files = 0

    def saw(self, slow: Sequence[SlowStep]) -> None:
        """Must be told of slow steps without a profiler. Where they recur, a window begins."""
        if self._is_over or self.is_due or not slow:
            return
        newest = slow[-1].step
        self._slow = [one for one in [*self._slow, *slow] if one.step > newest - _WITHIN]
        self.is_due = len(self._slow) >= _RECUR and newest >= self._rests_until

    def is_spoiled(self, step: StepRecord) -> bool:
        """Tells whether a step that was read felt the profiler, and keeps it for its window."""
        begin_ns, end_ns = step.host_ns[0], step.host_ns[-1]
        window = self._window
        if window is not None and window.opened_ns < end_ns <= window.until_ns:
            window.steps.append(step)
            return True
        # Steps are read in their order.
        while self._spoiled_ns and self._spoiled_ns[0][1] <= begin_ns:
            self._spoiled_ns.popleft()
        return any(end_ns > begun and begin_ns < ended for begun, ended in self._spoiled_ns)

    def turn(self, recorder: Recorder) -> None:
        """Must be called after the end of a step, where it `is_due`.

        Args:
            recorder: Is paused while a profiler starts or stops, and reads what it may.
        """
        if self._is_capturing():
            return
        if recorder.state is not OPEN:
            self.close()
            return
        try:
            window = self._window
            if window is not None and self._tracer.is_running and len(window.begins_ns) < _WINDOW:
                self._next_range(window)
                return
            begun_ns = self._now_ns()
            self._turns = True
            recorder.pause()
            if window is None:
                self._open()
            else:
                self.close()
                self.settle(recorder)
            self._spoiled_ns.append((begun_ns, self._now_ns()))
        except Exception as error:
            self._give_up(error)
        finally:
            self._turns = False
            recorder.resume()

    def watch(self, also: Callable[[str | None], None] | None) -> Callable[[str | None], None]:
        """Returns what a recorder must tell its labels: at a pause the window ends.

        Args:
            also: Who wants to know them, too.
        """

        @untraced
        def tell(label: str | None) -> None:
            is_pause = label is None and not self._turns
            # To stop it would break the capture of a graph.
            if (self._tracer.must_stop or is_pause) and not self._is_capturing():
                self.close()
            if also is not None:
                also(label)

        return tell

    def close(self) -> None:
        """Stops the profiler, if it runs: what follows is no step, or not one of this loop."""
        window, closing_ns = self._window, self._now_ns()
        try:
            # Also where nothing is known of it: Ctrl-C may come at any moment.
            profile = self._tracer.stop()
        except Exception as error:
            self._give_up(error)
            return
        # Else the loop's thread has closed it by now.
        if window is not None and window.closing_ns is None:
            window.closing_ns, window.profile = closing_ns, profile
            self._spoiled_ns.append((window.opened_ns, self._now_ns()))

    def drop(self) -> None:
        """Stops the profiler where the loop may have raised, and does not wait for the device."""
        self._tracer.try_to_stop()
        self.close()

    def settle(self, recorder: Recorder) -> None:
        """Keeps the slow steps of a window that is closed, once all were read."""
        window = self._window
        if window is None or window.closing_ns is None:
            return
        try:
            # The profiler has waited for the device: they can be read.
            recorder.drain()
            window.waited += 1
            is_lost = window.profile is None or window.waited > _PATIENCE
            if self._window is not window or not (is_lost or window.is_read):
                return
            kept = [] if is_lost else self._keep(window)
            self._rest(window.steps[-1].number if window.steps else self._slow[-1].step, kept)
            if kept:
                self._deliver(kept)
        except Exception as error:
            self._give_up(error)

    def remove(self) -> None:
        """Stops what runs, for good. Safe to call twice."""
        self.close()
        self._end()

    def forget(self) -> None:
        """Forgets what runs, in a process that was forked off."""
        self._tracer.forget()
        self._end()

    def _end(self) -> None:
        self._is_over, self.is_due, self._window = True, False, None

    def _open(self) -> None:
        window = Window(self._now_ns())
        if why_not := self._tracer.start():
            self._tell_once("Slow steps are not traced now, because %s.", why_not)
            self._rest(self._slow[-1].step, [])
            return
        self._window = window
        self._next_range(window)

    def _next_range(self, window: Window) -> None:
        self._tracer.range(f"{_RANGE} {len(window.begins_ns)}")
        window.begins_ns.append(self._now_ns())

    def _rest(self, number: int, kept: Sequence[SlowStep]) -> None:
        if not kept:
            self._cool_down = min(2 * self._cool_down, _LONGEST_COOL_DOWN)
        self._rests_until = number + self._cool_down
        self.is_due, self._window, self._slow = False, None, []
        self._is_over |= self._files >= _FILES

    def _keep(self, window: Window) -> list[SlowStep]:
        """Writes the traces of the slowest steps, and returns those with their files."""
        excess_ms = min(one.excess_ms for one in self._slow) / 2
        steps = window.steps[_LEAD_IN:]
        judged = self._inquiry.judge_traced(steps, Sums(steps).each_ms)
        slow = [(step, found) for step, found in judged if found.excess_ms >= excess_ms]
        slow.sort(key=lambda one: one[1].excess_ms, reverse=True)
        kept: list[SlowStep] = []
        if slow:
            text = exported(window.profile)
            for step, found in slow[: min(_AT_ONCE, _FILES - self._files)] if text else ():
                place = bisect_left(window.begins_ns, step.host_ns[-1]) - 1
                trace = cut(text, f"{_RANGE} {place}", f"step {step.number}")
                if path := written(self._folder, trace, step.number):
                    self._files += 1
                    kept.append(replace(found, trace=path))
                else:
                    self._tell_once("A trace of more than %d MB is not kept.", MOST_BYTES // 10**6)
            if not text:
                self._tell_once("%d steps have too large a trace, which is not kept.", _WINDOW)
        return kept

    def _give_up(self, error: Exception) -> None:
        self._end()
        if isinstance(error, OSError):
            # As text it names the file, too.
            self._tell_once(_NO_FILE, error, self._folder)
        else:
            self._tell_once("Slow steps are no longer traced: %r", error)
        with suppress(Exception):
            self._tracer.stop()
