"""What bounds a training, judged by the statistics of its phases."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from lightning_gputime._measurement.stats import PhaseStats, largest_part
from lightning_gputime._measurement.table import percent, unit_of
from lightning_gputime._phases import (
    CALLBACK_WAIT,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    WAIT,
    is_wait,
)

Rows = Mapping[str, PhaseStats]

INPUT, COPIES, CALLBACK, RANK = "input-bound", "copy-bound", "callback-bound", "rank-bound"
COMMUNICATION, GPU, LAUNCH, MIXED = "communication-bound", "GPU-bound", "launch-bound", "mixed"
LONGEST = "longest phase"  # The verdict without a device.
UNEVEN = "uneven"  # Where few steps hold most of what may be no fetch at all.
_OF_DATA = {FETCH: INPUT, COPY: COPIES, WAIT: RANK}
# The verdict by where a training waits between two batches.
_HOLDS_UP = {DATA: INPUT, **_OF_DATA, CALLBACKS: CALLBACK, CALLBACK_WAIT: RANK}
HELD_UP = 0.3  # From this fraction of a step, or of the wall clock, on something holds it up.
MANY_GAPS = 0.1  # From this fraction of a step on, launch gaps are worth an advice.


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a training."""

    bound: str = ""  # Such as "GPU-bound"; empty if nothing is known.
    grounds: str = ""
    phases: tuple[str, ...] = ()  # Where it is held up, or what takes longest, the worst first.

    def __str__(self) -> str:
        return f"{self.bound}: {self.grounds}" if self.bound else ""


def judge(
    rows: Rows, step: PhaseStats, host_wait_ms: float | None, launch_gap_share: float | None
) -> Verdict:
    """Return what bounds a training; `host_wait_ms` is None without a device."""
    if held_up := _held_up_between_batches(rows, step) or _held_up_by_ranks(rows):
        return held_up
    if host_wait_ms is None:
        return _longest(rows)
    return _pace(rows, step, host_wait_ms, launch_gap_share)


def without_blurred(verdict: Verdict, blurred: Collection[str]) -> Verdict:
    """Return a verdict as far as it does not rest on phases whose times are not separated."""
    tops = {name.partition("/")[0] for name in blurred}
    phases = tuple(one for one in verdict.phases if one.partition("/")[0] not in tops)
    if len(phases) == len(verdict.phases):
        return verdict
    # How long the device works, and how long it waits, does not depend on the phases.
    return replace(verdict, phases=phases) if verdict.bound in (GPU, LAUNCH) else Verdict()


def _held_up_between_batches(rows: Rows, step: PhaseStats) -> Verdict | None:
    """Name what is 30 % of the step or more: `callbacks`, a part of `data`, or `data` itself."""
    shares = {name: row.share for name, row in rows.items() if name in _HOLDS_UP}
    # Where the parts are known, the whole says nothing about the loader.
    if not _OF_DATA.keys().isdisjoint(shares):
        shares.pop(DATA, None)
    # A callback that waits for other ranks is not long itself.
    if CALLBACK_WAIT in shares:
        shares[CALLBACKS] -= shares[CALLBACK_WAIT]
    name = max(shares, key=shares.__getitem__, default=DATA)
    share = shares.get(name, 0.0)
    if share < HELD_UP or _is_of_one_step(rows[name], step):
        return None
    return Verdict(_HOLDS_UP[name], f"{percent(share)} of the step is `{name}`", (name,))


def _is_of_one_step(row: PhaseStats, step: PhaseStats) -> bool:
    """Return whether a phase is long in a single step: that is no habit of a training."""
    in_phase_ms = row.n * row.mean_ms
    elsewhere_ms = step.mean_ms - in_phase_ms / step.n
    in_others_ms = in_phase_ms - row.max_ms
    return in_others_ms < HELD_UP * (in_others_ms + (step.n - 1) * elsewhere_ms)


def _held_up_by_ranks(rows: Rows) -> Verdict | None:
    waits = {name: row.share for name, row in rows.items() if is_wait(name)}
    share = sum(waits.values())
    if share < HELD_UP:
        return None
    most = max(waits, key=waits.__getitem__)
    grounds = f"exposed communication takes {percent(share)} of the step, most of it in `{most}`"
    return Verdict(COMMUNICATION, grounds, (most,))


def _longest(rows: Rows) -> Verdict:
    """Name the longest phase, which is all that the host's clock shows."""
    shares = {name: row.share for name, row in rows.items() if "/" not in name}
    name = max(shares, key=shares.__getitem__, default="")
    if not name:
        return Verdict()
    return Verdict(LONGEST, f"{percent(shares[name])} of the step is `{name}`", (name,))


def _pace(
    rows: Rows, step: PhaseStats, host_wait_ms: float, launch_gap_share: float | None
) -> Verdict:
    """Return whether the device or its host sets the pace."""
    unit = unit_of(step.mean_ms)
    whole = f"{unit.of(step.mean_ms)} per step"
    waits = f"the CPU waits {unit.number(host_wait_ms)} of {whole} for the GPU"
    of_gpu = _longest(rows).phases
    if host_wait_ms >= 0.1 * step.mean_ms:
        return Verdict(GPU, waits, of_gpu)
    # What the device takes longer for than the host is queued behind the host. Where the host
    # takes longer, it works (a fetch) or waits inside the step (a copy, `.item()`).
    behind = {
        name: row.n * (row.mean_ms - row.host_mean_ms) / step.n
        for name, row in rows.items()
        if "/" not in name
    }
    ahead = sum(ms for ms in behind.values() if ms > 0)
    if ahead >= 0.2 * step.mean_ms:
        grounds = f"the GPU runs behind the CPU for {unit.number(ahead)} of {whole}"
        late = [name for name, ms in behind.items() if -ms >= 0.05 * step.mean_ms]
        if not late:
            return Verdict(GPU, grounds, of_gpu)
        # Of `data` the part in which the host was for most of it.
        of_data = {DATA, *_OF_DATA}
        host_ms = {one: row.n * row.host_mean_ms for one, row in rows.items() if one in of_data}
        parts = tuple(largest_part(host_ms, name) for name in late)
        named = ", ".join(f"`{part}`" for part in parts)
        return Verdict(MIXED, f"{grounds}, but the CPU is busy or blocked in {named}", parts)
    idles = "the GPU idles while the CPU launches kernels"
    if launch_gap_share is None:
        return Verdict(LAUNCH, f"{idles}; {waits}")
    share = f"{percent(launch_gap_share)} of the step"
    if launch_gap_share < MANY_GAPS:
        return Verdict(GPU, f"launch gaps are only {share}", of_gpu)
    return Verdict(LAUNCH, f"{idles} ({share})")
