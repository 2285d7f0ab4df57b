"""What to do next, as far as the numbers back it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lightning_gputime._phases import (
    BACKWARD,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    OPTIMIZER,
    OTHER,
    is_wait,
)
from lightning_gputime._results import verdict
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.table import duration

_WORTH_IT = 0.1  # From this fraction of the step on, something is worth an advice.
_PAUSE = "put what is no step, such as a validation, into `with timer.paused()`"
_FIRST_WORKERS = 4  # The most workers to begin with, where there are none.
_ITERATE = "iterate over timer.steps(loader), so that `data` is the loader's time alone"
_ENOUGH = 20  # Of fewer steps nothing is said of those that are long.


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """How a training is set up, as far as its timer knows. What it does not know is None."""

    has_loader: bool = False
    is_iterable: bool = False  # Each worker has a copy of the dataset.
    is_on_device: bool = False  # The batches come from tensors that are there already.
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    cores: int | None = None  # Per rank.
    batch_size: int | None = None
    precision: str = ""  # Such as "32-true", where a trainer tells.
    has_bf16: bool = False  # The device multiplies bfloat16 faster than float32.
    compiled: bool = False  # At least a part of the model, by torch.
    unfused: str = ""  # The class of the optimizers that could be fused, and are not.
    has_parts: bool = True  # There are modules inside the model.


def advise(summary: PhaseSummary, setup: TrainingSetup) -> tuple[str, ...]:
    """Return what to do next, the most promising first; nothing where nothing is known to help."""
    helps = _BY_BOUND.get(summary._judged.bound, _nothing)
    advice = [*_leave_out(summary, setup), *helps(summary, setup)]
    if summary.gap_share is not None and summary.gap_share >= verdict.MANY_GAPS:
        advice += _fewer_launches(summary, setup)
    return tuple(dict.fromkeys(advice))


def _nothing(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    yield from ()


def _leave_out(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    if summary.step.n < _ENOUGH or BACKWARD not in summary.rows:
        return
    # Longer batches are longer in backward, too.
    least = _WORTH_IT + max(_excess(summary, BACKWARD), 0.0)
    knows_fetch = setup.has_loader or FETCH in summary.rows
    for name in (OTHER, FORWARD) if knows_fetch else (DATA, OTHER, FORWARD):
        if _excess(summary, name) >= least:
            yield f"`{name}` is long in few steps: {_PAUSE}"


def _excess(summary: PhaseSummary, name: str) -> float:
    """Return the fraction of the step by which the mean of a phase exceeds its median."""
    row, step = summary.rows.get(name), summary.step
    if row is None:
        return 0.0
    return row.share - (row.p50_ms / step.mean_ms if 2 * row.n >= step.n else 0.0)


def _load_faster(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    if setup.is_on_device:
        # Workers cannot use the device that the training process has begun to use.
        yield "whole batches by index, as the dataset's tensors are on the device already"
        return
    workers, cores, ahead = setup.num_workers, setup.cores, setup.prefetch_factor
    # Most steps hardly wait for the loader, but some for long.
    fetches = summary.rows.get(FETCH, summary.rows.get(DATA))
    is_uneven = fetches is not None and fetches.is_uneven
    apart = ", each with a part of the IterableDataset of its own" if setup.is_iterable else ""
    now = f"num_workers is {workers}{'' if cores is None else f', of {cores} CPU cores'}"
    if workers is None:
        # Without parts nothing says that it is the loader.
        if not setup.has_loader and summary._judged.phases == (DATA,):
            yield _ITERATE
        yield "cheaper transforms, or workers that load ahead"
    elif workers == 0:
        yield f"num_workers={min(_FIRST_WORKERS, cores or _FIRST_WORKERS)} (now 0){apart}"
    elif cores is None or workers < cores:
        yield f"more workers ({now}){apart}"
        yield "cheaper transforms"
    else:
        yield f"cheaper transforms ({now})"
    if workers and is_uneven and setup.persistent_workers is False:
        yield "persistent_workers=True (now False), as few fetches take most of the time"
    if workers and is_uneven and ahead:
        yield f"prefetch_factor={2 * ahead} (now {ahead}), as fetches are uneven"
    if _share(summary, COPY) >= _WORTH_IT:
        yield from _copy_faster(summary, setup)


def _copy_faster(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    if summary.on_host_clock:
        return  # Nothing is copied to a device.
    if setup.pin_memory is False:
        yield "pin_memory=True (now False)"
    elif summary._judged.bound == verdict.COPIES:
        yield "copy less: smaller types (uint8, bfloat16), which the device converts"


def _call_back_less(summary: PhaseSummary, _: TrainingSetup) -> Iterator[str]:
    name, share = verdict.longest_callback(summary.rows)
    took = duration(share * summary.step.mean_ms)
    if name:
        yield f"run `{name}` less often, or make it cheaper ({took} a step)"
    else:
        yield "log less often: a larger log_every_n_steps"


def _meet_the_ranks(summary: PhaseSummary, _: TrainingSetup) -> Iterator[str]:
    ranks = summary.ranks
    if ranks is not None and ranks.slowest is not None:
        yield f"look at rank {ranks.slowest} first, in `{ranks.phase}`: the others wait for it"
    elif summary._judged.bound == verdict.COMMUNICATION:
        yield "more work between collectives: larger batches, or accumulation under no_sync()"


def _work_less(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    compute = _share(summary, FORWARD) + _share(summary, BACKWARD)
    if setup.precision == "32-true" and setup.has_bf16 and compute >= 0.5:
        yield 'precision="bf16-mixed" (now "32-true")'
    yield from _fuse(summary, setup)
    yield from _look_inside(summary, setup)


def _look_inside(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    [longest] = summary._judged.phases or ("",)
    parts = {
        name: row.share
        for name, row in summary.rows.items()
        if name.startswith(f"{longest}/") and not is_wait(name)
    }
    part = max(parts, key=parts.__getitem__, default="")
    if parts.get(part, 0.0) >= _WORTH_IT:
        yield f"look at `{part}`, {parts[part]:.0%} of the step"
    if not parts and longest in (FORWARD, BACKWARD) and setup.has_parts:
        share = _share(summary, longest)
        yield f"split `{longest}`, {share:.0%} of the step, by module: modules=2"


def _fuse(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    share = _share(summary, OPTIMIZER)
    if setup.unfused and share >= _WORTH_IT:
        yield f"{setup.unfused}(fused=True), as `optimizer` is {share:.0%} of the step"


def _fewer_launches(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
    yield f"a larger batch{now}"
    yield "torch.compile" + ('(mode="reduce-overhead")' if setup.compiled else "")
    yield "CUDA graphs"
    yield from _fuse(summary, setup)
    if summary.gap_share is None:
        yield "probe_every_n_steps=100 tells how much there is to win"


def _free_the_host(summary: PhaseSummary, setup: TrainingSetup) -> Iterator[str]:
    others = []
    for name in summary._judged.phases:
        if name in (FETCH, DATA):
            yield from _load_faster(summary, setup)
        elif name == COPY:
            yield from _copy_faster(summary, setup)
        else:
            others.append(f"`{name}`")
    if others:
        copies = " or prints" if setup.pin_memory else ", prints or copies from unpinned memory"
        yield f"no .item(){copies} in {', '.join(others)}"


def _share(summary: PhaseSummary, name: str) -> float:
    """Return the fraction of the step that a phase is, from 0 to 1."""
    return summary.rows[name].share if name in summary.rows else 0.0


_BY_BOUND: Mapping[str, Callable[[PhaseSummary, TrainingSetup], Iterator[str]]] = {
    verdict.INPUT: _load_faster,
    verdict.UNEVEN: lambda *_: iter([_ITERATE]),
    verdict.COPIES: _copy_faster,
    verdict.CALLBACK: _call_back_less,
    verdict.RANK: _meet_the_ranks,
    verdict.COMMUNICATION: _meet_the_ranks,
    verdict.GPU: _work_less,
    verdict.LAUNCH: _fewer_launches,
    verdict.MIXED: _free_the_host,
    verdict.LONGEST: _look_inside,
}
