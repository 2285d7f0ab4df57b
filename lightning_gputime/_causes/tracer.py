"""One run of `torch.profiler`, which ends before any other profiler begins."""

import gc
import os
import weakref
from threading import Event, RLock, Thread, get_ident
from typing import Any

import torch

from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._untraced import untraced

# What prepares a profiler of torch, and what starts one, in whichever way it was asked for.
_BEGINS = ("_prepare_profiler", "_enable_profiler")

# After an error the device may never finish; and a loop may wait for the thread that waits for it.
_PATIENCE_S = 5.0

# Those that run. Module state, because a fork happens to no timer in particular.
_running: "weakref.WeakSet[Tracer]" = weakref.WeakSet()


@untraced
class Tracer:
    """Runs a profiler, unless there is another, and ends it where another one begins.

    Two of them at a time, or one that begins while the other warms up, end the process. So does a
    `record_function` that was entered under one of ours and is left under the next.
    """

    def __init__(self) -> None:
        # Another thread may begin a profiler at any moment.
        self._lock = RLock()
        self._profile: Any = None
        self._range: Any = None
        self._stand_ins: list[StandIn] = []
        self._starts_in = self._home = -1
        self._has_stopped = Event()
        self.must_stop = False
        """Whether another thread waits for the one that has started it to stop it."""
        # What may have been entered while it ran, and not left.
        self._entered: list[weakref.ref[Any]] = []

    @property
    def is_running(self) -> bool:
        """Whether it runs: not if another profiler has begun."""
        return self._profile is not None

    def start(self) -> str:
        """Starts it. Returns why it did not, as the end of a sentence; empty if it did."""
        with self._lock:
            # First: else another might begin in between.
            self._stand_ins = [listen(torch.autograd.profiler, name, self) for name in _BEGINS]
            try:
                why_not = self._why_not()
                if not why_not:
                    self._start()
                return why_not
            finally:
                if self._profile is None:
                    self._take_off()

    def _start(self) -> None:
        profile = _new_profile()
        self._starts_in = self._home = get_ident()
        try:
            profile.start()
            self._has_stopped.clear()
            self._profile = profile
            _running.add(self)
        finally:
            self._starts_in = -1
            if self._profile is None:
                profile.stop()

    def range(self, name: str) -> None:
        """Begins a range in the trace, which ends the one before."""
        with self._lock:
            if self._profile is not None:
                self._end_range()
                self._range = torch.autograd.profiler.record_function(name)
                self._range.__enter__()

    def stop(self) -> Any:
        """Stops it. Returns what was profiled, or None if it did not run. Safe to call twice."""
        if self._profile is None:
            return None  # Or a thread of `try_to_stop` hangs with the lock.
        with self._lock:
            profile, self._profile = self._profile, None
            if profile is None:
                return None
            _running.discard(self)
            self._take_off()
            self.must_stop = False
            try:
                self._end_range()
                profile.stop()
            finally:
                self._has_stopped.set()
            self._entered = [
                weakref.ref(one)
                for one in _living(torch.autograd.profiler.record_function)
                if getattr(one, "record", None) is not None
            ]
            return profile

    def give_way(self) -> None:
        """Stops it for somebody else, in whichever thread."""
        if get_ident() != self._home:
            # It may be about to start, or to stop.
            if self._lock.acquire(timeout=_PATIENCE_S):
                self._lock.release()
            # Under an operation of the loop's it must not be stopped: that ends the process.
            if self.is_running:
                self.must_stop = True
                self._has_stopped.wait(_PATIENCE_S)
        self.stop()

    def try_to_stop(self) -> None:
        """Stops it, and drops what was profiled, where the device may never finish its work."""
        if self.is_running:
            # To stop it is to wait for the device.
            thread = Thread(target=self.stop, daemon=True)
            thread.start()
            thread.join(_PATIENCE_S)

    def forget(self) -> None:
        """Forgets it in a process that was forked off: it is the parent's."""
        self._profile = self._range = None
        self.must_stop = False
        self._take_off()

    def call_begins(self, *_: Any, **__: Any) -> bool:
        """Is told that a profiler is prepared, or starts."""
        if self._starts_in != get_ident():
            self.give_way()
        return False

    def _end_range(self) -> None:
        # Before the profiler ends, or it would be left under the next.
        entered, self._range = self._range, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _take_off(self) -> None:
        stand_ins, self._stand_ins = self._stand_ins, []
        for one in stand_ins:
            one.forget(self)

    def _why_not(self) -> str:
        profiler = torch.autograd.profiler
        if profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            return "another profiler runs"
        if os.environ.get("KINETO_USE_DAEMON"):
            return "a daemon may profile this process (KINETO_USE_DAEMON)"
        # Nothing else tells of one that warms up.
        if any(map(_is_begun, _living(profiler.profile))):
            return "another profiler warms up"
        if any(one() is not None for one in self._entered):
            return "a record_function is entered across steps: leave it before the step ends"
        return ""


def _new_profile() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    # It is then of the process, not of the thread: it can be stopped from another one, and what is
    # entered under it may be left under a profiler of the user's.
    config = _ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config)


def _is_begun(profile: Any) -> bool:
    # Another thread may be making one just now.
    return getattr(profile, "entered", False) and getattr(profile, "kineto_results", 0) is None


def _living(kind: type) -> list[Any]:
    # By their type, as `isinstance` would ask objects of the user's.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _stop_all() -> None:
    # A process that is forked off would go on recording what nobody reads.
    for one in [*_running]:
        one.give_way()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_stop_all)
