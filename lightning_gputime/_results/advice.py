"""What to do next, as far as the numbers back it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gputime._phases import (
    BACKWARD,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    OPTIMIZER,
    of_one_callback,
)
from lightning_gputime._results import verdict
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.units import duration
from lightning_gputime._results.verdict import Verdict

_WORTH_IT = 0.1
"""From this fraction of the step on, something is worth an advice."""

_FIRST_WORKERS = 4
"""The most workers to begin with, where there are none."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a training is set up, as far as its timer knows. What it does not know is None.

    Attributes:
        has_loader: Whether the timer knows what the batches come from.
        is_iterable: Whether they come from an iterable dataset, of which each worker has a copy.
        is_on_device: Whether they come from tensors that are on the device already.
        num_workers: Number of workers that load.
        pin_memory: Whether batches are in pinned memory.
        persistent_workers: Whether workers outlive an epoch.
        prefetch_factor: Number of batches that each worker loads ahead.
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


class _Found(NamedTuple):
    """What advice goes by: the numbers, what they say, and how the training is set up."""

    summary: PhaseSummary
    verdict: Verdict
    setup: Setup

    def share(self, name: str) -> float:
        """Return the fraction of the step that a phase is, from 0 to 1."""
        return self.summary.rows[name].share if name in self.summary.rows else 0.0


def advise(summary: PhaseSummary, setup: Setup) -> tuple[str, ...]:
    """Return what to do next, the most promising first; nothing where nothing is known to help."""
    found = _Found(summary, summary._judged(), setup)
    by_bound = _BY_BOUND.get(found.verdict.bound)
    advice = [] if by_bound is None else [*by_bound(found)]
    if summary.gap_share is not None and summary.gap_share >= verdict.MANY_GAPS:
        advice += _fewer_launches(found)
    return tuple(dict.fromkeys(advice))


def _load_faster(found: _Found) -> Iterator[str]:
    setup = found.setup
    if setup.is_on_device:
        # Workers cannot use the device that the training process has begun to use.
        yield "whole batches by index, as the dataset's tensors are on the device already"
        return
    yield from _more_workers(found)
    if setup.num_workers and _is_uneven(found):
        if setup.persistent_workers is False:
            yield "persistent_workers=True (now False), as few fetches take most of the time"
        if setup.prefetch_factor is not None:
            twice = 2 * setup.prefetch_factor
            yield f"prefetch_factor={twice} (now {setup.prefetch_factor}), as fetches are uneven"
    if found.share(COPY) >= _WORTH_IT:
        yield from _copy_faster(found)


def _more_workers(found: _Found) -> Iterator[str]:
    setup = found.setup
    workers, cores = setup.num_workers, setup.cores
    apart = ", each with a part of the IterableDataset of its own" if setup.is_iterable else ""
    if workers is None:
        if not setup.has_loader and found.verdict.phases == (DATA,):
            # Without parts nothing says that it is the loader.
            yield "iterate over timer.steps(loader), so that `data` is the loader's time alone"
        yield "cheaper transforms, or workers that load ahead"
    elif workers == 0:
        yield f"num_workers={min(_FIRST_WORKERS, cores or _FIRST_WORKERS)} (now 0){apart}"
    elif cores is None or workers < cores:
        of = f", of {cores} CPU cores" if cores is not None else ""
        yield f"more workers (num_workers is {workers}{of}){apart}"
        yield "cheaper transforms"
    else:
        yield f"cheaper transforms (num_workers is {workers}, of {cores} CPU cores)"


def _is_uneven(found: _Found) -> bool:
    """Return whether most steps hardly wait for the loader, but some for long."""
    row = found.summary.rows.get(FETCH if FETCH in found.summary.rows else DATA)
    return row is not None and row.p50_ms < 0.5 * row.mean_ms


def _copy_faster(found: _Found) -> Iterator[str]:
    if found.summary.on_host_clock:
        return  # Nothing is copied to a device.
    if found.setup.pin_memory is False:
        yield "pin_memory=True (now False)"
    elif found.verdict.bound == verdict.COPIES:
        yield "copy less: smaller types (uint8, bfloat16), which the device converts"


def _call_back_less(found: _Found) -> Iterator[str]:
    shares = {
        one: row.share for name, row in found.summary.rows.items() if (one := of_one_callback(name))
    }
    name = max(shares, key=shares.__getitem__, default="")
    if shares.get(name, 0.0) >= _WORTH_IT:
        took = duration(shares[name] * found.summary.step.mean_ms)
        yield f"run `{name}` less often, or make it cheaper ({took} a step)"
    else:
        yield "log less often: a larger log_every_n_steps"


def _meet_the_ranks(found: _Found) -> Iterator[str]:
    ranks = found.summary.ranks
    if ranks is not None and ranks.slowest is not None:
        yield f"look at rank {ranks.slowest} first, in `{ranks.phase}`: the others wait for it"
    elif found.verdict.bound == verdict.COMMUNICATION:
        yield "more work between collectives: larger batches, or accumulation under no_sync()"


def _work_less(found: _Found) -> Iterator[str]:
    setup = found.setup
    compute = found.share(FORWARD) + found.share(BACKWARD)
    if setup.precision == "32-true" and setup.has_bf16 and compute >= 0.5:
        yield 'precision="bf16-mixed" (now "32-true")'
    yield from _fuse(found)
    yield from _look_inside(found)


def _look_inside(found: _Found) -> Iterator[str]:
    [longest] = found.verdict.phases or ("",)
    parts = {
        name: row.share
        for name, row in found.summary.rows.items()
        if name.startswith(f"{longest}/")
    }
    parts = {name: share for name, share in parts.items() if not name.endswith("/comm")}
    if parts:
        most = max(parts, key=parts.__getitem__)
        if parts[most] >= _WORTH_IT:
            yield f"look at `{most}`, {parts[most]:.0%} of the step"
    elif longest in (FORWARD, BACKWARD) and found.setup.has_parts:
        share = found.share(longest)
        yield f"split `{longest}`, {share:.0%} of the step, by module: modules=2"


def _fuse(found: _Found) -> Iterator[str]:
    share = found.share(OPTIMIZER)
    if found.setup.unfused and share >= _WORTH_IT:
        yield f"{found.setup.unfused}(fused=True), as `optimizer` is {share:.0%} of the step"


def _fewer_launches(found: _Found) -> Iterator[str]:
    setup = found.setup
    now = f" (now {setup.batch_size})" if setup.batch_size is not None else ""
    yield f"a larger batch{now}"
    yield 'torch.compile(mode="reduce-overhead")' if setup.compiled else "torch.compile"
    yield "CUDA graphs"
    yield from _fuse(found)


def _launch_faster(found: _Found) -> Iterator[str]:
    yield from _fewer_launches(found)
    if found.summary.gap_share is None:
        yield "probe_every_n_steps=100 tells how much there is to win"


def _free_the_host(found: _Found) -> Iterator[str]:
    others = []
    for name in found.verdict.phases:
        if name in (FETCH, DATA):
            yield from _load_faster(found)
        elif name == COPY:
            yield from _copy_faster(found)
        else:
            others.append(f"`{name}`")
    if others:
        pinned = "copies from unpinned memory"
        waits = ".item() or prints" if found.setup.pin_memory else f".item(), prints or {pinned}"
        yield f"no {waits} in {', '.join(others)}"


_BY_BOUND: Mapping[str, Callable[[_Found], Iterator[str]]] = {
    verdict.INPUT: _load_faster,
    verdict.COPIES: _copy_faster,
    verdict.CALLBACK: _call_back_less,
    verdict.RANK: _meet_the_ranks,
    verdict.COMMUNICATION: _meet_the_ranks,
    verdict.GPU: _work_less,
    verdict.LAUNCH: _launch_faster,
    verdict.MIXED: _free_the_host,
    verdict.LONGEST: _look_inside,
}
