"""Readings of the machine: threads, processes, pressure, swap, and the clock of the GPU.

A *source* returns cumulative values by name, such as the CPU time of each thread. `MachineLog`
reads the sources next to the loop. The growth of a value during a step is the step's exposure.
`GPUClock` measures the clock of the GPU.
"""

import importlib.util
import os
import re
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from lightning_gputime._attribution.overlap import Candidate
from lightning_gputime._compat.python_ import place_in_thread
from lightning_gputime._compat.torch_ import LOADER_WORKER
from lightning_gputime._loader import Source
from lightning_gputime._record.clock import IGNORED_THREADS, Clock, TimingEvent, thread_ns

# Fraction of the time that reading a source may take, and minimum interval of reads: in the loop,
# where all sources together may take 0.1 %, and in the sampling thread. Chosen: fewer see less.
_IN_LOOP, _IN_THREAD = (2e-4, 250_000_000), (1e-3, 50_000_000)
_SAMPLE_S = 0.05  # Interval of the sampling thread, as in `_IN_THREAD`.
_MAX_READINGS = 2000  # Of more readings, every second is dropped.
_MIN_BUSY = 0.05  # Processes below this fraction of a core are not tracked, to bound the time.
_RESCAN_S = 1.0  # Minimum interval of searches for processes that have become busy.
_TICK_S = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
_NUMBERS = re.compile(r"[-_ ]*\d+")
_PAGES = re.compile(rb"^(pswpin|pswpout|pgmajfault) (\d+)", re.MULTILINE)
BLOCKED, WAITED = "waits of the loop's thread", "waits of the loop's thread for a CPU core"
"""Names of the times in which the thread of the loop was blocked, and was ready without a core."""
# Clock cycles of the kernel that measures the GPU's clock: 0.14 ms. Shorter kernels read low,
# because two events have a distance of 2 us. The kernel before it runs while the host launches the
# rest, 15 us later at most.
_CYCLES, _CYCLES_BEFORE = 200_000, 40_000
_MIN_DISTANCE_NS = 2_000_000_000  # Of two such measurements, which take the host about 30 us.
# Minimum change with two or more measurements after it, and with one. A measurement is off by up
# to 5 %.
_MIN_CHANGE, _MIN_CHANGE_OF_ONE = 0.05, 0.1


class _File:
    """A file of Linux, kept open: opening it for each reading takes ten times as long."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> bytes:
        parts, offset = list[bytes](), 0
        while part := os.pread(self._descriptor, 65_536, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


class MachineSource:
    """A source: cumulative values by name, with the place of each name."""

    kind = ""
    in_loop = True
    """False for a source that takes long. Only the sampling thread reads it."""

    def __init__(self) -> None:
        self.sums = defaultdict[str, float](float)
        self.places: dict[str, str] = {}
        self.readings: list[tuple[int, Mapping[str, float]]] = []
        """Cumulative time of the steps (in nanoseconds) and values, of each reading."""
        self.due_ns, self.cost_ns = 0, 1e5  # Time of the next read, and CPU time of a read.

    def read(self) -> Mapping[str, float]:
        """Return the values now. Raises OSError if the system does not have them."""
        raise NotImplementedError


class Threads(MachineSource):
    """CPU time of other Python threads (in seconds), and a function that each runs.

    Threads with the same name except for numbers are one. `BLOCKED` is the time in which the thread
    of the loop neither ran nor waited for a core. Create it in that thread.
    """

    kind = "thread"

    def __init__(self) -> None:
        super().__init__()
        self._loop = threading.get_native_id()
        self._loop_times = _File(f"/proc/self/task/{self._loop}/schedstat")
        self._run_ns: dict[int, int] | None = None  # Time of each thread at the last read.
        thread_ns(self._loop)  # Raises OSError if this kernel has no such clocks.

    def read(self) -> Mapping[str, float]:
        run_ns: dict[int, int] = {}
        for thread in threading.enumerate():
            native_id = thread.native_id
            if native_id is None or any(part in thread.name for part in IGNORED_THREADS):
                continue
            if native_id == self._loop:
                ran_ns, waited_ns = map(int, self._loop_times.read().split()[:2])
                self.sums[WAITED] = waited_ns / 1e9
                self.sums[BLOCKED] = (time.perf_counter_ns() - ran_ns - waited_ns) / 1e9
                continue
            try:
                ns = run_ns[native_id] = thread_ns(native_id)
            except OSError:  # The thread has ended.
                continue
            # Of a thread that runs at the first read, only the time since then counts.
            last_ns = ns if self._run_ns is None else self._run_ns.get(native_id, 0)
            if ns <= last_ns:
                continue
            # Python names a thread "Thread-7 (save)" after its function.
            function = re.search(r"\((\w+)\)$", thread.name)
            name = f"thread `{function[1] if function else _NUMBERS.sub('', thread.name)}`"
            self.sums[name] += (ns - last_ns) / 1e9
            # Looked up once, because it takes longer than the rest.
            if name not in self.places and (place := place_in_thread(thread.ident or 0)):
                file, line, code = place
                self.places[name] = str(Source(file, line, line, code))
        self._run_ns = run_ns
        return self.sums


class Processes(MachineSource):
    """CPU time of child processes, and of other busy processes on the cores of this process."""

    kind = "process"
    in_loop = False  # A search takes 10 ms.

    def __init__(self) -> None:
        super().__init__()
        self._pid, self._used_s = os.getpid(), dict[int, float]()
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._busy: Sequence[int] = ()
        # Child processes that the thread of the loop or the main thread has started.
        self._children: set[int] | None = None
        self._child_files = list[_File]()
        for thread in {threading.get_native_id(), self._pid}:
            with suppress(OSError):  # Some kernels do not have these files.
                self._child_files.append(_File(f"/proc/self/task/{thread}/children"))
        self._ticks: dict[int, float] = {}  # CPU time of each process in the newest search.
        self._searched_s, self._search_s = 0.0, 0.0  # End and duration of that search.
        self._stat(self._pid)  # Raises OSError if the system has no such files.

    def read(self) -> Mapping[str, float]:
        """Return the CPU time (in seconds) by name, of busy processes and of all children."""
        now_s = time.perf_counter()
        if now_s - self._searched_s > max(_RESCAN_S, self._search_s / _IN_THREAD[0]):
            self._search()
        used_s: dict[int, float] = {}
        children = {int(pid) for file in self._child_files for pid in file.read().split()}
        before, self._children = self._children, children
        new = set[int]() if before is None else children - before  # Started since the last read.
        for pid in {*self._busy, *children}:
            with suppress(OSError, ValueError, IndexError):
                name, parent, core, seconds = self._stat(pid)
                if name == LOADER_WORKER:
                    continue  # The loop may wait for it, for other reasons than its work.
                used_s[pid] = seconds
                # Count other processes only since the read at which they have become busy.
                grown_s = seconds - self._used_s.get(pid, 0.0 if pid in new else seconds)
                is_child = parent == self._pid
                if grown_s > 0.0 and (is_child or core in self._cores):
                    name = f"child process `{name}`" if is_child else f"process `{name}`"
                    self.sums[name] += grown_s
                    self.places[name] = f"pid {pid}"
        self._used_s = used_s
        return self.sums

    def _search(self) -> None:
        """Find the processes that have become busy since the last search."""
        start_s, before = time.perf_counter(), self._ticks
        found: dict[int, float] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self._pid:
                with suppress(OSError, ValueError, IndexError):
                    found[int(name)] = self._stat(int(name))[3]
        self._busy = [
            pid
            for pid, seconds in found.items()
            # A process that is new may have used all of its time since the last search; at first,
            # since the start of the system.
            if seconds - before.get(pid, 0.0) >= _MIN_BUSY * (start_s - self._searched_s)
        ]
        self._ticks, self._searched_s = found, time.perf_counter()
        self._search_s = self._searched_s - start_s

    def _stat(self, pid: int) -> tuple[str, int, int, float]:
        """Return name, parent, newest core and CPU time of a process."""
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
        fields = tail.split()  # From the third field of `man proc_pid_stat` on.
        seconds = (int(fields[11]) + int(fields[12])) * _TICK_S
        return head.partition("(")[2], int(fields[1]), int(fields[36]), seconds


class GPUProcesses(MachineSource):
    """Time that other processes use the GPU, if the package `pynvml` is installed."""

    kind = "GPU process"

    def __init__(self, index: int) -> None:
        super().__init__()
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            # NVML numbers the GPUs in another order than torch.
            uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except Exception as error:
            raise OSError from error
        if os.getpid() not in {process.pid for process in running}:
            raise OSError  # NVML has the ids of the host, from outside of this container.
        self._since_us, self._read_s = 0, time.perf_counter()

    def read(self) -> Mapping[str, float]:
        name = "another process on the GPU"
        now_s = time.perf_counter()
        elapsed_s, self._read_s = now_s - self._read_s, now_s
        with suppress(self._nvml.NVMLError):  # It raises if no process has used the GPU.
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since_us)
            self._since_us = max([self._since_us, *(sample.timeStamp for sample in samples)])
            for sample in samples:
                if sample.pid != os.getpid() and sample.smUtil > 0:
                    self.sums[name] += elapsed_s * sample.smUtil / 100
                    self.places[name] = f"pid {sample.pid}"
        return self.sums


class Pressure(MachineSource):
    """Time in which a process of the machine waited for a resource, as Linux counts it."""

    kind = "pressure"
    _NAMES: ClassVar[Mapping[str, str]] = {
        "io": "processes that wait for storage",
        "memory": "processes that wait for memory",
        "cpu": "processes that wait for a CPU core",
    }

    def __init__(self) -> None:
        super().__init__()
        self._files = {
            name: _File(f"/proc/pressure/{resource}") for resource, name in self._NAMES.items()
        }

    def read(self) -> Mapping[str, float]:
        for name, file in self._files.items():
            # The first line counts times in which some processes waited, in microseconds.
            some, _, _ = file.read().partition(b"\n")
            self.sums[name] = int(some.rpartition(b"total=")[2]) / 1e6
        return self.sums


class VirtualMemory(MachineSource):
    """Pages that the kernel has swapped, or read for a page fault.

    Pages that it writes to disk are no cause by themselves: `Pressure` has the waits for storage.
    """

    kind = "pages"
    _NAMES: ClassVar[Mapping[bytes, str]] = {
        b"pswpin": "swapping",
        b"pswpout": "swapping",
        b"pgmajfault": "page faults that read from disk",
    }

    def __init__(self) -> None:
        super().__init__()
        self._file = _File("/proc/vmstat")

    def read(self) -> Mapping[str, float]:
        found: dict[str, float] = defaultdict(float)
        for key, value in _PAGES.findall(self._file.read()):
            found[self._NAMES[key]] += int(value)
        return found


class MachineLog:
    """Readings of the sources: at reads of steps, or in a thread of its own after `sample_often`.

    Args:
        now_ns: Time of each reading; any thread may call it.
        sources: Functions that create the sources, by what they observe. If the system does not
            have a source, they raise OSError.
    """

    def __init__(
        self, now_ns: Callable[[], int], sources: Mapping[str, Callable[[], MachineSource]]
    ) -> None:
        self._now_ns = now_ns
        self._sources: list[MachineSource] = []
        self.missing: list[str] = []
        """What cannot be observed on this system."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        for observed, create in sources.items():
            try:
                source = create()
                if source.in_loop:
                    source.read()
            except (OSError, ValueError, IndexError):
                self.missing.append(observed)
            else:
                self._sources.append(source)

    def read(self, *, in_loop: bool = True) -> None:
        """Read the sources that are due. While the sampling thread runs, only it reads them."""
        if in_loop and self._thread is not None and self._thread.is_alive():
            return
        max_cost, min_interval_ns = _IN_LOOP if in_loop else _IN_THREAD
        for source in self._sources:
            if time.perf_counter_ns() < source.due_ns or (in_loop and not source.in_loop):
                continue
            start_ns = time.thread_time_ns()
            with suppress(OSError, ValueError, IndexError):
                source.readings.append((self._now_ns(), dict(source.read())))
            if len(source.readings) > _MAX_READINGS:
                del source.readings[1:-1:2]
            # A moving average, because the first read may take much longer than the others.
            cost_ns = min(time.thread_time_ns() - start_ns, 4.0 * source.cost_ns)
            source.cost_ns = 0.8 * source.cost_ns + 0.2 * cost_ns
            interval_ns = max(min_interval_ns, int(source.cost_ns / max_cost))
            source.due_ns = time.perf_counter_ns() + interval_ns

    def sample_often(self) -> None:
        """Read the sources in a thread, which sees what happens between reads of steps."""
        if self._sources and (self._thread is None or not self._thread.is_alive()):
            self._wake.clear()
            name = f"{__name__.partition('.')[0]} sampler"
            args = (weakref.ref(self), self._wake)
            self._thread = threading.Thread(target=_sample, args=args, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._wake.set()

    def candidates(self, starts_ns: npt.NDArray[Any], ends_ns: npt.NDArray[Any]) -> list[Candidate]:
        """Return what grew during some steps; NaN before the first and after the last reading.

        Args:
            starts_ns: Cumulative time of the steps at the start of each, as passed to the readings.
            ends_ns: The same at the end of each.
        """
        found = []
        # A host that runs ahead of the device may launch a step in almost no time.
        ends_ns = np.maximum(ends_ns, starts_ns + 1e6)
        for source in self._sources:
            readings = source.readings[:]
            names = dict.fromkeys(name for _, values in readings for name in values)
            at_ns = np.array([ns for ns, _ in readings], float)
            for name in names:
                sums = np.array([values.get(name, 0.0) for _, values in readings])
                if len(sums) < 3 or sums[-1] <= sums[0]:
                    continue
                grown = np.interp(ends_ns, at_ns, sums) - np.interp(starts_ns, at_ns, sums)
                rates = np.round(grown / ((ends_ns - starts_ns) / 1e9), 3)  # No rounding errors.
                rates[(ends_ns < at_ns[0]) | (starts_ns > at_ns[-1])] = np.nan
                found.append(Candidate(name, rates, source.places.get(name, ""), source.kind))
        return found


def system_sources(gpu: int | None) -> dict[str, Callable[[], MachineSource]]:
    """Return the sources of this system, the most specific first.

    Args:
        gpu: Index of the GPU; None without one.
    """
    sources: dict[str, Callable[[], MachineSource]] = {"threads": Threads}
    # Without NVML, do not complain: the package is optional.
    if gpu is not None and importlib.util.find_spec("pynvml") is not None:
        sources["other processes on the GPU"] = partial(GPUProcesses, gpu)
    shared = {"other processes": Processes, "pressure": Pressure, "swap": VirtualMemory}
    return {**sources, **shared}


def _sample(log: "weakref.ref[MachineLog]", wake: threading.Event) -> None:
    """Sample until the log is stopped or deleted."""
    while not wake.wait(_SAMPLE_S):
        owner = log()
        if owner is None or sys.is_finalizing():
            return
        try:
            owner.read(in_loop=False)
        except Exception:  # Sampling must never disturb the training.
            return
        del owner


class GPUClock:
    """The clock of the GPU, measured without NVML.

    A kernel that spins for a number of clock cycles takes time in proportion to the length of a
    cycle. One such kernel runs at the end of a timed step, behind its work, and is excluded from
    its phases. So it measures the clock of a busy GPU. Power and heat limits lower that clock.

    All measurements are empty on a device without a spinning kernel.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spin: Callable[[int], None] | None = getattr(clock, "spin_cycles", None)
        # Number of the step, start and end of the measurement that was launched.
        self._pending: tuple[int, TimingEvent, TimingEvent] | None = None
        self._launched_ns = -_MIN_DISTANCE_NS
        self.is_due = False
        """True if `measure` should be called at the end of the next timed step."""
        self.mhz: list[tuple[int, float]] = []
        """Number of each measured step, and clock (in MHz)."""

    def __getstate__(self) -> dict[str, Any]:
        # Neither the device's clock nor its events can be pickled.
        cleared = {"_clock": None, "_spin": None, "_pending": None, "is_due": False}
        return {**self.__dict__, **cleared, "mhz": self.mhz.copy()}

    def steps_read(self) -> None:
        """Read the newest measurement if the device has finished it. Does not wait or raise."""
        if self._spin is None or self._clock.is_capturing():
            return
        with suppress(RuntimeError):  # The next measurement may succeed.
            if self._pending is not None:
                number, start, end = self._pending
                if not end.query():
                    return
                if (ms := start.elapsed_time(end)) > 0.0:
                    self.mhz.append((number, _CYCLES / ms / 1e3))
                if len(self.mhz) > _MAX_READINGS:
                    del self.mhz[1:-1:2]
        self._pending = None
        self.is_due = self._clock.host_ns() - self._launched_ns >= _MIN_DISTANCE_NS

    def measure(self, number: int) -> None:
        """Launch a measurement at the end of the step of this number. Does not raise."""
        self.is_due = False
        if self._spin is None or self._clock.is_capturing():
            return
        self._launched_ns = self._clock.host_ns()
        try:
            start, end = self._clock.event(), self._clock.event()
            self._spin(_CYCLES_BEFORE)
            start.record()
            self._spin(_CYCLES)
            end.record()
        except RuntimeError:
            self.stop()
        else:
            self._pending = number, start, end

    def stop(self) -> Any:
        """Measure no more. Return the events of a measurement that was not read."""
        pending, self._pending, self._spin, self.is_due = self._pending, None, None, False
        return pending

    @property
    def median_mhz(self) -> float | None:
        """Median of all measurements; None without any."""
        return median(mhz for _, mhz in self.mhz) if self.mhz else None

    def change_at(self, step: int) -> str:
        """Return how the clock has fallen since a step, as part of a sentence; empty if not."""
        before = [mhz for number, mhz in self.mhz if number < step]
        after = [mhz for number, mhz in self.mhz if number >= step]
        # The quartiles, because the first measurements, and those of an idle GPU, may be low. Take
        # the values next to them: then one low value of three hides no fall.
        if (
            len(before) < 2
            or not after
            or np.quantile(after, 0.75, method="lower")
            >= np.quantile(before, 0.25, method="higher")
        ):
            return ""
        was, now = median(before), median(after)
        if now > (1 - (_MIN_CHANGE if len(after) > 1 else _MIN_CHANGE_OF_ONE)) * was:
            return ""
        return f"the GPU's clock fell from {was:,.0f} to {now:,.0f} MHz"
