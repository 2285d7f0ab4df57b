"""Code that calls the model many times per step, on parts of a batch."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._measurement.culprits import PLACE, WITHOUT_GRAD, Source
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.units import percent
from lightning_gputime._phases import BACKWARD, DATA, FETCH, FORWARD, LOSS, OPTIMIZER, OTHER

_MIN_SHARE = 0.2  # Minimum fraction of the observed steps for code to be reported.
_MIN_CALLS = 4  # Minimum number of calls per fetched batch for code to be reported.
_WORK = (FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER)

_Lines = tuple[str, str, int]
"""File, function and first line; 0 for all lines of the function."""


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """Code that calls the model many times per batch.

    Attributes:
        where: The function with its lines, or the lines of the loop body.
        calls: Number of calls per batch.
        share: Fraction of the step, from 0 to 1.
        has_grad: False if gradients are disabled in most calls, which may be an evaluation.
    """

    where: str
    calls: int
    share: float
    has_grad: bool = True

    def __str__(self) -> str:
        how = "" if self.has_grad else " without gradients"
        often = f"{self.where} calls the model {self.calls:,} times per batch{how}"
        return f"{often}, which takes {percent(self.share)} of the step"

    @property
    def advice(self) -> Advice:
        todo = "process the whole batch in one call"
        if not self.has_grad:
            todo = (
                "if this is an evaluation, run it less often, and after model.eval(), so that it"
                f" is not part of the steps; otherwise, {todo}"
            )
        text = f"{self}: {todo}"
        return Advice("repeated_calls", text, {"calls": self.calls, "share": round(self.share, 3)})


def repeated_calls(m: Measurement) -> RepeatedCalls | None:
    """Return the most expensive code that calls the model many times per batch, or None.

    The timer observes which lines run in each phase, in a few steps. Repeated code is a line that
    calls the model at least 4 times per batch. Its time is the time of its function. But if the
    function contains the update, it is the training loop: then only the time of the line counts.
    """
    places = [
        (culprit, culprit.source)
        for culprit in m.culprits
        if culprit.kind == PLACE and culprit.source is not None
    ]
    training_loops = {
        (source.file, source.function) for culprit, source in places if culprit.entry == OPTIMIZER
    }

    def is_in_loop(source: Source) -> bool:
        return (source.file, source.function) in training_loops

    def line_of(source: Source) -> _Lines:
        return source.file, source.function, source.first_line

    def timed_lines_of(source: Source) -> _Lines:
        """Return the function, or the line if the function is the training loop."""
        return line_of(source) if is_in_loop(source) else (source.file, source.function, 0)

    fetches = (culprit.calls for culprit, _ in places if culprit.entry in (DATA, FETCH))
    batches = max(fetches, default=0)
    # All places of an entry have the same `observed_s`: the entry's time in the observed steps.
    entries_s = {
        culprit.entry: culprit.observed_s or 0.0
        for culprit, _ in places
        if culprit.entry in (*_WORK, DATA)
    }
    all_s = sum(entries_s.values())
    if not batches or not all_s:
        return None
    seconds = defaultdict[_Lines, float](float)
    calls, calls_without_grad = Counter[_Lines](), Counter[_Lines]()
    for culprit, source in places:
        if culprit.entry in _WORK:
            seconds[timed_lines_of(source)] += culprit.seconds
        if culprit.entry == FORWARD:
            calls[line_of(source)] += culprit.calls
            if culprit.name == WITHOUT_GRAD:
                calls_without_grad[line_of(source)] += culprit.calls
    found = []
    for culprit, source in places:
        n_calls = calls[line_of(source)]
        share = seconds[timed_lines_of(source)] / all_s
        if culprit.entry == FORWARD and n_calls >= _MIN_CALLS * batches and share >= _MIN_SHARE:
            # Name the function, but not the training loop, "<module>" or "<listcomp>".
            has_name = not is_in_loop(source) and "<" not in source.function
            where = f"`{source.function}` ({source})" if has_name else str(source)
            has_grad = 2 * calls_without_grad[line_of(source)] < n_calls
            found.append(RepeatedCalls(where, round(n_calls / batches), share, has_grad))
    return max(found, key=lambda repeated: repeated.share, default=None)
