"""Follow the lines of the user's code that run in one thread, for the length of a step.

Python 3.12 and later report lines by `sys.monitoring`, at no cost for code that is not the user's.
Python 3.11 reports them by `sys.settrace`, which other tools, such as debuggers, may be using.
"""

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from lightning_gputime._compat.python_ import is_user_code, user_frames
from lightning_gputime._ledger import (
    CALLS,
    LINES,
    NOTHING,
    Function,
    FunctionKey,
    Line,
    key_of,
)

# A line keeps its events for this many executions in a step, whatever they cost. Chosen: fewer lose
# the lines of loops over layers; more, at about 10 us each, lengthen short steps.
_MIN_EVENTS = 64


_LineId = tuple[int, int]
"""Id of the code of a function, and number of a line; line 0 is a call of the function."""


class LineWatch:
    """The user's functions that are running in a thread, and the line that each is at.

    Lines of other code belong to the line of the user's code that called it.

    Args:
        mark: Called with the line that is running from now on, and True if it starts or False if
            it continues after a call.
        fail: Called with an error, after which nothing is followed any more.
    """

    def __init__(
        self, mark: Callable[[Line, bool], None], fail: Callable[[Exception], None]
    ) -> None:
        self._mark, self._fail = mark, fail
        self.root = Line(None, 0)
        """Time outside of the user's code."""
        self.base: frozenset[CodeType] = frozenset()
        """Functions that were running at the start."""
        self.details: dict[int, int] = {}
        """Detail of each function, by the id of its code: hashing code takes microseconds."""
        # The codes of these functions. References to them keep their ids from being reused.
        self._codes: list[CodeType] = []
        # The running functions, each with the line that it is at, outermost first.
        self._stack: list[tuple[Function, Line]] = []
        self._thread = -1
        self._n_events = 0
        self._limit = 0  # Number of events after which lines may have to be ignored.
        self._more_events: Callable[[int], int] = int  # See `start`.
        self._events: Counter[_LineId] = Counter()  # Number of events.
        # Lines that run too often to be followed. Their time belongs to the line before them.
        self._ignored: set[_LineId] = set()
        self.busy_functions: set[FunctionKey] = set()
        """Keys of the functions of these lines."""
        self._source: _Monitoring | _Tracing | None = None

    @property
    def is_on(self) -> bool:
        return self._source is not None

    @property
    def line(self) -> Line:
        """The line that is running."""
        if not self._stack:
            return self.root
        _, line = self._stack[-1]
        return line

    def start(self, frame: FrameType | None, more_events: Callable[[int], int]) -> str:
        """Follow the code of the calling thread. If that is impossible, return the reason, else "".

        Args:
            frame: Innermost frame that may be the user's.
            more_events: Returns how many events may follow, after a number of events. Then it is
                called again. If it returns 0 or less, the line with the most events is ignored,
                unless that has fewer than 64.
        """
        global _running
        if _running is not None:
            return "another timer follows the code"
        if _MONITORING is None:
            is_taken, by = sys.gettrace() is not None, "sys.settrace"
        else:
            is_taken = all(_MONITORING.get_tool(tool) is not None for tool in _FREE_IDS)
            by = "each free id of sys.monitoring"
        if is_taken:
            return f"another tool, such as a debugger, traces the code with {by}"
        self._thread, self._more_events = get_ident(), more_events
        self._n_events = self._limit = 0
        self._events.clear()
        self._stack.clear()
        # Do not keep frames: that would keep the local variables of functions that have returned.
        frames = user_frames(frame)[::-1]
        self.base = frozenset(frame.f_code for frame in frames)
        for running in frames:
            code = running.f_code
            if self.details.get(id(code)) is None:
                self._set_detail(code, LINES)
            self.enter(code)
            if self.details[id(code)] == LINES:
                function, _ = self._stack[-1]
                self._stack[-1] = function, function.line_at(running.f_lineno or 0)
        source = _Tracing() if _MONITORING is None else _Monitoring(self)
        try:
            # Ctrl-C may come at any line.
            self._source, _running = source, self
            source.start(frames)
            for running in frames:
                source.follow(running.f_code, self.details[id(running.f_code)])
        except BaseException:
            self.stop()
            raise
        return ""

    def stop(self) -> None:
        """Stop following the code. Safe to call twice, and from any thread."""
        global _running
        if _running is self:
            _running = None
        source = self._source
        if source is not None:
            source.stop(self._thread)
            # Not earlier: if Ctrl-C interrupts the line above, the next call stops the source.
            self._source = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no code in the thread that is followed, at no cost for the code that runs."""
        traces = _MONITORING is None and self.is_on
        if traces:
            sys.settrace(None)
        try:
            yield
        finally:
            if traces and self.is_on:
                sys.settrace(_trace)

    def detail_of(self, code: CodeType, frame: FrameType) -> int:
        """Return the detail of a function that has started in a frame. Choose it at its first."""
        detail = self.details.get(id(code))
        if detail is not None:
            return detail
        try:
            is_user = is_user_code(code, frame.f_globals.get("__name__"))
        except Exception as error:
            self.give_up(error)
            return NOTHING
        detail = LINES if is_user else NOTHING
        self._set_detail(code, detail)
        return detail

    def follow(self, functions: Iterable[CodeType]) -> None:
        """Follow calls of these functions of libraries. Those of the user are followed anyway."""
        for code in functions:
            if not is_user_code(code, ""):
                self._set_detail(code, CALLS)

    def _set_detail(self, code: CodeType, detail: int) -> None:
        """Store the detail with which a function is followed from its next call on."""
        if id(code) not in self.details:
            self._codes.append(code)
        self.details[id(code)] = detail

    def is_ignored(self, code: CodeType, number: int) -> bool:
        """Return True if a line runs too often to be followed."""
        return (id(code), number) in self._ignored

    # Events, in the thread that is followed

    def enter(self, code: CodeType) -> None:
        """Put a function that starts or resumes on the stack."""
        # Merge the levels of a recursion, which could be deep.
        function = next((running for running, _ in self._stack if running.code is code), None)
        if function is None:
            caller = self.line
            function = caller.calls.get(id(code))
            if function is None:
                function = Function(code, caller, self.details[id(code)])
                caller.calls[id(code)] = function
        self._stack.append((function, function.whole))
        if self._source is not None:
            self._count(code, 0)
            if self.details[id(code)] == CALLS:
                self._mark(function.whole, True)

    def reach(self, code: CodeType, number: int) -> None:
        """Record that a function has reached a line. Mark the line if it was at another."""
        stack = self._stack
        if not stack or stack[-1][0].code is not code:
            depth = self._depth_of(code)  # 0 if it is not running.
            if depth:
                del stack[depth:]  # Functions that it had called: their end was not reported.
            else:  # Its start was not reported, as of a generator that had been suspended.
                self.enter(code)
        function, line_before = stack[-1]
        line = function.line_at(number)
        self._count(code, number)
        if line is not line_before:
            stack[-1] = function, line
            self._mark(line, True)

    def leave(self, code: CodeType) -> None:
        """Remove a function that returns, raises or is suspended. Its caller continues."""
        depth = self._depth_of(code)
        if depth:
            # Also remove functions that it had called, and whose end was not reported.
            del self._stack[depth - 1 :]
            self._mark(self.line, False)

    def _depth_of(self, code: CodeType) -> int:
        """Return the place of a function on the stack, counted from 1; 0 if it does not run."""
        stack = self._stack
        return next((i for i in range(len(stack), 0, -1) if stack[i - 1][0].code is code), 0)

    def forget_line(self, code: CodeType) -> None:
        """From now on, the time of a running function belongs to none of its lines."""
        if not self._stack:
            return
        function, _ = self._stack[-1]
        if function.code is code:
            self._stack[-1] = function, function.whole
            self._mark(function.whole, False)

    def _count(self, code: CodeType, number: int) -> None:
        """Count an event. If events cost too much, ignore the line or function with the most."""
        self._events[id(code), number] += 1
        self._n_events += 1
        if self._n_events > self._limit:
            n_more = self._more_events(self._n_events)
            self._limit = self._n_events + n_more
            if n_more <= 0:
                self._ignore_most_frequent()

    def _ignore_most_frequent(self) -> None:
        """Ignore the line with the most events, or the function with the most calls.

        Ignore nothing if these are few: then the time of many lines adds up. The next line is
        ignored after 64 further events. For example, after 1,000 events, of which one line had 700,
        300 events remain, and the limit is 364.
        """
        line_id, events = self._events.most_common(1)[0]
        self._limit = self._n_events + _MIN_EVENTS
        if events < _MIN_EVENTS or self._source is None:
            return
        # Ignored lines cause no further events, so their events so far do not count either.
        self._n_events -= events
        self._limit -= events
        self._events[line_id] = 0
        code_id, number = line_id
        code = next(known for known in self._codes if id(known) == code_id)
        if number:
            self._ignored.add(line_id)
            self.busy_functions.add(key_of(code))
        else:
            self.details[code_id] = NOTHING
            self._source.follow(code, NOTHING)

    def guard(self, event: Callable[..., Any], *args: Any) -> Any:
        """Handle an event in the thread that is followed. No error reaches the user's code."""
        if get_ident() != self._thread:
            return None
        try:
            return event(*args)
        except Exception as error:
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Stop after an error."""
        self.stop()
        self._fail(error)


_running: LineWatch | None = None
"""The watch that is on. Module state, because Python reports lines to the whole process."""


@atexit.register  # While the interpreter ends, the names of modules are no longer defined.
def _stop_running() -> None:
    if _running is not None:
        _running.stop()


if hasattr(os, "register_at_fork"):  # Not on Windows. Workers of loaders are forked, for example.
    os.register_at_fork(after_in_child=_stop_running)


# sys.monitoring

_MONITORING: Any = getattr(sys, "monitoring", None)
_FREE_IDS = (4, 3)  # Ids that Python reserves for no kind of tool.


class _Monitoring:
    """Line events of Python 3.12 and later."""

    def __init__(self, watch: LineWatch) -> None:
        self._watch = watch
        self._tool = -1
        self._events: Iterable[int] = ()  # Events with a handler.
        self._followed: dict[int, CodeType] = {}  # By id: equal codes have separate events.

    def start(self, frames: list[FrameType]) -> None:
        tools = _MONITORING
        events = tools.events
        self._tool = next(tool for tool in _FREE_IDS if tools.get_tool(tool) is None)
        tools.use_tool_id(self._tool, "lightning_gputime")
        handlers = {
            events.PY_START: self._on_start,
            events.PY_RESUME: self._on_start,
            events.PY_THROW: self._on_throw,
            events.LINE: self._on_line,
            events.PY_RETURN: self._on_return,
            events.PY_YIELD: self._on_return,
            events.PY_UNWIND: self._on_return,
        }
        self._events = handlers.keys()
        for event, handler in handlers.items():
            tools.register_callback(self._tool, event, handler)
        started = events.PY_START | events.PY_RESUME | events.PY_THROW
        tools.set_events(self._tool, started | events.PY_UNWIND)

    def follow(self, code: CodeType, detail: int) -> None:
        events = _MONITORING.events
        ends = events.PY_RETURN | events.PY_YIELD
        wanted = {NOTHING: 0, CALLS: ends, LINES: ends | events.LINE}
        self._followed[id(code)] = code
        _MONITORING.set_local_events(self._tool, code, wanted[detail])

    def stop(self, _: int) -> None:
        tools, tool = _MONITORING, self._tool
        if tool < 0 or tools.get_tool(tool) != "lightning_gputime":
            return
        tools.set_events(tool, 0)
        for code in self._followed.values():
            tools.set_local_events(tool, code, 0)
        for event in self._events:
            tools.register_callback(tool, event, None)
        tools.free_tool_id(tool)

    def _on_start(self, code: CodeType, _: int) -> Any:
        watch = self._watch
        detail = watch.detail_of(code, sys._getframe(1))
        if not detail:
            return _MONITORING.DISABLE
        return watch.guard(self._enter_function, code, detail)

    def _enter_function(self, code: CodeType, detail: int) -> None:
        if id(code) not in self._followed:
            self.follow(code, detail)
        self._watch.enter(code)

    def _on_throw(self, code: CodeType, _: int, __: object) -> None:
        # This event cannot be disabled.
        detail = self._watch.detail_of(code, sys._getframe(1))
        if detail:
            self._watch.guard(self._enter_function, code, detail)

    def _on_line(self, code: CodeType, number: int) -> Any:
        if self._watch.is_ignored(code, number):
            return _MONITORING.DISABLE
        return self._watch.guard(self._watch.reach, code, number)

    def _on_return(self, code: CodeType, _: int, __: object) -> None:
        """Handle the end of a call, by a return, a yield or an exception.

        Exceptions are also reported from functions that are not followed.
        """
        if self._watch.details.get(id(code), NOTHING) != NOTHING:
            self._watch.guard(self._watch.leave, code)


# sys.settrace


class _Tracing:
    """Line events of Python 3.11. They are reported only to the thread that asks for them."""

    def start(self, frames: list[FrameType]) -> None:
        for frame in frames:
            frame.f_trace = _trace_lines
        sys.settrace(_trace)

    def follow(self, code: CodeType, detail: int) -> None:
        pass  # The trace functions look the detail up.

    def stop(self, thread: int) -> None:
        if sys.gettrace() is _trace:  # In another thread, `_trace` ends itself.
            sys.settrace(None)
        frame = sys._current_frames().get(thread)
        while frame is not None:
            _forget(frame)
            frame = frame.f_back


def _forget(frame: FrameType) -> None:
    """Do not trace a frame any more."""
    if frame.f_trace is _trace_lines:
        frame.f_trace = None
        frame.f_trace_lines = True


def _trace(frame: FrameType, event: str, _: object) -> Any:
    """Trace function of a thread. It is called when any function starts."""
    watch = _running
    if watch is None:
        sys.settrace(None)
        return None
    code = frame.f_code
    # Most calls are those of libraries, so look them up without a call.
    if watch.details.get(id(code)) == NOTHING or watch.detail_of(code, frame) == NOTHING:
        return None
    watch.guard(watch.enter, code)
    return _trace_lines(frame, "", None)


def _trace_lines(frame: FrameType, event: str, _: object) -> Any:
    """Trace function of a frame of the user's code."""
    watch = _running
    if watch is None:
        _forget(frame)
        return None
    code = frame.f_code
    if event == "line":
        if watch.is_ignored(code, frame.f_lineno):
            # Lines cannot be ignored one by one.
            watch.guard(watch.forget_line, code)
            frame.f_trace_lines = False
        else:
            watch.guard(watch.reach, code, frame.f_lineno)
    elif event == "return":
        watch.guard(watch.leave, code)
    if watch.detail_of(code, frame) != LINES:
        frame.f_trace_lines = False
    return _trace_lines
