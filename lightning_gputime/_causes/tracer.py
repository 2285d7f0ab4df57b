"""One run of `torch.profiler`, which ends before any other profiler begins."""

import functools
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread, current_thread
from typing import Any

import torch
from torch._C import _current_graph_task_id

from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._untraced import untraced

# What prepares a profiler of torch, and what starts one, in whichever way it was asked for.
_BEGINS = ("_prepare_profiler", "_enable_profiler")

# After an error the device may never finish; and a loop may wait for the thread that waits for it.
_PATIENCE_S = 5.0

# What a long trace takes at most to be ended.
_LONGEST_S = 300.0

# The one that runs, or is about to. Module state, as a profiler and a fork are of the process.
_running: "list[Tracer]" = []

_IN_THE_WAY = (
    "lightning_gputime profiles slow steps in the loop's thread, and cannot end that now: begin"
    " this profiler outside of a backward, and where the loop does not wait for the thread that"
    " does; or leave out trace_slow_steps"
)


@untraced
class Tracer:
    """Runs a profiler of the calling thread, unless there is another in the process.

    Two of them at a time, one that begins while another warms up, and what was entered under one
    and is left under the next: each may end the process. So may one of all threads: when it ends,
    it frees what the others still write to.

    Args:
        device: What is timed, if it is an accelerator: to end a profiler is to wait for it.
    """

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self._profile: Any = None
        self._range: Any = None
        self._stand_ins: list[StandIn] = []
        self._is_starting = False
        # The thread that has started it, and which alone can stop it.
        self._home: Thread | None = None
        self._is_over = Event()
        self.must_stop = False
        """Whether another thread waits for the one that has started it to stop it."""

    @property
    def is_running(self) -> bool:
        """Whether it runs: not if another profiler has begun."""
        return self._profile is not None

    def start(self) -> str:
        """Starts it. Returns why it did not, as the end of a sentence; empty if it did."""
        self._home, self.must_stop = current_thread(), False
        self._is_over.clear()
        try:
            # Without a lock, which a process that is forked off might find taken.
            _running.append(self)
            if _running[0] is not self:
                return "another profiler runs"
            # First: else another might begin in between.
            for name in _BEGINS:
                self._stand_ins.append(listen(torch.autograd.profiler, name, self, _giving_way))
            why_not = _why_not()
            if not why_not:
                self._start()
            return why_not
        finally:
            if self._profile is None:
                self.forget()

    def _start(self) -> None:
        profile = _new_profile()
        self._is_starting = True
        try:
            profile.start()
            self._profile = profile
        finally:
            self._is_starting = False
            if self._profile is None:
                with suppress(Exception):  # Else it would hide why, such as Ctrl-C.
                    profile.stop()

    def range(self, name: str) -> None:
        """Begins a range in the trace, which ends the one before."""
        if self._profile is not None:
            self._end_range()
            self._range = torch.autograd.profiler.record_function(name)
            self._range.__enter__()

    def stop(self) -> Any:
        """Stops it, or waits until the thread that has started it does. Safe to call twice.

        Returns:
            What was profiled; None if it did not run, or was not stopped here.
        """
        if self._profile is None:
            return None
        if current_thread() is not self._home:
            self._ask()
            return None
        profile, self._profile = self._profile, None
        try:
            self._end_range()
            _end_ranges()
        finally:
            try:
                profile.stop()
            except BaseException:
                # Ctrl-C while it waits for the device: nobody else would stop it.
                with suppress(Exception):
                    profile.stop()
                raise
            finally:
                self.forget()
        return profile

    def give_way(self) -> None:
        """Stops it for another profiler, in whichever thread that begins.

        Raises:
            RuntimeError: If it cannot: to begin all the same could end the process.
        """
        if current_thread() is not self._home:
            self._ask()
        elif self._is_starting:
            return
        elif _current_graph_task_id() == -1:
            with suppress(Exception):  # It is over, also after an error.
                self.stop()
        if self in _running:
            raise RuntimeError(_IN_THE_WAY)

    def try_to_stop(self) -> None:
        """Stops it where the device may never finish its work; then it is left as it is."""
        if self.is_running and current_thread() is self._home and not _finishes(self._device):
            self.forget()
        self.stop()

    def forget(self) -> None:
        """Forgets it: it was stopped, or is that of the process that this one was forked off."""
        self._profile = self._range = None
        self.must_stop = False
        stand_ins, self._stand_ins = self._stand_ins, []
        for one in stand_ins:
            one.forget(self)
        if self in _running:
            _running.remove(self)
        self._is_over.set()

    def _ask(self) -> None:
        """Lets the thread that has started it stop it, and waits for that."""
        if self._home is not None and not self._home.is_alive():
            self.forget()  # It ended with its thread.
            return
        self.must_stop = True
        if not self._is_over.wait(_PATIENCE_S) and self._profile is None:
            self._is_over.wait(_LONGEST_S)

    def _end_range(self) -> None:
        entered, self._range = self._range, None
        if entered is not None:
            entered.__exit__(None, None, None)


def _giving_way(call: Callable[..., Any], tracers: list[Tracer]) -> Callable[..., Any]:
    @functools.wraps(call)
    def begins(*args: Any, **kwargs: Any) -> Any:
        for one in [*tracers]:
            one.give_way()
        return call(*args, **kwargs)

    return begins


def _why_not() -> str:
    profiler = torch.autograd.profiler
    if profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return "another profiler runs"
    if os.environ.get("KINETO_USE_DAEMON"):
        return "a daemon may profile this process (KINETO_USE_DAEMON)"
    # Nothing else tells of one that warms up.
    if any(map(_is_begun, _living(profiler.profile))):
        return "another profiler warms up"
    return ""


def _new_profile() -> Any:
    # Else some versions of torch warn that a second profiler would clear the events of the first.
    return torch.profiler.profile(acc_events=True)


def _is_begun(profile: Any) -> bool:
    # Another thread may be making one just now.
    return getattr(profile, "entered", False) and getattr(profile, "kineto_results", 0) is None


def _end_ranges() -> None:
    """Ends what was entered and not left: then the next profiler knows nothing of it."""
    for one in _living(torch.autograd.profiler.record_function):
        # To leave it again does nothing.
        if (record := getattr(one, "record", None)) is not None:
            torch.ops.profiler._record_function_exit._RecordFunction(record)


def _living(kind: type) -> list[Any]:
    # By their type, as `isinstance` would ask objects of the user's.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _finishes(device: Any) -> bool:
    """Tells whether a device finishes its work, or fails, in time."""
    if device is None or device.type == "cpu":
        return True
    thread = Thread(target=_synchronize, args=[device], daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return not thread.is_alive()


def _synchronize(device: Any) -> None:
    with suppress(Exception):
        torch.accelerator.synchronize(device)


def _stop_all() -> None:
    # A process that is forked off would go on recording what nobody reads.
    for one in [*_running]:
        one.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_stop_all)
