"""Advice on a DataLoader, based on the times of its workers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_high

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.culprits import STAGES, WORKERS
from lightning_gputime._measurement.loader import LoaderTimes
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._phases import DATA, FETCH

_MIN_LINE = 0.5  # Minimum fraction of the time of a batch for a line to be named.
_MIN_SHARE = 0.2  # Minimum fraction of the workers' time or of the wait for a cause to be reported.
_MIN_STARTS_SHARE = 0.5  # Starts of workers that take this fraction of the first step are reported.
# Restarts of workers explain the wait if their measured time is this fraction of it. The time to
# create and to end the processes is not measured.
_MIN_RESTARTS_SHARE = 0.3
_MAX_RUN_DELAY = 0.5  # Workers lack CPU cores if they wait for a core this fraction of the time.
_MAX_IDLE = 0.5  # Workers that idle this fraction of the time are not the bottleneck.
# Minima at which a loop calls `iter(loader)` for each batch. Without workers: iterators that the
# loop leaves before their end, per batch. With workers: starts per step, and batches per start.
_MIN_ABANDONED, _MIN_STARTS_PER_STEP, _MIN_MADE_PER_START = 0.5, 0.9, 1.5
_MIN_SLOW_FACTOR = 1.5  # Time of a slow worker, as a multiple of the median of the others.
_MIN_REST = 0.01  # Minimum of rest_ms / batch_ms, which caps the suggestion at 110 workers.
_MIN_PINNING = 0.8  # A pin-memory thread that is busy for this fraction of a step is too slow.
_SMALLER_BATCHES = "return smaller batches, such as uint8 in place of float32"
_MIN_CPU_SHARE = 0.05  # Minimum CPU time of a worker, which caps the number per core at 20.
_MARGIN = 1.1  # Suggest enough workers for steps that are shorter by this factor.


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """A loader with workers, and the loop that reads it.

    Attributes:
        times: Times of the workers.
        exposed_ms: Time for which the loop waits for a batch (in milliseconds).
        rest_ms: Time between two waits, in which workers load ahead (in milliseconds).
        steps: Number of steps.
        batches: Number of batches that the loop read.
        cores: Number of CPU cores of this rank; None if unknown.
        prefix: Prefix of the loader's options, as in transformers.
        is_persistent: True if the workers outlive an epoch, as long as the loader exists.
        line: Code that takes most of the time of a batch; None if there is none, or if unknown.
    """

    times: LoaderTimes
    exposed_ms: float
    rest_ms: float
    steps: int
    batches: int
    cores: int | None = None
    prefix: str = ""
    is_persistent: bool = False
    line: LineRow | None = None

    @property
    def busy_ms(self) -> float:
        """Mean time that a worker takes for a batch (in milliseconds)."""
        return self.times.mean("busy_ms")

    @property
    def idle_share(self) -> float:
        """Fraction of the time in which a worker waits between two batches."""
        wait_ms = self.times.mean("wait_ms")
        return wait_ms / (wait_ms + self.busy_ms)

    @property
    def max_workers(self) -> int | None:
        """Number of workers that the CPU cores can keep running; None if unknown."""
        if self.cores is None or self.times.cpu_share is None:
            return None
        cpu_share = max(self.times.cpu_share, _MIN_CPU_SHARE)
        return max(math.floor((self.cores - 1) / cpu_share), 1)  # The training loop needs a core.

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
                    if line.entry == WORKERS and line.ms >= _MIN_LINE * times.mean("busy_ms")
                ),
                None,
            ),
        )

    def is_large_part_of_wait(self, ms: float) -> bool:
        """Return True if a delay of workers per batch is at least 20 % of the loop's wait."""
        return ms >= _MIN_SHARE * self.exposed_ms

    @property
    def makes_iterator_per_batch(self) -> bool:
        """True if workers start in each step, and make batches that the loop does not read."""
        starts = self.times.starts
        makes_unread_batches = self.times.batches >= _MIN_MADE_PER_START * starts
        return starts >= _MIN_STARTS_PER_STEP * self.steps and makes_unread_batches

    def describe_restarts(self) -> str:
        """Return the cost of restarts of workers as part of a sentence; empty if it is low."""
        times = self.times
        waited_s = self.exposed_ms * self.batches / 1e3
        restarts = times.starts - 1  # The first start is part of the first step.
        started_s = restarts * times.startup_s
        if restarts < 1 or waited_s <= 0 or started_s < _MIN_RESTARTS_SHARE * waited_s:
            return ""
        startup = duration(1e3 * times.startup_s)
        return f"workers started {times.starts} times, and the first batch took {startup} each time"

    def describe_intervals(self) -> str:
        """Return how often a batch arrives, and how long a step takes apart from waiting for it.

        The text is a part of a sentence.
        """
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
    """Return the number of workers that deliver a batch every `rest_ms`, with a margin of 10 %.

    Args:
        batch_ms: Time that a worker takes per batch (in milliseconds).
        rest_ms: Time that the loop takes per batch, without waiting (in milliseconds).
    """
    return max(math.ceil(_MARGIN * batch_ms / max(rest_ms, _MIN_REST * batch_ms)), 1)


def advise_on_loader(case: LoaderCase) -> Iterator[Advice]:
    """Yield advice that shortens the wait for workers, the most effective first."""
    if case.times.repeats:
        yield _split_dataset(case)
    for rule in _RULES:
        if (advice := rule(case)) is not None:
            yield advice
            return
    yield from _add_workers(case)


def _split_dataset(case: LoaderCase) -> Advice:
    n = len(case.times.workers)
    text = (
        "give each worker its part of the IterableDataset, by torch.utils.data.get_worker_info():"
        f" all {n} workers yield the same batches, so that each sample is used {n} times"
    )
    return Advice("shard_dataset", text, {"num_workers": n})


def advise_on_iterators(m: Measurement) -> Advice | None:
    """Return advice if the loop makes an iterator for each batch of a loader without workers."""
    stages = [culprit for culprit in m.culprits if culprit.kind in STAGES]
    if not any(stage.abandoned > _MIN_ABANDONED * stage.calls for stage in stages):
        return None
    slowest = max(stages, key=lambda stage: stage.seconds)
    took = f"`{slowest.name}` takes {duration(1e3 * slowest.seconds / slowest.calls)} each time"
    return _keep_iterator(took)


def _keep_iterator(cost: str) -> Advice:
    text = (
        "loop over the loader (`for batch in loader`), or keep its iterator: `iter(loader)` runs"
        f" for each batch; {cost}"
    )
    return Advice("keep_iterator", text)


def _restart_less(case: LoaderCase) -> Advice | None:
    if not (restarts := case.describe_restarts()):
        return None
    if case.makes_iterator_per_batch:
        return _keep_iterator(restarts)
    if case.is_persistent:
        return Advice("create_once", f"create the DataLoader once, not in each epoch: {restarts}")
    text = f"set {case.prefix}persistent_workers=True: {restarts}"
    return Advice("persistent_workers", text, {"now": False, "suggested": True})


def advise_on_first_step(case: LoaderCase, seconds: float) -> Iterator[Advice]:
    """Yield advice if the start of workers takes most of the first step."""
    if case.times.startup_s >= _MIN_STARTS_SHARE * seconds:
        text = (
            "make workers start faster (fewer imports, fewer open files): the first batch of a"
            f" worker takes {duration(1e3 * case.times.startup_s)}"
        )
        yield Advice("worker_startup", text)


def _fix_slow_samples(case: LoaderCase) -> Advice | None:
    times = case.times
    if not times.long_batches or times.long_share < _MIN_SHARE:
        return None
    if not case.is_large_part_of_wait(times.long_share * case.busy_ms):
        return None
    sample = "" if times.slowest_index is None else f", because of sample {times.slowest_index:,}"
    n = times.batches / times.long_batches
    text = (
        f"make rare slow samples faster: 1 of {n:,.0f} batches takes"
        f" {percent(times.long_share)} of the workers' time; the slowest took"
        f" {duration(times.slowest_ms)} in worker {times.slowest_worker}{sample}"
    )
    return Advice("slow_samples", text, {"sample": times.slowest_index})


def _fix_worker(case: LoaderCase) -> Advice | None:
    busy_ms = [worker.busy_ms for worker in case.times.workers]
    slowest = busy_ms.index(max(busy_ms))
    # Exclude workers without a batch, which have no times yet.
    others = [ms for ms in busy_ms[:slowest] + busy_ms[slowest + 1 :] if ms]
    other_ms = median_high(others) if others else math.inf
    if busy_ms[slowest] < _MIN_SLOW_FACTOR * other_ms:
        return None
    share = case.times.workers[slowest].batches / case.times.batches
    if not case.is_large_part_of_wait(share * (busy_ms[slowest] - other_ms)):
        return None
    text = (
        f"check what worker {slowest} reads: a batch takes {duration(busy_ms[slowest])} there,"
        f" and {duration(other_ms)} in the others; 1 of every {len(busy_ms)} batches comes from it"
    )
    return Advice("slow_worker", text, {"worker": slowest})


def _pin_less(case: LoaderCase) -> Advice | None:
    pin_ms = case.times.pin_ms
    if pin_ms is None or pin_ms < _MIN_PINNING * (case.exposed_ms + case.rest_ms):
        return None
    text = (
        f"set {case.prefix}pin_memory=False, or {_SMALLER_BATCHES}: the pin-memory thread copies"
        f" one batch at a time, in {duration(pin_ms)}, so more workers cannot help"
    )
    return Advice("pin_memory", text, {"now": True, "suggested": False})


def _hand_over_faster(case: LoaderCase) -> Advice | None:
    if case.idle_share < _MAX_IDLE:
        return None
    text = (
        f"{_SMALLER_BATCHES}: workers wait {percent(case.idle_share)} of the time, because the main"
        " process receives batches too slowly"
    )
    return Advice("hand_over", text, {"idle_share": case.idle_share})


def _free_cores(case: LoaderCase) -> Advice | None:
    delay, cores, n = case.times.run_delay_share, case.cores, len(case.times.workers)
    if delay is None or delay < _MAX_RUN_DELAY or cores is None:
        return None
    reason = f"workers wait {percent(delay)} of their time for one of {cores} CPU cores"
    if n <= cores:
        text = f"free CPU cores, or make `{case.times.dataset}` faster: {reason}"
        return Advice("busy_cores", text, {"run_delay_share": delay})
    fewer = max(cores - 1, 1)  # The training loop needs a core, too.
    text = f"set {case.prefix}num_workers={fewer} (now {n}): {reason}"
    return Advice("num_workers", text, {"now": n, "suggested": fewer})


def _unlock(case: LoaderCase) -> Advice | None:
    locked = case.times.lock_share
    if locked is None or locked < _MIN_SHARE:
        return None
    text = (
        f"remove the lock that workers share in `{case.times.dataset}`: they wait for it"
        f" {percent(locked)} of their time, and more workers cannot help"
    )
    return Advice("worker_lock", text, {"lock_share": locked})


def _add_workers(case: LoaderCase) -> Iterator[Advice]:
    now, needed = len(case.times.workers), workers_for(case.busy_ms, case.rest_ms)
    suggested = needed if case.max_workers is None else min(needed, case.max_workers)
    if suggested > now:
        cores = "" if case.cores is None else f"; {case.cores} CPU cores"
        goal = "keep up" if suggested == needed else "shorten the wait"
        text = (
            f"set {case.prefix}num_workers={suggested} (now {now}{cores}) to {goal}: at present,"
            f" {case.describe_intervals()}"
        )
        yield Advice("num_workers", text, {"now": now, "suggested": suggested})
        if suggested == needed:
            return
    stage = max(("dataset", "collate"), key=lambda stage: case.times.mean(f"{stage}_ms"))
    function = case.times.dataset if stage == "dataset" else case.times.collate
    code = f"`{function}`" if case.line is None else f"{case.line}"
    reason = f": more workers cannot help on {case.cores} CPU cores" if needed > now else ""
    yield Advice("cheaper_transforms", f"make {code} faster{reason}", {"stage": stage})


# The first rule that applies explains the wait.
_RULES = (
    _restart_less,
    _fix_slow_samples,
    _fix_worker,
    _free_cores,
    _pin_less,
    _hand_over_faster,
    _unlock,
)
