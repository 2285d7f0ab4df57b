"""Examined steps: steps in which each line of the user's code is a mark, too."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CodeType
from typing import Any

from torch import nn

from lightning_gputime._compat.python_ import code_of
from lightning_gputime._compat.torch_ import (
    GraphNode,
    graph_nodes,
    is_autograd_compiled,
    next_sequence,
    sharded_module,
    without_function_modes,
    without_wrappers,
)
from lightning_gputime._ledger.places import CALLS, Function, Line, Operations
from lightning_gputime._ledger.watch import LineWatch
from lightning_gputime._messages import WarnOnce
from lightning_gputime._record.clock import Clock, HostClock, TimingEvent
from lightning_gputime._record.pending_steps import LineMark

_MAX_NODES = 20_000  # The graphs of backwards with more nodes are not searched.
# Of a step's time, marks may take this fraction before frequent lines are ignored.
_MAX_MARKS_SHARE = 0.5
_FIRST_MARK_NS = 10_000  # Cost of a mark before it was measured.
_EVENT_NS = 3_000  # Cost of an event apart from its mark.
_MIN_EVENTS = 300  # Number of events at which lines may be ignored, however short the step is.


class Examiner:
    """Mark the lines of the user's code in a step, and the lines of forward in its backward.

    Nothing here raises. After an error, no further step is examined.

    Args:
        clock: Clock of the device.
        free: Events to reuse.
        warn_once: Reports an error.
    """

    def __init__(self, clock: Clock, free: list[TimingEvent], warn_once: WarnOnce) -> None:
        self._now, self._new_event, self._free = clock.host_ns, clock.event, free
        self._is_capturing = clock.is_capturing
        self._may_capture = getattr(clock, "may_capture", clock.is_capturing)
        self._has_events = not isinstance(clock, HostClock)
        self._warn_once = warn_once
        self.watch = LineWatch(self._mark, self._fail)
        self.is_on = False
        """True in an examined step. A plain attribute, because each backward reads it."""
        self.unavailable = ""
        """Reason why lines cannot be followed; empty if they can, or if that is not known."""
        self.operations: dict[Line, Operations] = {}
        """Operations of each line, as found in the graphs of the backwards of a step."""
        self._operations: dict[Line, Counter[str]] = {}  # The same, in the open step.
        self.trained: set[int] = set()
        """Ids of the tensors of which a backward has computed gradients in the newest step."""
        self.marks_ns = 0
        """Time that all marks so far have taken."""
        self._n_marks = 0
        self._start_ns = 0  # Host time at the start of the examined step.
        self._step_ns = 0.0  # Its expected duration.
        self._marks: list[LineMark] = []  # Of the open step.
        # Number of the next autograd node at each mark of this thread, and the line of the mark.
        self._sequences: list[int] = []
        self._lines: list[Line] = []
        self._handles: list[Any] = []  # Hooks on nodes of the running backward.
        self._backward_line: Line | None = None  # Line that runs a backward.
        self._node_line: Line | None = None  # Line of forward whose nodes run.
        # Line of each module of `fully_shard`, by name. Forward creates them, so in backward they
        # are part of the line of forward that calls the module.
        self._sharded: dict[str, Line] = {}
        self._is_waiting = False  # True while such a line runs.
        self._is_backward_known = True  # False if nodes of other threads are in the graph.

    def start(self, step_ns: float) -> list[LineMark] | None:
        """Examine the step that starts now in the calling thread, and is expected to last so long.

        Return the list to which its marks will be added; None if lines cannot be followed.
        """
        self._start_ns, self._step_ns = self._now(), step_ns
        self._marks, self._sequences, self._lines, self._is_backward_known = [], [], [], True
        self._operations.clear()
        self.trained.clear()
        try:
            self.unavailable = self.watch.start(sys._getframe(1), self._more_events)
        except Exception as error:
            self._fail(error)
        if not self.watch.is_on:
            return None
        self.is_on = True
        self._mark(self.watch.line)
        return self._marks

    def _more_events(self, events: int) -> int:
        """Return how many more events may follow after this many; 0 to ignore frequent lines."""
        event_ns = self.marks_ns / self._n_marks if self._n_marks else _FIRST_MARK_NS
        event_ns += _EVENT_NS
        # Without its events, the step may already have taken longer than expected.
        step_ns = max(self._now() - self._start_ns - events * event_ns, self._step_ns)
        allowed = int(_MAX_MARKS_SHARE * step_ns / event_ns)
        return max(allowed, _MIN_EVENTS) - events

    def stop(self) -> None:
        """End the examined step. Safe to call twice, and in any thread."""
        self.watch.stop()
        self._remove_hooks()
        self.is_on = False
        self._backward_line = self._node_line = None
        self._is_waiting = False
        # The recorder owns the marks.
        self._marks, self._sequences, self._lines = [], [], []

    def _fail(self, error: Exception) -> None:
        self.unavailable = f"following the code failed: {error!r}"
        self._warn_once("Lines of code are no longer timed: %r", error)

    def _mark(self, line: Line, starts: bool = False) -> None:
        """Record that a line starts, or continues, now."""
        if line is self._backward_line and self._node_line is not None:
            line = self._node_line  # Code that a node has called, such as a hook, has returned.
        if self._has_events and self._may_capture() and self._is_capturing():
            self.watch.stop()  # Recording an event would break the capture.
            return
        self._record(line, starts)
        self._sequences.append(next_sequence())
        self._lines.append(line)
        self._n_marks += 1

    def _record(self, line: Line, starts: bool = False) -> None:
        start_ns = self._now()
        event = None
        if self._has_events:
            event = self._free.pop() if self._free else self._new_event()
            event.record()
        end_ns = self._now()
        self._marks.append(LineMark(start_ns, end_ns, event, line, starts))
        self.marks_ns += end_ns - start_ns

    # Waits for other ranks, in any thread. No autograd node is created while they last.

    def wait_begins(self) -> None:
        """A wait for other ranks begins. If it is for a module of `fully_shard`, it has a line."""
        found = sharded_module()
        if found is None:
            return
        code, name = found
        line = self._sharded.get(name)
        if line is None:
            function = Function(code, self._node_line or self.watch.line, CALLS)
            function.name = f"fully_shard of {without_wrappers(name) or 'the model'}"
            line = self._sharded[name] = function.whole
        self._record(line, starts=True)
        self._is_waiting = True

    def wait_ends(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._record(self._node_line or self.watch.line)

    # Backward

    def backward_begins(self, tensors: Any, *, creates_graph: bool = False) -> None:
        """Mark the lines of forward in the backward that starts now."""
        if not self.watch.is_on or not self._is_backward_known:
            return
        # The engine's threads have other counters than the thread of the loop. So nodes that a
        # backward creates, for a second derivative, cannot be told from those of forward.
        self._is_backward_known = not creates_graph or not self._has_events
        try:
            if not is_autograd_compiled():  # It would trace the hooks.
                given = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
                self._hook_nodes(given)
        except Exception as error:
            self._remove_hooks()
            self._warn_once("The time of backward by line of forward is unknown: %r", error)

    def backward_ends(self) -> None:
        self._backward_line = self._node_line = None
        if self.watch.is_on:
            self._remove_hooks()
            self._mark(self.watch.line)

    def _hook_nodes(self, tensors: Iterable[Any]) -> None:
        """Hook the nodes at which the line of forward changes.

        The engine runs nodes roughly in the opposite order of their creation.
        """
        start_ns = self._now()
        previous: Line | None = None
        with self.watch.paused(), without_function_modes():
            for node in graph_nodes(tensors, _MAX_NODES):
                index = bisect_right(self._sequences, node.sequence) - 1
                if index < 0:
                    continue  # Created before this step.
                line = self._lines[index]
                if line is not previous:
                    self._handles.append(node.node.register_prehook(self._hook(line)))
                    previous = line
                counts = self._operations.setdefault(line, Counter())
                counts["all"] += 1
                if kind := _kind_of(node):
                    counts[kind] += 1
                for inner, _ in node.node.next_functions:
                    if (variable := getattr(inner, "variable", None)) is not None:
                        self.trained.add(id(variable))
            found = self._operations.items()
            self.operations |= {line: Operations(**counts) for line, counts in found}
        # Exclude the time of the search from the step.
        self._mark(self.watch.line)
        self._backward_line = self.watch.line
        self._marks[-1] = self._marks[-1]._replace(start_ns=start_ns)

    def _hook(self, line: Line) -> Callable[[Any], None]:
        def before_node(_: Any) -> None:
            # Runs in the thread of the engine, while the thread of the loop waits for it.
            with suppress(Exception):
                self._record(line)
                self._node_line = line

        return before_node

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _kind_of(node: GraphNode) -> str:
    """Return the field of `Operations` for the operation of a node; empty if there is none."""
    operation = node.kind
    if operation.startswith("Convolution"):
        return "convolutions"
    is_product = operation.startswith(("Mm", "Addmm", "Bmm", "Baddbmm", "Linear"))
    return "float32_products" if is_product and node.is_float32 else ""


def forwards_of(model: object) -> dict[CodeType, str]:
    """Return the code of each forward in a model, and the modules that run it.

    The text is the name of a single module, such as "blocks.3.att", or the number and the class of
    several, such as "8 x Block"; empty for the model itself.
    """
    names: dict[CodeType, list[tuple[str, str]]] = {}
    # The model of some trainers, such as SetFit, is not a module.
    modules = nn.Module.named_modules(model) if isinstance(model, nn.Module) else ()
    for name, module in modules:
        code = code_of(getattr(type(module), "forward", None))
        if code is not None:
            names.setdefault(code, []).append((without_wrappers(name), type(module).__name__))
    return {
        code: found[0][0] if len(found) == 1 else f"{len(found)} x {found[0][1]}"
        for code, found in names.items()
    }
