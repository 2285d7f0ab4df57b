"""Culprits: stages of loaders, and code that starts garbage collections and compilations.

The ledger (`_ledger`) names all other code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gputime._ledger.places import lines_in
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._loader import LoaderTimes, MadeBatch

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
