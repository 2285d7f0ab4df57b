"""Culprits: code that takes the time of an entry, summed by name and by place in the source.

An entry is a phase, or an entry of the wall clock.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from lightning_gputime._measurement.loader import LoaderTimes, MadeBatch
from lightning_gputime._phases import FETCH

CALL, PLACE, BLOCKING = "call", "place", "blocking"
SAMPLER, DATASET, COLLATE = STAGES = ("sampler", "dataset", "collate")
GC_COLLECT = "gc.collect"
"""Name of the code that starts a garbage collection explicitly."""
WITHOUT_GRAD = "without gradients"
"""Name of code in a training step that calls the model with gradients disabled."""
UNKNOWN_PHASE = ""
"""Entry of a call that waits for the GPU in an untimed step."""
BLOCKING_STEPS = 3
"""Number of steps in which calls that wait for the GPU are recorded."""
MAX_CULPRITS = 100
"""Maximum number of names and places per entry, to limit memory. All further code is summed without
a name."""


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

    entry: str  # Phase, or entry of the wall clock.
    # Hook, class or function, such as "Corpus.on_after_batch_transfer"; empty for a place without a
    # name.
    name: str
    seconds: float  # Time of all calls.
    calls: int  # Number of calls, or of passes through a place.
    # Time of all places, or of all stages of the loader, while they were observed (in seconds). It
    # includes `seconds`. None for other kinds, which are not sampled.
    observed_s: float | None = None
    source: Source | None = None  # Place in the source; None if unknown.
    caller: str = ""  # Name of the culprit that makes these calls; empty if none.
    # "call" of a function, "place" in a step or between loops, "blocking" for a line that waits for
    # the GPU, or a stage of a loader: "sampler", "dataset" or "collate".
    kind: str = CALL
    # Number of iterators of the loader that the loop left before their end; 0 for other code.
    abandoned: int = 0


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

    def culprits(self) -> Iterator[Culprit]:
        """Yield the code of each stage, with its time."""


@runtime_checkable
class TimedWorkers(TimedLoader, Protocol):
    """Stages of a loader that run in its workers, and their times."""

    def look(self) -> None:
        """Sample whether workers wait for a lock."""

    def times(self) -> LoaderTimes | None:
        """Return the times of the workers; None before the first batch."""

    def newest_batches(self) -> Iterator[MadeBatch]:
        """Yield the newest batches of the workers."""


Loader = TypeVar("Loader", bound=TimedLoader)


class LoaderStages:
    """Stages of a loader that run in the main process, and sums of their times."""

    num_workers = 0

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages
        self._ns = [0] * len(stages)  # Time of each stage.
        self._batches = 0
        self._iterators = 0  # Number of started iterators.
        self._exhausted = 0  # Number of iterators that have yielded their last batch.

    def start_iterator(self) -> None:
        """Count a new iterator of the loader."""
        self._iterators += 1

    def end_iterator(self) -> None:
        """Count an iterator that has yielded its last batch."""
        self._exhausted += 1

    def add(self, *ns: int) -> None:
        """Add the time of each stage for a batch (in nanoseconds), in the order of `stages`."""
        self._batches += 1
        for i, stage_ns in enumerate(ns):
            self._ns[i] += stage_ns

    def culprits(self) -> Iterator[Culprit]:
        if not self._batches:
            return
        all_ns = sum(self._ns)
        for stage, ns in zip(self.stages, self._ns, strict=True):
            yield Culprit(
                FETCH,
                stage.name,
                seconds=ns / 1e9,
                calls=self._batches,
                observed_s=all_ns / 1e9,
                source=stage.source,
                kind=stage.kind,
                abandoned=self._iterators - self._exhausted,
            )


def short_name(qualified: str) -> str:
    """Return a qualified name without its enclosing functions."""
    return qualified.rpartition("<locals>.")[2]


class Place(Protocol):
    """Place in the code. Its lines are looked up only on request, which takes milliseconds."""

    def source(self) -> Source | None:
        """Return the lines; None if they are unknown."""


# Entry, name, kind, place and caller of code.
_Key = tuple[str, str, str, Source | Place | None, str]
_KeyWithSource = tuple[str, str, str, Source | None, str]


class CulpritSums:
    """Time of named calls and places, summed by entry. Only the training thread adds to it."""

    def __init__(self) -> None:
        self._sums: dict[_Key, list[int]] = {}  # Time (in nanoseconds) and number of calls.
        self._n_keys: Counter[str] = Counter()  # Number of keys by entry.
        self._loaders: list[TimedLoader] = []
        self.workers: list[TimedWorkers] = []

    def __getstate__(self) -> dict[str, Any]:
        # Places refer to code, which cannot be pickled.
        return {**self.__dict__, "_sums": self._sums_by_source()}

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
        """Return the newest batches of all workers."""
        return [batch for workers in self.workers for batch in workers.newest_batches()]

    def loaders(self) -> tuple[LoaderTimes, ...]:
        """Return the times of the workers of each loader."""
        all_times = (workers.times() for workers in self.workers)
        return tuple(times for times in all_times if times is not None)

    def add(
        self,
        entry: str,
        name: str,
        ns: int,
        *,
        source: Source | Place | None = None,
        caller: str = "",
        kind: str = CALL,
        calls: int = 1,
    ) -> None:
        """Add a call of `name`, or a pass through a place, that took `ns` nanoseconds.

        With `calls=0`, the time belongs to a call that was added before.
        """
        key = entry, name, kind, source, caller
        found = self._sums.get(key)
        if found is None:
            self._n_keys[entry] += 1
            if self._n_keys[entry] > MAX_CULPRITS:
                key = entry, "", PLACE, None, ""
            found = self._sums.setdefault(key, [0, 0])
        found[0] += ns
        found[1] += calls

    def _sums_by_source(self) -> dict[_KeyWithSource, list[int]]:
        """Look up the lines of places, and return the sums by these lines."""
        sums: dict[_KeyWithSource, list[int]] = {}
        for (entry, name, kind, place, caller), (ns, calls) in [*self._sums.items()]:
            source = place if place is None or isinstance(place, Source) else place.source()
            found = sums.setdefault((entry, name, kind, source, caller), [0, 0])
            found[0] += ns
            found[1] += calls
        return sums

    def summary(self) -> tuple[Culprit, ...]:
        """Return all culprits, grouped by entry, the longest first."""
        sums = self._sums_by_source()
        observed_s: dict[str, float] = {}
        for (entry, _, kind, _, _), (ns, _) in sums.items():
            if kind == PLACE:
                observed_s[entry] = observed_s.get(entry, 0.0) + ns / 1e9
        culprits = [
            Culprit(
                entry,
                name,
                seconds=ns / 1e9,
                calls=calls,
                observed_s=observed_s[entry] if kind == PLACE else None,
                source=source,
                caller=caller,
                kind=kind,
            )
            for (entry, name, kind, source, caller), (ns, calls) in sums.items()
            # A place without a source has nothing to show.
            if source is not None or kind not in (PLACE, BLOCKING)
        ]
        culprits += [culprit for loader in self._loaders for culprit in loader.culprits()]
        return tuple(sorted(culprits, key=lambda culprit: (culprit.entry, -culprit.seconds)))


def of_entry(culprits: Sequence[Culprit], entry: str) -> list[Culprit]:
    """Return the culprits of an entry, the longest first."""
    found = [culprit for culprit in culprits if culprit.entry == entry]
    return sorted(found, key=lambda culprit: -culprit.seconds)
