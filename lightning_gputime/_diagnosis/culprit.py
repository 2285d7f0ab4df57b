"""Code that takes most of the time of an entry."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_gputime._diagnosis.codes import COMPILATIONS, HOOKS
from lightning_gputime._measurement.culprits import (
    BLOCKING,
    CALL,
    PLACE,
    STAGES,
    Culprit,
    Source,
    of_entry,
)
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._measurement.wall_clock import BETWEEN_LOOPS, TEAR_DOWN
from lightning_gputime._phases import CALLBACKS, DATA, FETCH, OTHER, SAVES, of_one_callback

_MIN_SHARE = 0.4  # Minimum fraction of an entry that a culprit takes.
_MIN_SHARE_INSIDE = 0.7  # An inner call that takes this fraction of the outer call replaces it.
_MIN_SHARE_NEXT_TO_PLACE = 0.2  # Minimum fraction of an entry for a call inside a place.
_MIN_SHARE_OF_OTHER = 0.05  # Minimum fraction of the step at which parts of `other` are reported.
_MIN_KNOWN_OF_OTHER = 0.95  # Fraction of `other` that its known parts must cover.
_MAX_BLOCKING = 3  # Maximum number of reported lines that wait for the GPU.
_MIN_STEPS = 0.5  # Calls in a smaller fraction of the steps are described by their total time.
_ENTRIES = {HOOKS: (DATA,), TEAR_DOWN: (TEAR_DOWN, BETWEEN_LOOPS)}
"""Names under which the culprits of an entry are recorded, if they differ from its name."""


@dataclass(frozen=True, slots=True)
class EntryCulprit:
    """Code that takes the time of an entry of the time breakdown.

    Attributes:
        name: Hook, class or function, such as "Corpus.on_after_batch_transfer"; empty if it has no
            name.
        kind: "call", "place", or a stage of a loader: "sampler", "dataset" or "collate".
        share: Fraction of the entry's time, from 0 to 1.
        seconds: Time of all calls, or of the observed passes through a place (in seconds).
        calls: Number of calls.
        file: Path of the source file; empty if unknown.
        line: First line; 0 if unknown.
        last_line: Last line; 0 if unknown.
        function: Function around the lines; empty if unknown.
        caller: Name of the enclosing call; may be empty.
    """

    name: str
    kind: str
    share: float
    seconds: float
    calls: int
    file: str = ""
    line: int = 0
    last_line: int = 0
    function: str = ""
    caller: str = ""

    @property
    def where(self) -> str:
        """Lines, such as "train.py:63-70"; empty if unknown."""
        return str(Source(self.file, self.line, self.last_line)) if self.file else ""

    def __str__(self) -> str:
        if self.kind not in (PLACE, BLOCKING) or self.name.endswith(".step"):
            name, part = f"`{self.name}`", ""
        else:
            name, part = f"`{self.function}`" if self.function != "<module>" else "", self.name
        where = ", ".join(filter(None, (self.where, part)))
        is_call = self.kind not in (PLACE, BLOCKING)
        caller = f" in `{self.caller}`" if self.caller and is_call else ""
        if not name:
            return where
        return (f"{name} ({where})" if where else name) + caller


def culprits_of(entry: str, seconds: float, m: Measurement) -> tuple[EntryCulprit, ...]:
    """Return the code that takes the time of an entry: the culprit first, then code inside it.

    Empty if no known code takes 40 % of the entry.

    Args:
        entry: Name of the entry.
        seconds: Time of the entry (in seconds).
        m: Measurement of the run.
    """
    names = _ENTRIES.get(entry, (entry,))
    found = [culprit for name in names for culprit in of_entry(m.culprits, name)]
    if entry in (DATA, FETCH):
        stages = [culprit for culprit in of_entry(m.culprits, FETCH) if culprit.kind in STAGES]
        if stages:
            return _first(map(_of_part, stages))
    calls = [*_calls(found, seconds), *_callbacks(entry, seconds, m)]
    if best := _first(calls):
        return best
    places = [_of_part(culprit) for culprit in found if culprit.kind == PLACE and culprit.source]
    if entry in (BETWEEN_LOOPS, TEAR_DOWN):
        places = [_of_entry(culprit, seconds) for culprit in found if culprit.kind == PLACE]
    elif entry == COMPILATIONS:
        # Code that was compiled once is not a recompilation.
        places = [place for place in places if place.calls > 1]
    inside = [culprit for culprit in calls if culprit.share >= _MIN_SHARE_NEXT_TO_PLACE]
    return _first(places, inside)


def parts_of_other(m: Measurement) -> str:
    """Return a sentence about the parts of `other`; empty if `other` is short or not split."""
    shares: dict[str, float] = {}
    for culprit in of_entry(m.culprits, OTHER):
        if culprit.kind == PLACE and culprit.name and culprit.observed_s:
            share = culprit.seconds / culprit.observed_s
            shares[culprit.name] = shares.get(culprit.name, 0.0) + share
    is_known = sum(shares.values()) >= _MIN_KNOWN_OF_OTHER
    if len(shares) < 2 or not is_known or m.share(OTHER) < _MIN_SHARE_OF_OTHER:
        return ""
    parts = [f"{percent(share)} {name}" for name, share in shares.items()]
    return f"`other` is about {' and '.join(parts)}, as measured in a few steps"


def blocking_calls(phases: Sequence[str], m: Measurement) -> list[EntryCulprit]:
    """Return up to 3 lines that wait for the GPU in some phases, the most frequent first.

    Their `caller` is the phase.
    """
    tops = {phase.partition("/")[0] for phase in phases}
    found = [
        replace(_entry_culprit(culprit, 0.0), caller=culprit.entry)
        for culprit in m.culprits
        if culprit.kind == BLOCKING and culprit.entry.partition("/")[0] in {*tops, ""}
    ]
    lines = [culprit for culprit in found if culprit.file]
    return sorted(lines, key=lambda culprit: -culprit.calls)[:_MAX_BLOCKING]


def _first(
    culprits: Iterable[EntryCulprit],
    inside: Sequence[EntryCulprit] = (),
) -> tuple[EntryCulprit, ...]:
    best = max(culprits, key=lambda culprit: culprit.share, default=None)
    return () if best is None or best.share < _MIN_SHARE else (best, *inside[:1])


def _calls(found: Sequence[Culprit], seconds: float) -> Iterator[EntryCulprit]:
    """Yield the outermost calls, or the inner calls that take at least 70 % of their time."""
    calls = [culprit for culprit in found if culprit.kind == CALL]
    names = {culprit.name for culprit in calls}
    for call in calls:
        if call.caller in names:
            continue
        inner, known = call, {call.name}
        while inside := [
            culprit
            for culprit in calls
            if culprit.caller == inner.name
            and culprit.name not in known
            and culprit.seconds >= _MIN_SHARE_INSIDE * inner.seconds
        ]:
            inner = inside[0]
            known.add(inner.name)
        yield _of_entry(inner, seconds)


def _callbacks(entry: str, seconds: float, m: Measurement) -> Iterator[EntryCulprit]:
    """Yield the callback hooks that are timed as sub-phases of `callbacks`."""
    total = m.share(CALLBACKS)
    if entry != CALLBACKS or not total > 0:
        return
    for name, row in m.rows.items():
        if name != SAVES and of_one_callback(name):
            share = row.share / total
            yield EntryCulprit(of_one_callback(name), CALL, share, share * seconds, row.n)


def _of_part(culprit: Culprit) -> EntryCulprit:
    observed_s = culprit.observed_s or culprit.seconds
    return _entry_culprit(culprit, culprit.seconds / observed_s if observed_s else 0.0)


def _of_entry(culprit: Culprit, seconds: float) -> EntryCulprit:
    return _entry_culprit(culprit, min(culprit.seconds / seconds, 1.0) if seconds else 0.0)


def _entry_culprit(culprit: Culprit, share: float) -> EntryCulprit:
    source = culprit.source
    # The user cannot change lines of an installed library.
    if source is None or "-packages" in source.file:
        where: tuple[str, int, int, str] = "", 0, 0, ""
    else:
        where = source.file, source.first_line, source.last_line, source.function
    name, kind = culprit.name, culprit.kind
    return EntryCulprit(
        name, kind, share, culprit.seconds, culprit.calls, *where, caller=culprit.caller
    )


def takes(culprit: EntryCulprit, entry: str, seconds: float, m: Measurement) -> str:
    """Return the time of a culprit, such as "2.5 ms of 7.1 ms per step" or "0.9 s in 3 calls".

    Args:
        culprit: The culprit.
        entry: Name of its entry, which must be inside steps.
        seconds: Time of that entry (in seconds).
        m: Measurement of the run.
    """
    steps, step_ms = m.steps + m.untimed_steps + m.warmup_steps, m.step.mean_ms
    if culprit.kind == CALL and culprit.calls < _MIN_STEPS * (m.steps + m.untimed_steps):
        return total(culprit)
    entry_ms = m.share(entry) * step_ms if entry in m.rows else 1e3 * seconds / max(steps, 1)
    return f"{duration(culprit.share * entry_ms)} of {duration(step_ms)} per step"


def total(culprit: EntryCulprit) -> str:
    """Return the time of all calls, such as "0.9 s in 3 calls"."""
    n = culprit.calls
    return f"{duration(1e3 * culprit.seconds)} in {n} call{'s' * (n != 1)}"
