"""What a session records with: with the marks' peaks of memory, or without."""

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._memory import PhaseMemory, sampler_for
from lightning_gputime._options import Options
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.ranges import Annotator
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._run.delivery import Delivery


def recorder_for(
    options: Options,
    clock: Clock,
    results: Results,
    means: MeanLog,
    analyzer: SlowStepAnalyzer,
    delivery: Delivery,
) -> Recorder:
    """Returns a recorder; what it reads of memory goes to the results and to the log.

    Args:
        options: How steps are timed.
        clock: Where events and host times come from.
        results: Get the peaks of memory.
        means: Log them.
        analyzer: Is told when steps are read.
        delivery: Gets the steps.
    """
    sampler = sampler_for(clock) if options.memory else None
    if sampler is not None:
        results.peaks = means.peaks = PhaseMemory(sampler.total)
        delivery.observers.append(results.peaks)
    return Recorder(
        clock,
        lag=options.lag,
        emit=delivery.add,
        batch=delivery.batch,
        annotate=Annotator() if options.annotate else None,
        on_reading_start=analyzer.reading_begins,
        sampler=sampler,
    )
