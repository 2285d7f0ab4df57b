"""Code that calls the model many times per step, on parts of a batch."""

from collections import Counter
from dataclasses import dataclass

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._measurement.culprits import PLACE, Source
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.units import percent
from lightning_gputime._phases import BACKWARD, DATA, FETCH, FORWARD, LOSS, OPTIMIZER, OTHER

_MIN_SHARE = 0.2  # Minimum fraction of the located steps for code to be reported.
_MIN_CALLS = 4  # Minimum number of calls per fetched batch for code to be reported.
_WORK = (FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER)


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """Code that calls the model many times per batch.

    Attributes:
        where: The function with its lines, or the lines of the loop body.
        calls: Number of calls per batch.
        share: Fraction of the step, from 0 to 1.
    """

    where: str
    calls: int
    share: float

    def __str__(self) -> str:
        often = f"{self.where} calls the model {self.calls:,} times per batch"
        return f"{often}, which takes {percent(self.share)} of the step"

    @property
    def advice(self) -> Advice:
        text = f"{self}: process the whole batch in one call"
        return Advice("repeated_calls", text, {"calls": self.calls, "share": round(self.share, 3)})


def repeated_calls(m: Measurement) -> RepeatedCalls | None:
    """Return the most expensive code that calls the model many times per batch, or None.

    The timer locates the code of each phase in a few steps. Repeated code is a line that calls the
    model at least 4 times per batch. Its time is that of its function, unless this is the training
    loop, which contains the update: then its time is that of the line.
    """
    places = [
        (culprit, culprit.source)
        for culprit in m.culprits
        if culprit.kind == PLACE and culprit.source is not None
    ]
    loops = {
        (source.file, source.function) for culprit, source in places if culprit.entry == OPTIMIZER
    }

    def part_of(source: Source) -> tuple[str, str, int]:
        is_loop = (source.file, source.function) in loops
        return source.file, source.function, source.first_line if is_loop else 0

    fetches = (culprit.calls for culprit, _ in places if culprit.entry in (DATA, FETCH))
    batches, all_s = max(fetches, default=0), _observed_s(m)
    if not batches or not all_s:
        return None
    seconds = Counter[tuple[str, str, int]]()
    calls = Counter[tuple[str, str, int]]()
    for culprit, source in places:
        if culprit.entry in _WORK:
            seconds[part_of(source)] += round(1e9 * culprit.seconds)
        if culprit.entry == FORWARD:
            calls[source.file, source.function, source.first_line] += culprit.calls
    found = []
    for culprit, source in places:
        n = calls[source.file, source.function, source.first_line]
        if culprit.entry == FORWARD and n >= _MIN_CALLS * batches:
            share = seconds[part_of(source)] / 1e9 / all_s
            is_loop = (source.file, source.function) in loops
            has_name = not is_loop and "<" not in source.function  # Exclude "<listcomp>".
            name = f"`{source.function}` ({source})" if has_name else str(source)
            found.append(RepeatedCalls(name, round(n / batches), share))
    best = max(found, key=lambda repeated: repeated.share, default=None)
    return best if best is not None and best.share >= _MIN_SHARE else None


def _observed_s(m: Measurement) -> float:
    """Return the total time of the located steps (in seconds)."""
    by_entry: dict[str, float] = {}
    for culprit in m.culprits:
        if culprit.kind == PLACE and culprit.entry in (*_WORK, DATA):
            by_entry[culprit.entry] = culprit.observed_s or 0.0
    return sum(by_entry.values())
