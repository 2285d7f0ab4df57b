"""Time breakdown of a training run: its wall clock, divided into entries.

1. `_groups` divides a step by the reasons for its phases: waits, slow steps, timing itself.
2. `_parts` divides the groups that consist of code by lines. Each part is an entry.
3. `break_down` scales the parts from a step to all steps, and adds the entries outside of steps.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lightning_gputime._diagnosis import (
    CODES,
    COMMUNICATION,
    COMPILATIONS,
    COMPUTE_BOUND,
    GPU_BOUND,
    HOST_BOUND,
    MIN_BOTTLENECK,
    MODEL_PHASES,
    NOT_EXAMINED,
    NOT_SAMPLED,
    OTHER_RANKS,
    SLOW,
    STANDARD_PHASES,
    STRAGGLER,
    TIMING,
    TRANSFER_HOOKS,
    Entry,
    TimeBreakdown,
)
from lightning_gputime._ledger.rows import LineRow, PhasePart
from lightning_gputime._loader import WORKERS, of_entry
from lightning_gputime._measurement import wall_clock as wall
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.slow import UNEXPLAINED
from lightning_gputime._measurement.sums import PhaseStats, is_uneven
from lightning_gputime._measurement.untimed import MIN_WAIT_SHARE
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._phases import (
    BACKWARD,
    CALLBACK_WAIT,
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    OPTIMIZER,
    SAVES,
    WAIT,
    is_wait,
    of_one_callback,
)

# Minimum fraction of an entry's time in which the host or the GPU sets the pace. Chosen: at 0.5,
# noise decides; a larger one says "both" where one of them clearly sets it.
_MIN_PACE = 0.6
# Compilations are frequent from one in 10 steps on. Fewer than 5 are necessary: the first of each
# graph. Chosen: smaller ones blame a usual start, larger ones miss short runs.
_FREQUENT, _MIN_COMPILATIONS = 0.1, 5


@dataclass(slots=True)
class _Group:
    """Phases inside steps that share a reason, and their time as a fraction of the step."""

    share: float = 0.0  # Less than the sum of `phases` once other groups have got a part of it.
    error: float = 0.0  # Half-width of the 95 % confidence interval of `share`.
    phases: dict[str, float] = field(default_factory=dict)  # Each without its sub-phases.


@dataclass(slots=True)
class _Part:
    """An entry inside steps: its time by top-level phase, as fractions of the step."""

    line: LineRow | None = None  # Code that the entry is about, if any.
    # Time in which the GPU or the host sets the pace.
    gpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    error: float = 0.0  # Half-width of the 95 % confidence interval of `share`.

    @property
    def share(self) -> float:
        return sum(self.gpu.values()) + sum(self.host.values())

    def add(self, top: str, gpu: float, host: float, error: float) -> None:
        self.gpu[top] += gpu
        self.host[top] += host
        self.error = math.hypot(self.error, error)


def break_down(m: Measurement, setup: TrainingSetup) -> TimeBreakdown:
    """Return the time breakdown, without advice.

    Three times: `steps_s` excludes checkpoints inside of steps, `all_steps_s` includes them, and
    `wall_s` counts them once, in the entry `checkpoints`.
    """
    wall_clock = m.wall_clock or WallClockBreakdown({})
    scope = "training" if setup.is_own_loop else "fit"
    if wall.STEPS not in wall_clock.entries_s:  # Before the second step.
        scope = "timed steps"
        n = m.steps + m.untimed_steps
        wall_clock = WallClockBreakdown({wall.STEPS: n * m.step.mean_ms / 1e3})
    entries_s = dict(wall_clock.entries_s)
    # The entry `steps` of the wall clock excludes checkpoints, but the step time includes them. So
    # scale: 1.8 s of steps without 0.2 s of checkpoints are 90 % of 2 s, to which groups refer.
    steps_s, saves_s = entries_s.pop(wall.STEPS), wall_clock.saves_in_steps_s
    groups = _groups(m, saves_s / (steps_s + saves_s or 1.0))
    share_without_saves = 1.0 - groups.pop(SAVES, _Group()).share
    # The entry of the first step is only its excess over a usual step: 500 ms are 15 ms in the
    # steps, and 485 ms in this entry.
    if first_step_s := entries_s.get(wall.FIRST_STEP, 0.0):
        usual_step_s = min(share_without_saves * m.step.mean_ms / 1e3, first_step_s)
        entries_s[wall.FIRST_STEP] -= usual_step_s
        steps_s += usual_step_s
    all_steps_s = steps_s / share_without_saves if share_without_saves > 0 else 0.0
    wall_s = sum(entries_s.values()) + (steps_s if all_steps_s else 0.0)
    rows = []
    for name, part in _parts(m, groups, setup).items():
        # A phase may share its name with an entry outside of steps: add both.
        seconds = entries_s.pop(name, 0.0) + part.share * all_steps_s
        if seconds > 0:
            rows.append(_entry_in_steps(name, part, seconds, all_steps_s, wall_s, m, setup))
    for name, seconds in entries_s.items():
        if seconds > 0:
            rows.append(_entry_outside(name, seconds, wall_s, m))
    mfu = m.mfu
    return TimeBreakdown(
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        wall_s=wall_s,
        scope=scope,
        step_ms=m.step.mean_ms,
        steps_share=all_steps_s / wall_s,
        # MFU above 1 means that the FLOPs or the peak are wrong.
        peak_share=None if mfu is None or mfu > 1 else mfu * all_steps_s / wall_s,
        unknown="" if m.on_host_clock or m.stage or mfu is not None else "MFU (pass flops=)",
    )


# Inside steps


def _groups(m: Measurement, saves_share: float) -> dict[str, _Group]:
    """Return the groups of phases of a step, whose shares add up to 1.

    `saves_share` is the fraction of the step that checkpoints take.
    """
    groups = defaultdict[str, _Group](_Group)
    has_parts_of_data = not {FETCH, COPY}.isdisjoint(m.rows)

    def group_of(name: str) -> str:
        top = name.partition("/")[0]
        if name in (WAIT, CALLBACK_WAIT):
            return OTHER_RANKS
        if is_wait(name):
            return COMMUNICATION
        if name in (FETCH, COPY):
            return name
        return TRANSFER_HOOKS if top == DATA and has_parts_of_data else top

    def move(source: str, target: str, share: float) -> float:
        """Move up to `share` from one group to another, and return the share moved."""
        moved = max(min(share, groups[source].share), 0.0)
        groups[source].share -= moved
        groups[target].share += moved
        return moved

    for name, row in m.rows.items():
        parts = [part.share for other, part in m.rows.items() if other.rpartition("/")[0] == name]
        own = max(row.share - sum(parts), 0.0)
        group = groups[group_of(name)]
        group.share += own
        group.phases[name] = own
        # The error of a phase includes the errors of sub-phases in the same group.
        if "/" not in name or group_of(name) != group_of(name.partition("/")[0]):
            group.error = math.hypot(group.error, row.share_error)
    # From here on, move time from phases to the reasons for it.
    move(CALLBACKS, SAVES, saves_share)  # In a step, checkpoints are part of callbacks.
    if m.slow is not None:
        for name, causes in m.slow.lost_shares.items():
            for cause, share in causes.items():
                if cause != UNEXPLAINED:
                    move(group_of(name), f"{SLOW}{cause}", share)
    model = [name for name in MODEL_PHASES if name in groups]
    # The causes of slow steps may already include a part of the compilations.
    missing_share = _frequently_compiled_share(m) - groups[COMPILATIONS].share
    for name in model:
        missing_share -= move(name, COMPILATIONS, missing_share)
    if (ranks := m.ranks) is not None and ranks.straggler is not None:
        # These are times of rank zero. It waits for the straggler, unless it is the straggler.
        source = group_of(ranks.phase) if ranks.straggler == 0 else COMMUNICATION
        move(source, STRAGGLER, ranks.excess_ms / m.step.mean_ms)
    added = m.added_share or 0.0
    for name in model:
        added -= move(name, TIMING, added)
    groups[NOT_SAMPLED].share += m.not_sampled_share
    if model:  # Add rounding errors to the model.
        rest = 1.0 - sum(group.share for group in groups.values())
        groups[model[0]].share = max(groups[model[0]].share + rest, 0.0)
    return {name: group for name, group in groups.items() if group.share > 0}


def _frequently_compiled_share(m: Measurement) -> float:
    """Return the fraction of all steps that compilations take; 0 if they are rare.

    Frequent compilations lengthen most steps, so the steps that they lengthen are not slow.
    """
    code = of_entry(m.culprits, COMPILATIONS)
    steps = m.steps + m.untimed_steps + m.warmup_steps
    if not steps or sum(compiled.calls for compiled in code) < _FREQUENT * steps:
        return 0.0
    # Exclude compilations in the first step, which is a separate entry. Nearly all of that step is
    # compilation, so subtract all of it.
    first_s = m.wall_clock.entries_s.get(wall.FIRST_STEP, 0.0) if m.wall_clock is not None else 0.0
    compiled_s = sum(compiled.seconds for compiled in code) - first_s
    share = 1e3 * compiled_s / (steps * m.step.mean_ms)
    return share if share >= MIN_BOTTLENECK else 0.0


def _parts(m: Measurement, groups: Mapping[str, _Group], setup: TrainingSetup) -> dict[str, _Part]:
    """Divide the groups into the entries of a step.

    Groups that a verdict names (`CODES`, such as `data`), groups that are no phase, and the time of
    the timer stay undivided. The phases of the model, callbacks and other code are divided by the
    code that is the reason for their time. The time of a row of lines goes to one of three kinds of
    parts: the undivided group, the row, or "<phase> (not examined)" for rows without code.

    All timed steps show how long a phase is, and the examined steps how it is divided. Example:
    `forward` takes 40 % of the step. In examined steps, `Net.forward` takes 6 of its 8 ms, so the
    entry `Net.forward` takes 30 % of the step. In the other 2 ms, the GPU idles, because code in
    `other` has waited for it. They count for that code.
    """
    parts = defaultdict[str, _Part](_Part)
    group_of_phase = {phase: name for name, group in groups.items() for phase in group.phases}
    # In a loop that only calls `step()`, `data` is all the time before forward.
    has_data = not setup.is_own_loop or setup.has_loader or FETCH in m.rows

    def is_undivided(group: str) -> bool:
        if group == DATA and m.examined_steps and not has_data:
            return False
        return group in CODES or group not in STANDARD_PHASES or group in (TIMING, NOT_SAMPLED)

    def part_of(row: LineRow, group: str, top: str) -> _Part:
        """Return the part for the time of a row in a group and a phase."""
        if group and is_undivided(group):
            return parts[group]
        if not row.function:
            return parts[f"{top}{NOT_EXAMINED}"]
        part = parts[str(row).replace("`", "")]
        part.line = part.line or row
        return part

    for name, group in groups.items():
        all_own = sum(group.phases.values())
        if not all_own:  # No phase, but causes of slow steps, for example. They delay the host.
            parts[name].host[name] += group.share
            parts[name].error = group.error
            continue
        for phase, own in group.phases.items():
            top = phase.partition("/")[0]
            share, error = group.share * own / all_own, group.error * own / all_own
            rows = [row for row in m.lines if not row.entry and phase in row.phases]
            all_ms = sum(row.phases[phase].ms for row in rows)
            if not all_ms:
                # Without lines, a trainer's callbacks are known.
                callback = wall.CHECKPOINTS if phase == SAVES else of_one_callback(phase)
                part = parts[name if is_undivided(name) else callback or top]
                host_paced = _host_paced(m, phase)
                part.add(top, (1 - host_paced) * share, host_paced * share, error)
                continue
            scale = share / all_ms
            for row in rows:
                in_phase = row.phases[phase]
                error_of_row = row.error_ms * in_phase.ms / (row.ms or 1.0)
                total_error = math.hypot(
                    error * in_phase.ms / all_ms, error_of_row / (m.step.mean_ms or 1.0)
                )
                busy_ms = in_phase.host_ms - in_phase.idle_ms
                part = part_of(row, name, top)
                part.add(top, scale * in_phase.gpu_ms, scale * busy_ms, total_error)
                if in_phase.idle_ms:
                    # The reason for the GPU's idle time is what the code waited in: its main phase.
                    # The error of this row in this phase was added above.
                    part = part_of(row, group_of_phase.get(row.main_phase, ""), top)
                    part.add(top, 0.0, scale * in_phase.idle_ms, 0.0)
    return {name: part for name, part in parts.items() if part.share > 0}


def _host_paced(m: Measurement, phase: str) -> float:
    """Return the fraction of a phase in which the host sets the pace."""
    if m.on_host_clock or m.host_paced:
        return m.host_paced.get(phase, 1.0)
    # A run of version 5. The host waits for the GPU only if the GPU sets the pace.
    return float(m.host_wait_mean_ms < MIN_WAIT_SHARE * m.step.mean_ms)


def _entry_in_steps(
    name: str,
    part: _Part,
    seconds: float,
    all_steps_s: float,
    wall_s: float,
    m: Measurement,
    setup: TrainingSetup,
) -> Entry:
    """Return an entry that takes `seconds` of the wall clock, of which all steps take a part."""
    share, steps_share = seconds / wall_s, all_steps_s / wall_s
    n, step_ms = m.steps + m.untimed_steps, m.step.mean_ms
    host, error = sum(part.host.values()), part.error * steps_share
    is_of_timer = name in (TIMING, NOT_SAMPLED)
    pace = ""
    if part.share and not is_of_timer and not m.on_host_clock:
        of_host = host / part.share
        pace = "host" if of_host >= _MIN_PACE else "GPU" if of_host <= 1 - _MIN_PACE else "both"
    tops = {*part.gpu, *part.host}
    rows = [m.rows[top] for top in tops if top in m.rows]
    compilations = sum(code.calls for code in of_entry(m.culprits, COMPILATIONS))
    # Most of the entry is in one step, which the examined steps are not like.
    longest_ms = max((row.max_ms for row in rows), default=0.0)
    is_one_unexamined_step = (
        name.endswith(NOT_EXAMINED) and longest_ms >= 0.5 * part.share * step_ms * n
    )
    is_removable = error < share and not (
        is_of_timer
        or is_blurred(tops, m)
        or is_one_unexamined_step
        or (name == COMPILATIONS and 0 < compilations < _MIN_COMPILATIONS)
        or (part.line is not None and part.line.is_rest)
        or (part.line is None and name.removesuffix(NOT_EXAMINED) in MODEL_PHASES)
        or (name == DATA and may_hide_evaluations(m, setup))
    )
    # A phase that is long in a single step only is not the bottleneck.
    is_of_one_step = rows and all(_is_of_one_step(row, n, step_ms) for row in rows)
    saved_share = share
    if pace == "GPU" and name not in CODES and m.host_wait_mean_ms >= MIN_WAIT_SHARE * step_ms:
        # Without this work, the host sets the pace: no step is shorter than its time on the host.
        # If it waits for 3 of 14 ms, then removing 10 ms of the GPU's work saves only 3 ms, and the
        # host's time for that work.
        of_phases_ms = sum(row.host_mean_ms * row.frequency for row in rows)
        busy_ms = of_phases_ms if part.line is None else part.line.busy_ms
        saved_ms = m.host_wait_mean_ms + busy_ms
        saved_share = min(share, saved_ms / step_ms * steps_share)
    phases_ms = {top: (part.gpu[top] + part.host[top]) * step_ms for top in sorted(tops)}
    code = CODES.get(name, GPU_BOUND if pace == "GPU" else HOST_BOUND)
    if name not in CODES and m.on_host_clock and is_model_work(part.line, phases_ms):
        code = COMPUTE_BOUND
    return Entry(
        name=name,
        seconds=seconds,
        share=share,
        error=error,
        speed_up=1 / (1 - saved_share) if is_removable and saved_share < 1 else None,
        code=code if is_removable and not is_of_one_step else "",
        pace=pace,
        phases_ms=phases_ms,
        host_share=host * steps_share,
        line=part.line,
        lines=_code_in(name, m) if part.line is None else (),
    )


def _is_of_one_step(row: PhaseStats, n: int, step_ms: float) -> bool:
    """Return True if a phase takes most of its time in one of `n` steps, and little in others.

    Example: in 100 steps of 15 ms, 600 ms are callbacks, 550 ms of them in one step. The others
    have 50 of 950 ms, which is less than 20 %.
    """
    in_others_ms = n * row.share * step_ms - row.max_ms
    all_of_others_ms = n * step_ms - row.max_ms
    return n > 1 and row.max_ms > in_others_ms and in_others_ms < 0.2 * all_of_others_ms


def _code_in(name: str, m: Measurement) -> tuple[LineRow, ...]:
    """Return the code that runs in an entry of steps such as `data/fetch`, the longest first."""
    if name in (DATA, FETCH) and m.loaders:
        # The loop only waits for what workers run.
        return tuple(row for row in m.lines if row.entry == WORKERS)
    phase = DATA if name == TRANSFER_HOOKS else name
    lines = [
        replace(row, phases={phase: row.phases[phase]})
        for row in m.lines
        if phase in row.phases and row.function and not row.entry
    ]
    return tuple(sorted(lines, key=lambda row: -row.ms))


def is_model_work(line: LineRow | None, phases: Mapping[str, float]) -> bool:
    """Return True for the model's work: its forward and backward, and the update.

    It cannot simply be removed. Other code in these phases can:

    - a recomputation in backward, which is exchanged for memory,
    - code that the model calls, if nothing in it is differentiable, such as a search in NumPy,
    - the user's code in `optimizer`, such as clipping before the update.

    Args:
        line: The code; None if the entry is not code.
        phases: Its time by top-level phase.
    """
    total = sum(phases.values())
    of_model = sum(phases.get(phase, 0.0) for phase in MODEL_PHASES)
    if line is None:
        return of_model >= 0.5 * total > 0
    if line.is_recomputed:
        return False  # Exchanged for memory.
    is_called_by_model = line.file and not line.is_library and not line.is_forward
    # Nodes of the graph have a time in backward. Code that runs only there has made none.
    has_nodes = 0 < phases.get(BACKWARD, 0.0) < total
    if is_called_by_model and line.operations == 0 and not has_nodes:
        return False  # Such as a search in NumPy.
    if not line.is_library:
        of_model -= phases.get(OPTIMIZER, 0.0)  # Such as clipping.
    return of_model >= 0.5 * total > 0


def is_update(line: LineRow) -> bool:
    """Return True for the update of an optimizer, which is the code of a library."""
    return line.is_library and line.function.endswith(".step")


# Outside of steps


def _entry_outside(name: str, seconds: float, wall_s: float, m: Measurement) -> Entry:
    share = seconds / wall_s
    rows = [row for row in m.lines if row.entry == name and row.function]
    # Scale the times of examined occurrences to the time of all of them.
    all_ms = sum(row.ms for row in rows)
    factor = 1e3 * seconds / all_ms if all_ms else 0.0
    lines = []
    for row in rows:
        phases = {
            phase: PhasePart(factor * part.gpu_ms, factor * part.host_ms)
            for phase, part in row.phases.items()
        }
        lines.append(replace(row, phases=phases, error_ms=factor * row.error_ms))
    return Entry(
        name=name,
        seconds=seconds,
        share=share,
        speed_up=1 / (1 - share) if name not in wall.ONCE and share < 1 else None,
        code=CODES.get(name, ""),
        lines=tuple(sorted(lines, key=lambda row: -row.ms)),
    )


def is_blurred(names: Iterable[str], m: Measurement) -> bool:
    """Return True if an entry with these names and phases cannot be separated from others."""
    tops = {DATA if name == TRANSFER_HOOKS else name.partition("/")[0] for name in names}
    return not tops.isdisjoint(phase.partition("/")[0] for phase in m.blurred)


def may_hide_evaluations(m: Measurement, setup: TrainingSetup) -> bool:
    """Return True if `data` may include undetected evaluations, for example of a model copy.

    In a loop that only calls `step()`, `data` is all the time before forward.
    """
    row = m.rows.get(DATA)
    is_time_before_forward = setup.is_own_loop and not setup.has_loader and FETCH not in m.rows
    return is_time_before_forward and row is not None and is_uneven(row)
