"""A DataLoader: where its time goes, and what shortens the wait for it.

`stages` times the stages of a loader, in the main process and in its workers. `advice` derives
advice and a table from these times. This module has the facts that both share: the code that takes
the time of an entry (`Culprit`), and the times of workers.

Culprits also name code that starts garbage collections and compilations. The ledger (`_ledger`)
names all other code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gputime._ledger import lines_in
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._messages import duration

SAMPLER, DATASET, COLLATE = STAGES = ("sampler", "dataset", "collate")
WORKERS = "workers"
"""Entry of lines that run in a loader's workers. Their times are those of a batch."""
GC_COLLECT = "gc.collect"
"""Name of the code that starts a garbage collection explicitly."""


@dataclass(frozen=True, slots=True)
class Source:
    """A range of lines of a function."""

    file: str  # Path.
    first_line: int
    last_line: int
    function: str = ""  # Qualified name; "<module>" outside of functions.

    def __str__(self) -> str:
        return lines_in(self.file, self.first_line, self.last_line)


@dataclass(frozen=True, slots=True)
class Culprit:
    """Code that takes the time of an entry."""

    entry: str  # Entry of the time breakdown.
    # Class or function, such as "Images.__getitem__"; empty for a line without a name.
    name: str
    seconds: float  # Time of all calls.
    calls: int  # Number of calls.
    share: float = 0.0  # Fraction of the time of all code of this entry, from 0 to 1.
    source: Source | None = None  # Place in the source; None if unknown.
    # "code", or a stage of a loader: "sampler", "dataset" or "collate".
    kind: str = "code"
    # Number of iterators of the loader that the loop left before their end; 0 for other code.
    abandoned: int = 0

    def __str__(self) -> str:
        """Return the code, such as "`Images.__getitem__` (data.py:12)"."""
        name = self.name or (self.source.function if self.source is not None else "")
        if self.source is None or "-packages" in self.source.file:
            return f"`{name}`"
        return f"`{name}` ({self.source})" if name != "<module>" else f"`{self.source}`"


class MadeBatch(NamedTuple):
    """A batch that a worker has made."""

    worker: int  # Number of the worker.
    start_ns: int  # Host time.
    end_ns: int
    collate_ns: int  # Time in `collate_fn`.
    slowest_index: int  # Index of the slowest sample in the batch; -1 if unknown.

    def __str__(self) -> str:
        batch_ns = self.end_ns - self.start_ns
        detail = "" if self.slowest_index < 0 else f", slowest sample {self.slowest_index:,}"
        if self.collate_ns > 0.5 * batch_ns:
            detail = ", most of it in collate_fn"
        return f"worker {self.worker} took {duration(batch_ns / 1e6)} for a batch{detail}"


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Times of one worker of a loader (in milliseconds per batch)."""

    batches: int  # Number of batches that it made.
    dataset_ms: float  # In the dataset: `dataset[i]`, `__getitems__` or the iterator's `next`.
    collate_ms: float  # In `collate_fn`.
    wait_ms: float  # Idle, between two batches.
    newest_ms: float = 0.0  # To make a batch: mean over its newest batches (at most 32).

    @property
    def batch_ms(self) -> float:
        """Time to make a batch: mean over all its batches (in milliseconds)."""
        return self.dataset_ms + self.collate_ms


@dataclass(frozen=True, slots=True)
class LoaderTimes:
    """Times of the workers of a DataLoader."""

    dataset: str  # Name of the dataset's class and method.
    collate: str  # Name of the collate function.
    workers: tuple[WorkerTimes, ...]  # By number. A worker without a batch has zeros.
    cpu_share: float | None  # Fraction of the time to make a batch on a CPU core; None if unknown.
    lock_share: float | None  # Fraction of this time waiting for a lock; None if unknown.
    # Fraction of all time, idle or not, in which a worker was ready to run while no core was free.
    run_delay_share: float | None
    startup_s: float  # Mean time from the start of a loop to the end of a worker's first batch.
    starts: int  # Number of times that the loader's workers were started.
    long_batches: int  # Number of batches that took more than 4 times the mean of their worker.
    long_share: float  # Fraction of the time to make all batches that the long batches took.
    slowest_ms: float  # Time to make the slowest batch.
    slowest_worker: int  # Number of the worker that made the slowest batch.
    slowest_index: int | None  # Index of the slowest sample in that batch; None if unknown.
    repeats: bool  # All workers yield the same batches: an IterableDataset that is not sharded.
    pin_ms: float | None = None  # Time of the pin-memory thread per batch; None if unknown.

    @property
    def batches(self) -> int:
        """Number of batches that the workers made."""
        return sum(worker.batches for worker in self.workers)

    def mean(self, name: str) -> float:
        """Return the mean of an attribute of `WorkerTimes` over all batches (in milliseconds)."""
        total = sum(worker.batches * getattr(worker, name) for worker in self.workers)
        return float(total / self.batches)


@dataclass(frozen=True, slots=True)
class LoaderStage:
    """Stage of a loader, which its iterator runs for each batch."""

    kind: str  # "sampler", "dataset" or "collate".
    name: str  # Class or function that the stage calls.
    source: Source | None = None  # Its definition; None if unknown.


class TimedLoader:
    """Stages of a loader, and their times. Only loaders with workers have more than `culprits`."""

    def __init__(self, num_workers: int, *stages: LoaderStage) -> None:
        self.num_workers, self.stages = num_workers, stages

    def culprits(self) -> Iterator[Culprit]:
        raise NotImplementedError

    def look(self) -> None:
        """Observe the workers for a moment."""

    def times(self) -> LoaderTimes | None:
        return None

    def newest_batches(self) -> Iterator[MadeBatch]:
        return iter(())

    def lines(self) -> tuple[LineRow, ...]:
        """Return the lines that take the time of a batch, the longest first."""
        return ()


class CulpritSums:
    """Stages of all loaders, and code by entry.

    Other threads only add garbage collections that they start, which never run at the same time.
    """

    def __init__(self) -> None:
        # Time (in nanoseconds) and number of calls, by entry, name and place.
        self._codes: dict[tuple[str, str, Source | None], list[int]] = {}
        self.loaders: list[TimedLoader] = []

    def add_loader(self, loader: TimedLoader) -> TimedLoader:
        """Return the object to add times to: `loader`, or an equal loader that was added before."""
        for known in self.loaders:
            if (known.num_workers, known.stages) == (loader.num_workers, loader.stages):
                return known
        self.loaders.append(loader)
        return loader

    def loader_times(self) -> tuple[LoaderTimes, ...]:
        all_times = (loader.times() for loader in self.loaders)
        return tuple(times for times in all_times if times is not None)

    def add(self, entry: str, name: str, ns: int, source: Source | None) -> None:
        """Add code that took `ns` nanoseconds."""
        key = entry, name, source
        if key in self._codes or len(self._codes) < 100:  # To limit memory.
            sums = self._codes.setdefault(key, [0, 0])
            sums[0] += ns
            sums[1] += 1

    def summary(self) -> tuple[Culprit, ...]:
        """Return all culprits, grouped by entry, the longest first."""
        codes = [*self._codes.items()]
        entries_ns: dict[str, int] = {}
        for (entry, _, _), (ns, _) in codes:
            entries_ns[entry] = entries_ns.get(entry, 0) + ns
        culprits = [
            Culprit(entry, name, ns / 1e9, calls, ns / entries_ns[entry], source)
            for (entry, name, source), (ns, calls) in codes
        ]
        culprits += [culprit for loader in self.loaders for culprit in loader.culprits()]
        return tuple(sorted(culprits, key=lambda culprit: (culprit.entry, -culprit.seconds)))


def of_entry(culprits: Sequence[Culprit], entry: str) -> list[Culprit]:
    """Return the culprits of an entry, the longest first."""
    found = [culprit for culprit in culprits if culprit.entry == entry]
    return sorted(found, key=lambda culprit: -culprit.seconds)


def describe_slowdown(loaders: Sequence[LoaderTimes]) -> str:
    """Describe the slowest worker of those that have slowed down; empty if no worker has.

    If all workers have slowed down, do not name it.
    """
    workers = [
        (number, worker)
        for loader in loaders
        for number, worker in enumerate(loader.workers)
        if worker.batches
    ]
    slower = [each for each in workers if each[1].newest_ms >= 1.25 * each[1].batch_ms]
    if not slower:
        return ""
    number, slowest = max(slower, key=lambda numbered: numbered[1].newest_ms)
    is_all = len(slower) == len(workers)
    subject = "all workers now take up to" if is_all else f"worker {number} now takes"
    newest, mean = duration(slowest.newest_ms), duration(slowest.batch_ms)
    return f"{subject} {newest} per batch, compared with {mean} on average"
