"""A DataLoader: where its time goes, and what shortens the wait for it.

`stages` times the stages of a loader, in the main process and in its workers. `advice` derives
advice and a table from these times. This module has the facts that both share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gputime._messages import duration


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
