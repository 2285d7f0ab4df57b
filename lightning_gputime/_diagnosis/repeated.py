"""Code that calls the model many times per step, on parts of a batch."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._measurement.culprits import PLACE, Source
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.units import percent
from lightning_gputime._phases import BACKWARD, DATA, FETCH, FORWARD, LOSS, OPTIMIZER, OTHER

_MIN_SHARE = 0.2  # Minimum fraction of the located steps for code to be reported.
_MIN_CALLS = 4  # Minimum number of calls per fetched batch for code to be reported.
_WORK = (FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER)

_Key = tuple[str, str, int]
"""File, function and first line of code; line 0 for all lines of the function."""


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

    def is_loop(source: Source) -> bool:
        return (source.file, source.function) in loops

    def line_key(source: Source) -> _Key:
        return source.file, source.function, source.first_line

    def function_key(source: Source) -> _Key:
        """Return the key of the function, or of the line if the function is the training loop."""
        return line_key(source) if is_loop(source) else (source.file, source.function, 0)

    fetches = (culprit.calls for culprit, _ in places if culprit.entry in (DATA, FETCH))
    batches = max(fetches, default=0)
    # All places of an entry have the same `observed_s`: the entry's time in all located steps.
    entries_s = {
        culprit.entry: culprit.observed_s or 0.0
        for culprit, _ in places
        if culprit.entry in (*_WORK, DATA)
    }
    all_s = sum(entries_s.values())
    if not batches or not all_s:
        return None
    seconds = defaultdict[_Key, float](float)
    calls = Counter[_Key]()
    for culprit, source in places:
        if culprit.entry in _WORK:
            seconds[function_key(source)] += culprit.seconds
        if culprit.entry == FORWARD:
            calls[line_key(source)] += culprit.calls
    found = []
    for culprit, source in places:
        n = calls[line_key(source)]
        share = seconds[function_key(source)] / all_s
        if culprit.entry == FORWARD and n >= _MIN_CALLS * batches and share >= _MIN_SHARE:
            has_name = not is_loop(source) and "<" not in source.function  # Exclude "<listcomp>".
            name = f"`{source.function}` ({source})" if has_name else str(source)
            found.append(RepeatedCalls(name, round(n / batches), share))
    return max(found, key=lambda repeated: repeated.share, default=None)
