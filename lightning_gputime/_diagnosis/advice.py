"""Advice on an entry of the time breakdown, given only if the numbers support it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lightning_gputime._diagnosis.codes import (
    ALLOCATOR,
    COLLECTIONS,
    COMMUNICATION,
    COMPILATIONS,
    CONTENTION,
    CPU_WORK,
    GPU_BOUND,
    GPU_WORK,
    LAUNCH_BOUND,
    LAUNCH_GAPS,
    OTHER_RANKS,
    SLOWEST_RANK,
    STANDARD_PHASES,
    SYNC_BOUND,
    TRANSFER_HOOKS,
)
from lightning_gputime._diagnosis.culprit import (
    EntryCulprit,
    blocking_calls,
    culprits_of,
    time_of_calls,
)
from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._diagnosis.loader import (
    LoaderCase,
    advise_on_first_step,
    advise_on_iterators,
    advise_on_loader,
    workers_for,
)
from lightning_gputime._diagnosis.pace import Pace
from lightning_gputime._measurement.culprits import (
    BLOCKING_STEPS,
    CALL,
    GC_COLLECT,
    PLACE,
    SAMPLER,
    STAGES,
)
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import OFF_CPU
from lightning_gputime._measurement.stats import is_rare, is_uneven
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._measurement.wall_clock import (
    BETWEEN_LOOPS,
    CHECKPOINTS,
    EPOCH_ENDS,
    EVALUATION,
    FIRST_STEP,
    PAUSED,
    SANITY_CHECK,
    SET_UP,
    TEAR_DOWN,
    VALIDATION,
)
from lightning_gputime._phases import (
    BACKWARD,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    SAVES,
    is_wait,
)

_MIN_SHARE = 0.05  # Entries with a smaller fraction of the wall clock get no advice.
_MIN_PART = 0.1  # Advice ignores parts with a smaller fraction of the step.
_MAX_WORKERS_WITHOUT_CORES = 4  # Maximum number of workers to suggest if the CPU cores are unknown.
_MIN_CALLS_PER_STEP = 0.5  # Below this rate of calls, report their total time, not that per step.
# Minimum fraction of the step in forward and backward for advice on the precision.
_MIN_COMPUTE_SHARE = 0.5
_MAX_MEMORY_SHARE = 0.8  # Above this fraction of the GPU memory, suggest no larger batch.
# Minimum fraction of the evaluation time that is spent after the last batch, for advice on metrics.
_MIN_AFTER_BATCHES = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """An entry of the time breakdown, with the facts on which its advice depends.

    Attributes:
        entry: Name of the entry.
        seconds: Time of the entry (in seconds).
        m: Measurement of the run.
        setup: Training setup.
        pace: Component that sets the pace of a step.
        culprits: Code that takes the time, the most important first.
    """

    entry: str
    seconds: float
    m: Measurement
    setup: TrainingSetup
    pace: Pace
    culprits: tuple[EntryCulprit, ...] = ()

    @property
    def ms_per_step(self) -> float:
        """Time of the entry per step (in milliseconds)."""
        return 1e3 * self.seconds / (self.m.steps + self.m.untimed_steps + self.m.warmup_steps)

    def time_of(self, culprit: EntryCulprit) -> str:
        """Return the time of a culprit, such as "4.1 ms of 9.8 ms per step" or "0.9 s in 3 calls".

        The entry must be inside steps.
        """
        m = self.m
        min_calls = _MIN_CALLS_PER_STEP * (m.steps + m.untimed_steps)
        if culprit.kind == CALL and culprit.calls < min_calls:
            return time_of_calls(culprit)
        is_phase = self.entry in m.rows
        entry_ms = m.share(self.entry) * m.step.mean_ms if is_phase else self.ms_per_step
        return _of_step(culprit.share * entry_ms, m)


Rule = Callable[[Case], Iterator[Advice]]


def advise(case: Case, share: float) -> tuple[Advice, ...]:
    """Return advice on an entry that takes this share of the wall clock; empty below 5 %."""
    if share < _MIN_SHARE:
        return ()
    rule = _RULES.get(case.entry)
    if rule is None and case.entry in case.m.rows and case.entry not in STANDARD_PHASES:
        rule = _shorten_user_phase
    found = [] if rule is None else [*rule(case)]
    found += [
        Advice("costly_setting", setting.text, {"setting": setting.name})
        for setting in case.setup.costly_settings
        if setting.entry == case.entry
    ]
    return tuple({advice.text: advice for advice in found}.values())  # Without duplicates.


def _per_step(m: Measurement, name: str) -> str:
    """Return the time of a phase, such as "4.1 ms of 9.8 ms per step"."""
    return _of_step(m.share(name) * m.step.mean_ms, m)


def _of_step(ms: float, m: Measurement) -> str:
    return f"{duration(ms)} of {duration(m.step.mean_ms)} per step"


def _load_faster(case: Case) -> Iterator[Advice]:
    m, setup = case.m, case.setup
    fetches = m.rows.get(FETCH, m.rows.get(DATA))
    if fetches is None:
        return
    culprit = next((found for found in case.culprits if found.kind in STAGES), None)
    reason = "" if culprit is None else f"{culprit} takes {case.time_of(culprit)}: "
    if (advice := advise_on_iterators(m)) is not None:
        yield advice
        return
    if culprit is not None and culprit.kind == SAMPLER:
        text = f"{reason}make it faster; it runs in the main process, even with workers"
        yield Advice("sampler", text, {"sampler": culprit.name})
        return
    if setup.is_in_memory:
        yield _index_batches(case, reason)
        return
    if not setup.has_loader and FETCH not in m.rows:
        # In a loop that only calls `step()`, `data` is all the time before forward.
        if is_uneven(fetches):
            yield _pause(DATA)
        if setup.num_workers is None:
            text = "iterate over timer.steps(loader), so that `data` excludes your own code"
            yield Advice("iterate_over_steps", text)
    is_long_on_host = case.pace.code == LAUNCH_BOUND and m.host_share(DATA) >= _MIN_PART
    if fetches.share >= _MIN_PART or case.pace.code == SYNC_BOUND or is_long_on_host:
        # For a shorter fetch, workers would cost about as much as they save.
        yield from _use_workers(case, reason, fetches.frequency * fetches.mean_ms)
        if setup.num_workers and not m.loaders and is_uneven(fetches):
            yield from _load_ahead(setup)


def _index_batches(case: Case, reason: str) -> Advice:
    """Return advice on tensors in memory. It never suggests workers.

    Workers would copy each batch twice, and cannot read device tensors.
    """
    setup, loader = case.setup, LoaderCase.of(case.m, case.setup)
    if loader is not None and (restarts := loader.describe_restarts()):
        # The loop waits for the start of workers, not for the code in `reason`.
        reason = f"set {setup.loader_prefix}num_workers=0 (now {setup.num_workers}): {restarts}; "
    text = f"{reason}index whole batches with dataset[indices]; the tensors are in memory"
    return Advice("index_batches", text)


def _use_workers(case: Case, reason: str, fetch_ms: float) -> Iterator[Advice]:
    """Yield advice on the number of workers, or on faster transforms.

    Args:
        case: The entry of the data wait.
        reason: Start of a sentence, such as "`Images` takes 4.1 ms of 9.8 ms per step: "; may be
            empty.
        fetch_ms: Data wait per step (in milliseconds).
    """
    m, setup = case.m, case.setup
    workers, cores, prefix = setup.num_workers, setup.cores, setup.loader_prefix
    split = "; give each worker its part of the IterableDataset" if setup.is_iterable else ""
    per_rank = "" if cores is None else f"; {cores} CPU cores per rank"
    off_cpu = m.slow.cause_shares.get(OFF_CPU, 0.0) if m.slow is not None else 0.0
    is_cpu_busy = off_cpu >= _MIN_SHARE
    loader = LoaderCase.of(m, setup)
    if workers and loader is not None:
        yield from advise_on_loader(loader)
    elif workers is None:
        text = "use faster transforms, or workers that load in advance"
        if setup.foreign_loader:
            text += (
                f"; stages of `{setup.foreign_loader}` are not measured, because it is not a torch"
                ' DataLoader: put `with phase("data/decode")` around a part to time it'
            )
        yield Advice("workers", text)
    elif workers == 0:
        needed = workers_for(fetch_ms, m.step.mean_ms - fetch_ms)
        n = min(needed, cores or _MAX_WORKERS_WITHOUT_CORES)
        faster = ", or make it faster" if reason else ""
        text = f"{reason}set {prefix}num_workers={n} (now 0){faster}{split}"
        yield Advice("num_workers", text, {"now": 0, "suggested": n})
    elif is_cpu_busy or (cores is not None and workers + 1 >= cores):
        # The training loop needs a core, too.
        now = f"now {prefix}num_workers={workers}{per_rank}"
        why = "all CPU cores are busy" if is_cpu_busy else "more workers would lack a CPU core"
        yield Advice("cheaper_transforms", f"use faster transforms: {why} ({now})")
    else:
        text = f"use more workers (now {prefix}num_workers={workers}{per_rank}){split}"
        yield Advice("num_workers", text, {"now": workers})
        yield Advice("cheaper_transforms", "use faster transforms")


def _load_ahead(setup: TrainingSetup) -> Iterator[Advice]:
    prefix, reason = setup.loader_prefix, "a few batches cause most of the data wait"
    if setup.persistent_workers is False:
        text = f"set {prefix}persistent_workers=True (now False): {reason}"
        yield Advice("persistent_workers", text, {"now": False, "suggested": True})
    if factor := setup.prefetch_factor:
        text = f"set {prefix}prefetch_factor={2 * factor} (now {factor}): {reason}"
        yield Advice("prefetch_factor", text, {"now": factor, "suggested": 2 * factor})


def _pause(name: str) -> Advice:
    text = (
        f"`{name}` is long in only a few steps: wrap code that is not part of a step, such as"
        " validation, in `with timer.paused()`"
    )
    return Advice("pause", text, {"phase": name})


def _move_to_workers(case: Case) -> Iterator[Advice]:
    m = case.m
    hooks_share = m.share(DATA) - m.share(FETCH) - m.share(COPY)
    took = _of_step(hooks_share * m.step.mean_ms, m)
    target = "into the dataset, so that the workers run it"
    calls = [culprit for culprit in case.culprits if culprit.kind != PLACE]
    if case.setup.is_own_loop:
        text = f"move the code between `{FETCH}` and `{COPY}` {target}: it takes {took}"
        yield Advice("transfer_hooks", text)
    elif calls:
        text = f"{calls[0]} takes {case.time_of(calls[0])}, on the CPU: move it {target}"
        yield Advice("transfer_hooks", text, {"hook": calls[0].name})
    else:
        hooks = "on_before_batch_transfer, on_after_batch_transfer and transfer_batch_to_device"
        text = f"{hooks} take {took}: move their work {target}"
        yield Advice("transfer_hooks", text)


def _copy_faster(case: Case) -> Iterator[Advice]:
    m, setup = case.m, case.setup
    if m.on_host_clock:
        # Without a GPU nothing is copied: the hook itself takes the time.
        text = (
            f"transfer_batch_to_device takes {_per_step(m, COPY)}: move its work into the dataset"
        )
        yield Advice("transfer_hooks", text)
    elif setup.pin_memory is False:
        yield _pin_memory(setup)
    else:
        text = "copy smaller types (uint8, bfloat16) and convert them on the GPU"
        yield Advice("smaller_copies", text)


def _pin_memory(setup: TrainingSetup, reason: str = "") -> Advice:
    text = f"set {setup.loader_prefix}pin_memory=True (now False){reason}"
    return Advice("pin_memory", text, {"now": False, "suggested": True})


def _shorten_callbacks(case: Case) -> Iterator[Advice]:
    m = case.m
    if culprits := case.culprits:
        yield _run_less(case, culprits[0])
    elif m.share(SAVES) >= _MIN_PART:
        yield from _save_less(case)
    else:
        # `case.seconds` excludes checkpoints, which have a separate entry.
        text = (
            f"callbacks take {_of_step(case.ms_per_step, m)}: log less often (log_every_n_steps),"
            " or remove callbacks one at a time to find the slow one"
        )
        yield Advice("callbacks", text)


def _run_less(case: Case, culprit: EntryCulprit) -> Advice:
    """Return advice to call a hook, a logger or `self.log` less often."""
    took = f"{culprit} takes {case.time_of(culprit)}"
    if culprit.name == "self.log":
        steps = case.m.steps + case.m.untimed_steps
        calls = f", {culprit.calls / steps:.0f} calls" if culprit.calls >= 2 * steps else ""
        return Advice("log_less", f"{took}{calls}: log fewer values, or log only every n-th step")
    if culprit.name.endswith((".log_metrics", ".on_log")):
        option = "logging_steps" if culprit.name.endswith(".on_log") else "log_every_n_steps"
        text = f"{took}: log less often ({option})"
        return Advice("log_less", text, {"callback": culprit.name})
    text = f"{took}: run it less often, or make it faster"
    return Advice("callback", text, {"callback": culprit.name})


def _save_less(case: Case) -> Iterator[Advice]:
    how = "save less often: every_n_train_steps (Lightning), save_steps (transformers)"
    culprits = [culprit for culprit in case.culprits if culprit.kind != PLACE]
    reason = f"{culprits[0]} takes {time_of_calls(culprits[0])}: " if culprits else ""
    yield Advice("save_less", f"{reason}{how}")


def _speed_up_rank(case: Case) -> Iterator[Advice]:
    if (ranks := case.m.ranks) is not None:
        rank, phase = ranks.slowest_rank, ranks.phase
        text = f"speed up rank {rank} in `{phase}`: all other ranks wait for it"
        yield Advice("slowest_rank", text, {"rank": rank, "phase": phase})


def _communicate_less(case: Case) -> Iterator[Advice]:
    if (ranks := case.m.ranks) is not None and ranks.suspect is not None:
        error = f" ± {duration(ranks.error_ms)}" if ranks.error_ms is not None else ""
        text = (
            f"rank {ranks.suspect} may cause this wait: it takes"
            f" {duration(ranks.behind_median_ms)}{error} longer per step than the others, in"
            f" `{ranks.phase}`; time more steps to be certain"
        )
        yield Advice("suspect_rank", text, {"rank": ranks.suspect, "phase": ranks.phase})
    larger = "larger batches, or " if _has_room(case.m) else ""
    text = f"do more work per collective: {larger}gradient accumulation under no_sync()"
    yield Advice("communicate_less", text)


def _speed_up_work(case: Case) -> Iterator[Advice]:
    m, setup, pace = case.m, case.setup, case.pace
    rare = [name for name in (FORWARD, BACKWARD) if name in m.rows and is_rare(m.rows[name])]
    # If only forward is rarely long, it may be validation. If backward is too, a few steps have
    # more micro-batches, and nothing can be paused.
    if setup.is_own_loop and rare == [FORWARD]:
        yield _pause(FORWARD)
    # Measured launch gaps have an entry with this advice.
    if pace.code == LAUNCH_BOUND and m.launch_gap_share is None:
        yield from _launch_less(case)
        return
    if pace.code == SYNC_BOUND:
        yield from _unblock(case)
        return
    if pace.code == GPU_BOUND:
        compute_share = m.share(FORWARD) + m.share(BACKWARD)
        is_fp32 = setup.precision == "32-true"
        if is_fp32 and setup.has_bf16 and compute_share >= _MIN_COMPUTE_SHARE:
            text = 'set precision="bf16-mixed" (now "32-true")'
            yield Advice("precision", text, {"now": "32-true", "suggested": "bf16-mixed"})
        yield from _fuse_update(case)
    longest = max((FORWARD, BACKWARD), key=m.share)
    if m.share(longest) >= _MIN_PART:
        yield from _look_inside(longest, case)


def _has_room(m: Measurement) -> bool:
    """Return True if at most 80 % of the GPU memory is used, or if its use is unknown."""
    return m.memory is None or m.memory.share <= _MAX_MEMORY_SHARE


def _launch_less(case: Case) -> Iterator[Advice]:
    setup = case.setup
    if _has_room(case.m):
        now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
        yield Advice("batch_size", f"use a larger batch{now}", {"now": setup.batch_size})
    mode = '(mode="reduce-overhead")' if setup.compiled else ""
    yield Advice("compile", f"use torch.compile{mode}")
    yield Advice("cuda_graphs", "use CUDA graphs")
    yield from _fuse_update(case)


def _fuse_update(case: Case) -> Iterator[Advice]:
    unfused, share = case.setup.unfused, case.m.share(OPTIMIZER)
    if unfused and share >= _MIN_PART:
        text = f"use {unfused}(fused=True): `optimizer` takes {percent(share)} of the step"
        yield Advice("fused", text, {"optimizer": unfused})


def _unblock(case: Case) -> Iterator[Advice]:
    """Yield advice on the lines, and then on the phases, in which the CPU waits for the GPU."""
    for line in blocking_calls(case.pace.phases, case.m):
        calls_per_step = line.calls / BLOCKING_STEPS
        rate = f" {calls_per_step:.3g} times per step" if calls_per_step >= 1.5 else ""
        phase = line.caller
        where = ""
        if phase in case.m.rows:
            row = case.m.rows[phase]
            took = _of_step(row.frequency * row.host_mean_ms, case.m)
            where = f" in `{phase}`, which takes the CPU {took}"
        text = f"{line} waits for the GPU{rate}{where}: read the value less often, or later"
        yield Advice("blocking_call", text, {"phase": phase})
    other_phases = []
    for name in case.pace.phases:
        if name in (FETCH, DATA):
            culprits = culprits_of(name, case.seconds, case.m)
            yield from _load_faster(replace(case, entry=name, culprits=culprits))
        elif name == COPY:
            yield from _copy_faster(case)
        else:
            other_phases.append(f"`{name}`")
    if other_phases:
        syncs = ".item(), prints and copies from unpinned memory"
        if case.setup.pin_memory:
            syncs = ".item() and prints"
        text = f"in {', '.join(other_phases)}, remove {syncs}"
        yield Advice("remove_syncs", text, {"phases": list(case.pace.phases)})


def _optimize_faster(case: Case) -> Iterator[Advice]:
    unfused, culprits = case.setup.unfused, case.culprits
    may_be_update = not culprits or culprits[0].name == f"{unfused}.step"
    if unfused and may_be_update:
        yield from _fuse_update(case)
    elif culprits:
        # The update is fused, or other code takes the time: report that code.
        yield _shorten_code(case)
    else:
        text = (
            "use a faster optimizer or cheaper clipping: `optimizer` includes clipping, hooks"
            " before the update, and the update"
        )
        yield Advice("optimizer", text)


def _shorten_user_code(where: str, case: Case) -> Iterator[Advice]:
    """Yield advice on `loss` or `other`, whose code is at the place `where` of a step."""
    m, setup, name = case.m, case.setup, case.entry
    culprits = case.culprits
    if culprits:
        yield _shorten_code(case)
    if name == OTHER and setup.is_own_loop and setup.pin_memory is False and not m.on_host_clock:
        yield _pin_memory(setup, ": `other` includes copies of the batch")
    if not culprits:
        text = f'`{name}` is code {where}: name its parts with phase("name")'
        yield Advice("name_phase", text, {"phase": name})
        if setup.is_own_loop and is_rare(m.rows[name]):
            yield _pause(name)


def _shorten_code(case: Case) -> Advice:
    """Return advice on the first culprit, which is a call or lines with calls inside."""
    culprit, *inside = case.culprits
    if culprit.kind != PLACE:
        return _run_less(case, culprit)
    took = f"{culprit} takes {case.time_of(culprit)}"
    part = f", {percent(inside[0].share)} of it in {inside[0]}" if inside else ""
    text = f"{took}{part}: make it faster, or run it less often"
    return Advice("shorten", text, {"phase": case.entry})


def _shorten_user_phase(case: Case) -> Iterator[Advice]:
    name, culprits = case.entry, case.culprits
    if inside := [*_look_inside(name, case)]:
        yield from inside
        return
    where = f" ({culprits[0].where})" if culprits and culprits[0].where else ""
    text = f"`{name}`{where} takes {_per_step(case.m, name)}: run it less often, or make it faster"
    yield Advice("shorten", text, {"phase": name})


def _look_inside(top: str, case: Case) -> Iterator[Advice]:
    """Yield advice on the longest module in a phase, or to time modules if none are timed."""
    m, setup = case.m, case.setup
    parts = [name for name in m.rows if name.startswith(f"{top}/") and not is_wait(name)]
    long = [name for name in parts if m.share(name) >= _MIN_PART]
    # Modules around a long module are long because they contain it, so consider only innermost.
    innermost = [name for name in long if not any(other.startswith(f"{name}/") for other in long)]
    if innermost:
        part = max(innermost, key=m.share)
        name = part.rpartition("/")[2]
        module = f"{name} {setup.classes.get(name, '')}".rstrip()
        text = f"speed up `{module}`: it takes {_per_step(m, part)} in `{top}`"
        yield Advice("module", text, {"module": name})
    if not parts and top in (FORWARD, BACKWARD) and setup.has_parts:
        text = (
            f"pass modules=2 (with run: --modules 2) to split `{top}`"
            f" ({percent(m.share(top))} of the step) by module"
        )
        yield Advice("modules", text, {"suggested": 2})


def _evaluate_less(how: str, metrics_hook: str, case: Case) -> Iterator[Advice]:
    """Yield advice to shorten evaluations, then to evaluate less.

    Args:
        how: Advice to evaluate less.
        metrics_hook: Function in which metrics are usually computed.
        case: The entry of evaluations.
    """
    culprit = case.culprits[0] if case.culprits else None
    if culprit is not None and culprit.kind != PLACE:
        took = f"{duration(1e3 * culprit.seconds)} of {duration(1e3 * case.seconds)}"
        yield Advice("metrics", f"{culprit} takes {took}: make it faster")
        yield Advice("evaluate_less", how)
    else:
        yield from _speed_up_metrics(metrics_hook, case.m)
        yield Advice("evaluate_less", how if culprit is None else f"{culprit}: {how}")


def _speed_up_metrics(metrics_hook: str, m: Measurement) -> Iterator[Advice]:
    if m.wall_clock is None:
        return
    entries_s, after_s = m.wall_clock.entries_s, m.wall_clock.after_batches_s
    all_s = entries_s.get(VALIDATION, 0.0) + entries_s.get(EVALUATION, 0.0)
    if after_s and after_s >= _MIN_AFTER_BATCHES * all_s:
        took = f"{duration(1e3 * after_s)} of {duration(1e3 * all_s)}"
        text = f"use faster metrics: {took} are spent after the last batch, in {metrics_hook}"
        yield Advice("metrics", text)


def _shorten_first_step(case: Case) -> Iterator[Advice]:
    if (loader := LoaderCase.of(case.m, case.setup)) is not None:
        yield from advise_on_first_step(loader, case.seconds)
    text = "cache compiled code; compilation, autotuning and the start of workers occur once"
    yield Advice("first_step", text)


def _shorten_outside_steps(code: str, general: str, how: str, case: Case) -> Iterator[Advice]:
    """Yield advice on an entry outside of steps.

    Args:
        code: Code of the advice.
        general: Text of the advice without a culprit.
        how: End of the text with a culprit: how to shorten it.
        case: The entry.
    """
    if culprits := case.culprits:
        culprit = culprits[0]
        text = f"{culprit} takes {time_of_calls(culprit)}: {how}"
        yield Advice(code, text, {"name": culprit.name})
    else:
        yield Advice(code, general)


def _always(code: str, text: str) -> Rule:
    """Return a rule that gives the same advice in all cases."""
    return lambda _: iter([Advice(code, text)])


def _free_cores(case: Case) -> Iterator[Advice]:
    workers = "" if case.setup.num_workers == 0 else "workers, "
    text = f"run fewer {workers}threads and other processes than there are CPU cores"
    yield Advice("free_cores", text)


def _collect_less(case: Case) -> Iterator[Advice]:
    if case.culprits:
        culprit = case.culprits[0]
        todo = (
            "create fewer objects there, such as lists of numbers, or call gc.disable(), and"
            " gc.collect() every n steps"
        )
        if culprit.name == GC_COLLECT:
            todo = "call it less often"
        text = f"most garbage collections start in {culprit}: {todo}"
        yield Advice("collect_less", text)
    yield Advice(
        "gc_freeze",
        "call gc.freeze() before training, so that the collector skips objects created during"
        " set-up",
    )


def _compile_once(case: Case) -> Iterator[Advice]:
    where = f"{case.culprits[0]} is recompiled: " if case.culprits else ""
    text = f"{where}use batches of equal shape, or torch.compile(dynamic=True)"
    yield Advice("dynamic_shapes", text)


_RULES: Mapping[str, Rule] = {
    GPU_WORK: _speed_up_work,
    CPU_WORK: _speed_up_work,
    DATA: _load_faster,
    FETCH: _load_faster,
    TRANSFER_HOOKS: _move_to_workers,
    COPY: _copy_faster,
    CALLBACKS: _shorten_callbacks,
    OTHER: partial(_shorten_user_code, "outside the model, loss, backward and update"),
    LOSS: partial(_shorten_user_code, "between forward and backward"),
    OPTIMIZER: _optimize_faster,
    COMMUNICATION: _communicate_less,
    SLOWEST_RANK: _speed_up_rank,
    OTHER_RANKS: _always(
        "other_ranks",
        "find the rank with the slowest loader or callbacks: all others wait for it",
    ),
    LAUNCH_GAPS: _launch_less,
    VALIDATION: partial(
        _evaluate_less,
        "validate less often: check_val_every_n_epoch or val_check_interval",
        "on_validation_epoch_end",
    ),
    EVALUATION: partial(
        _evaluate_less, "evaluate less often, or on fewer samples", "compute_metrics"
    ),
    CHECKPOINTS: _save_less,
    EPOCH_ENDS: partial(
        _shorten_outside_steps,
        "epoch_ends",
        "make hooks at the start and end of epochs faster, or use longer epochs",
        "make it faster, or run it in fewer epochs",
    ),
    SET_UP: partial(
        _shorten_outside_steps,
        "set_up",
        "cache results of prepare_data, setup and the construction of loaders; this occurs once",
        "cache its result; this occurs once",
    ),
    FIRST_STEP: _shorten_first_step,
    BETWEEN_LOOPS: partial(
        _shorten_outside_steps,
        "between_loops",
        "run code between two loops, such as an evaluation, less often",
        "run it less often, or make it faster",
    ),
    SANITY_CHECK: _always(
        "sanity_check", "pass num_sanity_val_steps=0 to skip it; this occurs once"
    ),
    TEAR_DOWN: partial(
        _shorten_outside_steps,
        "tear_down",
        "speed up code after the last epoch, such as a checkpoint, a test or an upload; this occurs"
        " once",
        "make it faster; this occurs once, after the last epoch",
    ),
    PAUSED: partial(
        _shorten_outside_steps,
        "paused",
        "run code in timer.paused(), such as an evaluation, less often",
        "run it less often, or make it faster",
    ),
    COLLECTIONS: _collect_less,
    COMPILATIONS: _compile_once,
    ALLOCATOR: _always("expandable_segments", "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
    CONTENTION: _free_cores,
}
