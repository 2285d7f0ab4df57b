"""Table of the stages of a DataLoader."""

from lightning_gputime._diagnosis.loader import LoaderCase
from lightning_gputime._measurement.culprits import STAGES
from lightning_gputime._measurement.loader import LoaderTimes
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._output.table import Table

_WAITING = "waiting for work"


def loader_table(m: Measurement, setup: TrainingSetup) -> Table | None:
    """Return a table of the stages of the loader with the most batches; None if not timed."""
    case = LoaderCase.of(m, setup)
    if case is not None:
        return _table_of_workers(case.times, case.describe())
    # Without workers, the stages are timed in the main process.
    stages = [culprit for culprit in m.culprits if culprit.kind in STAGES]
    if setup.num_workers or not stages:
        return None
    lines: list[tuple[str, ...]] = [("loader", "per batch", "share")]
    all_s = sum(stage.seconds for stage in stages)
    for stage in stages:
        per_batch = duration(1e3 * stage.seconds / stage.calls)
        lines.append((stage.name, per_batch, percent(stage.seconds / all_s if all_s else 0.0)))
    lines.append(("batch", duration(1e3 * all_s / stages[0].calls), "100 %"))
    return Table("DataLoader without workers: stages in the main process", lines, [])


def _table_of_workers(times: LoaderTimes, note: str) -> Table:
    n = len(times.workers)
    stages = {"dataset_ms": times.dataset, "collate_ms": times.collate, "wait_ms": _WAITING}
    all_ms = sum(map(times.mean, stages))
    lines: list[tuple[str, ...]] = [("loader", "per batch", "share", "slowest worker")]
    for name, title in stages.items():
        ms_by_worker = [getattr(worker, name) for worker in times.workers]
        slowest_ms = max(ms_by_worker)
        index = ms_by_worker.index(slowest_ms)
        slowest = f"{duration(slowest_ms)} ({index})" if n > 1 else ""
        share = percent(times.mean(name) / all_ms if all_ms else 0.0)
        lines.append((title, duration(times.mean(name)), share, slowest))
    lines.append(("batch", duration(all_ms), "100 %", ""))
    title = f"DataLoader with {n} worker{'s' * (n > 1)}: stages in a worker"
    return Table(title, lines, [note])
