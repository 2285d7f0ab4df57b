"""Where the wall clock of a run went, and what to do about it as far as the numbers back it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from lightning_gputime._measurement import verdict
from lightning_gputime._measurement.slow import OFF_CPU, UNEXPLAINED
from lightning_gputime._measurement.summary import PhaseSummary
from lightning_gputime._measurement.table import duration, percent
from lightning_gputime._measurement.wall_time import (
    BETWEEN_LOOPS,
    CHECKPOINTS,
    EVALUATION,
    FIRST_STEP,
    PAUSED,
    STEPS,
    VALIDATION,
    Loss,
    Losses,
    WallTimeBreakdown,
)
from lightning_gputime._phases import (
    BACKWARD,
    BETWEEN_BATCHES,
    CALLBACK_WAIT,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    GENERATE,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASES,
    SAVES,
    TRAINING_STEP,
    WAIT,
    is_wait,
    of_one_callback,
)

COMMUNICATION = "communication"
SLOWEST_RANK = "the slowest rank"
GAPS = "launch gaps"
SLOW = "slow steps: "
TIMING = "timing itself"
GPU_WORK, CPU_WORK = "GPU work", "CPU work"

_WORTH_IT = 0.05  # From this fraction of the wall clock on, an entry is worth an advice.
_LONG = 0.1  # From this fraction of the step on, a phase is.
# Phases that the hooks of a training, or code beside them, may fill.
_OWN_CODE = {
    LOSS: "what runs between forward and backward",
    OPTIMIZER: "hooks, and what runs between backward and the update",
}
_KNOWN = (*PHASES, GENERATE, TRAINING_STEP)
_PAUSE = "put what belongs to no step, such as a validation, into `with timer.paused()`"
_FIRST_WORKERS = 4  # The most workers to begin with, where there are none.
_SAVE_LESS = "save less often: every_n_train_steps (Lightning), save_steps (transformers)"
_BY_BATCH = "index whole batches, by dataset[indices]: its tensors are in memory already"
_ITERATE = "iterate over timer.steps(loader): without it, `data` may also hold your own code"
_ENOUGH = 20  # Of fewer steps nothing is said of those that are long.

Advice = Iterable[str]


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """How a training is set up, as far as its timer knows. What it does not know is None."""

    is_own_loop: bool = False  # No trainer runs it.
    has_loader: bool = False
    is_iterable: bool = False  # Each worker has a copy of the dataset.
    is_in_memory: bool = False  # The dataset is a TensorDataset.
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    loader_prefix: str = ""  # Of the options of the loader, such as that of transformers.
    cores: int | None = None  # Per rank.
    batch_size: int | None = None
    precision: str = ""  # Such as "32-true", if a trainer shows it.
    has_bf16: bool = False  # The device multiplies bfloat16 faster than float32.
    compiled: bool = False  # At least a part of the model, by torch.
    unfused: str = ""  # The class of the optimizers that could be fused, and are not.
    has_parts: bool = True  # There are modules inside the model.
    classes: Mapping[str, str] = field(default_factory=dict)  # Of those that `modules` means.


def find_losses(summary: PhaseSummary, setup: TrainingSetup) -> Losses | None:
    """Return where the wall clock of a run went; None where nothing is judged."""
    if not summary._judged.bound:
        return None
    work = CPU_WORK if summary.on_host_clock else GPU_WORK
    # A fit that was looked at before its second step has no steps yet.
    spent = summary.wall_time
    is_known = spent is not None and STEPS in spent.entries_s
    if spent is None or not is_known:
        spent = WallTimeBreakdown({STEPS: summary.steps * summary.step.mean_ms / 1e3})
    spent_s = dict(spent.entries_s)
    steps_s, saves_s = spent_s.pop(STEPS), spent.saves_in_steps_s
    of_step = _break_down_step(summary, work, saves_s / (steps_s + saves_s))
    # The wall time has these already, and not among the steps.
    without_saves = 1.0 - of_step.pop(SAVES)
    # The first step is a step, too: what it takes longer than the others is lost.
    first_s = spent_s.get(FIRST_STEP, 0.0)
    steady_s = min(without_saves * summary.step.mean_ms / 1e3, first_s)
    spent_s[FIRST_STEP] = first_s - steady_s
    steps_s = (steps_s + steady_s) / without_saves
    for name, share in of_step.items():  # A phase may be named as an entry is.
        spent_s[name] = spent_s.get(name, 0.0) + share * steps_s
    wall_s = sum(spent_s.values())
    rows = {
        name: Loss(name, s / wall_s, _advise(name, of_step.get(name, s / wall_s), summary, setup))
        for name, s in sorted(spent_s.items(), key=lambda one: -one[1])
        if s > 0 or name == work
    }
    mfu = summary.mfu
    return Losses(
        work=rows.pop(work),
        rows=tuple(rows.values()),
        wall_s=wall_s,
        is_fit=is_known and not setup.is_own_loop,
        # More than all: the FLOPs, or the peak, are not those of this training.
        peak_share=None if mfu is None or mfu > 1 else mfu * steps_s / wall_s,
        unknown=_unknown(summary),
    )


def _break_down_step(summary: PhaseSummary, work: str, saves: float) -> dict[str, float]:
    """Return the entries of a step as fractions of it, which add up to 1."""

    def entry_of(name: str) -> str:
        top = name.partition("/")[0]
        if is_wait(name):
            return COMMUNICATION
        if _is_your_own(name):
            return top
        return name if name in (FETCH, COPY) else top if top in (DATA, CALLBACKS) else work

    found = defaultdict[str, float](float)
    for name, row in summary.rows.items():
        entry, above = entry_of(name), entry_of(name.partition("/")[0])
        if "/" not in name:
            found[entry] += row.share
        elif entry != above:
            found[above] -= row.share
            found[entry] += row.share

    def move(source: str, entry: str, share: float) -> float:
        moved = max(min(share, found[source]), 0.0)
        found[source] -= moved
        found[entry] += moved
        return moved

    move(CALLBACKS, SAVES, saves)  # To a step they are a callback.
    work_of_slow_steps = 0.0
    if summary.slow is not None:
        for name, causes in summary.slow.lost_shares.items():
            moved = sum(move(entry_of(name), f"{SLOW}{cause}", n) for cause, n in causes.items())
            work_of_slow_steps += moved * (entry_of(name) == work)
    if (ranks := summary.ranks) is not None and ranks.slowest_rank is not None:
        # This is rank zero: where it is slow itself, it does not wait.
        waits_in = entry_of(ranks.phase) if ranks.slowest_rank == 0 else COMMUNICATION
        move(waits_in, SLOWEST_RANK, ranks.behind_median_ms / summary.step.mean_ms)
    # No probe has the excess of slow steps, which is no gap.
    move(work, GAPS, (summary.launch_gap_share or 0.0) - work_of_slow_steps)
    move(work, TIMING, (summary.timing_share or 0.0) / summary.timed_every_n_steps)
    return found


def _is_your_own(name: str) -> bool:
    """Return whether a phase, or its parent, was named by the user."""
    return name.partition("/")[0] not in _KNOWN


def _unknown(summary: PhaseSummary) -> str:
    if summary.on_host_clock:
        return ""  # There is neither.
    how = "no step can be probed" if summary.probe_failure else "set probe_every_n_steps=100"
    gaps = "" if summary.probed_steps else f"launch gaps ({how})"
    peak = "" if summary.mfu is not None else "work at the peak (set flops=)"
    return "; ".join(filter(None, (gaps, peak)))


def _advise(
    name: str, share: float, summary: PhaseSummary, setup: TrainingSetup
) -> tuple[str, ...]:
    """Return what to do about an entry; nothing where nothing is known to help."""
    if name.partition("/")[0] in summary.blurred:
        return ()
    own = partial(_shorten, name) if name in summary.rows and _is_your_own(name) else ()
    advice = _ABOUT.get(name, own) if share >= _WORTH_IT else ()
    return advice if isinstance(advice, tuple) else tuple(dict.fromkeys(advice(summary, setup)))


def _work_less(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    rest = [] if summary.slow is not None else [*_leave_out(summary, OTHER, FORWARD)]
    yield from rest
    bound, phases = summary._judged.bound, summary._judged.phases
    if bound == verdict.LAUNCH and summary.launch_gap_share is None:
        yield from _launch_less(summary, setup)
    elif bound == verdict.MIXED:
        yield from _free_the_host(summary, setup)
    elif bound == verdict.GPU:
        compute = _share(summary, FORWARD) + _share(summary, BACKWARD)
        if setup.precision == "32-true" and setup.has_bf16 and compute >= 0.5:
            yield 'precision="bf16-mixed" (now "32-true")'
        yield from _fuse(summary, setup)
    if bound in (verdict.GPU, verdict.LONGEST):
        of_work = [one for one in summary.rows if one in _KNOWN and one not in BETWEEN_BATCHES]
        longest = max(of_work, key=lambda name: _share(summary, name), default="")
        if _share(summary, longest) >= _LONG:
            yield from _look_inside(longest, summary, setup)
    # Slow steps are a loss of their own.
    share = _share(summary, OTHER) - sum(_lost(summary, OTHER).values())
    if share >= _LONG and not rest and (bound != verdict.MIXED or OTHER not in phases):
        what = "code outside of the model, the loss, backward and the update"
        if summary.stage:
            what = "code after the model: metrics, self.log"
        whole = percent(_share(summary, OTHER))
        yield f'`other`, {whole} of the step, is {what}: name it, with phase("name")'
    if bound == verdict.LONGEST and phases[0] in _OWN_CODE:
        of = f"`{phases[0]}`, {percent(_share(summary, phases[0]))} of the step, also holds"
        yield f'{of} {_OWN_CODE[phases[0]]}: name it, with phase("name")'


def _leave_out(summary: PhaseSummary, *names: str) -> Advice:
    if summary.step.n < _ENOUGH or BACKWARD not in summary.rows:
        return
    # Longer batches are longer in backward, too.
    least = _LONG + max(_excess(summary, BACKWARD), 0.0)
    for name in names:
        lost = _lost(summary, name).items()
        known = sum(share for cause, share in lost if cause != UNEXPLAINED)
        if _excess(summary, name) - known >= least:
            yield f"`{name}` is long in few steps: {_PAUSE}"


def _lost(summary: PhaseSummary, name: str) -> Mapping[str, float]:
    """Return what slow steps lost in a phase, by cause, as fractions of the step."""
    return summary.slow.lost_shares.get(name, {}) if summary.slow is not None else {}


def _excess(summary: PhaseSummary, name: str) -> float:
    """Return the fraction of the step by which the mean of a phase exceeds its median."""
    row, step = summary.rows.get(name), summary.step
    if row is None:
        return 0.0
    return row.share - (row.p50_ms / step.mean_ms if 2 * row.n >= step.n else 0.0)


def _load_faster(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    if not setup.has_loader and FETCH not in summary.rows:
        yield from _leave_out(summary, DATA)
    if setup.is_in_memory:
        # To a worker a batch is copied twice, and on a device no worker can read it.
        yield _BY_BATCH
        return
    if summary.is_uneven:
        yield _ITERATE
        return
    workers, cores, ahead = setup.num_workers, setup.cores, setup.prefetch_factor
    prefix = setup.loader_prefix
    off_cpu = summary.slow.cause_shares.get(OFF_CPU, 0.0) if summary.slow is not None else 0.0
    fetches = summary.rows.get(FETCH, summary.rows.get(DATA))
    # Without parts nothing says that it is the loader.
    if workers is None and not setup.has_loader and FETCH not in summary.rows:
        yield _ITERATE
    is_short = fetches is not None and fetches.share < _LONG
    if is_short and summary._judged.bound != verdict.MIXED:
        return  # Workers cost about as much.
    # Most steps hardly wait for the loader, but some for long.
    is_uneven = fetches is not None and fetches.is_uneven
    apart = "; give each its own part of the IterableDataset" if setup.is_iterable else ""
    now = f"{prefix}num_workers={workers}{'' if cores is None else f'; {cores} CPU cores per rank'}"
    if workers is None:
        yield "cheaper transforms, or workers that load ahead"
    elif workers == 0:
        yield f"{prefix}num_workers={min(_FIRST_WORKERS, cores or _FIRST_WORKERS)} (now 0){apart}"
    elif off_cpu >= _WORTH_IT or (cores is not None and workers + 1 >= cores):
        # The loop needs a core, too.
        yield f"cheaper transforms: the CPU cores are busy ({now})"
    else:
        yield f"more workers ({now}){apart}"
        yield "cheaper transforms"
    if workers and is_uneven and setup.persistent_workers is False:
        yield f"{prefix}persistent_workers=True (now False): few fetches take most of the time"
    if workers and is_uneven and ahead:
        yield f"{prefix}prefetch_factor={2 * ahead} (now {ahead}): fetch times vary"


def _copy_faster(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    if summary.on_host_clock:
        return  # Nothing is copied to a device.
    if setup.pin_memory is False:
        yield f"{setup.loader_prefix}pin_memory=True (now False)"
    elif summary._judged.bound == verdict.COPIES:
        yield "copy smaller types (uint8, bfloat16), and convert them on the device"


def _call_back_less(summary: PhaseSummary, _: TrainingSetup) -> Advice:
    others = {one: row.share for one, row in summary.rows.items() if one != SAVES}
    name = max(filter(of_one_callback, others), key=others.__getitem__, default="")
    if others.get(name, 0.0) >= _LONG:
        took = duration(others[name] * summary.step.mean_ms)
        yield f"run `{of_one_callback(name)}` less often, or make it cheaper ({took} per step)"
    elif _share(summary, SAVES) >= _LONG:
        yield _SAVE_LESS


def _meet_the_rank(summary: PhaseSummary, _: TrainingSetup) -> Advice:
    if (ranks := summary.ranks) is not None:
        others = "the other ranks wait for it"
        yield f"start with rank {ranks.slowest_rank}, in `{ranks.phase}`: {others}"


def _communicate_less(summary: PhaseSummary, _: TrainingSetup) -> Advice:
    if any(is_wait(name) and name not in (WAIT, CALLBACK_WAIT) for name in summary.rows):
        yield "more work between collectives: larger batches, or accumulation under no_sync()"


def _shorten(name: str, summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    yield from [*_look_inside(name, summary, setup)] or ["run it less often, or make it cheaper"]


def _look_inside(longest: str, summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    parts = [name for name in summary.rows if name.startswith(f"{longest}/") and not is_wait(name)]
    long = [name for name in parts if _share(summary, name) >= _LONG]
    # The innermost: what is around it is as long because of it.
    inner = [one for one in long if not any(other.startswith(f"{one}/") for other in long)]
    if inner:
        part = max(inner, key=lambda name: _share(summary, name))
        name = part.rpartition("/")[2]
        module = f"{name} {setup.classes.get(name, '')}".rstrip()
        yield f"look at `{module}` in `{longest}`, {percent(_share(summary, part))} of the step"
    if not parts and longest in (FORWARD, BACKWARD) and setup.has_parts:
        share = _share(summary, longest)
        yield f"split `{longest}`, {percent(share)} of the step, by module: modules=2"


def _fuse(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    share = _share(summary, OPTIMIZER)
    if setup.unfused and share >= _LONG:
        yield f"{setup.unfused}(fused=True): `optimizer` is {percent(share)} of the step"


def _launch_less(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
    yield f"a larger batch{now}"
    yield "torch.compile" + ('(mode="reduce-overhead")' if setup.compiled else "")
    yield "CUDA graphs"
    yield from _fuse(summary, setup)


def _free_the_host(summary: PhaseSummary, setup: TrainingSetup) -> Advice:
    others = []
    for name in summary._judged.phases:
        if name in (FETCH, DATA):
            yield from _load_faster(summary, setup)
        elif name == COPY:
            yield from _copy_faster(summary, setup)
        else:
            others.append(f"`{name}`")
    if others:
        copies = " and prints" if setup.pin_memory else ", prints and copies from unpinned memory"
        yield f"remove .item(){copies} from {', '.join(others)}"


def _evaluate_less(
    how: str, after: str, inside: str, summary: PhaseSummary, _: TrainingSetup
) -> Advice:
    if (spent := summary.wall_time) is not None and spent.after_batches_s:
        whole_s = sum(spent.entries_s.get(name, 0.0) for name in (VALIDATION, EVALUATION))
        if spent.after_batches_s >= verdict.HELD_UP * whole_s:
            of = f"{duration(1e3 * spent.after_batches_s)} of {duration(1e3 * whole_s)}"
            yield f"cheaper metrics: {of} come after the last batch, as in {after}"
            inside = ""
    yield how + inside


def _free_cores(_: PhaseSummary, setup: TrainingSetup) -> Advice:
    workers = "" if setup.num_workers == 0 else "workers, "
    yield f"use fewer {workers}threads and other processes than CPU cores"


def _share(summary: PhaseSummary, name: str) -> float:
    """Return the fraction of the step that a phase is, from 0 to 1."""
    return summary.rows[name].share if name in summary.rows else 0.0


# What to do about an entry: a text, or what finds one.
_ABOUT: Mapping[str, tuple[str, ...] | Callable[[PhaseSummary, TrainingSetup], Advice]] = {
    GPU_WORK: _work_less,
    CPU_WORK: _work_less,
    DATA: _load_faster,
    FETCH: _load_faster,
    COPY: _copy_faster,
    CALLBACKS: _call_back_less,
    COMMUNICATION: _communicate_less,
    SLOWEST_RANK: _meet_the_rank,
    GAPS: _launch_less,
    # Its callbacks may take most of it, however few batches it has.
    VALIDATION: partial(
        _evaluate_less,
        "validate less often: check_val_every_n_epoch or val_check_interval",
        "on_validation_epoch_end",
        '; its phases are logged under "val/"',
    ),
    EVALUATION: partial(
        _evaluate_less, "evaluate less often, or on fewer samples", "compute_metrics", ""
    ),
    CHECKPOINTS: (_SAVE_LESS,),
    BETWEEN_LOOPS: ("do less often what runs between two loops, such as an evaluation",),
    PAUSED: ("do less often what is paused, such as an evaluation",),
    f"{SLOW}{UNEXPLAINED}": lambda summary, _: (
        [*_leave_out(summary, OTHER, FORWARD)] or ["see timer.slow_steps()"]
    ),
    f"{SLOW}garbage collection": ("gc.freeze() after the set-up",),
    f"{SLOW}compilation": ("batches of equal shape, or torch.compile(dynamic=True)",),
    f"{SLOW}the allocator": ("PYTORCH_ALLOC_CONF=expandable_segments:True",),
    f"{SLOW}{OFF_CPU}": _free_cores,
}
