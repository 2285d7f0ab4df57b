"""Advice on an entry of the time breakdown, as far as the numbers support it."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from lightning_gputime._diagnosis.breakdown import KNOWN
from lightning_gputime._diagnosis.codes import (
    COMMUNICATION,
    CPU_WORK,
    GAPS,
    GPU,
    GPU_WORK,
    HOOKS,
    LAUNCH,
    OTHER_RANKS,
    SLOW,
    SLOWEST_RANK,
    SYNC,
)
from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._diagnosis.pace import Pace
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import OFF_CPU
from lightning_gputime._measurement.stats import is_uneven
from lightning_gputime._measurement.table import duration, percent
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
    of_one_callback,
)

_MIN_SHARE = 0.05  # Smaller entries have no advice.
_MIN_PART = 0.1  # A smaller fraction of the step is not named.
_FIRST_WORKERS = 4  # The most workers to begin with, if there are none.
_MIN_AFTER_BATCHES = 0.3  # Fraction of an evaluation after its last batch that is named.


def advise(
    name: str, share: float, m: Measurement, setup: TrainingSetup, pace: Pace
) -> tuple[Advice, ...]:
    """Return what to do about an entry that takes this share of the wall clock."""
    if share < _MIN_SHARE:
        return ()
    rule = _RULES.get(name)
    if rule is None:
        is_phase = name in m.rows and name not in KNOWN
        return tuple(_shorten(name, m, setup)) if is_phase else ()
    return tuple({advice.text: advice for advice in rule(m, setup, pace)}.values())


def _per_step(m: Measurement, name: str) -> str:
    """Return a phase's time per step in words, "4.1 ms of 9.8 ms per step"."""
    step_ms = m.step.mean_ms
    return f"{duration(m.share(name) * step_ms)} of {duration(step_ms)} per step"


def _load_faster(m: Measurement, setup: TrainingSetup, pace: Pace) -> Iterator[Advice]:
    fetches = m.rows.get(FETCH, m.rows.get(DATA))
    if fetches is None:
        return
    if setup.is_in_memory:
        # Workers would copy each batch twice, and cannot read tensors on a device.
        text = "index whole batches, by dataset[indices]: the tensors are in memory already"
        yield Advice("index_batches", text)
        return
    workers, cores, prefix = setup.num_workers, setup.cores, setup.loader_prefix
    if not setup.has_loader and FETCH not in m.rows and is_uneven(fetches):
        yield _pause(DATA)
    if workers is None and not setup.has_loader and FETCH not in m.rows:
        text = "iterate over timer.steps(loader): without it, `data` may include your own code"
        yield Advice("iterate_over_steps", text)
    long_for_host = pace.code == LAUNCH and m.host_share(DATA) >= _MIN_PART
    if fetches.share < _MIN_PART and pace.code != SYNC and not long_for_host:
        return  # Workers cost about as much.
    apart = "; give each worker its part of the IterableDataset" if setup.is_iterable else ""
    of_cores = "" if cores is None else f"; {cores} CPU cores per rank"
    off_cpu = m.slow.cause_shares.get(OFF_CPU, 0.0) if m.slow is not None else 0.0
    cheaper = Advice("cheaper_transforms", "cheaper transforms")
    if workers is None:
        yield Advice("workers", "cheaper transforms, or workers that load ahead")
    elif workers == 0:
        n = min(_FIRST_WORKERS, cores or _FIRST_WORKERS)
        text = f"{prefix}num_workers={n} (now 0){apart}"
        yield Advice("num_workers", text, {"now": 0, "suggested": n})
    elif off_cpu >= _MIN_SHARE or (cores is not None and workers + 1 >= cores):
        # The training loop needs a core, too.
        now = f"now {prefix}num_workers={workers}{of_cores}"
        yield Advice("cheaper_transforms", f"cheaper transforms: the CPU cores are busy ({now})")
    else:
        text = f"more workers (now {prefix}num_workers={workers}{of_cores}){apart}"
        yield Advice("num_workers", text, {"now": workers})
        yield cheaper
    if workers and is_uneven(fetches):
        few = "few fetches take most of the time"
        if setup.persistent_workers is False:
            text = f"{prefix}persistent_workers=True (now False): {few}"
            yield Advice("persistent_workers", text, {"now": False, "suggested": True})
        if ahead := setup.prefetch_factor:
            text = f"{prefix}prefetch_factor={2 * ahead} (now {ahead}): {few}"
            yield Advice("prefetch_factor", text, {"now": ahead, "suggested": 2 * ahead})


def _pause(name: str) -> Advice:
    text = (
        f"`{name}` is long in few steps: put what belongs to no step, such as a validation, into"
        " `with timer.paused()`"
    )
    return Advice("pause", text, {"phase": name})


def _move_to_workers(m: Measurement, setup: TrainingSetup, _: Pace) -> Iterator[Advice]:
    rest = m.share(DATA) - m.share(FETCH) - m.share(COPY)
    took = f"{duration(rest * m.step.mean_ms)} of {duration(m.step.mean_ms)} per step"
    if setup.is_own_loop:
        text = f"{took} of `data` lie between fetch and copy"
    else:
        text = (
            f"on_before_batch_transfer, on_after_batch_transfer and transfer_batch_to_device take"
            f" {took}: move them into the dataset, so that its workers run them"
        )
    yield Advice("transfer_hooks", text)


def _copy_faster(m: Measurement, setup: TrainingSetup, pace: Pace) -> Iterator[Advice]:
    if m.on_host_clock:
        # Nothing is copied to a device.
        text = (
            f"transfer_batch_to_device takes {_per_step(m, COPY)}: move its work into the dataset"
        )
        yield Advice("transfer_hooks", text)
    elif setup.pin_memory is False:
        yield _pin_memory(setup)
    else:
        text = "copy smaller types (uint8, bfloat16), and convert them on the device"
        yield Advice("smaller_copies", text)


def _pin_memory(setup: TrainingSetup, why: str = "") -> Advice:
    text = f"{setup.loader_prefix}pin_memory=True (now False){why}"
    return Advice("pin_memory", text, {"now": False, "suggested": True})


def _call_back_less(m: Measurement, _: TrainingSetup, __: Pace) -> Iterator[Advice]:
    shares = {name: row.share for name, row in m.rows.items() if name != SAVES}
    single = [name for name in shares if of_one_callback(name)]
    longest = max(single, key=shares.__getitem__, default="")
    if shares.get(longest, 0.0) >= 0.3 * m.share(CALLBACKS) > 0:
        callback = of_one_callback(longest)
        text = f"`{callback}` takes {_per_step(m, longest)}: run it less often, or make it cheaper"
        yield Advice("callback", text, {"callback": callback})
    elif m.share(SAVES) >= _MIN_PART:
        yield from _save_less(m, _, __)
    else:
        text = (
            "log less often (log_every_n_steps), or remove callbacks one by one: they take"
            f" {_per_step(m, CALLBACKS)}"
        )
        yield Advice("callbacks", text)


def _save_less(*_: object) -> Iterator[Advice]:
    text = "save less often: every_n_train_steps (Lightning), save_steps (transformers)"
    yield Advice("save_less", text)


def _meet_the_rank(m: Measurement, _: TrainingSetup, __: Pace) -> Iterator[Advice]:
    if (ranks := m.ranks) is not None:
        text = f"look at rank {ranks.slowest_rank}, in `{ranks.phase}`: the other ranks wait for it"
        yield Advice("slowest_rank", text, {"rank": ranks.slowest_rank, "phase": ranks.phase})


def _communicate_less(*_: object) -> Iterator[Advice]:
    text = "more work between collectives: larger batches, or accumulation under no_sync()"
    yield Advice("communicate_less", text)


def _work_less(m: Measurement, setup: TrainingSetup, pace: Pace) -> Iterator[Advice]:
    uneven = [name for name in (FORWARD, BACKWARD) if name in m.rows and is_uneven(m.rows[name])]
    if setup.is_own_loop and uneven == [FORWARD]:  # Steps of more micro-batches are longer in both.
        yield _pause(FORWARD)
    if pace.code == LAUNCH and m.launch_gap_share is None:
        yield from _launch_less(m, setup, pace)
        return
    if pace.code == SYNC:
        yield from _unblock(m, setup, pace)
        return
    if pace.code == GPU:
        compute = m.share(FORWARD) + m.share(BACKWARD)
        if setup.precision == "32-true" and setup.has_bf16 and compute >= 0.5:
            text = 'precision="bf16-mixed" (now "32-true")'
            yield Advice("precision", text, {"now": "32-true", "suggested": "bf16-mixed"})
        yield from _fuse(m, setup)
    longest = max((FORWARD, BACKWARD), key=m.share)
    if m.share(longest) >= _MIN_PART:
        yield from _look_inside(longest, m, setup)


def _launch_less(m: Measurement, setup: TrainingSetup, _: Pace) -> Iterator[Advice]:
    now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
    yield Advice("batch_size", f"a larger batch{now}", {"now": setup.batch_size})
    mode = '(mode="reduce-overhead")' if setup.compiled else ""
    yield Advice("compile", f"torch.compile{mode}")
    yield Advice("cuda_graphs", "CUDA graphs")
    yield from _fuse(m, setup)


def _fuse(m: Measurement, setup: TrainingSetup) -> Iterator[Advice]:
    if setup.unfused and m.share(OPTIMIZER) >= _MIN_PART:
        share = percent(m.share(OPTIMIZER))
        text = f"{setup.unfused}(fused=True): `optimizer` is {share} of the step"
        yield Advice("fused", text, {"optimizer": setup.unfused})


def _unblock(m: Measurement, setup: TrainingSetup, pace: Pace) -> Iterator[Advice]:
    others = []
    for name in pace.phases:
        if name in (FETCH, DATA):
            yield from _load_faster(m, setup, pace)
        elif name == COPY:
            yield from _copy_faster(m, setup, pace)
        else:
            others.append(f"`{name}`")
    if others:
        copies = " and prints" if setup.pin_memory else ", prints and copies from unpinned memory"
        text = f"remove .item(){copies} from {', '.join(others)}"
        yield Advice("remove_syncs", text, {"phases": list(pace.phases)})


def _optimize_faster(m: Measurement, setup: TrainingSetup, _: Pace) -> Iterator[Advice]:
    yield from _fuse(m, setup)
    text = "`optimizer` is clipping, hooks before the update, and the update itself"
    yield Advice("optimizer", text)


def _own_code(
    name: str, where: str, m: Measurement, setup: TrainingSetup, _: Pace
) -> Iterator[Advice]:
    if setup.is_own_loop and is_uneven(m.rows[name]):
        yield _pause(name)
    if name == OTHER and setup.is_own_loop and setup.pin_memory is False and not m.on_host_clock:
        yield _pin_memory(setup, "; `other` includes copies of the batch")
    text = f'`{name}` is code {where}: name its parts, with phase("name")'
    yield Advice("name_phase", text, {"phase": name})


def _shorten(name: str, m: Measurement, setup: TrainingSetup) -> Iterator[Advice]:
    inside = [*_look_inside(name, m, setup)]
    text = f"`{name}` takes {_per_step(m, name)}: run it less often, or make it cheaper"
    yield from inside or [Advice("shorten", text, {"phase": name})]


def _look_inside(top: str, m: Measurement, setup: TrainingSetup) -> Iterator[Advice]:
    parts = [name for name in m.rows if name.startswith(f"{top}/") and not is_wait(name)]
    long = [name for name in parts if m.share(name) >= _MIN_PART]
    # The innermost: modules around it are long because of it.
    inner = [name for name in long if not any(other.startswith(f"{name}/") for other in long)]
    if inner:
        part = max(inner, key=m.share)
        name = part.rpartition("/")[2]
        module = f"{name} {setup.classes.get(name, '')}".rstrip()
        text = f"look at `{module}` in `{top}`: it takes {_per_step(m, part)}"
        yield Advice("module", text, {"module": name})
    if not parts and top in (FORWARD, BACKWARD) and setup.has_parts:
        text = f"split `{top}`, {percent(m.share(top))} of the step, by module: modules=2"
        yield Advice("modules", text, {"suggested": 2})


def _evaluate_less(how: str, after: str, m: Measurement, *_: object) -> Iterator[Advice]:
    if (wall_clock := m.wall_clock) is not None and wall_clock.after_batches_s:
        entries_s, after_s = wall_clock.entries_s, wall_clock.after_batches_s
        all_s = entries_s.get(VALIDATION, 0.0) + entries_s.get(EVALUATION, 0.0)
        if after_s >= _MIN_AFTER_BATCHES * all_s:
            of = f"{duration(1e3 * after_s)} of {duration(1e3 * all_s)}"
            text = f"cheaper metrics: {of} come after the last batch, in {after}"
            yield Advice("metrics", text)
    yield Advice("evaluate_less", how)


def _text(code: str, text: str) -> "Rule":
    return lambda *_: iter([Advice(code, text)])


def _free_cores(_: Measurement, setup: TrainingSetup, __: Pace) -> Iterator[Advice]:
    workers = "" if setup.num_workers == 0 else "workers, "
    text = f"use fewer {workers}threads and other processes than CPU cores"
    yield Advice("free_cores", text)


Rule = Callable[[Measurement, TrainingSetup, Pace], Iterator[Advice]]

_RULES: Mapping[str, Rule] = {
    GPU_WORK: _work_less,
    CPU_WORK: _work_less,
    DATA: _load_faster,
    FETCH: _load_faster,
    HOOKS: _move_to_workers,
    COPY: _copy_faster,
    CALLBACKS: _call_back_less,
    OTHER: partial(_own_code, OTHER, "outside of the model, the loss, backward and the update"),
    LOSS: partial(_own_code, LOSS, "between forward and backward"),
    OPTIMIZER: _optimize_faster,
    COMMUNICATION: _communicate_less,
    SLOWEST_RANK: _meet_the_rank,
    OTHER_RANKS: _text(
        "other_ranks", "look for the rank whose loader or callbacks take longest: all others wait"
    ),
    GAPS: _launch_less,
    VALIDATION: partial(
        _evaluate_less,
        "validate less often: check_val_every_n_epoch or val_check_interval",
        "on_validation_epoch_end",
    ),
    EVALUATION: partial(
        _evaluate_less, "evaluate less often, or on fewer samples", "compute_metrics"
    ),
    CHECKPOINTS: _save_less,
    EPOCH_ENDS: _text(
        "epoch_ends", "cheaper hooks at the start and end of epochs, or longer epochs"
    ),
    SET_UP: _text(
        "set_up",
        "it occurs once: cache what prepare_data, setup and the construction of loaders compute",
    ),
    FIRST_STEP: _text("first_step", "it occurs once: compilation, autotuning, start of workers"),
    BETWEEN_LOOPS: _text(
        "between_loops", "run less often what is between two loops, such as an evaluation"
    ),
    SANITY_CHECK: _text("sanity_check", "it occurs once: num_sanity_val_steps=0 leaves it out"),
    TEAR_DOWN: _text(
        "tear_down",
        "it occurs once: look at what runs after the last epoch, such as a last checkpoint, a test"
        " or an upload",
    ),
    PAUSED: _text("paused", "run less often what is in timer.paused(), such as an evaluation"),
    f"{SLOW}garbage collection": _text("gc_freeze", "gc.freeze() after the set-up"),
    f"{SLOW}compilation": _text(
        "dynamic_shapes", "batches of equal shape, or torch.compile(dynamic=True)"
    ),
    f"{SLOW}the allocator": _text(
        "expandable_segments", "PYTORCH_ALLOC_CONF=expandable_segments:True"
    ),
    f"{SLOW}{OFF_CPU}": _free_cores,
}
