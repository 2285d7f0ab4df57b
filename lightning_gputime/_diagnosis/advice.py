"""Advice on an entry of the time breakdown, given only if the numbers support it."""

from collections.abc import Callable, Iterator, Mapping

from lightning_gputime._diagnosis import (
    ALLOCATOR,
    COLLECTIONS,
    COMMUNICATION,
    COMPILATIONS,
    MIN_BOTTLENECK,
    MIN_OF_ENTRY,
    MIN_PART,
    MIN_REPORTED,
    MODEL_PHASES,
    OFF_CPU,
    OTHER_RANKS,
    STANDARD_PHASES,
    STRAGGLER,
    TRANSFER_HOOKS,
    Advice,
    Case,
    Entry,
)
from lightning_gputime._diagnosis.breakdown import is_model_work, is_update
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._loader import GC_COLLECT, of_entry
from lightning_gputime._loader.advice import advise_on_first_step, advise_on_loader
from lightning_gputime._measurement import wall_clock as wall
from lightning_gputime._measurement.measurement import CostlySetting, Measurement, TrainingSetup
from lightning_gputime._measurement.sums import is_rare, is_uneven
from lightning_gputime._messages import duration, percent
from lightning_gputime._phases import (
    BACKWARD,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    OPTIMIZER,
    OTHER,
)

# Above this fraction of the GPU memory, suggest no larger batch. Chosen: a smaller one leaves more
# memory unused, with a larger one the next batch size runs out of it.
_MAX_MEMORY_SHARE = 0.8
# An entry that occurs once is short up to this time. Chosen: with a smaller one, set-up is the
# bottleneck of each short trial; with a larger one, slow set-up has no advice there.
_MAX_SHORT_S = 5.0
_MIN_CALLS = 4  # Per step. From this number on, advice tells how often code is called. Chosen.
# Minimum fraction of evaluations for computing metrics after them. Chosen: smaller ones advise on
# what costs little next to the batches, larger ones miss slow metrics.
_MIN_AFTER_BATCHES = 0.3

Rule = Callable[[Case], Iterator[Advice]]


def advise(case: Case, *, only_settings: bool = False) -> tuple[Advice, ...]:
    """Return advice on an entry; empty if it takes less than 5 % of the wall clock.

    With `only_settings`, return only advice on costly settings and on code that takes ever longer.
    """
    entry = case.entry
    is_small = entry.share < MIN_REPORTED and (entry.speed_up or 1.0) < 1 + MIN_REPORTED
    if is_small or is_short_once(entry):
        return ()
    settings = [setting for setting in case.setup.costly_settings if _is_costly(setting, case)]
    found = [Advice("costly_setting", item.text, {"setting": item.name}) for item in settings]
    line = entry.line or case.main_line
    if line is not None and line.grew_to_ms:
        found.append(advise_on_growth(line))
    if only_settings:
        pass  # Another entry has the other advice.
    elif entry.line is not None:
        found += _advise_on_line(case, entry.line)
    elif entry.name in _RULES:
        found += _RULES[entry.name](case)
    elif case.phase in case.m.rows and case.phase in STANDARD_PHASES:
        found += _advise_on_phase(case)
    elif case.phase in case.m.rows or CALLBACKS in entry.phases_ms:
        found += _advise_on_user_phase(case)
    return tuple({advice.text: advice for advice in found}.values())  # Without duplicates.


def is_short_once(entry: Entry) -> bool:
    """Return True if an entry occurs once, and would not matter in a longer training."""
    return entry.name in wall.ONCE and entry.seconds < _MAX_SHORT_S


def _is_costly(setting: CostlySetting, case: Case) -> bool:
    """Return True if this entry is where a setting costs time."""
    line = case.entry.line
    if setting.operation:  # The setting slows down operations of the GPU.
        runs_operation = line is not None and getattr(line, setting.operation)
        return runs_operation and case.entry.pace == "GPU"
    if setting.entry:  # The setting costs time in one phase.
        top = line.main_phase.partition("/")[0] if line is not None else case.entry.name
        return setting.entry in (top, *case.entry.phases_ms)

    def in_model_ms(row: Entry) -> float:
        return sum(row.phases_ms.get(phase, 0.0) for phase in MODEL_PHASES)

    # Settings that cost time in all of the model's work belong to the entry with most of it.
    most = max(case.breakdown.rows, key=in_model_ms)
    return case.entry is most and in_model_ms(most) > 0


def growth_of(line: LineRow) -> str:
    """Return how a line's time has grown since the start: "grew from 1.6 ms to 14.6 ms"."""
    return f"grew from {duration(line.grew_from_ms)} to {duration(line.grew_to_ms)}"


def advise_on_growth(line: LineRow) -> Advice:
    text = f"{line} {growth_of(line)} per step: keep the data that it processes from growing"
    return Advice("growth", text, {"function": line.function})


# Code of the user


def _advise_on_line(case: Case, line: LineRow) -> Iterator[Advice]:
    """Yield advice on code. The most specific that applies is given, so the order matters."""
    m, setup, entry = case.m, case.setup, case.entry
    if is_update(line):
        yield from _fuse_update(m, setup)
        return
    if line.is_rest:  # Many short lines: shortening one of them saves little.
        return
    times = f", {line.calls:.0f} times per step" if line.calls >= _MIN_CALLS else ""
    in_model = is_model_work(line, entry.phases_ms)
    keeps_waiting = entry.pace == "host" and not m.on_host_clock
    if in_model and keeps_waiting and entry.share < MIN_BOTTLENECK:
        return  # `advise_on_launches` has advice for all of the model's short code together.
    if line.is_library and CALLBACKS not in entry.phases_ms and entry.share < MIN_PART:
        return
    if line.is_recomputed:
        memory = f" (now {percent(m.memory.share)} of the GPU's)" if m.memory is not None else ""
        text = (
            f"{line} takes {case.took}: turn activation checkpointing off there, if the memory is"
            f" large enough{memory}"
        )
        yield Advice("recomputation", text, {"function": line.function})
    elif line.function.endswith((".log_metrics", ".on_log", "Module.log")):
        text = f"{line} takes {case.took}{times}: log fewer values, or less often"
        yield Advice("log_less", text, {"function": line.function})
    elif keeps_waiting and line.idle_ms >= 0.5 * line.ms:
        idle = case.of_step(line.idle_ms)
        text = (
            f"{line} waits for the GPU{times}, which then has no work for {idle}: read the value"
            " less often, or later"
        )
        yield Advice("blocking_call", text, {"phase": line.main_phase})
    elif keeps_waiting:
        how = "or launch fewer operations there"
        if not in_model:
            how = "run it less often, or move it to another process"
        text = f"{line} keeps the GPU waiting for {case.took}{times}: make it faster, {how}"
        yield Advice("shorten", text, {"phase": line.main_phase})
    elif CALLBACKS in entry.phases_ms:
        text = f"{line} takes {case.took}{times}: run it less often, or make it faster"
        yield Advice("callback", text, {"function": line.function})
    elif in_model:
        where = "" if m.on_host_clock else " on the GPU"
        parts = ", ".join(
            f"{duration(ms)} in {phase}"
            for phase, ms in entry.phases_ms.items()
            if ms >= MIN_REPORTED * entry.ms_per_step
        )
        text = f"{line} takes {case.took}{where} ({parts}){times}: make it faster"
        yield Advice("speed_up", text, {"function": line.function, "modules": line.modules})
        has_compute = m.share(FORWARD) + m.share(BACKWARD) >= 0.5
        if setup.precision == "32-true" and setup.has_bf16 and has_compute:
            text = 'set precision="bf16-mixed" (now "32-true")'
            yield Advice("precision", text, {"now": "32-true", "suggested": "bf16-mixed"})
    else:
        text = f"{line} takes {case.took}{times}: make it faster, or run it less often"
        yield Advice("shorten", text, {"phase": line.main_phase})
        may_copy = setup.is_own_loop and setup.pin_memory is False and not m.on_host_clock
        if OTHER in entry.phases_ms and may_copy:
            yield _pin_memory(setup, ": `other` includes copies of the batch")


def _advise_on_phase(case: Case) -> Iterator[Advice]:
    """Yield advice on a phase whose code is unknown."""
    name, m = case.phase, case.m
    if name == OPTIMIZER and case.setup.unfused:
        yield from _fuse_update(m, case.setup)
        return
    if name not in MODEL_PHASES:
        why = f" ({m.lines_unavailable})" if m.lines_unavailable else ""
        text = f"`{name}` takes {case.took}, at unknown lines{why}: name its parts with"
        yield Advice("name_phase", f'{text} phase("name")', {"phase": name})
    outside = m.outside
    is_explained = outside is not None and (outside.blocking or outside.explained >= 0.5)
    is_long_in_few = name in m.rows and is_rare(m.rows[name])
    if case.setup.is_own_loop and is_long_in_few and not is_explained:
        yield _pause(name)


def _advise_on_user_phase(case: Case) -> Iterator[Advice]:
    name = case.entry.name
    reason = f", most of it at {case.main_line}" if case.main_line is not None else ""
    text = f"`{name}` takes {case.took}{reason}: run it less often, or make it faster"
    yield Advice("shorten", text, {"phase": name})


def advise_on_launches(m: Measurement, setup: TrainingSetup) -> Iterator[Advice]:
    """Yield advice if launches of the model's work set the pace."""
    is_mostly_update = m.share(OPTIMIZER) >= max(m.share(FORWARD), m.share(BACKWARD))
    if is_mostly_update:
        yield from _fuse_update(m, setup)
    if m.memory is None or m.memory.share <= _MAX_MEMORY_SHARE:
        now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
        yield Advice("batch_size", f"use a larger batch{now}", {"now": setup.batch_size})
    mode = '(mode="reduce-overhead")' if setup.compiled else ""
    yield Advice("compile", f"use torch.compile{mode}")
    yield Advice("cuda_graphs", "use CUDA graphs")
    if not is_mostly_update:
        yield from _fuse_update(m, setup)


def _fuse_update(m: Measurement, setup: TrainingSetup) -> Iterator[Advice]:
    share = m.share(OPTIMIZER)
    if setup.unfused and share >= MIN_PART:
        text = f"use {setup.unfused}(fused=True): `optimizer` takes {percent(share)} of the step"
        yield Advice("fused", text, {"optimizer": setup.unfused})


# Data


def _load_faster(case: Case) -> Iterator[Advice]:
    m, setup = case.m, case.setup
    if DATA in m.rows and FETCH not in m.rows and not setup.has_loader:
        # In a loop that only calls `step()`, `data` is all the time before forward.
        if is_uneven(m.rows[DATA]):
            yield _pause(DATA)
        if setup.num_workers is None:
            text = "iterate over timer.steps(loader), so that `data` excludes your own code"
            yield Advice("iterate_over_steps", text)
    yield from advise_on_loader(case)


def _pause(name: str) -> Advice:
    text = (
        f"`{name}` is long in only a few steps: wrap code that is not part of a step, such as"
        " validation, in `with timer.paused()`"
    )
    return Advice("pause", text, {"phase": name})


def _move_to_workers(case: Case) -> Iterator[Advice]:
    target = "into the dataset, so that the workers run it"
    if (line := case.main_line) is not None:
        text = f"{line} takes {case.of_step(line.ms)}, on the CPU: move it {target}"
        yield Advice("transfer_hooks", text, {"hook": line.function})
    elif case.setup.is_own_loop:
        text = f"move the code between `{FETCH}` and `{COPY}` {target}: it takes {case.took}"
        yield Advice("transfer_hooks", text)
    else:
        hooks = "on_before_batch_transfer, on_after_batch_transfer and transfer_batch_to_device"
        text = f"{hooks} take {case.took}: move their work {target}"
        yield Advice("transfer_hooks", text)


def _copy_faster(case: Case) -> Iterator[Advice]:
    m, setup = case.m, case.setup
    if m.on_host_clock:
        # Without a GPU nothing is copied: the hook itself takes the time.
        text = f"transfer_batch_to_device takes {case.took}: move its work into the dataset"
        yield Advice("transfer_hooks", text)
    elif setup.pin_memory is False:
        yield _pin_memory(setup)
    else:
        text = "copy smaller types (uint8, bfloat16) and convert them on the GPU"
        yield Advice("smaller_copies", text)


def _pin_memory(setup: TrainingSetup, reason: str = "") -> Advice:
    text = f"set {setup.loader_prefix}pin_memory=True (now False){reason}"
    return Advice("pin_memory", text, {"now": False, "suggested": True})


# Ranks


def _speed_up_rank(case: Case) -> Iterator[Advice]:
    if (ranks := case.m.ranks) is not None:
        rank = ranks.straggler
        if ranks.batch:
            text = f"balance the batches: rank {rank}, for which the others wait, has {ranks.batch}"
        else:
            who = "the other ranks wait" if len(ranks.stragglers) > 1 else "all other ranks wait"
            text = f"speed up rank {rank} in {ranks.where}: {who} for it"
        yield Advice("straggler", text, {"rank": rank, "phase": ranks.phase})


def _communicate_less(case: Case) -> Iterator[Advice]:
    if (ranks := case.m.ranks) is not None and ranks.suspect is not None:
        error = f" ± {duration(ranks.error_ms)}" if ranks.error_ms is not None else ""
        text = (
            f"rank {ranks.suspect} may cause this wait: it takes"
            f" {duration(ranks.excess_ms)}{error} longer per step than the others, in"
            f" {ranks.where}; time more steps to be certain"
        )
        if ranks.batch:
            text += f". It has {ranks.batch}"
        yield Advice("suspect_rank", text, {"rank": ranks.suspect, "phase": ranks.phase})
    has_room = case.m.memory is None or case.m.memory.share <= _MAX_MEMORY_SHARE
    larger = "larger batches, or " if has_room else ""
    text = f"do more work per collective: {larger}gradient accumulation under no_sync()"
    yield Advice("communicate_less", text)


# Outside of steps


def _save_less(case: Case) -> Iterator[Advice]:
    how = "save less often: every_n_train_steps (Lightning), save_steps (transformers)"
    reason = f"most of it is at {case.main_line}: " if case.main_line is not None else ""
    yield Advice("save_less", f"{reason}{how}")


def _evaluate_less(case: Case) -> Iterator[Advice]:
    how, metrics_hook = "evaluate less often, or on fewer samples", "compute_metrics"
    if case.entry.name == wall.VALIDATION:
        how = "validate less often: check_val_every_n_epoch or val_check_interval"
        metrics_hook = "on_validation_epoch_end"
    line, clock = case.main_line, case.m.wall_clock
    if line is not None:
        took = f"{duration(line.ms)} of {duration(1e3 * case.entry.seconds)}"
        yield Advice("metrics", f"{line} takes {took}: make it faster")
    if clock is not None and (after_s := clock.after_batches_s):
        entries = (wall.VALIDATION, wall.EVALUATION)
        all_s = sum(clock.entries_s.get(name, 0.0) for name in entries)
        if after_s >= _MIN_AFTER_BATCHES * all_s:
            took = f"{duration(1e3 * after_s)} of {duration(1e3 * all_s)}"
            text = f"use faster metrics: {took} are spent after the last batch, in {metrics_hook}"
            yield Advice("metrics", text)
    yield Advice("evaluate_less", how)


def _shorten_first_step(case: Case) -> Iterator[Advice]:
    yield from advise_on_first_step(case)
    text = "cache compiled code; compilation, autotuning and the start of workers occur once"
    yield Advice("first_step", text)


# By entry: code, advice if its code is unknown, and how to shorten its longest code.
_OUTSIDE_STEPS: Mapping[str, tuple[str, str, str]] = {
    wall.EPOCH_ENDS: (
        "epoch_ends",
        "make hooks at the start and end of epochs faster, or use longer epochs",
        "make it faster, or run it in fewer epochs",
    ),
    wall.SET_UP: (
        "set_up",
        "cache results of prepare_data, setup and the construction of loaders; this occurs once",
        "cache its result; this occurs once",
    ),
    wall.BETWEEN_LOOPS: (
        "between_loops",
        "run code between two loops, such as an evaluation, less often",
        "run it less often, or make it faster",
    ),
    wall.TEAR_DOWN: (
        "tear_down",
        "speed up code after the last epoch, such as a checkpoint, a test or an upload; this occurs"
        " once",
        "make it faster; this occurs once, after the last epoch",
    ),
    wall.PAUSED: (
        "paused",
        "run code in timer.paused(), such as an evaluation, less often",
        "run it less often, or make it faster",
    ),
}


def _shorten_outside_steps(case: Case) -> Iterator[Advice]:
    code, general, how = _OUTSIDE_STEPS[case.entry.name]
    if (line := case.main_line) is None:
        yield Advice(code, general)
    else:
        text = f"{line} takes {duration(line.ms)}: {how}"
        yield Advice(code, text, {"name": line.function})


def _always(code: str, text: str) -> Rule:
    return lambda _: iter([Advice(code, text)])


def _collect_less(case: Case) -> Iterator[Advice]:
    codes = of_entry(case.m.culprits, COLLECTIONS)
    if codes and codes[0].share >= MIN_OF_ENTRY:
        todo = (
            "create fewer objects there, such as lists of numbers, or call gc.disable(), and"
            " gc.collect() every n steps"
        )
        if codes[0].name == GC_COLLECT:
            todo = "call it less often"
        text = f"most garbage collections start in {codes[0]}: {todo}"
        yield Advice("collect_less", text)
    yield Advice(
        "gc_freeze",
        "call gc.freeze() before training, so that the collector skips objects created during"
        " set-up",
    )


def _compile_once(case: Case) -> Iterator[Advice]:
    # The first compilation is not a recompilation.
    codes = [code for code in of_entry(case.m.culprits, COMPILATIONS) if code.calls > 1]
    where = f"{codes[0]} is recompiled: " if codes else ""
    text = f"{where}use batches of equal shape, or torch.compile(dynamic=True)"
    yield Advice("dynamic_shapes", text)


_RULES: Mapping[str, Rule] = {
    DATA: _load_faster,
    FETCH: _load_faster,
    TRANSFER_HOOKS: _move_to_workers,
    COPY: _copy_faster,
    COMMUNICATION: _communicate_less,
    STRAGGLER: _speed_up_rank,
    OTHER_RANKS: _always(
        "other_ranks", "find the rank with the slowest loader or callbacks: all others wait for it"
    ),
    wall.VALIDATION: _evaluate_less,
    wall.EVALUATION: _evaluate_less,
    wall.CHECKPOINTS: _save_less,
    wall.FIRST_STEP: _shorten_first_step,
    wall.SANITY_CHECK: _always(
        "sanity_check", "pass num_sanity_val_steps=0 to skip it; this occurs once"
    ),
    **dict.fromkeys(_OUTSIDE_STEPS, _shorten_outside_steps),
    COLLECTIONS: _collect_less,
    COMPILATIONS: _compile_once,
    ALLOCATOR: _always("expandable_segments", "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
    OFF_CPU: _always("busy_cores", "run fewer threads and processes than there are CPU cores"),
}
