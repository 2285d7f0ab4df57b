"""Stages of a DataLoader: in the main process, or in its workers.

`StagedLoaders` replaces attributes of a loader while `iter(loader)` runs. Without workers, these
are the sampler and `collate_fn`. With workers, it is `worker_init_fn`: each worker times its
batches in shared memory, at the cost of two clock reads per batch and stage. The main process reads
the sums for a summary.
"""

import contextlib
import json
import operator
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial, wraps
from inspect import unwrap
from pathlib import Path
from statistics import fmean
from threading import get_native_id
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_gputime._compat import report_missing
from lightning_gputime._compat.python_ import code_of, short_name
from lightning_gputime._compat.torch_ import (
    FETCHERS,
    fetcher_classes,
    leave_out_of_errors,
    pin_loop,
)
from lightning_gputime._instrumentation.loop import dataset_of
from lightning_gputime._instrumentation.patching import Subscription, do_nothing
from lightning_gputime._ledger import key_of
from lightning_gputime._ledger.ledger import OutsideLines
from lightning_gputime._ledger.rows import LineRow, PhasePart, line_rows
from lightning_gputime._loader import (
    COLLATE,
    DATASET,
    SAMPLER,
    WORKERS,
    Culprit,
    LoaderStage,
    LoaderTimes,
    MadeBatch,
    Source,
    TimedLoader,
    WorkerTimes,
)
from lightning_gputime._phases import FETCH
from lightning_gputime._record.clock import core_times

_CPU_INTERVAL_NS = 1_000_000_000  # Interval of reads of CPU time in a worker.
# Minimum mean time of a sample for samples to be timed one by one: timing one costs 0.4 us.
_MIN_SAMPLE_NS = 100_000
# A batch is long if it takes more than this multiple of its worker's mean. Chosen: a smaller one
# counts batches that vary, a larger one misses slow samples in large batches.
_LONG_BATCH = 4
# Limits on how often the main process looks at a busy worker: each look takes about 20 us, and a
# share of few looks is noise.
_MAX_LOOKS, _MIN_LOOKS = 400, 8
# The lines of these batches of a worker are timed. The first batches may fill caches.
_FIRST_EXAMINED, _EXAMINED = 3, 3
_MAX_LINES, _MAX_LINE_BYTES = 5, 4096  # Number and size of the lines that a worker reports.
# Numbers of the Linux system calls that wait for locks: futex, flock and fcntl.
_LOCKS = {"x86_64": ("202", "73", "72"), "aarch64": ("98", "32", "25")}.get(platform.machine(), ())

# Columns of a worker's row in shared memory: counts, and total times (in nanoseconds).
(
    PID,
    BUSY_SINCE,  # Start of the current batch; 0 between batches.
    BATCHES,
    WAIT_NS,  # Between two batches.
    DATASET_NS,
    COLLATE_NS,
    CPU_NS,  # CPU time of the worker's main thread.
    RUN_DELAY_NS,  # Time that this thread waited for a core.
    OBSERVED_NS,  # Time to make the batches that `CPU_NS` and `RUN_DELAY_NS` cover.
    ELAPSED_NS,  # `OBSERVED_NS` and the time between these batches.
    STARTS,  # Number of times that the worker was started.
    STARTUP_NS,  # From the start of the loop to the end of the worker's first batch.
    LONG_BATCHES,
    LONG_NS,
    MAX_NS,  # Time of the slowest batch.
    SLOWEST_INDEX,  # Index of the slowest sample in that batch; -1 if unknown.
) = range(16)
CHECKSUMS = range(16, 19)  # Columns of checksums of the first batches; 0 if unknown.
NEWEST = 19  # Column of the number of batches written to the ring buffer, whose columns follow.
# Size of the ring buffer of a worker's newest batches, and number of fields per batch: those of
# `MadeBatch` after the worker, in order.
RING, RING_FIELDS = 32, 4
FIELDS = NEWEST + 1 + RING * RING_FIELDS  # Number of columns.


class StagedLoaders:
    """Timer of the stages of loaders whose iterators are created while it is attached.

    When `iter(loader)` is called, it replaces attributes of the loader by versions that time
    themselves. The iterator copies them. When the call returns, the loader gets its attributes
    back, so the replacements are only in the iterator.

    Args:
        includes: Function that returns True for a loader to time.
        now_ns: The loop's clock, for loaders without workers. Workers use the system's clock.
        add_loader: Takes new, empty sums for a loader. Returns the sums to add its times to: those
            of an earlier iterator of the same loader, or the new sums.
    """

    def __init__(
        self,
        includes: Callable[[object], bool | None],
        now_ns: Callable[[], int],
        add_loader: Callable[[Any], Any],
    ) -> None:
        self._includes, self._now_ns, self._add_loader = includes, now_ns, add_loader
        # For each running call of `iter`, innermost last: objects whose attributes were replaced,
        # and the original values.
        self._replaced: list[list[tuple[Any, dict[str, Any]]]] = []
        self._iter = Subscription(DataLoader, "__iter__", self)

    def attach(self) -> None:
        self._iter.attach()

    def remove(self) -> None:
        self._iter.remove()
        self._includes = do_nothing  # The original function may refer to the timer.

    def on_call_start(self, loader: Any, *_: Any, **__: Any) -> bool:
        if not self._includes(loader):
            return False
        if loader.num_workers:
            self._replace_for_workers(loader)
            return True
        return self._replace_in_main_process(loader)

    # Store the originals before replacing them: after Ctrl-C, `on_call_end` restores them. Write to
    # `vars(loader)`, because a DataLoader forbids to set some of its attributes.

    def _replace_for_workers(self, loader: Any) -> None:
        """Let workers time their batches, and the pin-memory thread its copies."""
        report_missing(*FETCHERS)
        worker_stages = [*_stages_of(loader)][1:]  # The sampler runs in the main process.
        workers = self._add_loader(LoaderWorkers(loader.num_workers, *worker_stages))
        user_init = vars(loader).get("worker_init_fn")
        originals = [(loader, {"worker_init_fn": _original(user_init)})]
        self._replaced.append(originals)
        vars(loader)["worker_init_fn"] = workers.init(user_init)
        if loader.pin_memory and (found := pin_loop()) is not None:
            module, name = found
            loop = getattr(module, name)
            originals.append((module, {name: unwrap(loop)}))
            setattr(module, name, workers.timed_pin_loop(loop))

    def _replace_in_main_process(self, loader: Any) -> bool:
        """Time the sampler and `collate_fn`. Return False if the loader has them elsewhere."""
        attributes = vars(loader)
        sampler_name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler, collate = attributes.get(sampler_name), attributes.get("collate_fn")
        if sampler is None or not callable(collate):
            return False  # In a subclass of `DataLoader`.
        sums = self._add_loader(LoaderStages(*_stages_of(loader)))
        stages = _Stages(sampler, collate, self._now_ns, sums)
        originals = {sampler_name: _original(sampler), "collate_fn": _original(collate)}
        self._replaced.append([(loader, originals)])
        attributes.update({sampler_name: stages, "collate_fn": stages.collate})
        return True

    def on_call_end(self, _: Any) -> None:
        if self._replaced:  # It is empty if Ctrl-C interrupted `on_call_start`.
            for owner, attributes in self._replaced.pop():
                vars(owner).update(attributes)


class LoaderStages(TimedLoader):
    """Stages of a loader that run in the main process, and sums of their times."""

    def __init__(self, *stages: LoaderStage) -> None:
        super().__init__(0, *stages)
        self._ns = [0] * len(stages)  # Time of each stage.
        self._batches = 0
        self.iterators = 0  # Number of started iterators of the loader.
        self.exhausted = 0  # Number of iterators that have yielded their last batch.

    def add(self, *ns: int) -> None:
        """Add the time of each stage for a batch (in nanoseconds), in the order of `stages`."""
        self._batches += 1
        for i, stage_ns in enumerate(ns):
            self._ns[i] += stage_ns

    def culprits(self) -> Iterator[Culprit]:
        """Yield each stage with its time, and its share of the time of all stages."""
        if not self._batches:
            return
        all_ns = sum(self._ns)
        for stage, ns in zip(self.stages, self._ns, strict=True):
            yield Culprit(
                FETCH,
                stage.name,
                ns / 1e9,
                self._batches,
                ns / all_ns if all_ns else 0.0,
                stage.source,
                stage.kind,
                abandoned=self.iterators - self.exhausted,  # Until its end, the newest counts, too.
            )


class _Stages:
    """Replacement for a loader's sampler. Its method `collate` replaces `collate_fn`."""

    def __init__(
        self, indices: Any, collate: Any, now_ns: Callable[[], int], sums: LoaderStages
    ) -> None:
        self.indices, self.collate_fn = indices, collate
        self._now_ns, self._sums = now_ns, sums
        self._sampler_ns = 0  # Time in the sampler for the current batch.
        self._indices_ready_ns = 0  # Host time when the sampler returned its indices.

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        now_ns = self._now_ns
        self._sums.iterators += 1
        start_ns = now_ns()
        for index in self.indices:
            self._indices_ready_ns = now_ns()
            self._sampler_ns = self._indices_ready_ns - start_ns
            yield index
            start_ns = now_ns()
        self._sums.exhausted += 1

    def collate(self, examples: Any) -> Any:
        start_ns = self._now_ns()
        collated = self.collate_fn(examples)
        end_ns = self._now_ns()
        # The loader reads the dataset between the sampler and `collate_fn`.
        dataset_ns = start_ns - self._indices_ready_ns
        self._sums.add(self._sampler_ns, dataset_ns, end_ns - start_ns)
        return collated


def _original(value: Any) -> Any:
    """Return an attribute of a loader without the replacements of timers.

    Several timers may time a loader. The first to replace an attribute is also the first to restore
    it, so each restores the original. No timer blames the replacements of another.
    """
    while True:
        if isinstance(value, _Stages):
            value = value.indices
        elif isinstance(stages := getattr(value, "__self__", None), _Stages):
            value = stages.collate_fn
        elif isinstance(value, partial) and value.func is _init_worker:
            value = value.args[2]
        else:
            return value


def _source_of(function: Any) -> Source | None:
    if (code := code_of(function)) is None:
        return None
    file, name, line = key_of(code)
    return Source(file, line, line, name)


def _stages_of(loader: Any) -> Iterator[LoaderStage]:
    """Yield the sampler, the dataset and `collate_fn` of a loader, with the function of each."""
    sampler, collate = _original(loader.batch_sampler), _original(loader.collate_fn)
    if sampler is None:
        sampler = _original(loader.sampler)
    elif type(sampler).__module__.partition(".")[0] == "torch":
        # The batch samplers of torch only group the indices that their sampler yields.
        sampler = _original(getattr(sampler, "sampler", loader.sampler))
    yield LoaderStage(SAMPLER, type(sampler).__name__, _source_of(type(sampler).__iter__))
    dataset = dataset_of(loader)
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        method = "__iter__"
    else:
        method = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    yield LoaderStage(DATASET, f"{kind.__name__}.{method}", _source_of(getattr(kind, method, None)))
    # The transformers Trainer wraps its collator to remove columns.
    collate = getattr(collate, "data_collator", collate)
    is_function = hasattr(collate, "__qualname__")
    name = short_name(collate.__qualname__) if is_function else type(collate).__name__
    yield LoaderStage(COLLATE, name, _source_of(collate if is_function else type(collate).__call__))


# In a worker


def _init_worker(
    times: Tensor,
    lines: Tensor,
    user_init: Callable[[int], object] | None,
    iter_ns: int,
    worker: int,
) -> None:
    """Start to time the batches of this worker, then call the user's `worker_init_fn`.

    The shared memory has a row per worker: of `FIELDS` numbers in `times`, and of bytes in `lines`,
    for the lines that take its time. The loader's iterator was created at `iter_ns`.
    """
    with contextlib.suppress(Exception):  # Training continues, without times.
        row, line_row = (memoryview(shared.numpy()[worker]) for shared in (times, lines))
        timer = WorkerTimer(row, iter_ns, lines=line_row)
        # The method `fetch` of torch's fetchers makes a batch.
        for kind in fetcher_classes():
            type.__setattr__(kind, "fetch", timed_fetch(kind, timer))
        leave_out_of_errors(str(Path(__file__).parents[1]))
    if user_init is not None:
        user_init(worker)


def timed_fetch(kind: type, timer: "WorkerTimer") -> Callable[[Any, Any], Any]:
    """Return a fetcher class's method `fetch`, wrapped to time the batches that a worker makes."""
    fetch = kind.fetch  # type: ignore[attr-defined]

    def timed(fetcher: Any, indices: Any) -> Any:
        # The dataset may itself iterate over loaders, which have other fetchers: time only the
        # fetcher of this worker.
        if fetcher is not timer.fetcher:
            info = get_worker_info()
            if info is None or fetcher.dataset is not info.dataset:
                return fetch(fetcher, indices)
            timer.follow(fetcher)
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
        iter_ns: Creation time of the loader's iterator.
        now_ns: Clock that all processes of a machine share.
        cpu_ns: CPU time of this thread.
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
        self.fetcher: Any = None  # Its batches are timed; None before the first.
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

    def follow(self, fetcher: Any) -> None:
        """Time the batches of a fetcher from now on, and replace its `collate_fn`."""
        self.fetcher = fetcher
        # Persistent workers get a new fetcher in each epoch. Do not count the time between epochs.
        self._last_end_ns = 0
        collate, now_ns = fetcher.collate_fn, self._now_ns

        def timed_collate(samples: Any) -> Any:
            start_ns = now_ns()
            collated = collate(samples)
            self._collate_ns += now_ns() - start_ns
            return collated

        vars(fetcher)["collate_fn"] = timed_collate
        dataset = fetcher.dataset
        gets_items = fetcher.auto_collation and hasattr(type(dataset), "__getitem__")
        if gets_items and not getattr(dataset, "__getitems__", None):
            # `start` installs it for a batch after batches that took long.
            self._samples = _TimedSamples(dataset, now_ns)

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
        """End a batch, and add it to this worker's row of the shared memory."""
        row, end_ns = self._row, self._now_ns()
        if self._lines is not None and row[BATCHES] >= _FIRST_EXAMINED:
            self._lines.switch_to("")
            if len(self._lines.occurrences) >= _EXAMINED:
                self._report_lines(self._lines)
        batch_ns, collate_ns = end_ns - self._start_ns, self._collate_ns
        self._last_end_ns = end_ns
        row[BUSY_SINCE] = 0
        row[BATCHES] += 1
        row[DATASET_NS] += batch_ns - collate_ns
        row[COLLATE_NS] += collate_ns
        if self._iter_ns:
            row[STARTS] += 1
            row[STARTUP_NS] += end_ns - self._iter_ns
            self._iter_ns = 0
        n, all_ns = row[BATCHES], row[DATASET_NS] + row[COLLATE_NS]
        if n <= len(CHECKSUMS):
            row[CHECKSUMS[n - 1]] = _checksum(batch)
        if batch_ns > _LONG_BATCH * all_ns / n:
            row[LONG_BATCHES] += 1
            row[LONG_NS] += batch_ns
        slowest_index = -1 if self._samples is None else self._samples.take_slowest()
        if batch_ns > row[MAX_NS]:
            row[MAX_NS], row[SLOWEST_INDEX] = batch_ns, slowest_index
        # Overwrite the oldest batch in the ring buffer.
        column = NEWEST + 1 + RING_FIELDS * (row[NEWEST] % RING)
        for value in (self._start_ns, end_ns, collate_ns, slowest_index):
            row[column] = value
            column += 1
        row[NEWEST] += 1
        if end_ns >= self._cpu_read_due_ns:  # Seldom, because these reads take microseconds.
            self._cpu_read_due_ns = end_ns + _CPU_INTERVAL_NS
            cpu_ns, delay_ns = self._cpu_ns(), _run_delay_ns()
            row[CPU_NS] += cpu_ns - self._read_cpu_ns
            row[RUN_DELAY_NS] += delay_ns - self._read_delay_ns
            self._read_cpu_ns, self._read_delay_ns = cpu_ns, delay_ns
            row[OBSERVED_NS] = all_ns
            row[ELAPSED_NS] = all_ns + row[WAIT_NS]

    def _report_lines(self, lines: OutsideLines) -> None:
        """Write the lines with most of the time to the shared memory, as JSON."""
        self._lines = None
        rows = line_rows(lines.occurrences, trainer="", entry=WORKERS)
        # Leave out the functions in which the worker's own loop runs. A forked worker starts inside
        # of the call that has created the iterator, so these include functions of the user, such as
        # `train`, which has called `iter(loader)`.
        base = {(file, name) for file, name, _ in lines.occurrences[0].loops}
        named = [row for row in rows if row.file and (row.file, row.function) not in base]
        found = [
            (row.function, row.file, row.line, row.last_line, row.ms) for row in named[:_MAX_LINES]
        ]
        while len(text := json.dumps(found).encode()) >= len(self._shared_lines):
            found.pop()
        # Overwrite all of the text of an earlier worker.
        self._shared_lines[:] = text.ljust(len(self._shared_lines), b"\0")


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
        with contextlib.suppress(TypeError):  # A key that is no number, such as a name.
            return operator.index(index)
        return -1


def _run_delay_ns() -> int:
    """Return how long this thread has waited for a core; 0 if unknown."""
    times = core_times(get_native_id())
    return 0 if times is None else times[1]


def _checksum(batch: Any) -> int:
    """Return a checksum of the tensors of a batch; 0 if all of them are constant."""
    checksum = 0
    for tensor in _tensors_of(batch):
        with contextlib.suppress(Exception):  # A sparse tensor, for example, has no view.
            data = tensor.detach().cpu().contiguous().view(-1)[: 1 << 16]
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


# Times of the workers, in the main process


class LoaderWorkers(TimedLoader):
    """Times of the workers of a loader, for the main process.

    The stages are the dataset and `collate_fn`.
    """

    def __init__(
        self,
        num_workers: int,
        *stages: LoaderStage,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(num_workers, *stages)
        self._now_ns = now_ns
        self._times = torch.zeros((num_workers, FIELDS), dtype=torch.int64).share_memory_()
        self._lines = torch.zeros((num_workers, _MAX_LINE_BYTES), dtype=torch.uint8).share_memory_()
        self._looks = 0  # Number of times that a busy worker was looked at.
        self._locked = 0  # Number of times that it was waiting for a lock.
        self._pin_ns = self._pinned = 0  # Time and number of the copies to pinned memory.

    def init(self, user_init: Callable[[int], object] | None) -> Callable[[int], None]:
        return partial(_init_worker, self._times, self._lines, user_init, time.perf_counter_ns())

    @property
    def pin_ms(self) -> float | None:
        """Mean time to copy a batch to pinned memory (in milliseconds); None without a copy."""
        return self._pin_ns / self._pinned / 1e6 if self._pinned else None

    def timed_pin_loop(self, loop: Callable[..., None]) -> Callable[..., None]:
        """Wrap the main loop of a pin-memory thread, to time its copies.

        The thread takes a batch from a queue, copies it, and puts it into another queue. So the
        time between the two calls is the time of the copy. Each epoch has a new thread.
        """

        @wraps(loop)
        def timed_loop(batches: Any, pinned: Any, *args: Any, **kwargs: Any) -> None:
            start_ns = 0

            def get(*args: Any, **kwargs: Any) -> Any:
                nonlocal start_ns
                batch = batches.get(*args, **kwargs)
                start_ns = self._now_ns()
                return batch

            def put(*args: Any, **kwargs: Any) -> None:
                nonlocal start_ns
                if start_ns:  # It is 0 if the queue was full and the thread calls `put` again.
                    self._pin_ns += self._now_ns() - start_ns
                    self._pinned += 1
                    start_ns = 0
                pinned.put(*args, **kwargs)

            loop(SimpleNamespace(get=get), SimpleNamespace(put=put), *args, **kwargs)

        return timed_loop

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
        rows = self._times.tolist()
        used = [row for row in rows if row[BATCHES]]
        if not used:
            return None

        def total(column: int) -> int:
            return sum(row[column] for row in used)

        workers = []
        for i, row in enumerate(rows):
            n = row[BATCHES]
            newest_ns = [batch.end_ns - batch.start_ns for batch in _newest_batches(i, row)]
            dataset_ms, collate_ms, wait_ms = (
                row[column] / (n or 1) / 1e6 for column in (DATASET_NS, COLLATE_NS, WAIT_NS)
            )
            newest_ms = fmean(newest_ns) / 1e6 if newest_ns else 0.0
            workers.append(WorkerTimes(n, dataset_ms, collate_ms, wait_ms, newest_ms))
        observed_ns, elapsed_ns = total(OBSERVED_NS), total(ELAPSED_NS)
        busy_ns = total(DATASET_NS) + total(COLLATE_NS)
        slowest = max(range(len(rows)), key=lambda worker: rows[worker][MAX_NS])
        index = rows[slowest][SLOWEST_INDEX]
        checksums = {tuple(row[column] for column in CHECKSUMS) for row in used}
        dataset, collate = (stage.name for stage in self.stages)
        return LoaderTimes(
            dataset,
            collate,
            workers=tuple(workers),
            cpu_share=min(total(CPU_NS) / observed_ns, 1.0) if observed_ns else None,
            lock_share=self._locked / self._looks if self._looks >= _MIN_LOOKS else None,
            run_delay_share=min(total(RUN_DELAY_NS) / elapsed_ns, 1.0) if elapsed_ns else None,
            startup_s=total(STARTUP_NS) / max(total(STARTS), 1) / 1e9,
            starts=max(row[STARTS] for row in used),
            long_batches=total(LONG_BATCHES),
            long_share=total(LONG_NS) / busy_ns if busy_ns else 0.0,
            slowest_ms=rows[slowest][MAX_NS] / 1e6,
            slowest_worker=slowest,
            slowest_index=index if index >= 0 else None,
            # A checksum of 0 is unknown, so it does not show a repeat.
            repeats=len(used) > 1 and len(checksums) == 1 and all(next(iter(checksums))),
            pin_ms=self.pin_ms,
        )

    def lines(self) -> tuple[LineRow, ...]:
        """Return the lines that take the time of a batch, the longest first."""
        found = []
        for row in self._lines.numpy():
            with contextlib.suppress(ValueError):  # It is empty, or the worker is writing it.
                found.append(json.loads(bytes(row).rstrip(b"\0")))
        ms: dict[tuple[str, str, int, int], float] = {}  # Mean over the workers in `found`.
        for function, file, first, last, line_ms in (row for rows in found for row in rows):
            key = function, file, first, last
            ms[key] = ms.get(key, 0.0) + line_ms / len(found)
        rows = [
            LineRow(*line, phases={WORKERS: PhasePart(host_ms=line_ms)}, entry=WORKERS)
            for line, line_ms in ms.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.ms))

    def newest_batches(self) -> Iterator[MadeBatch]:
        for worker, row in enumerate(self._times.tolist()):
            yield from _newest_batches(worker, row)

    def culprits(self) -> Iterator[Culprit]:
        """Yield each stage with its time in all workers, and its share of the time of a batch."""
        times = self.times()
        if times is None:
            return
        n, batch_ms = times.batches, times.mean("batch_ms")
        for stage, name in zip(self.stages, ("dataset_ms", "collate_ms"), strict=True):
            ms = times.mean(name)
            share = ms / batch_ms if batch_ms else 0.0
            yield Culprit(FETCH, stage.name, n * ms / 1e3, n, share, stage.source, stage.kind)


def _newest_batches(worker: int, row: Sequence[int]) -> Iterator[MadeBatch]:
    """Yield the newest batches of a worker, from its row of shared memory."""
    for i in range(min(row[NEWEST], RING)):
        start = NEWEST + 1 + i * RING_FIELDS
        yield MadeBatch(worker, *row[start : start + RING_FIELDS])
