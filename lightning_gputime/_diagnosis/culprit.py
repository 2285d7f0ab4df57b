"""Code that takes most of the time of an entry."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_gputime._diagnosis.codes import COMPILATIONS, TRANSFER_HOOKS
from lightning_gputime._measurement.culprits import (
    BLOCKING,
    CALL,
    PLACE,
    STAGES,
    UNKNOWN_PHASE,
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
_MIN_SHARE_INSIDE_PLACE = 0.2  # Minimum fraction of an entry for a call inside a place.
_MIN_SHARE_OF_OTHER = 0.05  # Minimum fraction of the step for a report of the parts of `other`.
_MIN_KNOWN_OF_OTHER = 0.95  # Minimum fraction of `other` that these parts cover.
_MAX_BLOCKING = 3  # Maximum number of reported lines that wait for the GPU.
_ENTRIES = {TRANSFER_HOOKS: (DATA,), TEAR_DOWN: (TEAR_DOWN, BETWEEN_LOOPS)}
"""Names under which the culprits of an entry are recorded, if they differ from its name."""


@dataclass(frozen=True, slots=True)
class EntryCulprit:
    """Code that takes the time of an entry of the time breakdown.

    Attributes:
        name: Hook, class or function, such as "Corpus.on_after_batch_transfer"; empty if it has no
            name.
        kind: "call", "place", "blocking" for a line that waits for the GPU, or a stage of a loader:
            "sampler", "dataset" or "collate".
        share: Fraction of the entry's time, from 0 to 1.
        seconds: Time of all calls, or of the observed passes through a place (in seconds).
        calls: Number of calls.
        file: Path of the source file; empty if unknown.
        line: First line; 0 if unknown.
        last_line: Last line; 0 if unknown.
        function: Function around the lines; empty if unknown.
        caller: Name of the enclosing call; of a blocking line, its phase; may be empty.
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
        is_update = self.name.endswith(".step")  # A place that is named "Adam.step", for example.
        if self.kind not in (PLACE, BLOCKING) or is_update:
            code, details = f"`{self.name}`", self.where
        elif self.function == "<module>":
            # The name is a part of `other`, such as "before forward".
            code, details = self.where, self.name
        else:
            code, details = f"`{self.function}`", ", ".join(filter(None, (self.where, self.name)))
        text = f"{code} ({details})" if code and details else code or details
        # The caller of a blocking line is its phase, which is reported elsewhere.
        return f"{text} in `{self.caller}`" if self.caller and self.kind != BLOCKING else text


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
            return _largest(map(_entry_culprit, stages))
    calls = [*_calls(found, seconds), *_callbacks(entry, seconds, m)]
    if best := _largest(calls):
        return best
    # Code outside of steps is always observed, so its share is a fraction of `seconds`. Code inside
    # steps is observed in a few steps, so its share is a fraction of their time
    # (`Culprit.observed_s`).
    observed_s = seconds if entry in (BETWEEN_LOOPS, TEAR_DOWN) else None
    min_calls = 2 if entry == COMPILATIONS else 1  # The first compilation is not a recompilation.
    places = [
        _entry_culprit(culprit, observed_s)
        for culprit in found
        if culprit.kind == PLACE and culprit.calls >= min_calls
    ]
    inside = [culprit for culprit in calls if culprit.share >= _MIN_SHARE_INSIDE_PLACE]
    return _largest(places, inside)


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
    """Return up to 3 lines that wait for the GPU in these phases, the most frequent first.

    The `caller` of a line is its phase. Lines whose phase is unknown are included.
    """
    top_phases = {UNKNOWN_PHASE, *(phase.partition("/")[0] for phase in phases)}
    found = [
        replace(_entry_culprit(culprit), caller=culprit.entry)
        for culprit in m.culprits
        if culprit.kind == BLOCKING and culprit.entry.partition("/")[0] in top_phases
    ]
    return sorted(found, key=lambda culprit: culprit.calls, reverse=True)[:_MAX_BLOCKING]


def _largest(
    culprits: Iterable[EntryCulprit], inside: Sequence[EntryCulprit] = ()
) -> tuple[EntryCulprit, ...]:
    """Return the largest culprit and the first of the calls `inside` it.

    Empty if the largest culprit takes less than 40 % of the entry.
    """
    best = max(culprits, key=lambda culprit: culprit.share, default=None)
    return () if best is None or best.share < _MIN_SHARE else (best, *inside[:1])


def _calls(found: Sequence[Culprit], seconds: float) -> Iterator[EntryCulprit]:
    """Yield each outermost call, or the call inside it that takes at least 70 % of its time."""
    calls = [culprit for culprit in found if culprit.kind == CALL]
    names = {culprit.name for culprit in calls}
    for outermost in calls:
        if outermost.caller in names:
            continue
        call, visited = outermost, {outermost.name}
        while inner_calls := [
            inner
            for inner in calls
            if inner.caller == call.name
            and inner.name not in visited
            and inner.seconds >= _MIN_SHARE_INSIDE * call.seconds
        ]:
            call = inner_calls[0]
            visited.add(call.name)
        yield _entry_culprit(call, seconds)


def _callbacks(entry: str, seconds: float, m: Measurement) -> Iterator[EntryCulprit]:
    """Yield the callback hooks that are timed as sub-phases of `callbacks`."""
    callbacks_share = m.share(CALLBACKS)
    if entry != CALLBACKS or callbacks_share <= 0:
        return
    for name, row in m.rows.items():
        if name != SAVES and of_one_callback(name):
            share = row.share / callbacks_share
            yield EntryCulprit(
                name=of_one_callback(name),
                kind=CALL,
                share=share,
                seconds=share * seconds,
                calls=row.n,
            )


def _entry_culprit(culprit: Culprit, observed_s: float | None = None) -> EntryCulprit:
    """Return a culprit with its share of the entry.

    Args:
        culprit: Code that takes time of the entry.
        observed_s: Time of the entry while the code was observed (in seconds); by default,
            `culprit.observed_s`.
    """
    observed_s = observed_s or culprit.observed_s or culprit.seconds
    source = culprit.source
    # A definition in an installed library is omitted, because the user cannot change it. A place
    # is kept: it is code of the user, whose training command may be an installed package.
    is_definition = culprit.kind not in (PLACE, BLOCKING)
    if source is None or (is_definition and "-packages" in source.file):
        source = Source("", 0, 0)
    return EntryCulprit(
        name=culprit.name,
        kind=culprit.kind,
        share=min(culprit.seconds / observed_s, 1.0) if observed_s else 0.0,
        seconds=culprit.seconds,
        calls=culprit.calls,
        file=source.file,
        line=source.first_line,
        last_line=source.last_line,
        function=source.function,
        caller=culprit.caller,
    )


def time_of_calls(culprit: EntryCulprit) -> str:
    """Return the time of all calls, such as "0.9 s in 3 calls"."""
    n = culprit.calls
    return f"{duration(1e3 * culprit.seconds)} in {n} call{'s' * (n != 1)}"
