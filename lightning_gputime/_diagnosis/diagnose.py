"""Diagnosis of a training run, derived from its measurement."""

from dataclasses import replace
from operator import itemgetter

from lightning_gputime._attribution import advice_on
from lightning_gputime._diagnosis import (
    CODES,
    COMMUNICATION_BOUND,
    COMPUTE_BOUND,
    GPU_BOUND,
    HOST_BOUND,
    INPUT_BOUND,
    LAUNCH_BOUND,
    MIN_BOTTLENECK,
    MIN_REPORTED,
    MODEL_PHASES,
    OVERHEAD_BOUND,
    Advice,
    Case,
    Diagnosis,
    Entry,
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
    is_update,
    may_hide_evaluations,
)
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.sums import is_uneven
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._messages import duration, percent
from lightning_gputime._phases import DATA, FORWARD

_MIN_OF_ALL = 0.5  # With most of an entry or of all launches, a line is named.
# Higher than `MIN_BOTTLENECK`: launches at many lines cannot all be removed. Chosen: a smaller one
# hides the longest GPU work behind launches, a larger one hides small batches.
_MIN_LAUNCHES = 0.3
# In forward, Python launches an operation in 5 to 50 us. A longer time contains other work. Chosen:
# smaller ones take slow hosts for other work, larger ones take host code for launches.
_MAX_LAUNCH_MS = 0.1
# Minimum fraction of the time that a slowdown in the headline costs. Chosen: a smaller one adds the
# drift of a warm GPU to many headlines, a larger one leaves such losses to the table.
_MIN_SLOWDOWN = 0.1
_MIN_EVALUATION_STEPS = 20  # An evaluation of fewer steps has no diagnosis. Chosen: all is warm-up.
# A verdict must hold in both halves of the run, with this fraction of the minimum in each. Chosen:
# at 1, noise drops entries near the minimum; a smaller one keeps what has ended.
_OF_MIN_IN_HALF = 0.75


def diagnose(measurement: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return the diagnosis of a training run.

    The bottleneck is the entry of the time breakdown whose removal would speed up training the
    most, if it is large enough. Otherwise the model's own work is the bottleneck, and the headline
    names the line with most of it.
    """
    m = measurement
    is_short_evaluation = m.stage and m.steps < _MIN_EVALUATION_STEPS
    if m.is_warmup or is_short_evaluation or not m.steps or not m.step.mean_ms > 0:
        return Diagnosis()
    breakdown = _with_advice(break_down(m, setup), m, setup)
    blurred_share = sum(row.share for row in breakdown.rows if is_blurred(_names(row), m))
    is_gpu_bound = not m.on_host_clock and _gpu_share(breakdown) >= 1 - MIN_BOTTLENECK
    if blurred_share >= MIN_BOTTLENECK and not is_gpu_bound:
        # The bottleneck may be in phases whose times cannot be separated.
        return Diagnosis(time_breakdown=breakdown)
    unclear_share = breakdown[DATA].share if may_hide_evaluations(m, setup) else 0.0
    unclear = (
        f"unclear: `data` takes {percent(unclear_share)} of the {breakdown.scope}, mostly in a few"
        " steps, which may be evaluations"
    )
    if unclear_share >= MIN_BOTTLENECK:
        advice = _advice_of(breakdown, first=DATA)
        return Diagnosis(headline=unclear, time_breakdown=breakdown, advice=advice)
    found = _bottleneck(breakdown, m, setup)
    headline = found.headline
    if found.code == COMMUNICATION_BOUND and m.ranks is not None and m.ranks.suspect is not None:
        headline += f"; rank {m.ranks.suspect} may be the cause"
    if unclear_share >= MIN_REPORTED:
        headline += f"; {unclear}"
    advice = (*found.advice, *_advice_of(breakdown, first=found.entry))
    slowdown = m.slowdown
    # A change of the work in a step explains the slowdown, so nothing has to be found.
    if slowdown is not None and slowdown.lost_share >= _MIN_SLOWDOWN and not m.work_change:
        headline += f"; {slowdown}"
        advice = _add_slowdown(advice, slowdown, breakdown, bottleneck=breakdown[found.entry])
    # Advice on what costs more than the bottleneck comes first. Without an entry, the bottleneck is
    # all of the model's work.
    of_model = sum(row.share for row in breakdown.rows if _is_models_entry(row))
    bottleneck_share = _saved_share(breakdown[found.entry]) if found.entry else of_model
    outside = sorted(advice_on(m.outside), key=itemgetter(0), reverse=True)
    costs_more = [share * breakdown.steps_share > bottleneck_share for share, *_ in outside]
    on_outside = [Advice(code, text) for _, code, text in outside]
    n_first = sum(costs_more)
    advice = (*on_outside[:n_first], *advice, *on_outside[n_first:])
    unique = tuple({item.text: item for item in advice}.values())
    return replace(found, headline=headline, time_breakdown=breakdown, advice=unique)


def _with_advice(breakdown: TimeBreakdown, m: Measurement, setup: TrainingSetup) -> TimeBreakdown:
    """Return the breakdown with the advice on each entry whose share is known well enough."""
    rows = []
    has_longer_line = False  # True after the longest line of the model's work.
    for row in breakdown.rows:
        line = row.line
        is_of_model = line is not None and _is_models_entry(row)
        # Advice on each of the model's short lines would say the same, so give it on the longest.
        # Advice on updates differs.
        is_short_line = row.share < MIN_BOTTLENECK and not (line and is_update(line))
        only_settings = is_of_model and has_longer_line and is_short_line
        has_longer_line |= is_of_model
        if row.error < row.share and not is_blurred(_names(row), m):
            advice = advise(Case(row, breakdown, m, setup), only_settings=only_settings)
            row = replace(row, advice=advice)
        rows.append(row)
    return replace(breakdown, rows=tuple(rows))


def _add_slowdown(
    advice: tuple[Advice, ...], slowdown: Slowdown, breakdown: TimeBreakdown, bottleneck: Entry
) -> tuple[Advice, ...]:
    """Return the advice with advice on a slowdown, first if it costs more than the bottleneck."""
    grown: LineRow | None = None  # Line whose time has grown the most.
    if slowdown.until_step is None:  # A slowdown that has ended is not the growth of a line.
        lines = [line for row in breakdown.rows for line in filter(None, (row.line, *row.lines))]
        grown = max(lines, key=lambda line: line.grew_to_ms - line.grew_from_ms, default=None)
    when = f"since step {slowdown.since_step:,}"
    if slowdown.until_step is not None:
        when = f"from step {slowdown.since_step:,} to {slowdown.until_step:,}"
    lost_share = min(slowdown.lost_share, 0.99)  # Promise a speed-up of at most 100x.
    promise = f"without this the training is up to {1 / (1 - lost_share):.2f}x as fast"
    is_first = slowdown.lost_share > _saved_share(bottleneck)
    if grown is not None and grown.grew_to_ms > 0:
        on_line = advise_on_growth(grown)
        text = f"{on_line.text}; {promise}"
        advice = tuple(item for item in advice if item != on_line)  # It says the same.
        is_first = is_first or grown == bottleneck.line
    elif slowdown.phase and slowdown.is_most_in_phase:
        text = f"find what takes longer in `{slowdown.phase}` {when}: {promise}"
    else:
        text = f"find what slows down all phases {when}: {promise}"
    parameters = {"step": slowdown.since_step, "phase": slowdown.phase}
    on_slowdown = Advice("slowdown", text, parameters)
    return (on_slowdown, *advice) if is_first else (*advice, on_slowdown)


def _names(row: Entry) -> tuple[str, ...]:
    return row.name, *row.phases_ms


def _bottleneck(breakdown: TimeBreakdown, m: Measurement, setup: TrainingSetup) -> Diagnosis:
    """Return the diagnosis, with advice that belongs to no entry.

    The bottleneck is the launches of the model's work if they take more than the largest entry that
    can be removed, else that entry if it is large enough, else the model's own work.
    """
    of_model = [row for row in breakdown.rows if _is_models_entry(row)]
    if not m.on_host_clock:
        # Code in the model at which the host does something else than launch the model's work.
        of_model = [row for row in of_model if row.pace != "host" or _is_launching(row)]
    launches = 0.0 if m.on_host_clock else sum(row.host_share for row in of_model)
    others = [
        row for row in breakdown.rows if row.code and row not in of_model and not is_short_once(row)
    ]
    largest = max(others, key=_saved_share, default=Entry("", 0.0, 0.0))
    recurring = max(
        (row for row in others if row.name not in ONCE), key=_saved_share, default=largest
    )
    is_worth_a_look = _saves(recurring, MIN_REPORTED, m) and recurring.error < recurring.share
    # The lower end of the interval may be below the minimum, but not below half of it.
    min_end = MIN_BOTTLENECK / 2
    is_certain = _saved_share(largest) - largest.error >= min_end
    is_bottleneck = is_certain and _saves(largest, MIN_BOTTLENECK, m)
    if launches >= _MIN_LAUNCHES and not (is_bottleneck and _saved_share(largest) > launches):
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
    found = _models_work(breakdown, of_model, m)
    if is_worth_a_look and recurring.name not in ONCE:
        cost = f"{_describe(recurring, breakdown, m)} ({recurring.code})"
        headline = f"{found.headline}; worth a look: {cost}"
        return replace(found, grade="worth a look", headline=headline)
    unclear = (_unclear(row, m) for row in breakdown.rows if not _is_models_entry(row))
    if first := next(filter(None, unclear), ""):
        return replace(found, grade="unknown", headline=f"{found.headline}; unclear: {first}")
    return found


def _models_work(breakdown: TimeBreakdown, of_model: list[Entry], m: Measurement) -> Diagnosis:
    """Return the diagnosis if the model's own work is the bottleneck, with its longest line."""
    gpu_share = _gpu_share(breakdown)
    if m.on_host_clock:
        code, reason = COMPUTE_BOUND, "the CPU computes the step"
    elif gpu_share < _MIN_OF_ALL:
        code = HOST_BOUND
        reason = f"the host sets the pace for {percent(1 - gpu_share)} of the step, at many lines"
    else:
        code, reason = GPU_BOUND, f"the GPU sets the pace for {percent(gpu_share)} of the step"
    headline, entry = f"{code}: {reason}", ""
    known = [row for row in of_model if not is_blurred(_names(row), m)]
    longest = max(known, key=lambda row: row.share, default=None)
    if longest is not None and longest.share >= MIN_REPORTED:
        entry = longest.name
        headline += f"; {_describe(longest, breakdown, m)}"
    rests = [row for row in breakdown.rows if row.line is not None and row.line.is_rest]
    rest = max(rests, key=lambda row: row.share, default=None)
    if rest is not None and rest.share >= MIN_BOTTLENECK:
        headline += f"; many short lines of {rest.line} take {percent(rest.share)}"
    return Diagnosis(code, "balanced", entry, headline)


def _unclear(row: Entry, m: Measurement) -> str:
    """Return why it is unclear what an entry takes, and what to do; empty if it is clear."""
    if row.share < MIN_REPORTED:
        return ""
    if row.error >= row.share:
        how = "train for longer" if row.line is not None else "pass every_n_steps=1"
        return f"`{row.name}` takes {percent(row.share)} ± {percent(row.error)}: {how}"
    least_share = _least_share(row, m)
    if least_share < _OF_MIN_IN_HALF * MIN_REPORTED:
        in_half = f"but {percent(least_share)} in half of the run"
        return f"`{row.name}` takes {percent(row.share)}, {in_half}: train for longer"
    return ""


def _saves(row: Entry, minimum: float, m: Measurement) -> bool:
    """Return True if removing an entry would save a minimum share, in both halves of the run."""
    return _saved_share(row) >= minimum and _least_share(row, m) >= _OF_MIN_IN_HALF * minimum


def _is_models_entry(row: Entry) -> bool:
    """Return True for an entry that is the model's work, which cannot simply be removed."""
    return row.name not in CODES and is_model_work(row.line, row.phases_ms)


def _is_launching(row: Entry) -> bool:
    """Return True if the host only launches operations in an entry of the model's work."""
    line = row.line
    if line is None or line.is_library:
        return True
    # Only forward is in Python. Backward launches its operations in C++.
    host_ms = sum(part.host_ms for name, part in line.phases.items() if name.startswith(FORWARD))
    return line.is_forward and host_ms <= _MAX_LAUNCH_MS * (line.operations or 0)


def _gpu_share(breakdown: TimeBreakdown) -> float:
    """Return the fraction of the steps in which the GPU sets the pace."""
    host = sum(row.host_share for row in breakdown.rows if row.pace)
    return 1 - host / (breakdown.steps_share or 1.0)


def _describe_launches(of_model: list[Entry], launches: float, breakdown: TimeBreakdown) -> str:
    """Return in which phases the GPU waits for launches, as part of a sentence.

    `launches` is the fraction of the wall clock in which it waits for them.
    """
    in_phases = dict.fromkeys(MODEL_PHASES, 0.0)
    for row in of_model:
        for phase in {*MODEL_PHASES} & {*row.phases_ms}:
            # Assume that the host sets the pace for the same fraction of each phase of an entry.
            in_phases[phase] += row.host_share * row.phases_ms[phase] / (row.ms_per_step or 1.0)
    parts = ", ".join(
        f"{percent(share / breakdown.steps_share)} in {phase}"
        for phase, share in in_phases.items()
        if share >= MIN_REPORTED * launches
    )
    where = "at many lines"
    longest = max(of_model, key=lambda row: row.host_share)
    if longest.line is not None and longest.host_share >= _MIN_OF_ALL * launches:
        where = f"most of it at {longest.line}"
    of_step = percent(launches / breakdown.steps_share)
    return f"the GPU waits for launches for {of_step} of the step ({parts}), {where}"


def _least_share(entry: Entry, m: Measurement) -> float:
    """Return what removing an entry would save in that half of the run in which it takes less.

    The result is the same fraction of the wall clock as `_saved_share` if there is another reason
    why the halves differ: a slowdown, or a phase that is long in a few steps only.

    Example: an entry in `data` would save 20 %. `data` takes 25 % of all steps, but 10 % of the
    second half. So the entry would save 20 % * 10 / 25 = 8 % there.
    """
    saved = _saved_share(entry)
    is_uneven_phase = any(is_uneven(m.rows[name]) for name in entry.phases_ms if name in m.rows)
    if m.slowdown is not None or is_uneven_phase or not entry.ms_per_step:
        return saved
    least_ms = 0.0
    for name, ms in entry.phases_ms.items():
        share = m.share(name)  # 0 if only the whole entry was measured: then nothing is known.
        least_ms += ms * min(m.least_shares.get(name, share) / share, 1.0) if share else ms
    return saved * least_ms / entry.ms_per_step


def _saved_share(entry: Entry) -> float:
    """Return the fraction of the wall clock that removing an entry would save: 0.2 for 1.25x."""
    return entry.share if entry.speed_up is None else 1 - 1 / entry.speed_up


def _describe(entry: Entry, breakdown: TimeBreakdown, m: Measurement) -> str:
    """Return what an entry costs, as part of a sentence."""
    error = f" ± {percent(entry.error)}" if entry.error >= MIN_REPORTED else ""
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
    # The names of other entries already say which code it is.
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
    """Return the advice on the entry `first`, then on other entries, then on the model's work."""

    def order(row: Entry) -> tuple[bool, bool, float]:
        return row.name != first, _is_models_entry(row), -_saved_share(row)

    rows = sorted(breakdown.rows, key=order)
    return tuple({advice.text: advice for row in rows for advice in row.advice}.values())
