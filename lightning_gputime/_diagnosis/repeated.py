"""Code that calls the model many times per step, on parts of a batch."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._measurement.culprits import PLACE, Source
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.units import percent
from lightning_gputime._phases import BACKWARD, DATA, FETCH, FORWARD, LOSS, OPTIMIZER, OTHER

_MIN_SHARE = 0.2  # Fraction of the located steps from which the code is reported.
_MIN_CALLS = 4  # Calls per fetched batch from which the code is reported.
_WORK = (FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER)


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """Code that calls the model, or runs a backward, many times per batch.

    Attributes:
        where: The function with its lines, or the lines of the loop body.
        does: Action that is repeated, as in "calls the model".
        calls: Number of calls per batch.
        share: Fraction of the step, from 0 to 1.
    """

    where: str
    does: str
    calls: int
    share: float

    def __str__(self) -> str:
        often = f"{self.where} {self.does} {self.calls:,} times per batch"
        return f"{often}, which takes {percent(self.share)} of the step"

    @property
    def advice(self) -> Advice:
        text = f"{self}: process the whole batch in one call"
        return Advice("repeated_calls", text, {"calls": self.calls, "share": round(self.share, 3)})


def repeated_calls(m: Measurement) -> RepeatedCalls | None:
    """Return the most expensive code that calls the model many times per batch, or None.

    A few located steps show the code of each phase. It is grouped by function, or by line in the
    training loop, which is the function that contains the update.
    """
    places = [culprit for culprit in m.culprits if culprit.kind == PLACE and culprit.source]
    around = [culprit.source for culprit in places if culprit.entry == OPTIMIZER]
    loops = {(source.file, source.function) for source in around if source is not None}
    fetches = (culprit.calls for culprit in places if culprit.entry in (DATA, FETCH))
    batches = max(fetches, default=0)
    all_s = _observed_s(m)
    if not batches or not all_s:
        return None
    seconds, calls = defaultdict[object, float](float), Counter[object]()
    sources: dict[object, Source] = {}
    names = {FORWARD: "calls the model", BACKWARD: "runs a backward"}
    for culprit in places:
        if culprit.source is None or culprit.entry not in _WORK:
            continue
        source = culprit.source
        is_loop = (source.file, source.function) in loops
        key = (source.file, source.first_line if is_loop else source.function)
        sources.setdefault(key, source)
        seconds[key] += culprit.seconds
        if culprit.entry in names:
            calls[key, culprit.entry] += culprit.calls
    found = [
        RepeatedCalls(_name(sources[key], loops), does, round(n / batches), seconds[key] / all_s)
        for key in sources
        for phase, does in names.items()
        if (n := calls[key, phase]) >= _MIN_CALLS * batches
    ]
    best = max(found, key=lambda repeated: repeated.share, default=None)
    return best if best is not None and best.share >= _MIN_SHARE else None


def _observed_s(m: Measurement) -> float:
    """Return the time of the located steps (in seconds)."""
    by_entry: dict[str, float] = {}
    for culprit in m.culprits:
        if culprit.kind == PLACE and culprit.entry in (*_WORK, DATA):
            by_entry[culprit.entry] = culprit.observed_s or 0.0
    return sum(by_entry.values())


def _name(source: Source, loops: set[tuple[str, str]]) -> str:
    is_loop = (source.file, source.function) in loops
    return str(source) if is_loop or not source.function else f"`{source.function}` ({source})"
