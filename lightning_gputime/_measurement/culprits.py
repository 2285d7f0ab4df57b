"""Culprits: stages of loaders, and code that starts garbage collections and compilations.

The ledger (`_ledger`) names all other code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.loader import LoaderTimes, MadeBatch
from lightning_gputime._phases import FETCH

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
        last = f"-{self.last_line}" if self.last_line > self.first_line else ""
        path = Path(self.file)
        # The cell of a notebook is a file such as /tmp/ipykernel_71/3747189239.py.
        name = "cell" if path.parent.name.startswith("ipykernel_") else path.name
        return f"{name}:{self.first_line}{last}"


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


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a loader."""

    kind: str  # "sampler", "dataset" or "collate".
    name: str  # Class or function that the stage calls.
    source: Source | None = None  # Its definition; None if unknown.


class TimedLoader(Protocol):
    """Stages of a loader, and their times."""

    num_workers: int
    stages: tuple[Stage, ...]

    def culprits(self) -> Iterator[Culprit]: ...


@runtime_checkable
class TimedWorkers(TimedLoader, Protocol):
    """Stages of a loader that run in its workers, and their times."""

    def look(self) -> None: ...

    def times(self) -> LoaderTimes | None: ...

    def newest_batches(self) -> Iterator[MadeBatch]: ...

    def lines(self) -> tuple[LineRow, ...]: ...


Loader = TypeVar("Loader", bound=TimedLoader)


class LoaderStages:
    """Stages of a loader that run in the main process, and sums of their times."""

    num_workers = 0

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages
        self._ns = [0] * len(stages)  # Time of each stage.
        self._batches = 0
        self.iterators = 0
        """Number of started iterators of the loader."""
        self.exhausted = 0
        """Number of iterators that have yielded their last batch."""

    def add(self, *ns: int) -> None:
        """Add the time of each stage for a batch (in nanoseconds), in the order of `stages`."""
        self._batches += 1
        for i, stage_ns in enumerate(ns):
            self._ns[i] += stage_ns

    def culprits(self) -> Iterator[Culprit]:
        n, all_ns, abandoned = self._batches, sum(self._ns), self.iterators - self.exhausted
        for stage, ns in zip(self.stages, self._ns, strict=True) if n else ():
            seconds, share = ns / 1e9, ns / (all_ns or 1)
            yield Culprit(FETCH, stage.name, seconds, n, share, stage.source, stage.kind, abandoned)


def short_name(qualified: str) -> str:
    """Return a qualified name without its enclosing functions."""
    return qualified.rpartition("<locals>.")[2]


class CulpritSums:
    """Stages of all loaders, and code by entry. Only the training thread adds to it."""

    def __init__(self) -> None:
        # Time (in nanoseconds) and number of calls, by entry, name and place.
        self._codes: dict[tuple[str, str, Source | None], list[int]] = {}
        self._loaders: list[TimedLoader] = []
        self.workers: list[TimedWorkers] = []

    def add_loader(self, loader: Loader) -> Loader:
        """Return the object to add times to: `loader`, or an equal loader that was added before."""
        for known in self._loaders:
            if (known.num_workers, known.stages) == (loader.num_workers, loader.stages):
                return cast("Loader", known)
        self._loaders.append(loader)
        if isinstance(loader, TimedWorkers):
            self.workers.append(loader)
        return loader

    def newest_batches(self) -> list[MadeBatch]:
        return [batch for workers in self.workers for batch in workers.newest_batches()]

    def loaders(self) -> tuple[LoaderTimes, ...]:
        all_times = (workers.times() for workers in self.workers)
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
        culprits += [culprit for loader in self._loaders for culprit in loader.culprits()]
        return tuple(sorted(culprits, key=lambda culprit: (culprit.entry, -culprit.seconds)))


def of_entry(culprits: Sequence[Culprit], entry: str) -> list[Culprit]:
    """Return the culprits of an entry, the longest first."""
    found = [culprit for culprit in culprits if culprit.entry == entry]
    return sorted(found, key=lambda culprit: -culprit.seconds)
