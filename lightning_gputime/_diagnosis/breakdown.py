"""Time breakdown of a training run: its wall clock, divided into entries."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_gputime._diagnosis.advice import Case, advise
from lightning_gputime._diagnosis.codes import (
    CODES,
    COMMUNICATION,
    COMPILATIONS,
    CPU_WORK,
    GPU_WORK,
    LAUNCH_BOUND,
    LAUNCH_GAPS,
    NOT_SAMPLED,
    OTHER_RANKS,
    PHASE_BOUND,
    SLOW,
    SLOWEST_RANK,
    STANDARD_PHASES,
    TIMING,
    TRANSFER_HOOKS,
)
from lightning_gputime._diagnosis.culprit import culprits_of
from lightning_gputime._diagnosis.diagnosis import Entry, TimeBreakdown
from lightning_gputime._diagnosis.pace import Pace
from lightning_gputime._measurement.culprits import of_entry
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import UNEXPLAINED
from lightning_gputime._measurement.stats import PhaseStats, is_uneven
from lightning_gputime._measurement.wall_clock import FIRST_STEP, ONCE, STEPS, WallClockBreakdown
from lightning_gputime._phases import (
    CALLBACK_WAIT,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    LOSS,
    OPTIMIZER,
    OTHER,
    SAVES,
    WAIT,
    is_wait,
)

# Minimum fraction of the step at which a phase of the model's work becomes a separate entry.
_MIN_OTHER = 0.05
_MIN_LOSS_ON_HOST_CLOCK = 0.1
_MIN_LOSS_ON_GPU = 0.2
_MIN_OPTIMIZER = 0.2
# Frequent compilations get an entry from these fractions on: of the number of all steps, and of the
# time of all steps.
_MIN_COMPILED_STEPS = 0.1
_MIN_COMPILED_SHARE = 0.2
# If one step has most of a phase's total time, the phase is a bottleneck only if it also takes this
# fraction of the other steps.
_MIN_SHARE_OF_OTHER_STEPS = 0.2


@dataclass(slots=True)
class _Part:
    """Time of an entry inside steps, as fractions of the step.

    Attributes:
        share: Time on the GPU's clock.
        host: Host time.
        error: Half-width of the 95 % confidence interval of `share`.
    """

    share: float = 0.0
    host: float = 0.0
    error: float = 0.0

    def add(self, share: float, host: float = 0.0, error: float = 0.0) -> None:
        self.share += share
        self.host += host
        self.error = (self.error**2 + error**2) ** 0.5


def break_down(m: Measurement, setup: TrainingSetup, pace: Pace) -> TimeBreakdown:
    """Return the time breakdown, with the advice on each entry."""
    work = CPU_WORK if m.on_host_clock else GPU_WORK
    wall_clock = m.wall_clock or WallClockBreakdown({})
    scope = "training" if setup.is_own_loop else "fit"
    if STEPS not in wall_clock.entries_s:  # Before the second step.
        scope = "timed steps"
        n = m.steps + m.untimed_steps
        wall_clock = WallClockBreakdown({STEPS: n * m.step.mean_ms / 1e3})
    entries_s = dict(wall_clock.entries_s)
    # The entry `steps` of the wall clock excludes checkpoints, but the step time includes them.
    steps_s, saves_s = entries_s.pop(STEPS), wall_clock.saves_in_steps_s
    saves_share = saves_s / (steps_s + saves_s or 1.0)
    parts = _parts_of_step(m, pace, work, saves_share)
    share_without_saves = 1.0 - parts.pop(SAVES).share
    # The entry of the first step is only its excess over a usual step.
    first_step_s = entries_s.get(FIRST_STEP, 0.0)
    usual_step_s = min(share_without_saves * m.step.mean_ms / 1e3, first_step_s)
    if first_step_s:
        entries_s[FIRST_STEP] = first_step_s - usual_step_s
    # Parts are fractions of the step with checkpoints, so scale the time of all steps accordingly.
    all_steps_s = 0.0
    if share_without_saves > 0:
        all_steps_s = (steps_s + usual_step_s) / share_without_saves
    wall_s = sum(entries_s.values()) + share_without_saves * all_steps_s
    rows = []
    for name in dict.fromkeys([*entries_s, *parts]):
        part = parts[name]
        # A phase may share its name with an entry outside of steps: add both.
        seconds = entries_s.get(name, 0.0) + part.share * all_steps_s
        if seconds > 0 or name == work:
            culprits = () if is_blurred(name, m) else culprits_of(name, seconds, m)
            case = Case(name, seconds, m, setup, pace, culprits)
            share, steps_share = seconds / wall_s, all_steps_s / wall_s
            rows.append(_entry(case, part, share, steps_share))
    mfu = m.mfu
    return TimeBreakdown(
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        wall_s=wall_s,
        scope=scope,
        work=work,
        # MFU above 1 means that the FLOPs or the peak are wrong.
        peak_share=None if mfu is None or mfu > 1 else mfu * all_steps_s / wall_s,
        unknown=_unknown(m),
    )


def _entry(case: Case, part: _Part, share: float, steps_share: float) -> Entry:
    """Return an entry.

    Args:
        case: The entry's name and time, with the facts on which its advice depends.
        part: The entry's time inside steps.
        share: Fraction of the wall clock that the entry takes.
        steps_share: Fraction of the wall clock that all steps take.
    """
    name, m = case.entry, case.m
    # In launch-bound training, removing an entry may save more than its own time.
    extra_share = max(_removable_share(name, part, m, case.pace) - part.share, 0.0)
    saved_share = share + extra_share * steps_share
    error = part.error * steps_share
    is_time_known = not is_blurred(name, m) and error < share
    is_removable = (
        is_time_known
        and name not in (GPU_WORK, CPU_WORK, TIMING, NOT_SAMPLED)
        and not (name == DATA and may_hide_evaluations(m, case.setup))
    )
    can_be_bottleneck = is_removable and not (name in m.rows and _is_of_one_step(m.rows[name], m))
    code = CODES.get(name, PHASE_BOUND if name in m.rows else "")
    has_speed_up = is_removable and name not in ONCE and saved_share < 1
    return Entry(
        name=name,
        seconds=case.seconds,
        share=share,
        error=error,
        speed_up=1 / (1 - saved_share) if has_speed_up else None,
        code=code if can_be_bottleneck else "",
        advice=advise(case, max(share, saved_share)) if is_time_known else (),
        culprits=case.culprits,
    )


def _is_of_one_step(row: PhaseStats, m: Measurement) -> bool:
    """Return True if a phase is long in a single step only, so that it cannot be the bottleneck."""
    n = m.steps + m.untimed_steps
    # Without the step in which the phase is longest: time of the phase, and of all steps.
    rest_ms = n * row.share * m.step.mean_ms - row.max_ms
    other_steps_ms = n * m.step.mean_ms - row.max_ms
    is_rest_short = rest_ms < _MIN_SHARE_OF_OTHER_STEPS * other_steps_ms
    return n > 1 and row.max_ms > rest_ms and is_rest_short


def is_blurred(name: str, m: Measurement) -> bool:
    """Return True if an entry includes a phase that cannot be separated from other phases."""
    top = DATA if name == TRANSFER_HOOKS else name.partition("/")[0]
    return top in {phase.partition("/")[0] for phase in m.blurred}


def may_hide_evaluations(m: Measurement, setup: TrainingSetup) -> bool:
    """Return True if `data` may include undetected evaluations, for example of a model copy.

    In a loop that only calls `step()`, `data` is all the time before forward.
    """
    row = m.rows.get(DATA)
    is_time_before_forward = setup.is_own_loop and not setup.has_loader and FETCH not in m.rows
    return is_time_before_forward and row is not None and is_uneven(row)


def _removable_share(name: str, part: _Part, m: Measurement, pace: Pace) -> float:
    """Return the maximum fraction of the step that removing an entry would save.

    In launch-bound training, this is the entry's host time: its GPU time may be small while the GPU
    works through its queue. No step can be shorter than its GPU work.
    """
    if pace.code != LAUNCH_BOUND or name in (LAUNCH_GAPS, COMMUNICATION):
        return part.share
    busy_ms = sum(
        row.frequency * (row.gpu_busy_mean_ms or 0.0)
        for other, row in m.rows.items()
        if "/" not in other
    )
    return min(max(part.share, part.host), 1 - busy_ms / m.step.mean_ms)


def _parts_of_step(
    m: Measurement, pace: Pace, work: str, saves_share: float
) -> defaultdict[str, _Part]:
    """Return the entries of a step, whose shares add up to 1.

    Args:
        m: Measurement of the run.
        pace: Component that sets the pace of a step.
        work: Name of the entry for the model's work.
        saves_share: Fraction of the step that checkpoints take.
    """
    entry_of = _entries_of_phases(m, pace, work)
    parts = defaultdict[str, _Part](_Part)

    def move(source: str, entry: str, share: float) -> float:
        """Move up to `share` from one entry to another, and return the share moved."""
        moved = max(min(share, parts[source].share), 0.0)
        parts[source].add(-moved)
        parts[entry].add(moved)
        return moved

    for name, row in m.rows.items():
        entry, parent = entry_of(name), entry_of(name.partition("/")[0])
        if "/" not in name or entry != parent:
            parts[entry].add(row.share, m.host_share(name), row.share_error)
            if "/" in name:  # The phase includes this sub-phase, which has another entry.
                parts[parent].add(-row.share, -m.host_share(name))
    move(CALLBACKS, SAVES, saves_share)  # In a step, checkpoints are part of callbacks.
    moved_from_work = 0.0
    if m.slow is not None:
        for name, causes in m.slow.lost_shares.items():
            for cause, share in causes.items():
                if cause != UNEXPLAINED:
                    source = entry_of(name)
                    moved = move(source, f"{SLOW}{cause}", share)
                    moved_from_work += moved if source == work else 0.0
    # Frequent compilations lengthen all steps, so they are not causes of slow steps.
    missing_share = _frequent_compilations(m) - parts[COMPILATIONS].share
    moved_from_work += move(work, COMPILATIONS, missing_share)
    if (ranks := m.ranks) is not None and ranks.slowest_rank is not None:
        # These are times of rank zero. It waits for the slowest rank, unless it is the slowest.
        source = entry_of(ranks.phase) if ranks.slowest_rank == 0 else COMMUNICATION
        move(source, SLOWEST_RANK, ranks.behind_median_ms / m.step.mean_ms)
    # Probes exclude slow steps, so do not count the excess of slow steps as launch gaps.
    move(work, LAUNCH_GAPS, (m.launch_gap_share or 0.0) - moved_from_work)
    move(work, TIMING, m.added_share or 0.0)
    parts[NOT_SAMPLED].add(m.not_sampled_share)
    # Add rounding errors to the work.
    parts[work].add(1.0 - sum(part.share for part in parts.values()))
    return parts


def _frequent_compilations(m: Measurement) -> float:
    """Return the fraction of the steps' time in which torch compiles; 0 if low or if rare."""
    compiled_code = of_entry(m.culprits, COMPILATIONS)
    steps = m.steps + m.untimed_steps + m.warmup_steps
    # Exclude compilations in the first step, which is a separate entry. Nearly all of that step is
    # compilation, so subtract all of it.
    first_s = m.wall_clock.entries_s.get(FIRST_STEP, 0.0) if m.wall_clock is not None else 0.0
    compiled_s = sum(code.seconds for code in compiled_code) - first_s
    is_frequent = sum(code.calls for code in compiled_code) >= _MIN_COMPILED_STEPS * steps
    share = 1e3 * compiled_s / (steps * m.step.mean_ms) if is_frequent and steps else 0.0
    return share if share >= _MIN_COMPILED_SHARE else 0.0


def _entries_of_phases(m: Measurement, pace: Pace, work: str) -> Callable[[str], str]:
    """Return a function that maps a phase or sub-phase to its entry."""
    if m.on_host_clock:
        is_long_loss = m.share(LOSS) >= _MIN_LOSS_ON_HOST_CLOCK
    else:
        is_long_loss = pace.code == LAUNCH_BOUND and m.host_share(LOSS) >= _MIN_LOSS_ON_GPU
    is_separate: Mapping[str, bool] = {
        OTHER: m.share(OTHER) >= _MIN_OTHER or m.host_share(OTHER) >= _MIN_OTHER,
        LOSS: is_long_loss,
        OPTIMIZER: m.on_host_clock and m.share(OPTIMIZER) >= _MIN_OPTIMIZER,
    }
    entry_of_data = TRANSFER_HOOKS if {FETCH, COPY} & m.rows.keys() else DATA

    def entry_of(name: str) -> str:
        top = name.partition("/")[0]
        if name in (WAIT, CALLBACK_WAIT):
            return OTHER_RANKS
        if is_wait(name):
            return COMMUNICATION
        if name in (FETCH, COPY):
            return name
        if top == DATA:
            return entry_of_data
        if top not in STANDARD_PHASES or top == CALLBACKS or is_separate.get(top):
            return top
        return work

    return entry_of


def _unknown(m: Measurement) -> str:
    """Return what was not measured, with the options that measure it."""
    if m.on_host_clock or m.stage:
        return ""
    how = "no step can be probed" if m.probe_failure else "pass probe_every_n_steps=100"
    gaps = "" if m.probed_steps else f"launch gaps ({how})"
    peak = "" if m.mfu is not None else "MFU (pass flops=)"
    return ", ".join(filter(None, (gaps, peak)))
