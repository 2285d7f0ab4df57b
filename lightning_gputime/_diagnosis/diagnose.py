"""Diagnosis of a training run, derived from its measurement."""

from dataclasses import replace

from lightning_gputime._diagnosis.breakdown import break_down, is_blurred, may_hide_evaluations
from lightning_gputime._diagnosis.codes import (
    COMMUNICATION_BOUND,
    GPU_BOUND,
    LAUNCH_BOUND,
    SYNC_BOUND,
)
from lightning_gputime._diagnosis.diagnosis import Advice, Diagnosis, Entry, Grade, TimeBreakdown
from lightning_gputime._diagnosis.pace import Pace, pace_of
from lightning_gputime._diagnosis.repeated import repeated_calls
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._phases import DATA

# Minimum fraction of the wall clock for an entry to be the bottleneck, and to be reported. XProf
# uses the same thresholds to grade input pipelines.
_MIN_BOTTLENECK = 0.2
_MIN_REPORTED = 0.05
# If the CPU blocks on the GPU, other entries grow as a consequence. So they need a larger fraction
# to be the bottleneck.
_MIN_BOTTLENECK_IF_SYNC = 0.3
_MIN_BATCHES = 20  # Shorter evaluations get no diagnosis.
_MAX_LOST = 0.99  # Maximum lost fraction of a run, which caps the promised speed-up at 100x.
_MIN_SLOWDOWN = 0.1  # A slowdown that costs this fraction of the run is in the headline.
_UNCLEAR = "unclear: `data` takes {} of the {}, mostly in a few steps, which may be evaluations"


def diagnose(measurement: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return the diagnosis of a training run.

    The bottleneck is the entry of the time breakdown whose removal would speed up training the
    most. If no entry is large enough, it is the component that sets the pace of the model's work.
    """
    m = measurement
    is_short = m.stage and m.steps < _MIN_BATCHES
    if m.is_warmup or is_short or not m.steps or not m.step.mean_ms > 0:
        return Diagnosis()
    pace = pace_of(m)
    breakdown = break_down(m, setup, pace)
    blurred_share = sum(row.share for row in breakdown.rows if is_blurred(row.name, m))
    if blurred_share >= _MIN_BOTTLENECK and pace.code != GPU_BOUND:
        # The bottleneck may be in phases whose times cannot be separated.
        return Diagnosis(time_breakdown=breakdown)
    unclear_share = breakdown[DATA].share if may_hide_evaluations(m, setup) else 0.0
    unclear = _UNCLEAR.format(percent(unclear_share), breakdown.scope)
    if unclear_share >= _MIN_BOTTLENECK and pace.code != GPU_BOUND:
        advice = _advice_of(breakdown, first=DATA)
        return Diagnosis(headline=unclear, time_breakdown=breakdown, advice=advice)
    found = _bottleneck(breakdown, pace, is_complete=not (m.blurred or unclear_share))
    headline = found.headline
    if found.code == COMMUNICATION_BOUND and m.ranks is not None and m.ranks.suspect is not None:
        headline += f"; rank {m.ranks.suspect} may be the cause"
    if unclear_share >= _MIN_REPORTED:
        headline += f"; {unclear}"
        advised_first = DATA
    elif found.code == SYNC_BOUND:
        # The entry of the model's work has the advice on calls that block the CPU.
        advised_first = breakdown.work
    else:
        advised_first = found.entry
    advice = _advice_of(breakdown, first=advised_first)
    is_removable = found.entry != breakdown.work
    bottleneck_share = _saved_share(breakdown[found.entry]) if is_removable else 0.0
    # Advice on repeated calls or a slowdown that cost more than the bottleneck comes first.
    if pace.code != GPU_BOUND and (repeated := repeated_calls(m)) is not None:
        if repeated.share > bottleneck_share:
            headline += f"; {repeated}"
            advice = (repeated.advice, *advice)
        else:
            advice = (*advice, repeated.advice)
    if (slowdown := m.slowdown) is not None and slowdown.lost_share >= _MIN_SLOWDOWN:
        headline += f"; {slowdown}"
        on_slowdown = _advice_on(slowdown)
        is_first = slowdown.lost_share > bottleneck_share
        advice = (on_slowdown, *advice) if is_first else (*advice, on_slowdown)
    return replace(found, headline=headline, advice=advice)


def _advice_on(slowdown: Slowdown) -> Advice:
    lost_share = min(slowdown.lost_share, _MAX_LOST)
    without = f"without this the training is up to {1 / (1 - lost_share):.2f}x as fast"
    if slowdown.until_step is None:
        when = f"since step {slowdown.since_step:,}"
    else:
        when = f"from step {slowdown.since_step:,} to {slowdown.until_step:,}"
    if slowdown.phase and slowdown.is_most_in_phase:
        text = f"find what takes longer in `{slowdown.phase}` {when}: {without}"
    else:
        text = (
            f"find what runs {when} and slows down all phases, such as another thread, another"
            f" process or a GPU that throttles: {without}"
        )
    return Advice("slowdown", text, {"step": slowdown.since_step, "phase": slowdown.phase})


def _bottleneck(breakdown: TimeBreakdown, pace: Pace, *, is_complete: bool) -> Diagnosis:
    """Return the diagnosis without advice.

    Args:
        breakdown: The time breakdown.
        pace: Component that sets the pace of a step.
        is_complete: True if no entry is blurred or unclear. Only then may the headline say that
            everything else takes little time.
    """

    def diagnosis(code: str, entry: str, grade: Grade, headline: str) -> Diagnosis:
        return Diagnosis(code, grade, entry, headline, breakdown)

    entries = sorted((row for row in breakdown.rows if row.code), key=_saved_share, reverse=True)
    largest = entries[0] if entries else Entry(name="", seconds=0.0, share=0.0)
    largest_share = _saved_share(largest)
    min_share = _MIN_BOTTLENECK_IF_SYNC if pace.code == SYNC_BOUND else _MIN_BOTTLENECK
    # The lower end of the interval may be below the minimum, but not below half of it.
    is_certain = largest_share - largest.error >= min_share / 2
    if largest_share >= min_share and is_certain:
        headline = f"{largest.code}: {_describe_cost(largest, breakdown)}"
        recurring = next((row for row in entries if row.name not in ONCE), None)
        if largest.name in ONCE and recurring and _saved_share(recurring) >= _MIN_REPORTED:
            cost = _describe_cost(recurring, breakdown)
            headline += f"; apart from that, {recurring.code}: {cost}"
        return diagnosis(largest.code, largest.name, "bound", headline)
    headline = f"{pace.code}: {pace.reason}"
    if pace.code in (LAUNCH_BOUND, SYNC_BOUND):
        # In the phases in which the CPU blocks, the GPU runs out of work and idles. So if such a
        # phase has an entry, name the speed-up without it.
        blocked = next((row for row in entries if row.name in pace.phases), None)
        if blocked is None or blocked.speed_up is None or _saved_share(blocked) < _MIN_REPORTED:
            return diagnosis(pace.code, breakdown.work, "bound", headline)
        headline += f"; without that the training is up to {blocked.speed_up:.2f}x as fast"
        return diagnosis(pace.code, blocked.name, "bound", headline)
    if largest_share >= _MIN_REPORTED:
        cost = _describe_cost(largest, breakdown)
        headline = f"{pace.code}; worth a look: {cost} ({largest.code})"
        return diagnosis(largest.code, largest.name, "worth a look", headline)
    if (uncertain := _uncertain(breakdown)) is not None:
        share = f"{percent(uncertain.share)} ± {percent(uncertain.error)}"
        headline += f"; unclear: `{uncertain.name}` takes {share}: pass every_n_steps=1"
        return diagnosis(pace.code, breakdown.work, "unknown", headline)
    if is_complete:
        headline += ", and everything else takes less than 5 % of the time"
    return diagnosis(pace.code, breakdown.work, "balanced", headline)


def _uncertain(breakdown: TimeBreakdown) -> Entry | None:
    """Return the largest entry with an error of at least its share, or None."""
    rows = [row for row in breakdown.rows if row.error >= row.share >= _MIN_REPORTED]
    return next((row for row in rows if row.name != breakdown.work), None)


def _saved_share(entry: Entry) -> float:
    """Return the fraction of the wall clock that removing an entry would save."""
    return entry.share if entry.speed_up is None else 1 - 1 / entry.speed_up


def _describe_cost(entry: Entry, breakdown: TimeBreakdown) -> str:
    """Return the cost of an entry, as part of a sentence."""
    error = f" ± {percent(entry.error)}" if entry.error >= _MIN_REPORTED else ""
    share = f"{percent(entry.share)}{error} of the {breakdown.scope}"
    if entry.name in ONCE:
        took = duration(1e3 * entry.seconds)
        return f"`{entry.name}` takes {took}, {share}, and occurs once"
    cost = f"`{entry.name}` takes {share}"
    if entry.speed_up is None:
        return cost
    if _saved_share(entry) >= 2 * entry.share:
        # The entry takes little GPU time, but much CPU time, which limits the step.
        cost = f"`{entry.name}` keeps the CPU from launching work"
    return f"{cost}; without it the training is up to {entry.speed_up:.2f}x as fast"


def _advice_of(breakdown: TimeBreakdown, first: str) -> tuple[Advice, ...]:
    """Return the advice on all entries: on the entry `first` first, on the model's work last."""
    rows = sorted(
        breakdown.rows,
        key=lambda row: (row.name != first, row.name == breakdown.work, -_saved_share(row)),
    )
    return tuple({advice.text: advice for row in rows for advice in row.advice}.values())
