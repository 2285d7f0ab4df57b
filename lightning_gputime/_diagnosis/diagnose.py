"""Diagnosis of a training run, derived from its measurement."""

from dataclasses import replace

from lightning_gputime._diagnosis import (
    CODES,
    COMMUNICATION_BOUND,
    COMPUTE_BOUND,
    GPU_BOUND,
    HOST_BOUND,
    INPUT_BOUND,
    LAUNCH_BOUND,
    MODEL_PHASES,
    OVERHEAD_BOUND,
    Advice,
    Case,
    Diagnosis,
    Entry,
    Grade,
    TimeBreakdown,
)
from lightning_gputime._diagnosis.advice import (
    advise,
    advise_on_growth,
    advise_on_launches,
    growth_of,
    is_short_once,
)
from lightning_gputime._diagnosis.breakdown import (
    break_down,
    is_blurred,
    is_model_work,
    may_hide_evaluations,
)
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.outside import advice_on
from lightning_gputime._measurement.sums import is_uneven
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._messages import duration, percent
from lightning_gputime._phases import DATA, FORWARD

# Minimum fraction of the wall clock for an entry to be the bottleneck, and to be reported. XProf
# uses the same thresholds to grade input pipelines.
_MIN_BOTTLENECK = 0.2
_MIN_REPORTED = 0.05
_MIN_OF_ALL = 0.5  # With this fraction of an entry or of all launches, a line is named.
# A verdict must hold in both halves of the run. There, this fraction of the minimum is enough.
_MIN_HALF = 0.75


def diagnose(measurement: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return the diagnosis of a training run.

    The bottleneck is the entry of the time breakdown whose removal would speed up training the
    most, if it is large enough. Otherwise the model's own work is the bottleneck, and the headline
    names the line with most of it.
    """
    m = measurement
    is_short = m.stage and m.steps < 20  # A short evaluation.
    if m.is_warmup or is_short or not m.steps or not m.step.mean_ms > 0:
        return Diagnosis()
    breakdown = break_down(m, setup)
    of_model = [row for row in breakdown.rows if row.line is not None and _is_models_entry(row)]
    rows = []
    for row in breakdown.rows:
        case = Case(row, breakdown, m, setup)
        # Advice on each of the model's short lines would say the same, so give it on the longest.
        line = row.line
        is_update = line is not None and line.is_library and line.function.endswith(".step")
        is_short = row.share < _MIN_BOTTLENECK and not is_update
        if row.error < row.share and not is_blurred(_names(row), m):
            row = replace(row, advice=advise(case, only_settings=row in of_model[1:] and is_short))
        rows.append(row)
    breakdown = replace(breakdown, rows=tuple(rows))
    blurred_share = sum(row.share for row in rows if is_blurred(_names(row), m))
    is_gpu_bound = not m.on_host_clock and _gpu_share(breakdown) >= 1 - _MIN_BOTTLENECK
    if blurred_share >= _MIN_BOTTLENECK and not is_gpu_bound:
        # The bottleneck may be in phases whose times cannot be separated.
        return Diagnosis(time_breakdown=breakdown)
    unclear_share = breakdown[DATA].share if may_hide_evaluations(m, setup) else 0.0
    unclear = (
        f"unclear: `data` takes {percent(unclear_share)} of the {breakdown.scope}, mostly in a few"
        " steps, which may be evaluations"
    )
    if unclear_share >= _MIN_BOTTLENECK:
        advice = _advice_of(breakdown, first=DATA)
        return Diagnosis(headline=unclear, time_breakdown=breakdown, advice=advice)
    found = _bottleneck(breakdown, m, setup)
    headline = found.headline
    if found.code == COMMUNICATION_BOUND and m.ranks is not None and m.ranks.suspect is not None:
        headline += f"; rank {m.ranks.suspect} may be the cause"
    if unclear_share >= _MIN_REPORTED:
        headline += f"; {unclear}"
    advice = (*found.advice, *_advice_of(breakdown, first=found.entry))
    slowdown = m.slowdown
    if slowdown is not None and slowdown.lost_share >= 0.1 and not m.work_change:
        headline += f"; {slowdown}"
        # Line whose time has grown the most, if the slowdown lasts.
        lines = [line for row in breakdown.rows for line in filter(None, (row.line, *row.lines))]
        grown = max(lines, key=lambda line: line.grew_to_ms - line.grew_from_ms, default=None)
        if grown is not None and (grown.grew_to_ms <= 0 or slowdown.until_step is not None):
            grown = None
        lost_share = min(slowdown.lost_share, 0.99)  # Promise a speed-up of at most 100x.
        when = f"since step {slowdown.since_step:,}"
        if slowdown.until_step is not None:
            when = f"from step {slowdown.since_step:,} to {slowdown.until_step:,}"
        if grown is not None:
            text = advise_on_growth(grown).text
        elif slowdown.phase and slowdown.is_most_in_phase:
            text = f"find what takes longer in `{slowdown.phase}` {when}"
        else:
            text = f"find what slows down all phases {when}"
        joint = ";" if grown is not None else ":"
        text += f"{joint} without this the training is up to {1 / (1 - lost_share):.2f}x as fast"
        parameters = {"step": slowdown.since_step, "phase": slowdown.phase}
        on_slowdown = Advice("slowdown", text, parameters)
        # Advice on the line that has grown says the same.
        advice = tuple(item for item in advice if grown is None or item != advise_on_growth(grown))
        row = breakdown[found.entry]
        is_first = slowdown.lost_share > _saved_share(row) or (grown and grown == row.line)
        advice = (on_slowdown, *advice) if is_first else (*advice, on_slowdown)
    advice = (*advice, *(Advice(code, text) for code, text in advice_on(m.outside)))
    unique = tuple({item.text: item for item in advice}.values())
    return replace(found, headline=headline, time_breakdown=breakdown, advice=unique)


def _names(row: Entry) -> tuple[str, ...]:
    return row.name, *row.phases_ms


def _bottleneck(breakdown: TimeBreakdown, m: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return the diagnosis, with advice that belongs to no entry."""
    of_model = [row for row in breakdown.rows if _is_models_entry(row)]
    if not m.on_host_clock:
        # Code in the model at which the host does something else than launch the model's work.
        of_model = [row for row in of_model if row.pace != "host" or _launches(row)]
    launches = 0.0 if m.on_host_clock else sum(row.host_share for row in of_model)
    others = [
        row for row in breakdown.rows if row.code and row not in of_model and not is_short_once(row)
    ]
    largest = max(others, key=_saved_share, default=Entry("", 0.0, 0.0))
    recurring = max(
        (row for row in others if row.name not in ONCE), key=_saved_share, default=largest
    )
    is_worth_a_look = _saved_share(recurring) >= _MIN_REPORTED and recurring.error < recurring.share
    is_worth_a_look = is_worth_a_look and _least_share(recurring, m) >= _MIN_HALF * _MIN_REPORTED
    # The lower end of the interval may be below the minimum, but not below half of it.
    is_certain = _saved_share(largest) - largest.error >= _MIN_BOTTLENECK / 2
    is_certain = is_certain and _least_share(largest, m) >= _MIN_HALF * _MIN_BOTTLENECK
    is_bottleneck = _saved_share(largest) >= _MIN_BOTTLENECK and is_certain
    # Launches at many lines cannot all be removed, so require 30 %.
    if launches >= 0.3 and not (is_bottleneck and _saved_share(largest) > launches):
        headline = f"{LAUNCH_BOUND}: {_describe_launches(of_model, launches, breakdown)}"
        if is_worth_a_look:
            headline += f"; worth a look: {_describe(recurring, breakdown, m)}"
        # A setting may be the reason for slow launches.
        settings = [item for item in _advice_of(breakdown, "") if item.code == "costly_setting"]
        advice = (*settings, *advise_on_launches(m, setup))
        return Diagnosis(LAUNCH_BOUND, "bound", "", headline, advice=advice)
    if is_bottleneck:
        headline = f"{largest.code}: {_describe(largest, breakdown, m)}"
        if largest.name in ONCE and recurring is not largest and is_worth_a_look:
            headline += f"; apart from that, {recurring.code}: {_describe(recurring, breakdown, m)}"
        return Diagnosis(largest.code, "bound", largest.name, headline)
    gpu_share = _gpu_share(breakdown)
    if m.on_host_clock:
        code, pace = COMPUTE_BOUND, "the CPU computes the step"
    elif gpu_share < _MIN_OF_ALL:
        code = HOST_BOUND
        pace = f"the host sets the pace for {percent(1 - gpu_share)} of the step, at many lines"
    else:
        code, pace = GPU_BOUND, f"the GPU sets the pace for {percent(gpu_share)} of the step"
    known = [row for row in of_model if not is_blurred(_names(row), m)]
    first = max(known, key=lambda row: row.share, default=None)
    headline, entry = f"{code}: {pace}", ""
    if first is not None and first.share >= _MIN_REPORTED:
        entry = first.name
        headline += f"; {_describe(first, breakdown, m)}"
    rests = [row for row in breakdown.rows if row.line is not None and row.line.is_rest]
    rest = max(rests, key=lambda row: row.share, default=None)
    if rest is not None and rest.share >= _MIN_BOTTLENECK:
        headline += f"; many short lines of {rest.line} take {percent(rest.share)}"
    # Largest entry whose error is at least its share, or that takes much less in half of the run.
    uncertain = next(
        (
            row
            for row in breakdown.rows
            if row.share >= _MIN_REPORTED
            and (row.error >= row.share or _least_share(row, m) < _MIN_HALF * _MIN_REPORTED)
            and not _is_models_entry(row)
        ),
        None,
    )
    grade: Grade = "balanced"
    if is_worth_a_look and recurring.name not in ONCE:
        grade = "worth a look"
        headline += f"; worth a look: {_describe(recurring, breakdown, m)} ({recurring.code})"
    elif uncertain is not None:
        share = f"{percent(uncertain.share)} ± {percent(uncertain.error)}"
        how = "train for longer" if uncertain.line is not None else "pass every_n_steps=1"
        if uncertain.error < uncertain.share:
            share = f"{percent(uncertain.share)}, but {percent(_least_share(uncertain, m))} in half"
            share += " of the run"
            how = "train for longer"
        headline += f"; unclear: `{uncertain.name}` takes {share}: {how}"
        grade = "unknown"
    return Diagnosis(code, grade, entry, headline)


def _is_models_entry(row: Entry) -> bool:
    """Return True for an entry that is the model's work, which cannot simply be removed."""
    return row.name not in CODES and is_model_work(row.line, row.phases_ms)


def _launches(row: Entry) -> bool:
    """Return True if the host's time in an entry of the model is that of launching operations."""
    line = row.line
    if line is None or line.is_library:
        return True
    # Backward launches its operations in C++. In forward, with Python, each takes 5 to 50 us.
    host_ms = sum(part.host_ms for name, part in line.phases.items() if name.startswith(FORWARD))
    return line.is_forward and host_ms <= 0.1 * (line.operations or 0)


def _gpu_share(breakdown: TimeBreakdown) -> float:
    """Return the fraction of the steps in which the GPU sets the pace."""
    host = sum(row.host_share for row in breakdown.rows if row.pace)
    return 1 - host / (breakdown.steps_share or 1.0)


def _describe_launches(of_model: list[Entry], share: float, breakdown: TimeBreakdown) -> str:
    """Return in which phases the GPU waits for launches, as part of a sentence."""
    phases = {
        phase: sum(
            row.host_share * row.phases_ms[phase] / row.ms_per_step
            for row in of_model
            if row.phases_ms.get(phase)
        )
        for phase in MODEL_PHASES
    }
    parts = ", ".join(
        f"{percent(part / breakdown.steps_share)} in {phase}"
        for phase, part in phases.items()
        if part >= _MIN_REPORTED * share
    )
    of_step = percent(share / breakdown.steps_share)
    longest = max(of_model, key=lambda row: row.host_share)
    where = "at many lines"
    if longest.line is not None and longest.host_share >= _MIN_OF_ALL * share:
        where = f"most of it at {longest.line}"
    return f"the GPU waits for launches for {of_step} of the step ({parts}), {where}"


def _least_share(entry: Entry, m: Measurement) -> float:
    """Return what removing an entry would save in that half of the run in which it takes less.

    A slowdown explains why the halves differ, and phases that are long in few steps always do.
    """
    saved = _saved_share(entry)
    is_uneven_phase = any(is_uneven(m.rows[name]) for name in entry.phases_ms if name in m.rows)
    if m.slowdown is not None or is_uneven_phase or not entry.ms_per_step:
        return saved
    least_ms = sum(
        ms * min(m.least_shares.get(name, m.share(name)) / m.share(name), 1.0)
        for name, ms in entry.phases_ms.items()
        if m.share(name)
    )
    unknown_ms = sum(ms for name, ms in entry.phases_ms.items() if not m.share(name))
    return saved * (least_ms + unknown_ms) / entry.ms_per_step


def _saved_share(entry: Entry) -> float:
    """Return the fraction of the wall clock that removing an entry would save."""
    return entry.share if entry.speed_up is None else 1 - 1 / entry.speed_up


def _describe(entry: Entry, breakdown: TimeBreakdown, m: Measurement) -> str:
    """Return what an entry costs, as part of a sentence."""
    error = f" ± {percent(entry.error)}" if entry.error >= _MIN_REPORTED else ""
    share = f"{percent(entry.share)}{error} of the {breakdown.scope}"
    name = str(entry.line) if entry.line is not None else f"`{entry.name}`"
    if entry.name in ONCE:
        took = duration(1e3 * entry.seconds)
        return f"{name} takes {took}, {share}, and occurs once"
    if entry.ms_per_step:
        ms, step_ms = duration(entry.ms_per_step), duration(breakdown.step_ms)
        keeps_waiting = entry.pace == "host" and entry.line is not None and not m.on_host_clock
        does = "keeps the GPU waiting for" if keeps_waiting else "takes"
        cost = f"{name} {does} {ms} of {step_ms} per step ({share})"
    else:
        cost = f"{name} takes {share}"
    if entry.line is not None and entry.line.grew_to_ms:
        cost += f"; it {growth_of(entry.line)}"
    if entry.lines and entry.code in (OVERHEAD_BOUND, INPUT_BOUND):
        longest = entry.lines[0]
        all_ms = sum(line.ms for line in entry.lines)
        if longest.file and longest.ms >= _MIN_OF_ALL * all_ms:
            cost += f", most of it at {longest}"
            cost += f", which {growth_of(longest)}" if longest.grew_to_ms else ""
    if entry.speed_up is None:
        return cost
    return f"{cost}; without it the training is up to {entry.speed_up:.2f}x as fast"


def _advice_of(breakdown: TimeBreakdown, first: str) -> tuple[Advice, ...]:
    """Return the advice on all entries: on the entry `first` first, on the model's work last."""
    rows = sorted(
        breakdown.rows,
        key=lambda row: (row.name != first, _is_models_entry(row), -_saved_share(row)),
    )
    return tuple({advice.text: advice for row in rows for advice in row.advice}.values())
