"""Examined steps, in which each line of the user's code is a mark, too: their choice and marks."""

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
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
from lightning_gputime._ledger import CALLS, Function, Line, Operations
from lightning_gputime._ledger.watch import LineWatch
from lightning_gputime._messages import WarnOnce
from lightning_gputime._record.clock import Clock, HostClock, TimingEvent
from lightning_gputime._record.pending_steps import LineMark

# Chosen, each: a smaller one knows less of the lines, a larger one costs more time.
_MAX_NODES = 20_000  # The graphs of backwards with more nodes are not searched.
# Of a step's time, marks may take this fraction before frequent lines are ignored.
_MAX_MARKS_SHARE = 0.5
_MIN_EVENTS = 300  # Number of events at which lines may be ignored, however short the step is.
_FIRST = (12, 15, 18)  # Indices of the first examined steps. They follow the warm-up.
_GROWTH = 1.6  # Later, a step is examined each time the run has grown by this factor.
_MORE, _DISTANCE = 3, 3  # Number of steps that `examine_more` adds, and their distance.
# Examined steps may lengthen a run by this fraction. A shorter run counts as this many steps.
_MAX_COST_SHARE, _MIN_RUN_STEPS = 0.002, 1_000
_MAX_LONG = 3  # Maximum number of steps that are examined because they are expected to be long.
# Estimates: cost of a mark before it was measured, and of an event apart from its mark.
_FIRST_MARK_NS, _EVENT_NS = 10_000, 3_000


class ExaminationSchedule:
    """Choice of the steps that are examined, by their index, which counts all steps from 0.

    Args:
        next_long: Returns the index of the next expected long step from an index on; infinity if
            there is none.
        is_distributed: True if all ranks must examine the same steps. Then only the index decides.
    """

    def __init__(self, next_long: Callable[[int], float], *, is_distributed: bool) -> None:
        self._next_long, self._is_distributed = next_long, is_distributed
        self._n_soon = 0  # Number of steps that `examine_more` still has to examine.
        # Costs in units of a usual step. A step that is expected to be long counts as the step
        # before it, because its own duration does not show the cost.
        self._newest_cost = 0.0
        self._total_cost = 0.0  # Of all examined steps.
        self._n_long = 0  # Number of examined steps that were expected to be long.
        self.expects_long = False
        """True if the next examined step is expected to be long."""
        self.next_index: float = _FIRST[0]
        """Index of the first step that may be examined next; infinity if there is none."""

    def stop(self) -> None:
        """Examine no further steps."""
        self.next_index = math.inf

    def examine_more(self) -> None:
        """Examine three more steps soon."""
        is_stopped = self.next_index == math.inf
        if is_stopped or self._is_distributed:  # Other ranks may not need more.
            return
        self._n_soon, self.next_index = _MORE, 0  # 0: the next step that may be examined.
        self.expects_long = False

    def step_examined(self, index: int, cost: float) -> None:
        """Record that the step of this index was examined, and choose the next step to examine.

        Args:
            index: Index of the examined step.
            cost: Time that examining it took, as a fraction of a usual step.
        """
        if self.expects_long:
            self._n_long += 1
            self.expects_long = False
        else:
            self._newest_cost = cost
        self._total_cost += self._newest_cost
        if self._n_soon:
            self._n_soon -= 1
        if self._n_soon:
            self.next_index = index + _DISTANCE
            return
        later = [first for first in _FIRST if first > index]
        if later:
            self.next_index = later[0]
            return
        self.next_index = following = int(index * _GROWTH) + 1
        if self._is_distributed:
            return
        cost = self._total_cost + self._newest_cost  # With the next examined step.
        if cost > _MAX_COST_SHARE * max(following, _MIN_RUN_STEPS):
            first_affordable = int(cost / _MAX_COST_SHARE) + 1
            self.next_index = max(following, first_affordable)
        elif self._n_long < _MAX_LONG:
            # The step after an examined step cannot be examined: the device has no work queued
            # there.
            next_long = self._next_long(index + 2)
            self.expects_long = next_long < following
            self.next_index = min(next_long, following)


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
        # A line for the waits of each module of `fully_shard`, by the name of the module. Forward
        # creates them, so a wait in backward is also part of the line that calls the module.
        self._sharded: dict[str, Line] = {}
        self._is_in_sharded_wait = False  # True while the time belongs to a line of `_sharded`.
        # False once the graph of the step may contain nodes that backward has created.
        self._has_only_forward_nodes = True

    def start(self, step_ns: float) -> list[LineMark] | None:
        """Examine the step that starts now in the calling thread.

        Args:
            step_ns: Expected duration of the step.

        Returns:
            The list to which its marks will be added; None if lines cannot be followed.
        """
        self._start_ns, self._step_ns = self._now(), step_ns
        self._marks, self._sequences, self._lines = [], [], []
        self._has_only_forward_nodes = True
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
        """Return how many more events may follow; 0 or less to ignore frequent lines."""
        event_ns = self.marks_ns / self._n_marks if self._n_marks else _FIRST_MARK_NS
        event_ns += _EVENT_NS
        # Without its events, the step may already have taken longer than expected.
        step_ns = max(self._now() - self._start_ns - events * event_ns, self._step_ns)
        max_events = int(_MAX_MARKS_SHARE * step_ns / event_ns)
        return max(max_events, _MIN_EVENTS) - events

    def stop(self) -> None:
        """End the examined step. Safe to call twice, and in any thread."""
        self.watch.stop()
        self._remove_hooks()
        self.is_on = False
        self._backward_line = self._node_line = None
        self._is_in_sharded_wait = False
        # The recorder owns the marks.
        self._marks, self._sequences, self._lines = [], [], []

    def _fail(self, error: Exception) -> None:
        self.unavailable = f"following the code failed: {error!r}"
        self._warn_once("Lines of code are no longer timed: %r", error)

    def _mark(self, line: Line, starts: bool = False) -> None:
        """Record that a line starts, or continues, now. Listener of `LineWatch`."""
        if line is self._backward_line and self._node_line is not None:
            # A hook that a node of the running backward has called has returned: the node goes on.
            line = self._node_line
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
        """Start a wait for other ranks. Give it a line if `fully_shard` waits for a module."""
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
        self._is_in_sharded_wait = True

    def wait_ends(self) -> None:
        if self._is_in_sharded_wait:
            self._is_in_sharded_wait = False
            self._record(self._node_line or self.watch.line)

    # Backward

    def backward_begins(self, tensors: Any, *, creates_graph: bool = False) -> None:
        """Mark the lines of forward in the backward that starts now."""
        if not self.watch.is_on or not self._has_only_forward_nodes:
            return
        # A backward with `create_graph` creates nodes, for a second derivative. With a device, the
        # engine does so in its own threads, which count nodes separately: the numbers of these
        # nodes cannot be compared with those of forward.
        if creates_graph and self._has_events:
            self._has_only_forward_nodes = False
        try:
            if not is_autograd_compiled():  # It would trace the hooks.
                roots = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
                self._hook_nodes(roots)
        except Exception as error:
            self._remove_hooks()
            self._warn_once("The time of backward by line of forward is unknown: %r", error)

    def backward_ends(self) -> None:
        self._backward_line = self._node_line = None
        if self.watch.is_on:
            self._remove_hooks()
            self._mark(self.watch.line)

    def _hook_nodes(self, roots: Iterable[Any]) -> None:
        """Find the line of forward of each node in a graph, and hook nodes at which it changes.

        The engine runs nodes roughly in the opposite order of their creation, so from one such node
        to the next, backward works on the operations of a single line.
        """
        start_ns = self._now()
        line_before: Line | None = None
        with self.watch.paused(), without_function_modes():
            for node in graph_nodes(roots, _MAX_NODES):  # Newest first.
                index = bisect_right(self._sequences, node.sequence) - 1
                if index < 0:
                    continue  # Created before this step.
                line = self._lines[index]
                if line is not line_before:
                    before_node = partial(self._node_begins, line)
                    self._handles.append(node.node.register_prehook(before_node))
                    line_before = line
                counts = self._operations.setdefault(line, Counter())
                counts["all"] += 1
                if field := _field_of(node):
                    counts[field] += 1
                for inner, _ in node.node.next_functions:
                    if (variable := getattr(inner, "variable", None)) is not None:
                        self.trained.add(id(variable))
            found = self._operations.items()
            self.operations |= {line: Operations(**counts) for line, counts in found}
        # End with a mark that started before the search: the time of marks is in no line.
        self._mark(self.watch.line)
        self._backward_line = self.watch.line
        self._marks[-1] = self._marks[-1]._replace(start_ns=start_ns)

    def _node_begins(self, line: Line, _: Any) -> None:
        # Runs in the thread of the engine, while the thread of the loop waits for it.
        with suppress(Exception):
            self._record(line)
            self._node_line = line

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _field_of(node: GraphNode) -> str:
    """Return the field of `Operations` for the operation of a node; empty if there is none."""
    operation = node.kind
    if operation.startswith("Convolution"):
        return "convolutions"
    is_product = operation.startswith(("Mm", "Addmm", "Bmm", "Baddbmm", "Linear"))
    return "float32_products" if is_product and node.is_float32 else ""


def forwards_of(model: object) -> dict[CodeType, str]:
    """Return a description of the modules that run each forward in a model, by its code.

    The description is the name of a single module, such as "blocks.3.att", or the number and the
    class of several, such as "8 x Block"; empty for the model itself.
    """
    if not isinstance(model, nn.Module):
        return {}  # The model of some trainers, such as SetFit.
    found: dict[CodeType, list[tuple[str, nn.Module]]] = {}
    for name, module in nn.Module.named_modules(model):
        code = code_of(getattr(type(module), "forward", None))
        if code is not None:
            found.setdefault(code, []).append((name, module))
    described = {}
    for code, modules in found.items():
        name, module = modules[0]
        is_single = len(modules) == 1
        many = f"{len(modules)} x {type(module).__name__}"
        described[code] = without_wrappers(name) if is_single else many
    return described
