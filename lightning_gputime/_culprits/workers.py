"""Stages of a DataLoader with workers: each worker times its batches, in shared memory.

A `WorkerInit` replaces `worker_init_fn` while `iter(loader)` runs. In the worker it wraps the
method that makes a batch, then calls the user's function. This adds two clock reads per batch and
stage. The main process reads the sums for a summary.
"""

import contextlib
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from threading import get_native_id
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_gputime._compat.torch_ import fetcher_classes
from lightning_gputime._culprits.pin_memory import PinTimes
from lightning_gputime._culprits.threads import core_times
from lightning_gputime._ledger.outside import OutsideLines
from lightning_gputime._ledger.rows import LineRow, PhasePart, line_rows
from lightning_gputime._measurement.culprits import WORKERS, Culprit, Stage
from lightning_gputime._measurement.loader import (
    BATCHES,
    BUSY_SINCE,
    CHECKSUMS,
    COLLATE_NS,
    CPU_NS,
    DATASET_NS,
    ELAPSED_NS,
    FIELDS,
    LONG_BATCHES,
    LONG_NS,
    MAX_NS,
    NEWEST,
    OBSERVED_NS,
    PID,
    RING,
    RING_FIELDS,
    RUN_DELAY_NS,
    SLOWEST_INDEX,
    STARTS,
    STARTUP_NS,
    WAIT_NS,
    LoaderTimes,
    MadeBatch,
    loader_times,
    newest_batches,
)
from lightning_gputime._phases import FETCH

# Minimum mean time to load a sample for timing each sample. Timing a sample costs 0.4 us.
_MIN_SAMPLE_NS = 100_000
_LONG_FACTOR = 4  # A batch is long if it takes this many times the mean of its worker.
_MAX_LOOKS = 400  # Maximum number of reads of /proc by the main process, about 20 us each.
_CPU_INTERVAL_NS = 1_000_000_000  # Interval of reads of CPU time in a worker.
_MAX_CHECKED_VALUES = 1 << 16  # Maximum number of values of a tensor in a checksum.
# The lines of these batches of a worker are timed. The first batches may fill caches.
_FIRST_EXAMINED, _EXAMINED = 3, 3
_MAX_LINES, _MAX_LINE_BYTES = 5, 4096  # Number and size of the lines that a worker reports.


class WorkerInit:
    """Replacement for `worker_init_fn`: start to time the batches of this worker, then call `init`.

    Args:
        times: Shared memory with a row of `FIELDS` numbers per worker.
        lines: Shared memory with a row of bytes per worker, for the lines that take its time.
        init: The user's `worker_init_fn`, or None.
        iter_ns: Creation time of the loader's iterator (`time.perf_counter_ns`).
    """

    def __init__(
        self, times: Tensor, lines: Tensor, init: Callable[[int], object] | None, iter_ns: int
    ) -> None:
        self._times, self._lines, self._init, self._iter_ns = times, lines, init, iter_ns

    def __call__(self, worker: int) -> None:
        with contextlib.suppress(Exception):  # Training continues, without times.
            row, lines = (
                memoryview(shared.numpy()[worker]) for shared in (self._times, self._lines)
            )
            timer = WorkerTimer(row, self._iter_ns, lines=lines)
            # The method `fetch` of torch's fetchers makes a batch.
            for kind in fetcher_classes():
                type.__setattr__(kind, "fetch", timed_fetch(kind, timer))
        if self._init is not None:
            self._init(worker)


def timed_fetch(kind: type, timer: "WorkerTimer") -> Callable[[Any, Any], Any]:
    """Return a fetcher class's method `fetch`, wrapped to time the batches that a worker makes."""
    fetch = kind.fetch  # type: ignore[attr-defined]

    def timed(fetcher: Any, indices: Any) -> Any:
        # The dataset may itself iterate over loaders, which have other fetchers: time only the
        # fetcher of this worker.
        if fetcher is not timer.fetcher and timer.is_own(fetcher):
            timer.follow(fetcher)
        if fetcher is not timer.fetcher:
            return fetch(fetcher, indices)
        try:
            timer.start(indices)
        except Exception:  # Never break the loader.
            return fetch(fetcher, indices)
        try:
            batch = fetch(fetcher, indices)
        except BaseException:  # An iterable dataset has ended, or the dataset raised an error.
            timer.stop()
            raise
        with contextlib.suppress(Exception):
            timer.end(batch)
        return batch

    return timed


class WorkerTimer:
    """Time the batches of a worker.

    Args:
        row: The worker's row of the shared memory.
        iter_ns: Creation time of the loader's iterator (in nanoseconds).
        now_ns: Clock that all processes of a machine share.
        cpu_ns: CPU time of this thread (in nanoseconds).
        lines: The worker's bytes of the shared memory for lines; None to time no lines.
    """

    def __init__(
        self,
        row: Any,
        iter_ns: int,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        lines: Any = None,
    ) -> None:
        self.fetcher: Any = None
        """Fetcher whose batches are timed; None before the first batch."""
        self._row, self._now_ns, self._cpu_ns = row, now_ns, cpu_ns
        # Timed dataset; None for a dataset that is not read one sample at a time.
        self._samples: _TimedSamples | None = None
        self._last_end_ns = 0  # End of the previous batch; 0 if the time since is not counted.
        self._start_ns = 0  # Start of the current batch.
        self._collate_ns = 0  # Time in `collate_fn` for the current batch.
        # Last read of the CPU time and of the time without a core. The next read comes early, for
        # short runs.
        self._read_cpu_ns, self._read_delay_ns = cpu_ns(), _run_delay_ns()
        self._cpu_read_due_ns = now_ns() + _CPU_INTERVAL_NS // 10
        self._iter_ns = iter_ns  # 0 after the first batch.
        self._shared_lines = lines
        self._lines = None if lines is None else OutsideLines(now_ns)
        row[PID] = os.getpid()

    @staticmethod
    def is_own(fetcher: Any) -> bool:
        """Return True if a fetcher reads the dataset of this worker."""
        info = get_worker_info()
        return info is not None and fetcher.dataset is info.dataset

    def follow(self, fetcher: Any) -> None:
        """Time the batches of a fetcher from now on."""
        self.fetcher = fetcher
        # Persistent workers get a new fetcher in each epoch. Do not count the time between epochs.
        self._last_end_ns = 0
        vars(fetcher)["collate_fn"] = self._timed_collate(fetcher.collate_fn)
        dataset = fetcher.dataset
        gets_items = fetcher.auto_collation and hasattr(type(dataset), "__getitem__")
        if gets_items and not getattr(dataset, "__getitems__", None):
            self._samples = _TimedSamples(dataset, self._now_ns)

    def _timed_collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        now_ns = self._now_ns

        def timed_collate(samples: Any) -> Any:
            start_ns = now_ns()
            collated = collate(samples)
            self._collate_ns += now_ns() - start_ns
            return collated

        return timed_collate

    def start(self, indices: Any) -> None:
        """Start a batch of the samples with these indices."""
        row, samples = self._row, self._samples
        n = row[BATCHES]
        if samples is not None and n:
            # A batch sampler may yield iterators, which have no length.
            size = len(indices) if isinstance(indices, Sized) else 1
            if row[DATASET_NS] / n >= _MIN_SAMPLE_NS * size:
                vars(self.fetcher)["dataset"] = samples  # Time each sample from now on.
        self._collate_ns = 0
        if self._lines is not None and n >= _FIRST_EXAMINED:
            self._lines.switch_to(WORKERS)
        start_ns = self._start_ns = row[BUSY_SINCE] = self._now_ns()
        if self._last_end_ns:
            row[WAIT_NS] += start_ns - self._last_end_ns

    def stop(self) -> None:
        """Drop a batch whose fetch raised."""
        if self._lines is not None:
            self._lines.switch_to("")
        self._row[BUSY_SINCE] = 0
        self._last_end_ns = 0

    def end(self, batch: Any) -> None:
        """Add the times of a batch to the worker's row."""
        row, end_ns = self._row, self._now_ns()
        if self._lines is not None and row[BATCHES] >= _FIRST_EXAMINED:
            self._lines.switch_to("")
            if len(self._lines.occurrences) >= _EXAMINED:
                self._report_lines(self._lines)
        start_ns, collate_ns = self._start_ns, self._collate_ns
        batch_ns = end_ns - start_ns
        self._last_end_ns = end_ns
        row[BUSY_SINCE] = 0
        n = row[BATCHES] = row[BATCHES] + 1
        row[DATASET_NS] += batch_ns - collate_ns
        row[COLLATE_NS] += collate_ns
        if self._iter_ns:
            row[STARTS] += 1
            row[STARTUP_NS] += end_ns - self._iter_ns
            self._iter_ns = 0
        slowest_index = -1 if self._samples is None else self._samples.take_slowest()
        if n <= len(CHECKSUMS):
            row[CHECKSUMS[n - 1]] = _checksum(batch)
        mean_ns = (row[DATASET_NS] + row[COLLATE_NS]) / n
        if batch_ns > _LONG_FACTOR * mean_ns:
            row[LONG_BATCHES] += 1
            row[LONG_NS] += batch_ns
        if batch_ns > row[MAX_NS]:
            row[MAX_NS], row[SLOWEST_INDEX] = batch_ns, slowest_index
        # Overwrite the oldest batch in the ring buffer.
        first_field = NEWEST + 1 + RING_FIELDS * (row[NEWEST] % RING)
        for field, value in enumerate((start_ns, end_ns, collate_ns, slowest_index), first_field):
            row[field] = value
        row[NEWEST] += 1
        if end_ns >= self._cpu_read_due_ns:
            self._add_cpu_time(end_ns)

    def _report_lines(self, lines: OutsideLines) -> None:
        """Write the lines with most of the time to the shared memory, as JSON."""
        self._lines = None
        rows = line_rows(lines.occurrences, trainer="", entry=WORKERS)
        # Forked workers start below the line that has created the iterator.
        base = {(file, name) for file, name, _ in lines.occurrences[0].base}
        named = [row for row in rows if row.file and (row.file, row.function) not in base]
        found = [
            (row.function, row.file, row.line, row.last_line, row.ms) for row in named[:_MAX_LINES]
        ]
        text = json.dumps(found).encode()
        if len(text) < len(self._shared_lines):
            # Overwrite all of the text of an earlier worker.
            self._shared_lines[:] = text.ljust(len(self._shared_lines), b"\0")

    def _add_cpu_time(self, now_ns: int) -> None:
        """Add the CPU time since the last read. Call it rarely: a read takes microseconds."""
        row = self._row
        cpu_ns, delay_ns = self._cpu_ns(), _run_delay_ns()
        row[CPU_NS] += cpu_ns - self._read_cpu_ns
        row[RUN_DELAY_NS] += delay_ns - self._read_delay_ns
        # Time of the batches that the CPU time covers.
        row[OBSERVED_NS] = row[DATASET_NS] + row[COLLATE_NS]
        row[ELAPSED_NS] = row[OBSERVED_NS] + row[WAIT_NS]
        self._read_cpu_ns, self._read_delay_ns = cpu_ns, delay_ns
        self._cpu_read_due_ns = now_ns + _CPU_INTERVAL_NS


class _TimedSamples:
    """Replacement for the dataset of a fetcher, which finds the slowest sample of a batch."""

    def __init__(self, dataset: Any, now_ns: Callable[[], int]) -> None:
        self._dataset, self._now_ns = dataset, now_ns
        self._slowest_ns = 0
        self._slowest_index: Any = None

    def __getitem__(self, index: Any) -> Any:
        start_ns = self._now_ns()
        sample = self._dataset[index]
        ns = self._now_ns() - start_ns
        if ns > self._slowest_ns:
            self._slowest_ns, self._slowest_index = ns, index
        return sample

    def take_slowest(self) -> int:
        """Return the index of the slowest sample since the last call; -1 if unknown."""
        index = self._slowest_index
        self._slowest_ns, self._slowest_index = 0, None
        return int(index) if isinstance(index, int | Tensor) else -1


def _run_delay_ns() -> int:
    """Return how long this thread has waited for a core (in nanoseconds); 0 if unknown."""
    times = core_times(get_native_id())
    return 0 if times is None else times.wait_ns


def _checksum(batch: Any) -> int:
    """Return a checksum of the tensors of a batch; 0 if all of them are constant."""
    checksum = 0
    for tensor in _tensors_of(batch):
        with contextlib.suppress(Exception):  # A sparse tensor, for example, has no view.
            data = tensor.detach().cpu().contiguous().view(-1)[:_MAX_CHECKED_VALUES]
            # Skip constant tensors, because they are the same in different batches.
            if data.numel() > 1 and bool((data != data[0]).any()):
                # NumPy has no bfloat16, so pass bytes.
                checksum = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors_of(part)
    elif isinstance(batch, list | tuple):
        for part in batch[:8]:
            yield from _tensors_of(part)


# In the main process

# Numbers of the Linux system calls that wait for locks: futex, flock and fcntl.
_LOCKS = {"x86_64": ("202", "73", "72"), "aarch64": ("98", "32", "25")}.get(platform.machine(), ())


class LoaderWorkers:
    """Times of the workers of a loader, for the main process.

    Args:
        num_workers: Number of workers.
        stages: Two stages: the dataset and `collate_fn`.
    """

    def __init__(self, num_workers: int, *stages: Stage) -> None:
        self.num_workers, self.stages = num_workers, stages
        self._times = torch.zeros((num_workers, FIELDS), dtype=torch.int64).share_memory_()
        self._lines = torch.zeros((num_workers, _MAX_LINE_BYTES), dtype=torch.uint8).share_memory_()
        self._looks = 0  # Number of times that a busy worker was looked at.
        self._locked = 0  # Number of times that it was waiting for a lock.
        self.pin_times = PinTimes()

    def init(self, user_init: Callable[[int], object] | None) -> WorkerInit:
        """Return a replacement for `worker_init_fn`, for workers that start now."""
        return WorkerInit(self._times, self._lines, user_init, time.perf_counter_ns())

    def look(self) -> None:
        """Count the workers that are making a batch now, and those that wait for a lock in it."""
        if self._looks >= _MAX_LOOKS:
            return
        for row in self._times.numpy():
            if row[BUSY_SINCE]:
                with contextlib.suppress(OSError, IndexError):
                    call = Path(f"/proc/{row[PID]}/syscall").read_text().split()[0]
                    self._looks += 1
                    self._locked += int(call in _LOCKS)

    def times(self) -> LoaderTimes | None:
        """Return the times so far; None if no batch was made."""
        dataset, collate = (stage.name for stage in self.stages)
        rows = self._times.tolist()
        looks = self._looks, self._locked
        return loader_times(rows, dataset, collate, looks, self.pin_times.mean_ms)

    def lines(self) -> tuple[LineRow, ...]:
        """Return the lines that take the time of a batch, the longest first."""
        texts = [bytes(row).rstrip(b"\0") for row in self._lines.numpy()]
        found = []
        for text in filter(None, texts):
            with contextlib.suppress(ValueError):  # A worker is writing it.
                found.append(json.loads(text))
        ms: dict[tuple[str, str, int, int], float] = {}
        for function, file, first, last, line_ms in (row for rows in found for row in rows):
            key = function, file, first, last
            ms[key] = ms.get(key, 0.0) + line_ms / len(found)
        rows = [
            LineRow(*line, phases={WORKERS: PhasePart(host_ms=line_ms)}, entry=WORKERS)
            for line, line_ms in ms.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.ms))

    def newest_batches(self) -> Iterator[MadeBatch]:
        """Yield the newest batches of each worker."""
        return newest_batches(self._times.tolist())

    def culprits(self) -> Iterator[Culprit]:
        if (times := self.times()) is not None:
            n = times.batches
            for stage, name in zip(self.stages, ("dataset_ms", "collate_ms"), strict=True):
                yield Culprit(
                    entry=FETCH,
                    name=stage.name,
                    seconds=n * times.mean(name) / 1e3,
                    calls=n,
                    share=times.mean(name) / (times.mean("busy_ms") or 1.0),
                    source=stage.source,
                    kind=stage.kind,
                )
