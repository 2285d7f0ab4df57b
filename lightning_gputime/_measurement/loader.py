"""Times of a DataLoader's workers, and their layout in shared memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lightning_gputime._measurement.units import duration

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
CHECKSUMS = range(16, 19)
"""Columns of checksums of the first batches; 0 if unknown."""
NEWEST = 19
"""Column of the number of batches written to the ring buffer, whose columns follow."""
RING, RING_FIELDS = 32, 4
"""Size of the ring buffer of a worker's newest batches, and number of fields per batch: the fields
of `MadeBatch` after the worker, in order."""
FIELDS = NEWEST + 1 + RING * RING_FIELDS
"""Number of columns."""
_SLOWED_DOWN = 1.25  # A worker slows down if its newest batches take this multiple of its mean.
_MIN_LOOKS = 8  # Minimum number of reads of /proc to estimate waits for locks.


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


def newest_batches(rows: Sequence[Sequence[int]]) -> Iterator[MadeBatch]:
    """Yield the newest batches of each worker, from their rows of shared memory."""
    for worker, row in enumerate(rows):
        for i in range(min(row[NEWEST], RING)):
            start = NEWEST + 1 + i * RING_FIELDS
            yield MadeBatch(worker, *row[start : start + RING_FIELDS])


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Times of one worker of a loader (in milliseconds per batch)."""

    batches: int  # Number of batches that it made.
    dataset_ms: float  # In the dataset: `dataset[i]`, `__getitems__` or the iterator's `next`.
    collate_ms: float  # In `collate_fn`.
    wait_ms: float  # Idle, between two batches.
    newest_ms: float = 0.0  # To make a batch: mean over its newest batches (at most 32).

    @property
    def busy_ms(self) -> float:
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


def describe_slowdown(loaders: Sequence[LoaderTimes]) -> str:
    """Describe the slowest worker of those that have slowed down; empty if no worker has.

    If all workers have slowed down, do not name it.
    """
    workers = [worker for loader in loaders for worker in enumerate(loader.workers)]
    slower = [
        (number, worker)
        for number, worker in workers
        if worker.batches and worker.newest_ms >= _SLOWED_DOWN * worker.busy_ms
    ]
    if not slower:
        return ""
    number, slowest = max(slower, key=lambda numbered: numbered[1].newest_ms)
    is_all = len(slower) == len(workers)
    subject = "all workers now take up to" if is_all else f"worker {number} now takes"
    newest, mean = duration(slowest.newest_ms), duration(slowest.busy_ms)
    return f"{subject} {newest} per batch, compared with {mean} on average"


def _worker_times(row: Sequence[int]) -> WorkerTimes:
    if not row[BATCHES]:
        return WorkerTimes(batches=0, dataset_ms=0.0, collate_ms=0.0, wait_ms=0.0)
    dataset_ms, collate_ms, wait_ms = (
        row[column] / row[BATCHES] / 1e6 for column in (DATASET_NS, COLLATE_NS, WAIT_NS)
    )
    newest_ns = [batch.end_ns - batch.start_ns for batch in newest_batches([row])]
    newest_ms = fmean(newest_ns) / 1e6 if newest_ns else 0.0
    return WorkerTimes(int(row[BATCHES]), dataset_ms, collate_ms, wait_ms, newest_ms)


def loader_times(
    rows: Sequence[Sequence[int]],
    dataset: str,
    collate: str,
    looks: tuple[int, int],
    pin_ms: float | None = None,
) -> LoaderTimes | None:
    """Return the times of a loader's workers; None if they made no batch.

    Args:
        rows: The workers' rows of shared memory.
        dataset: Name of the dataset's class and method.
        collate: Name of the collate function.
        looks: Number of reads of /proc while a worker made a batch, and number of these reads that
            found the worker waiting for a lock.
        pin_ms: Time of the pin-memory thread per batch (in milliseconds); None if unknown.
    """
    used = [row for row in rows if row[BATCHES]]
    if not used:
        return None

    def total(column: int) -> int:
        return sum(row[column] for row in used)

    observed_ns, elapsed_ns = total(OBSERVED_NS), total(ELAPSED_NS)
    busy_ns = total(DATASET_NS) + total(COLLATE_NS)
    slowest = max(range(len(rows)), key=lambda worker: rows[worker][MAX_NS])
    index = int(rows[slowest][SLOWEST_INDEX])
    checksums = {tuple(row[column] for column in CHECKSUMS) for row in used}
    busy_looks, locked_looks = looks
    return LoaderTimes(
        dataset,
        collate,
        workers=tuple(map(_worker_times, rows)),
        cpu_share=min(total(CPU_NS) / observed_ns, 1.0) if observed_ns else None,
        lock_share=locked_looks / busy_looks if busy_looks >= _MIN_LOOKS else None,
        run_delay_share=min(total(RUN_DELAY_NS) / elapsed_ns, 1.0) if elapsed_ns else None,
        startup_s=total(STARTUP_NS) / max(total(STARTS), 1) / 1e9,
        starts=max(row[STARTS] for row in used),
        long_batches=int(total(LONG_BATCHES)),
        long_share=total(LONG_NS) / busy_ns if busy_ns else 0.0,
        slowest_ms=rows[slowest][MAX_NS] / 1e6,
        slowest_worker=slowest,
        slowest_index=index if index >= 0 else None,
        # A checksum of 0 is unknown, so it does not show a repeat.
        repeats=len(used) > 1 and len(checksums) == 1 and all(next(iter(checksums))),
        pin_ms=pin_ms,
    )
