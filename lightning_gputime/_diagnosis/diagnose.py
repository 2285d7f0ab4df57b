"""From a measurement to the one answer: what limits this training?"""

from collections.abc import Iterator

from lightning_gputime._diagnosis.advice import Case, advise
from lightning_gputime._diagnosis.breakdown import break_down, is_blurred, may_hide_evaluations
from lightning_gputime._diagnosis.codes import COMMUNICATES, GPU, LAUNCH, SYNC
from lightning_gputime._diagnosis.culprit import EntryCulprit
from lightning_gputime._diagnosis.diagnosis import Advice, Diagnosis, Entry, Grade, TimeBreakdown
from lightning_gputime._diagnosis.pace import pace_of
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.units import duration, percent
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._phases import DATA

# Fractions of the wall clock: from which on an entry is the bottleneck, and is worth a look. XProf
# grades input pipelines by the same.
_BOUND, _WORTH_A_LOOK = 0.2, 0.05
# Where the CPU blocks on the GPU, other entries are partly its consequence: they must be larger.
_BOUND_BESIDE_SYNC = 0.3
_MIN_BATCHES = 20  # Shorter evaluations are not judged.
_UNCLEAR = "unclear: `data` takes {} of the {}, most of it in few steps, as evaluations do"
_MIN_LOST = 0.1  # A slowdown that costs less of the run is not in the headline.


def diagnose(measurement: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return what limits a training, by its measurement and its set-up alone.

    The bottleneck is the largest entry of the time breakdown that can be removed, by how much
    faster the training is without it. If there is none, it is what limits the model's own work.
    """
    m = measurement
    is_short = m.stage and m.steps < _MIN_BATCHES
    if m.is_warmup or is_short or not m.steps or not m.step.mean_ms > 0:
        return Diagnosis()
    pace = pace_of(m)

    def advise_all(
        name: str, seconds: float, share: float, culprits: tuple[EntryCulprit, ...]
    ) -> tuple[Advice, ...]:
        costly = _on_costly_settings(name, setup) if share >= _WORTH_A_LOOK else ()
        return (*advise(Case(name, seconds, m, setup, pace, culprits), share), *costly)

    breakdown = break_down(m, setup, pace, advise_all)
    blurred = sum(row.share for row in breakdown.rows if is_blurred(row.name, m))
    if blurred >= _BOUND and pace.code != GPU:
        # Time that cannot be attributed may be the bottleneck.
        return Diagnosis(time_breakdown=breakdown)
    unclear = sum(row.share for row in breakdown.rows if may_hide_evaluations(row.name, m, setup))
    if unclear >= _BOUND and pace.code != GPU:
        headline = _UNCLEAR.format(percent(unclear), breakdown.scope)
        advice = _advice_of(breakdown, DATA)
        return Diagnosis("", "unknown", "", headline, breakdown, advice)
    largest = sorted((row for row in breakdown.rows if row.code), key=_weight, reverse=True)
    entry = largest[0] if largest else None
    weight = _weight(entry) if entry is not None else 0.0
    is_sync = pace.code == SYNC
    grade: Grade
    if entry is not None and weight >= (_BOUND_BESIDE_SYNC if is_sync else _BOUND):
        code, name, grade = entry.code, entry.name, "bound"
        headline = _about(entry, breakdown)
        second = next((row for row in largest if row.name not in ONCE), None)
        if entry.name in ONCE and second is not None and _weight(second) >= _WORTH_A_LOOK:
            headline += f"; apart from that, {_about(second, breakdown)}"
    elif pace.code in (LAUNCH, SYNC):
        code, name, grade = pace.code, breakdown.work, "bound"
        headline = f"{pace.code}: {pace.grounds}"
        # While the CPU blocks, the GPU runs out of work: it idles in these phases.
        blocked = [row for row in largest if row.name in pace.phases]
        if blocked and blocked[0].speed_up is not None and _weight(blocked[0]) >= _WORTH_A_LOOK:
            name = blocked[0].name
            headline += f"; without that the training is up to {blocked[0].speed_up:.2f}x as fast"
    elif entry is not None and weight >= _WORTH_A_LOOK:
        code, name, grade = entry.code, entry.name, "worth a look"
        headline = f"{pace.code}, and worth a look: {_about(entry, breakdown)}"
    else:
        code, name, grade = pace.code, breakdown.work, "balanced"
        headline = f"{pace.code}: {pace.grounds}, and nothing else takes 5 % of the time"
    if (m.blurred or unclear) and code == pace.code and grade == "balanced":
        # How long the device works does not depend on what is missing; the rest may.
        headline = f"{pace.code}: {pace.grounds}"
    if code == COMMUNICATES and m.ranks is not None and m.ranks.suspect is not None:
        headline += f"; rank {m.ranks.suspect} may be the cause"
    first = breakdown.work if code == SYNC else name  # What blocks the CPU is part of the work.
    if unclear >= _WORTH_A_LOOK:
        headline += f"; {_UNCLEAR.format(percent(unclear), breakdown.scope)}"
        first = DATA
    if (slowdown := m.slowdown) is not None and slowdown.lost_share >= _MIN_LOST:
        headline += f"; {slowdown}"
    return Diagnosis(code, grade, name, headline, breakdown, _advice_of(breakdown, first))


def _on_costly_settings(name: str, setup: TrainingSetup) -> Iterator[Advice]:
    for setting in setup.costly_settings:
        if setting.entry == name:
            yield Advice("costly_setting", setting.text, {"setting": setting.name})


def _weight(entry: Entry) -> float:
    """Return the fraction of the wall clock that is saved without an entry."""
    return entry.share if entry.speed_up is None else 1 - 1 / entry.speed_up


def _about(entry: Entry, breakdown: TimeBreakdown) -> str:
    share = f"{percent(entry.share)} of the {breakdown.scope}"
    if entry.name in ONCE:
        took = duration(1e3 * entry.seconds)
        return f"{entry.code}: `{entry.name}` takes {took}, {share}, and occurs once"
    about = f"{entry.code}: `{entry.name}` takes {share}"
    if entry.speed_up is None:
        return about
    if _weight(entry) >= 2 * entry.share:
        # Little GPU time, but much of the CPU, which sets the pace.
        about = f"{entry.code}: `{entry.name}` keeps the CPU from launching work"
    return f"{about}; without it the training is up to {entry.speed_up:.2f}x as fast"


def _advice_of(breakdown: TimeBreakdown, bottleneck: str) -> tuple[Advice, ...]:
    """Return the advice of all entries: first of the bottleneck, last of the model's work."""
    rows = sorted(
        breakdown.rows,
        key=lambda row: (row.name != bottleneck, row.name == breakdown.work, -_weight(row)),
    )
    return tuple({advice.text: advice for row in rows for advice in row.advice}.values())
