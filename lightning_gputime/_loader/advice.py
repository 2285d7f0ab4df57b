"""Advice on a DataLoader, and the table of its stages."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_high

from lightning_gputime._diagnosis import MIN_OF_ENTRY, MIN_PART, Advice, Case
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._loader import SAMPLER, STAGES, WORKERS, LoaderTimes, of_entry
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.sums import PhaseStats, is_uneven
from lightning_gputime._measurement.wall_clock import MIN_CORE_WAIT_SHARE
from lightning_gputime._messages import duration, percent
from lightning_gputime._output.table import Table
from lightning_gputime._phases import DATA, FETCH

# Chosen: `benchmarks/loader.py` names 12 of 12 planted problems. The first cause that applies hides
# the others, so smaller ones hide larger causes, larger ones leave "use more workers".
_MIN_SHARE = 0.2  # Minimum fraction of the workers' time or of the wait for a cause to be reported.
# Minimum fraction of the wait that starts of workers must explain. It is low, because the time to
# create and to end the processes is not measured.
_MIN_RESTARTS = 0.3
_MAJORITY = 0.5  # From this fraction of a worker's time on, a cause is the main one.
_SLOW_WORKER = 1.5  # A worker is slow if its batches take this multiple of the others' median.
# The pin-memory thread sets the pace if its copy takes this fraction of the time between batches.
_MIN_PIN_SHARE = 0.8
# Suggested workers, as a multiple of those that just keep up. Over 90 % of the wait is then removed
# (`benchmarks/results/loader.json`).
_MARGIN = 1.1
_MAX_PER_CORE = 20  # Maximum number of suggested workers per CPU core, also if they mostly sleep.
_SPLIT = "; give each worker its part of the IterableDataset"
_SMALLER_BATCHES = "return smaller batches, such as uint8 in place of float32"


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """A loader with workers, and the loop that reads it."""

    times: LoaderTimes
    setup: TrainingSetup
    # Time for which the loop waits for a batch, and time between two waits, in which workers load
    # ahead: 12 ms per step with 4 ms of `data/fetch` are 4 and 8 ms, or 2 and 4 ms with two
    # micro-batches.
    exposed_ms: float
    rest_ms: float
    steps: int
    batches: int  # Number of batches that the loop read.
    line: LineRow | None  # Code that takes most of the time of a batch; None if unknown.

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
        lines = (line for line in m.lines if line.entry == WORKERS)
        return cls(
            times,
            setup,
            exposed_ms=exposed_ms_per_step / batches_per_step,
            rest_ms=(m.step.mean_ms - exposed_ms_per_step) / batches_per_step,
            steps=steps,
            batches=steps * batches_per_step,
            line=next((line for line in lines if line.ms >= 0.5 * times.mean("batch_ms")), None),
        )

    @property
    def batch_ms(self) -> float:
        """Mean time that a worker takes for a batch (in milliseconds)."""
        return self.times.mean("batch_ms")

    def describe_restarts(self) -> str:
        """Return the cost of restarts of workers as part of a sentence; empty if it is low."""
        times = self.times
        waited_s = self.exposed_ms * self.batches / 1e3
        restarts = times.starts - 1  # The first start is part of the first step.
        if restarts < 1 or waited_s <= 0 or restarts * times.startup_s < _MIN_RESTARTS * waited_s:
            return ""
        startup = duration(1e3 * times.startup_s)
        return f"workers started {times.starts} times, and the first batch took {startup} each time"

    def describe_intervals(self) -> str:
        """Return, as part of a sentence, how often a batch arrives, and how long the rest takes."""
        n = len(self.times.workers)
        workers = f"{n} workers deliver" if n > 1 else "1 worker delivers"
        of = "step" if self.batches == self.steps else "micro-batch"
        return (
            f"{workers} a batch every {duration(self.batch_ms / n)}, and the rest of the {of} takes"
            f" {duration(self.rest_ms)}"
        )


def advise_on_loader(case: Case) -> Iterator[Advice]:
    """Yield advice that shortens the wait for a loader, with workers or without.

    The first cause that applies explains the wait.
    """
    m, setup, line = case.m, case.setup, case.main_line
    fetches = m.rows.get(FETCH, m.rows.get(DATA))
    if fetches is None:
        return
    reason = ""  # Start of a sentence, such as "`Images` takes 4.1 ms of 9.8 ms per step: ".
    # Without workers, the stages are timed in the main process.
    if stages := [culprit for culprit in of_entry(m.culprits, FETCH) if culprit.kind in STAGES]:
        slowest = stages[0]
        if any(stage.abandoned > _MAJORITY * stage.calls for stage in stages):
            took = duration(1e3 * slowest.seconds / slowest.calls)
            yield _keep_iterator(f"`{slowest.name}` takes {took} each time")
            return
        if slowest.share >= MIN_OF_ENTRY:
            reason = f"{slowest} takes {case.of_step(slowest.share * case.entry.ms_per_step)}: "
            if slowest.kind == SAMPLER:
                text = f"{reason}make it faster; it runs in the main process, even with workers"
                yield Advice("sampler", text, {"sampler": slowest.name})
                return
    if not setup.num_workers and line is not None and line.calls:
        reason = f"{line} takes {case.of_step(line.ms)}: "

    loader = LoaderCase.of(m, setup)
    if setup.is_in_memory:
        # Workers would copy each batch twice, and cannot read device tensors.
        if loader is not None and (restarts := loader.describe_restarts()):
            # The loop waits for the start of workers, not for the code in `reason`.
            now = f"now {setup.num_workers}"
            reason = f"set {setup.loader_prefix}num_workers=0 ({now}): {restarts}; "
        text = f"{reason}index whole batches with dataset[indices]; the tensors are in memory"
        yield Advice("index_batches", text)
    elif fetches.share < MIN_PART and case.entry.share < MIN_PART:
        return  # For a short fetch, workers would cost about as much as they save.
    elif setup.num_workers is None:
        text = "use faster transforms, or workers that load in advance"
        if setup.foreign_loader:
            text += (
                f"; stages of `{setup.foreign_loader}` are not measured, because it is not a torch"
                ' DataLoader: put `with phase("data/decode")` around a part to time it'
            )
        yield Advice("workers", text)
    elif setup.num_workers == 0 and _is_cpu_busy(m):
        faster = f"{reason}make it faster" if reason else "use faster transforms"
        text = f"{faster}: workers would need CPU cores, and all are busy"
        yield Advice("cheaper_transforms", text)
    elif setup.num_workers == 0:
        fetch_ms = fetches.frequency * fetches.mean_ms
        needed = _workers_for(fetch_ms, m.step.mean_ms - fetch_ms)
        # A loop that waits for its loader leaves its core to a worker, so up to as many workers as
        # cores help. If the cores are unknown, 4.
        n = min(needed, setup.cores or 4)
        end = (", or make it faster" if reason else "") + (_SPLIT if setup.is_iterable else "")
        text = f"{reason}set {setup.loader_prefix}num_workers={n} (now 0){end}"
        yield Advice("num_workers", text, {"now": 0, "suggested": n})
    elif loader is not None:
        yield from _advise_on_workers(loader)
    else:
        yield from _advise_on_untimed_workers(m, setup, fetches)


def _is_cpu_busy(m: Measurement) -> bool:
    """Return True if no CPU core is free for workers."""
    if m.outside is not None and m.outside.core_wait_share:  # With a GPU. It is 0 if it is small.
        return True
    return m.wall_clock is not None and m.wall_clock.core_wait_share >= MIN_CORE_WAIT_SHARE


def _advise_on_untimed_workers(
    m: Measurement, setup: TrainingSetup, fetches: PhaseStats
) -> Iterator[Advice]:
    """Yield advice on workers whose batches were not timed."""
    workers, cores, prefix = setup.num_workers or 0, setup.cores, setup.loader_prefix
    per_rank = "" if cores is None else f"; {cores} CPU cores per rank"
    now = f"now {prefix}num_workers={workers}{per_rank}"
    is_cpu_busy = _is_cpu_busy(m)
    if is_cpu_busy or (cores is not None and workers + 1 >= cores):
        # The training loop needs a core, too.
        why = "all CPU cores are busy" if is_cpu_busy else "more workers would lack a CPU core"
        yield Advice("cheaper_transforms", f"use faster transforms: {why} ({now})")
    else:
        text = f"use more workers ({now}){_SPLIT if setup.is_iterable else ''}"
        yield Advice("num_workers", text, {"now": workers})
        yield Advice("cheaper_transforms", "use faster transforms")
    if is_uneven(fetches):
        why = "a few batches cause most of the data wait"
        if setup.persistent_workers is False:
            text = f"set {prefix}persistent_workers=True (now False): {why}"
            yield Advice("persistent_workers", text, {"now": False, "suggested": True})
        if factor := setup.prefetch_factor:
            text = f"set {prefix}prefetch_factor={2 * factor} (now {factor}): {why}"
            yield Advice("prefetch_factor", text, {"now": factor, "suggested": 2 * factor})


def _workers_for(batch_ms: float, rest_ms: float) -> int:
    """Return the number of workers that deliver a batch every `rest_ms`, with a margin.

    Example: batches of 20 ms, one every 5 ms, need 20 / 5 = 4 workers, so 5 with the margin.
    """
    # The minimum of `rest_ms` caps the suggestion at 110 workers or so.
    return max(math.ceil(_MARGIN * batch_ms / max(rest_ms, 0.01 * batch_ms)), 1)


def _keep_iterator(cost: str) -> Advice:
    text = (
        "loop over the loader (`for batch in loader`), or keep its iterator: `iter(loader)` runs"
        f" for each batch; {cost}"
    )
    return Advice("keep_iterator", text)


def _advise_on_workers(case: LoaderCase) -> Iterator[Advice]:
    """Yield advice that shortens the wait for workers. The first cause that applies explains it."""
    times, cores, prefix = case.times, case.setup.cores, case.setup.loader_prefix
    n = len(times.workers)
    if times.repeats:
        text = (
            "give each worker its part of the IterableDataset, by"
            f" torch.utils.data.get_worker_info(): all {n} workers yield the same batches, so that"
            f" each sample is used {n} times"
        )
        yield Advice("shard_dataset", text, {"num_workers": n})

    if restarts := case.describe_restarts():
        # In each step, a new iterator: its workers make several batches, of which one is read.
        if times.starts >= 0.9 * case.steps and times.batches >= 1.5 * times.starts:
            yield _keep_iterator(restarts)
        elif case.setup.persistent_workers:
            text = f"create the DataLoader once, not in each epoch: {restarts}"
            yield Advice("create_once", text)
        else:
            text = f"set {prefix}persistent_workers=True: {restarts}"
            yield Advice("persistent_workers", text, {"now": False, "suggested": True})
        return

    min_delay_ms = _MIN_SHARE * case.exposed_ms  # Minimum delay of workers per batch.
    are_few_slow = times.long_batches and times.long_share >= _MIN_SHARE
    if are_few_slow and times.long_share * case.batch_ms >= min_delay_ms:
        index = times.slowest_index
        sample = "" if index is None else f", because of sample {index:,}"
        text = (
            f"make rare slow samples faster: 1 of {times.batches / times.long_batches:,.0f} batches"
            f" takes {percent(times.long_share)} of the workers' time; the slowest took"
            f" {duration(times.slowest_ms)} in worker {times.slowest_worker}{sample}"
        )
        yield Advice("slow_samples", text, {"sample": index})
        return

    ms_by_worker = [worker.batch_ms for worker in times.workers]
    slowest_ms = max(ms_by_worker)
    slowest = ms_by_worker.index(slowest_ms)
    # Exclude workers without a batch, which have no times yet.
    others = [ms for ms in ms_by_worker[:slowest] + ms_by_worker[slowest + 1 :] if ms]
    other_ms = median_high(others) if others else math.inf
    share = times.workers[slowest].batches / times.batches
    if slowest_ms >= _SLOW_WORKER * other_ms and share * (slowest_ms - other_ms) >= min_delay_ms:
        text = (
            f"check what worker {slowest} reads: a batch takes {duration(slowest_ms)} there,"
            f" and {duration(other_ms)} in the others; 1 of every {n} batches comes from it"
        )
        yield Advice("slow_worker", text, {"worker": slowest})
        return

    delay = times.run_delay_share
    if delay is not None and delay >= _MAJORITY and cores is not None:
        reason = f"workers wait {percent(delay)} of their time for one of {cores} CPU cores"
        if n <= cores:
            text = f"free CPU cores, or make `{times.dataset}` faster: {reason}"
            yield Advice("busy_cores", text, {"run_delay_share": delay})
        else:
            fewer = max(cores - 1, 1)  # The training loop needs a core, too.
            text = f"set {prefix}num_workers={fewer} (now {n}): {reason}"
            yield Advice("num_workers", text, {"now": n, "suggested": fewer})
        return

    between_batches_ms = case.exposed_ms + case.rest_ms
    if times.pin_ms is not None and times.pin_ms >= _MIN_PIN_SHARE * between_batches_ms:
        text = (
            f"set {prefix}pin_memory=False, or {_SMALLER_BATCHES}: the pin-memory thread copies one"
            f" batch at a time, in {duration(times.pin_ms)}, so more workers cannot help"
        )
        yield Advice("pin_memory", text, {"now": True, "suggested": False})
        return

    wait_ms = times.mean("wait_ms")
    idle_share = wait_ms / (wait_ms + case.batch_ms)
    if idle_share >= _MAJORITY:
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

    suggested = needed = _workers_for(case.batch_ms, case.rest_ms)
    if cores is not None and times.cpu_share is not None:
        # The training loop needs a core, too. Workers that compute for half of their time share a
        # core by two: 4 cores have room for (4 - 1) / 0.5 = 6.
        room = math.floor((cores - 1) / max(times.cpu_share, 1 / _MAX_PER_CORE))
        suggested = min(needed, max(room, 1))
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
    more = "more" if suggested <= n else f"more than {suggested}"
    reason = f": {more} workers cannot help on {cores} CPU cores" if needed > n else ""
    yield Advice("cheaper_transforms", f"make {code} faster{reason}", {"stage": stage})


def advise_on_first_step(case: Case) -> Iterator[Advice]:
    """Yield advice if the start of workers takes most of the first step."""
    loader = LoaderCase.of(case.m, case.setup)
    if loader is not None and loader.times.startup_s >= 0.5 * case.entry.seconds:
        text = (
            "make workers start faster (fewer imports, fewer open files): the first batch of a"
            f" worker takes {duration(1e3 * loader.times.startup_s)}"
        )
        yield Advice("worker_startup", text)


def loader_table(m: Measurement, setup: TrainingSetup) -> Table | None:
    """Return a table of the stages of the loader with the most batches; None if not timed."""
    case = LoaderCase.of(m, setup)
    if case is None:
        # Without workers, the stages are timed in the main process.
        timed = [culprit for culprit in m.culprits if culprit.kind in STAGES]
        if setup.num_workers or not timed:
            return None
        all_s = sum(stage.seconds for stage in timed)
        lines: list[tuple[str, ...]] = [("loader", "per batch", "share")]
        for stage in timed:
            per_batch = duration(1e3 * stage.seconds / stage.calls)
            lines.append((stage.name, per_batch, percent(stage.seconds / all_s if all_s else 0.0)))
        lines.append(("batch", duration(1e3 * all_s / timed[0].calls), "100 %"))
        return Table("DataLoader without workers: stages in the main process", lines, [])
    times, n = case.times, len(case.times.workers)
    stages = {
        "dataset_ms": times.dataset,
        "collate_ms": times.collate,
        "wait_ms": "waiting for work",
    }
    all_ms = sum(map(times.mean, stages))
    lines = [("loader", "per batch", "share", "slowest worker")]
    for name, title in stages.items():
        ms_by_worker = [getattr(worker, name) for worker in times.workers]
        slowest_ms = max(ms_by_worker)
        slowest = f"{duration(slowest_ms)} ({ms_by_worker.index(slowest_ms)})" if n > 1 else ""
        share = percent(times.mean(name) / all_ms if all_ms else 0.0)
        lines.append((title, duration(times.mean(name)), share, slowest))
    lines.append(("batch", duration(all_ms), "100 %", ""))
    hidden_ms = max(case.batch_ms - case.exposed_ms, 0.0)
    cost = f"A batch takes {duration(case.batch_ms)} in a worker; {case.describe_intervals()}"
    overlap = (
        f" So the loop waits {duration(case.exposed_ms)} per batch, and {duration(hidden_ms)}"
        " overlap with training"
    )
    pins = ""
    if times.pin_ms is not None:
        pins = f". The pin-memory thread takes {duration(times.pin_ms)}"
    title = f"DataLoader with {n} worker{'s' * (n > 1)}: stages in a worker"
    return Table(title, lines, [f"{cost}.{overlap}{pins}"])
