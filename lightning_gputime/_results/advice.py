"""What to do next, as far as the numbers back it."""

from collections.abc import Callable, Mapping
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
from lightning_gputime._results.units import duration

_WORTH_IT = 0.1
"""From this fraction of the step on, something is worth an advice."""

_PAUSE = "put what is no step, such as a validation, into `with timer.paused()`"

_FIRST_WORKERS = 4
"""The most workers to begin with, where there are none."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a training is set up, as far as its timer knows. What it does not know is None.

    Attributes:
        has_loader: Whether the timer knows what the batches come from.
        is_iterable: Whether they come from an iterable dataset, of which each worker has a copy.
        is_on_device: Whether they come from tensors that are on the device already.
        num_workers: As the loader has it; so are the next three.
        cores: Number of CPU cores per rank.
        batch_size: Number of items of a batch.
        precision: Such as "32-true", where a trainer tells.
        has_bf16: Whether the device multiplies bfloat16 faster than float32.
        compiled: Whether anything of the model is compiled by torch.
        unfused: The class of the optimizers that could be fused, and are not; else empty.
        has_parts: Whether there are modules inside the model.
    """

    has_loader: bool = False
    is_iterable: bool = False
    is_on_device: bool = False
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    cores: int | None = None
    batch_size: int | None = None
    precision: str = ""
    has_bf16: bool = False
    compiled: bool = False
    unfused: str = ""
    has_parts: bool = True


Rows = list[tuple[bool, str]]
"""Conditions, and what helps where they hold."""


def advise(summary: PhaseSummary, setup: Setup) -> tuple[str, ...]:
    """Return what to do next, the most promising first; nothing where nothing is known to help."""
    of_bound = _BY_BOUND.get(summary._judged.bound)
    rows = [_leave_out(summary)]
    rows += of_bound(summary, setup) if of_bound is not None else []
    if summary.gap_share is not None and summary.gap_share >= verdict.MANY_GAPS:
        rows += _fewer_launches(summary, setup)
    return tuple(dict.fromkeys(sentence for holds, sentence in rows if holds))


def _leave_out(summary: PhaseSummary) -> tuple[bool, str]:
    row, n = summary.rows.get(OTHER), summary.step.n
    is_long = row is not None and n >= 20 and row.share >= _WORTH_IT
    is_uneven = row is not None and (2 * row.n < n or row.p95_ms > 3 * row.p50_ms)
    return is_long and is_uneven, f"`{OTHER}` is long in few steps: {_PAUSE}"


def _load_faster(summary: PhaseSummary, setup: Setup) -> Rows:
    if setup.is_on_device:
        # Workers cannot use the device that the training process has begun to use.
        return [
            (True, "whole batches by index, as the dataset's tensors are on the device already")
        ]
    workers, cores = setup.num_workers, setup.cores
    first = min(_FIRST_WORKERS, cores or _FIRST_WORKERS)
    apart = ", each with a part of the IterableDataset of its own" if setup.is_iterable else ""
    of = f", of {cores} CPU cores" if cores is not None else ""
    is_full = bool(workers and cores is not None and workers >= cores)
    has_room = bool(workers) and not is_full
    # Without parts nothing says that it is the loader.
    is_unknown = not setup.has_loader and summary._judged.phases == (DATA,)
    # Most steps hardly wait for the loader, but some for long.
    fetches = summary.rows.get(FETCH, summary.rows.get(DATA))
    is_uneven = bool(fetches and fetches.p50_ms < 0.5 * fetches.mean_ms)
    ahead = setup.prefetch_factor or 0
    rows = [
        (
            workers is None and is_unknown and is_uneven,
            _PAUSE,
        ),
        (
            workers is None and is_unknown,
            "iterate over timer.steps(loader), so that `data` is the loader's time alone",
        ),
        (workers is None, "cheaper transforms, or workers that load ahead"),
        (workers == 0, f"num_workers={first} (now 0){apart}"),
        (has_room, f"more workers (num_workers is {workers}{of}){apart}"),
        (has_room, "cheaper transforms"),
        (is_full, f"cheaper transforms (num_workers is {workers}{of})"),
        (
            bool(workers) and is_uneven and setup.persistent_workers is False,
            "persistent_workers=True (now False), as few fetches take most of the time",
        ),
        (
            bool(workers) and is_uneven and ahead > 0,
            f"prefetch_factor={2 * ahead} (now {ahead}), as fetches are uneven",
        ),
    ]
    return rows + (_copy_faster(summary, setup) if _share(summary, COPY) >= _WORTH_IT else [])


def _copy_faster(summary: PhaseSummary, setup: Setup) -> Rows:
    if summary.on_host_clock:
        return []  # Nothing is copied to a device.
    is_pageable = setup.pin_memory is False
    is_bound = summary._judged.bound == verdict.COPIES
    smaller = "copy less: smaller types (uint8, bfloat16), which the device converts"
    return [(is_pageable, "pin_memory=True (now False)"), (is_bound and not is_pageable, smaller)]


def _call_back_less(summary: PhaseSummary, _: Setup) -> Rows:
    name, share = verdict.longest_callback(summary.rows)
    took = duration(share * summary.step.mean_ms)
    return [
        (bool(name), f"run `{name}` less often, or make it cheaper ({took} a step)"),
        (not name, "log less often: a larger log_every_n_steps"),
    ]


def _meet_the_ranks(summary: PhaseSummary, _: Setup) -> Rows:
    ranks = summary.ranks
    if ranks is not None and ranks.slowest is not None:
        where = f"rank {ranks.slowest} first, in `{ranks.phase}`"
        return [(True, f"look at {where}: the others wait for it")]
    more = "more work between collectives: larger batches, or accumulation under no_sync()"
    return [(summary._judged.bound == verdict.COMMUNICATION, more)]


def _work_less(summary: PhaseSummary, setup: Setup) -> Rows:
    compute = _share(summary, FORWARD) + _share(summary, BACKWARD)
    is_slow = setup.precision == "32-true" and setup.has_bf16 and compute >= 0.5
    return [
        (is_slow, 'precision="bf16-mixed" (now "32-true")'),
        _fuse(summary, setup),
        *_look_inside(summary, setup),
    ]


def _look_inside(summary: PhaseSummary, setup: Setup) -> Rows:
    [longest] = summary._judged.phases or ("",)
    parts = {
        name: row.share
        for name, row in summary.rows.items()
        if name.startswith(f"{longest}/") and not is_wait(name)
    }
    part = max(parts, key=parts.__getitem__, default="")
    can_split = not parts and longest in (FORWARD, BACKWARD) and setup.has_parts
    share, of_part = _share(summary, longest), parts.get(part, 0.0)
    return [
        (of_part >= _WORTH_IT, f"look at `{part}`, {of_part:.0%} of the step"),
        (can_split, f"split `{longest}`, {share:.0%} of the step, by module: modules=2"),
    ]


def _fuse(summary: PhaseSummary, setup: Setup) -> tuple[bool, str]:
    share = _share(summary, OPTIMIZER)
    is_long = bool(setup.unfused) and share >= _WORTH_IT
    return is_long, f"{setup.unfused}(fused=True), as `optimizer` is {share:.0%} of the step"


def _fewer_launches(summary: PhaseSummary, setup: Setup) -> Rows:
    now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
    how = '(mode="reduce-overhead")' if setup.compiled else ""
    return [
        (True, f"a larger batch{now}"),
        (True, f"torch.compile{how}"),
        (True, "CUDA graphs"),
        _fuse(summary, setup),
        (summary.gap_share is None, "probe_every_n_steps=100 tells how much there is to win"),
    ]


def _free_the_host(summary: PhaseSummary, setup: Setup) -> Rows:
    rows: Rows = []
    others = []
    for name in summary._judged.phases:
        if name in (FETCH, DATA):
            rows += _load_faster(summary, setup)
        elif name == COPY:
            rows += _copy_faster(summary, setup)
        else:
            others.append(f"`{name}`")
    copies = " or prints" if setup.pin_memory else ", prints or copies from unpinned memory"
    return [*rows, (bool(others), f"no .item(){copies} in {', '.join(others)}")]


def _share(summary: PhaseSummary, name: str) -> float:
    """Return the fraction of the step that a phase is, from 0 to 1."""
    return summary.rows[name].share if name in summary.rows else 0.0


_BY_BOUND: Mapping[str, Callable[[PhaseSummary, Setup], Rows]] = {
    verdict.INPUT: _load_faster,
    verdict.COPIES: _copy_faster,
    verdict.CALLBACK: _call_back_less,
    verdict.RANK: _meet_the_ranks,
    verdict.COMMUNICATION: _meet_the_ranks,
    verdict.GPU: _work_less,
    verdict.LAUNCH: _fewer_launches,
    verdict.MIXED: _free_the_host,
    verdict.LONGEST: _look_inside,
}
