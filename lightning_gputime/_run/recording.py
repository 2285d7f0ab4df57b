"""The recorder of a session: with the marks' peaks of memory, or without."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._options import Options
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.memory import meter_for
from lightning_gputime._record.metered import MeteredRecorder
from lightning_gputime._record.ranges import Annotator
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.peaks import Peaks
from lightning_gputime._results.results import Results


def recorder_for(
    options: Options,
    clock: Clock,
    results: Results,
    means: MeanLog,
    *,
    emit: Callable[[list[StepRecord]], object],
    batch: int,
    reading_begins: Callable[[], object],
) -> Recorder:
    """Returns a recorder; what it reads of memory goes to the results and to the log.

    Args:
        options: How steps are timed.
        clock: Where events and host times come from.
        results: Get the peaks of memory.
        means: Log them.
        emit: As that of `Recorder`.
        batch: As that of `Recorder`.
        reading_begins: As that of `Recorder`.
    """
    annotate = Annotator() if options.annotate else None
    known: Mapping[str, Any] = {
        "lag": options.lag,
        "emit": emit,
        "batch": batch,
        "reading_begins": reading_begins,
        "annotate": annotate,
    }
    meter = meter_for(clock) if options.memory else None
    if meter is None:
        return Recorder(clock, **known)
    results.peaks = means.peaks = Peaks(meter.memory.allocator.total)
    return MeteredRecorder(clock, meter=meter, deliver=results.peaks.add, **known)
