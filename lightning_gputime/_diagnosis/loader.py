"""Advice on a DataLoader, based on the times of its workers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_high

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.culprits import STAGES, WORKERS
from lightning_gputime._measurement.loader import LoaderTimes
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._phases import DATA, FETCH

_MIN_SHARE = 0.2  # Minimum fraction of the workers' time or of the wait for a cause to be reported.
_SMALLER_BATCHES = "return smaller batches, such as uint8 in place of float32"


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """A loader with workers, and the loop that reads it."""

    times: LoaderTimes
    exposed_ms: float  # Time for which the loop waits for a batch.
    rest_ms: float  # Time between two waits, in which workers load ahead.
    steps: int
    batches: int  # Number of batches that the loop read.
    cores: int | None = None  # Number of CPU cores of this rank; None if unknown.
    prefix: str = ""  # Of the loader's options, as in transformers.
    is_persistent: bool = False  # The workers outlive an epoch, as long as the loader exists.
    line: LineRow | None = None  # Code that takes most of the time of a batch; None if unknown.

    @property
    def busy_ms(self) -> float:
        """Mean time that a worker takes for a batch (in milliseconds)."""
        return self.times.mean("busy_ms")

    @classmethod
    def of(cls, m: Measurement, setup: TrainingSetup) -> "LoaderCase | None":
        """Return the case of the loader with the most batches; None if no workers were timed."""
        fetches = m.rows.get(FETCH, m.rows.get(DATA))
        if not m.loaders or fetches is None:
            return None
        times = max(m.loaders, key=lambda loader: loader.batches)
        steps = m.steps + m.untimed_steps + m.warmup_steps
        batches_per_step = max(round(times.batches / steps), 1)
        exposed_ms_per_step = fetches.frequency * fetches.mean_ms
        return cls(
            times,
            exposed_ms=exposed_ms_per_step / batches_per_step,
            rest_ms=(m.step.mean_ms - exposed_ms_per_step) / batches_per_step,
            steps=steps,
            batches=steps * batches_per_step,
            cores=setup.cores,
            prefix=setup.loader_prefix,
            is_persistent=setup.persistent_workers is True,
            line=next(
                (
                    line
                    for line in m.lines
                    if line.entry == WORKERS and line.ms >= 0.5 * times.mean("busy_ms")
                ),
                None,
            ),
        )

    def describe_restarts(self) -> str:
        """Return the cost of restarts of workers as part of a sentence; empty if it is low."""
        times = self.times
        waited_s = self.exposed_ms * self.batches / 1e3
        restarts = times.starts - 1  # The first start is part of the first step.
        # The time to create and to end the processes is not measured, so the measured time explains
        # the wait from this fraction on.
        if restarts < 1 or waited_s <= 0 or restarts * times.startup_s < 0.3 * waited_s:
            return ""
        startup = duration(1e3 * times.startup_s)
        return f"workers started {times.starts} times, and the first batch took {startup} each time"

    def describe_intervals(self) -> str:
        """Return, as part of a sentence, how often a batch arrives, and how long the rest takes."""
        n = len(self.times.workers)
        workers = f"{n} workers deliver" if n > 1 else "1 worker delivers"
        return (
            f"{workers} a batch every {duration(self.busy_ms / n)}, and the rest of the step takes"
            f" {duration(self.rest_ms)}"
        )

    def describe(self) -> str:
        """Return a sentence on the cost of a batch, and on the part that the loop waits for."""
        hidden_ms = max(self.busy_ms - self.exposed_ms, 0.0)
        pin_ms = self.times.pin_ms
        pins = "" if pin_ms is None else f". The pin-memory thread takes {duration(pin_ms)}"
        return (
            f"A batch takes {duration(self.busy_ms)} in a worker; {self.describe_intervals()}."
            f" So the loop waits {duration(self.exposed_ms)} per batch, and {duration(hidden_ms)}"
            f" overlap with training{pins}"
        )


def workers_for(batch_ms: float, rest_ms: float) -> int:
    """Return the number of workers that deliver a batch every `rest_ms`, with a margin of 10 %."""
    # The minimum of `rest_ms` caps the suggestion at 110 workers.
    return max(math.ceil(1.1 * batch_ms / max(rest_ms, 0.01 * batch_ms)), 1)


def advise_on_loader(case: LoaderCase) -> Iterator[Advice]:
    """Yield advice that shortens the wait for workers. The first cause that applies explains it."""
    times, cores, prefix = case.times, case.cores, case.prefix
    n = len(times.workers)
    if times.repeats:
        text = (
            "give each worker its part of the IterableDataset, by"
            f" torch.utils.data.get_worker_info(): all {n} workers yield the same batches, so that"
            f" each sample is used {n} times"
        )
        yield Advice("shard_dataset", text, {"num_workers": n})

    if restarts := case.describe_restarts():
        starts_in_each_step = times.starts >= 0.9 * case.steps
        if starts_in_each_step and times.batches >= 1.5 * times.starts:
            yield _keep_iterator(restarts)  # The loop does not read most batches.
        elif case.is_persistent:
            text = f"create the DataLoader once, not in each epoch: {restarts}"
            yield Advice("create_once", text)
        else:
            text = f"set {prefix}persistent_workers=True: {restarts}"
            yield Advice("persistent_workers", text, {"now": False, "suggested": True})
        return

    min_delay_ms = _MIN_SHARE * case.exposed_ms  # Minimum delay of workers per batch.
    are_few_slow = times.long_batches and times.long_share >= _MIN_SHARE
    if are_few_slow and times.long_share * case.busy_ms >= min_delay_ms:
        index = times.slowest_index
        sample = "" if index is None else f", because of sample {index:,}"
        text = (
            f"make rare slow samples faster: 1 of {times.batches / times.long_batches:,.0f} batches"
            f" takes {percent(times.long_share)} of the workers' time; the slowest took"
            f" {duration(times.slowest_ms)} in worker {times.slowest_worker}{sample}"
        )
        yield Advice("slow_samples", text, {"sample": index})
        return

    busy_ms = [worker.busy_ms for worker in times.workers]
    slowest_ms = max(busy_ms)
    slowest = busy_ms.index(slowest_ms)
    # Exclude workers without a batch, which have no times yet.
    others = [ms for ms in busy_ms[:slowest] + busy_ms[slowest + 1 :] if ms]
    other_ms = median_high(others) if others else math.inf
    share = times.workers[slowest].batches / times.batches
    if slowest_ms >= 1.5 * other_ms and share * (slowest_ms - other_ms) >= min_delay_ms:
        text = (
            f"check what worker {slowest} reads: a batch takes {duration(slowest_ms)} there,"
            f" and {duration(other_ms)} in the others; 1 of every {n} batches comes from it"
        )
        yield Advice("slow_worker", text, {"worker": slowest})
        return

    delay = times.run_delay_share
    if delay is not None and delay >= 0.5 and cores is not None:
        reason = f"workers wait {percent(delay)} of their time for one of {cores} CPU cores"
        if n <= cores:
            text = f"free CPU cores, or make `{times.dataset}` faster: {reason}"
            yield Advice("busy_cores", text, {"run_delay_share": delay})
        else:
            fewer = max(cores - 1, 1)  # The training loop needs a core, too.
            text = f"set {prefix}num_workers={fewer} (now {n}): {reason}"
            yield Advice("num_workers", text, {"now": n, "suggested": fewer})
        return

    if times.pin_ms is not None and times.pin_ms >= 0.8 * (case.exposed_ms + case.rest_ms):
        text = (
            f"set {prefix}pin_memory=False, or {_SMALLER_BATCHES}: the pin-memory thread copies one"
            f" batch at a time, in {duration(times.pin_ms)}, so more workers cannot help"
        )
        yield Advice("pin_memory", text, {"now": True, "suggested": False})
        return

    wait_ms = times.mean("wait_ms")
    idle_share = wait_ms / (wait_ms + case.busy_ms)
    if idle_share >= 0.5:
        text = (
            f"{_SMALLER_BATCHES}: workers wait {percent(idle_share)} of the time, because the main"
            " process receives batches too slowly"
        )
        yield Advice("hand_over", text, {"idle_share": idle_share})
        return

    locked = times.lock_share
    if locked is not None and locked >= _MIN_SHARE:
        text = (
            f"remove the lock that workers share in `{times.dataset}`: they wait for it"
            f" {percent(locked)} of their time, and more workers cannot help"
        )
        yield Advice("worker_lock", text, {"lock_share": locked})
        return

    suggested = needed = workers_for(case.busy_ms, case.rest_ms)
    if cores is not None and times.cpu_share is not None:
        # The training loop needs a core, too. Suggest at most 20 workers per core.
        suggested = min(needed, max(math.floor((cores - 1) / max(times.cpu_share, 0.05)), 1))
    if suggested > n:
        with_cores = "" if cores is None else f"; {cores} CPU cores"
        goal = "keep up" if suggested == needed else "shorten the wait"
        text = (
            f"set {prefix}num_workers={suggested} (now {n}{with_cores}) to {goal}: at present,"
            f" {case.describe_intervals()}"
        )
        yield Advice("num_workers", text, {"now": n, "suggested": suggested})
        if suggested == needed:
            return
    stage = max(("dataset", "collate"), key=lambda stage: times.mean(f"{stage}_ms"))
    function = times.dataset if stage == "dataset" else times.collate
    code = f"`{function}`" if case.line is None else f"{case.line}"
    reason = f": more workers cannot help on {cores} CPU cores" if needed > n else ""
    yield Advice("cheaper_transforms", f"make {code} faster{reason}", {"stage": stage})


def advise_on_iterators(m: Measurement) -> Advice | None:
    """Return advice if the loop makes an iterator for each batch of a loader without workers."""
    stages = [culprit for culprit in m.culprits if culprit.kind in STAGES]
    if not any(stage.abandoned > 0.5 * stage.calls for stage in stages):
        return None
    slowest = max(stages, key=lambda stage: stage.seconds)
    took = duration(1e3 * slowest.seconds / slowest.calls)
    return _keep_iterator(f"`{slowest.name}` takes {took} each time")


def _keep_iterator(cost: str) -> Advice:
    text = (
        "loop over the loader (`for batch in loader`), or keep its iterator: `iter(loader)` runs"
        f" for each batch; {cost}"
    )
    return Advice("keep_iterator", text)


def advise_on_first_step(case: LoaderCase, seconds: float) -> Iterator[Advice]:
    """Yield advice if the start of workers takes most of the first step."""
    if case.times.startup_s >= 0.5 * seconds:
        text = (
            "make workers start faster (fewer imports, fewer open files): the first batch of a"
            f" worker takes {duration(1e3 * case.times.startup_s)}"
        )
        yield Advice("worker_startup", text)
