"""The vocabulary of phases, and the records of one step."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

DATA = "data"
CALLBACKS = "callbacks"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
OTHER = "other"
# Replaces `forward` and `loss` if both were compiled together.
TRAINING_STEP = "training_step"
# Text generation in a step that trains on it, and its rewards.
GENERATE = "generate"
REWARD = "reward"
# Sub-phase in which a rank waits for others or runs a collective, such as `backward/comm`.
COMM = "comm"
# Parts of `data`, if a trainer reports them: the fetch of the next batch from the loader, the copy
# of the batch to the device, and the wait for other ranks.
FETCH = "data/fetch"
COPY = "data/copy"
WAIT = "data/comm"
CALLBACK_WAIT = "callbacks/comm"
SAVES = "callbacks/checkpoints"  # Checkpoints that a trainer saves, in or outside a callback.
BETWEEN_BATCHES = (DATA, CALLBACKS)
"""Phases between batches, in which the device has no work of the step."""
# With `every_n_steps="auto"`: number of first steps that are all timed, and the largest `n` for
# timing 1 of `n` steps after them.
FIRST_STEPS, MAX_STEPS_PER_TIMED = 100, 500
# Labels of marks whose phase depends on the next label; `resolve_labels` decides. `check_name`
# rejects such names for user phases.
AFTER_FORWARD = "<after forward>"
AFTER_BACKWARD = "<after backward>"
GRAD = "<grad>"
AFTER_GRAD = "<after grad>"
AFTER_UPDATE = "<after update>"
MAYBE_EVALUATION = "<evaluation>"  # A call in eval mode that may turn out to be an evaluation.
EVALUATION_IN_STEP = "<evaluated>"  # Certainly an evaluation: its time is excluded from the step.
EXCLUDED = "<excluded>"  # Time in no step, such as in `timer.paused()`.
BETWEEN = "<between>"  # Time after a loop whose gradients wait for an update in the next loop.
LEFT = "<left>"  # Time after the last update of a step in which the loop was left.
# Labels of time in which a loop may evaluate.
MAY_EVALUATE = (MAYBE_EVALUATION, EVALUATION_IN_STEP, EXCLUDED)
IN_NO_STEP = (EXCLUDED, EVALUATION_IN_STEP, LEFT)  # Labels of time that counts for no step.
# Labels of marks that interrupt a phase: a wait for other ranks, a wait of a pipeline stage for its
# input, and the end of either wait.
WAITS = "<waits>"
RECEIVES = "<receives>"
CONTINUES = "<continues>"
INTERRUPTIONS = (WAITS, RECEIVES, CONTINUES)


# Phases in the order of a step, with colors of Okabe and Ito's palette for color-blind readers.
COLOURS = {
    DATA: "#E69F00",
    CALLBACKS: "#D55E00",
    FORWARD: "#0072B2",
    LOSS: "#CC79A7",
    BACKWARD: "#56B4E9",
    OPTIMIZER: "#009E73",
    OTHER: "#BBBBBB",
}

_CUSTOM_COLOURS = ("#9467BD", "#F0E442", "#8C564B")  # Colors of custom phases.

PHASES = tuple(COLOURS)
# Sub-phases of any loop, without modules and custom phases.
SUB_PHASES = (*(f"{phase}/{COMM}" for phase in PHASES), FETCH, COPY)
# Labels of the code after a phase that the user named.
FOLLOWED_BY = {FORWARD: AFTER_FORWARD, BACKWARD: AFTER_BACKWARD, OPTIMIZER: AFTER_UPDATE}

# By label: the phase of its time, by the work that follows (see `_following`; None at the end of a
# micro-batch). It is `other` if there is no entry.
_PHASE_BY_NEXT: Mapping[str, Mapping[str | None, str]] = {
    # In a step with a closure, only the mark at its end shows that there was an update.
    AFTER_FORWARD: {FORWARD: FORWARD, BACKWARD: LOSS, GRAD: LOSS, AFTER_UPDATE: OPTIMIZER},
    AFTER_BACKWARD: {OPTIMIZER: OPTIMIZER, AFTER_UPDATE: OPTIMIZER},
    # `torch.autograd.grad` is a penalty in the loss if a backward follows, else it is the backward.
    GRAD: {
        BACKWARD: LOSS,
        **dict.fromkeys((GRAD, FORWARD, OPTIMIZER, AFTER_UPDATE, None), BACKWARD),
    },
    AFTER_GRAD: {BACKWARD: LOSS, OPTIMIZER: OPTIMIZER, AFTER_UPDATE: OPTIMIZER},
    AFTER_UPDATE: {},
    MAYBE_EVALUATION: {},
    BETWEEN: {},
}

# Most frequent phase of each label whose phase depends on the next label. Profilers use it, because
# they cannot wait for the next label.
LIKELY = {
    AFTER_FORWARD: LOSS,
    AFTER_BACKWARD: OPTIMIZER,
    GRAD: BACKWARD,
    AFTER_GRAD: OPTIMIZER,
    AFTER_UPDATE: OTHER,
    BETWEEN: OTHER,
}


# Keys such as `step_ms` and `slow/ranks_ms` are taken, so no phase may have these names.
_RESERVED = ("step", "host_wait", "slow", "slow_excess", "lasting_change", "local")
# Characters that a part of a name must not contain, for a regular expression. Control characters
# and line breaks would break tables and logger keys.
UNUSABLE = r"/<>\x00-\x1f\x7f-\x9f\u2028\u2029"
_NAME = re.compile(rf"[^{UNUSABLE}]+(/[^{UNUSABLE}]+)*")
_INVALID = (
    "is not valid: pass a non-empty string without '<', '>' or control characters, such as"
    " 'augment' or 'forward/body'"
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Intervals of a step, in order."""

    names: tuple[tuple[str, ...], ...]  # Phases that each interval counts for.
    device_ms: Sequence[float]
    host_ns: Sequence[int]  # Host time of each mark; has one more element than the intervals.
    finished_ns: int  # Host time at which the device finished, if the host waited; otherwise 0.


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one training step: one optimizer update, with all its micro-batches.

    Attributes:
        step: Number of the step, under which its values are logged. By default the first step is 0;
            with transformers it is 1.
        phase_ms: Device time of each phase that ran (in milliseconds). A sub-phase
            (`backward/comm`) has its own entry and is included in its parent's (`backward`).
        host_ms: Host time between the same marks (in milliseconds): the time to launch the phase,
            not to run it.
        host_wait_ms: Time for which the host was blocked until the device finished this step (in
            milliseconds); 0.0 if the step was read without waiting. If untimed steps precede the
            wait, the wait divided by the number of steps.
        step_ms: The sum of the top-level phases (in milliseconds).
        skipped_update: True if no optimizer ran its update, as when a GradScaler finds gradients
            that are not finite. Stays False with a fused optimizer, which decides on the device.
        timeline: The step's intervals in order, for traces.
    """

    step: int
    phase_ms: Mapping[str, float]
    host_ms: Mapping[str, float]
    host_wait_ms: float
    step_ms: float
    skipped_update: bool = False
    timeline: Timeline | None = field(default=None, repr=False, compare=False)


class LineTime(NamedTuple):
    """Time at which a line of the user's code started to run, in an examined step.

    Attributes:
        start_ns: Host time before the mark of the line (in nanoseconds).
        end_ns: Host time after it, when the line started.
        device_ms: Device time since the first mark of the step (in milliseconds).
        line: The line, see `_ledger.places`.
        starts: False if the line continues after a call, or if its backward runs.
    """

    start_ns: int
    end_ns: int
    device_ms: float
    line: Any
    starts: bool


class StepRecord(NamedTuple):
    """Labels and times of a step that the device has finished.

    All fields but `lines` contain plain values, which the garbage collector does not track.

    Attributes:
        number: The number that the step is logged under.
        labels: The labels of the step's marks, without the last one, which is its end.
        device_ms: Device time from each mark to the next (in milliseconds).
        host_ns: Host time of each mark (in nanoseconds).
        wait_ms: Time for which the host waited for the device to finish the step (in milliseconds).
        finished_ns: Host time at which the device finished (in nanoseconds), if the host waited for
            it; else 0.
        skipped_update: True if no optimizer ran its update.
        reached_ns: Host time at which a wait for the end of the step returned, even if the device
            had already finished; 0 without a wait.
        items: Number of items; NaN if unknown.
        step_index: Index among all steps since the timer was attached, timed or not; -1 if only
            timed steps are counted.
        lines: Marks of lines of the user's code, if the step was examined; else None.
        ended_ns: Cumulative time of all steps at the end of the step (in nanoseconds).
    """

    number: int
    labels: tuple[str, ...]
    device_ms: Sequence[float]
    host_ns: Sequence[int]
    wait_ms: float
    finished_ns: int
    skipped_update: bool
    reached_ns: int = 0
    items: float = nan
    step_index: int = -1
    lines: tuple["LineTime", ...] | None = None
    ended_ns: int = 0

    @property
    def evaluation_ms(self) -> float:
        """Device time of evaluations inside the step (in milliseconds)."""
        labels_and_ms = zip(self.labels, self.device_ms, strict=True)
        return sum(ms for label, ms in labels_and_ms if label == EVALUATION_IN_STEP)

    def times(self) -> StepTimes:
        """Return the times by phase. Most steps are only summed, so do not store the result."""
        phases = resolve_labels(self.labels)
        phase_ms: dict[str, float] = {}
        host_ms: dict[str, float] = {}
        step_ms = 0.0
        for names, ms, (start, end) in zip(
            phases, self.device_ms, itertools.pairwise(self.host_ns), strict=True
        ):
            if names:  # Otherwise the interval belongs to no step.
                step_ms += ms
            for name in names:
                phase_ms[name] = phase_ms.get(name, 0.0) + ms
                host_ms[name] = host_ms.get(name, 0.0) + (end - start) / 1e6
        timeline = Timeline(phases, (*self.device_ms,), (*self.host_ns,), self.finished_ns)
        return StepTimes(
            self.number,
            phase_ms,
            host_ms,
            self.wait_ms,
            step_ms,
            self.skipped_update,
            timeline,
        )


# Cached, because most steps of a loop have the same labels.
@lru_cache(maxsize=256)
def resolve_labels(labels: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the phases that the time after each mark of a step counts for.

    Time between two model calls is `forward`; time after the last call is `loss` if a backward
    follows. Time after backward is `optimizer` if an update follows. `torch.autograd.grad` is part
    of `loss` if a backward follows, else it is `backward`. Anything else is `other`. A wait for
    other ranks is the `comm` of the phase that it interrupts; a pipeline's wait for input between
    two passes is the `comm` of the next pass.

    A sub-phase follows its parents. Time outside of steps has no names.
    """
    intervals = iter(_intervals([label for label in labels if label not in INTERRUPTIONS]))
    resolved: list[tuple[str, ...]] = []
    current = _Interval(EXCLUDED, EXCLUDED)  # Before the first mark that is no interruption.
    for label in labels:
        if label not in INTERRUPTIONS:
            current = next(intervals)
        name = current.phase
        if name in IN_NO_STEP:
            resolved.append(())
            continue
        if label in (WAITS, RECEIVES):
            interrupted = current.receiving_phase if label == RECEIVES else name
            name = f"{interrupted.partition('/')[0]}/{COMM}"
        with_parents = itertools.accumulate(name.split("/"), "{}/{}".format)
        resolved.append(tuple(with_parents))
    return tuple(resolved)


class _Interval(NamedTuple):
    phase: str
    receiving_phase: str  # Phase that a pipeline's wait for input in this interval belongs to.


def _intervals(labels: Sequence[str]) -> list[_Interval]:
    """Return the interval after each mark of a step without interruptions."""
    intervals = []
    # Work that follows in the same micro-batch: FORWARD, BACKWARD, OPTIMIZER, GRAD, AFTER_UPDATE.
    following: str | None = None
    # What follows decides, so go from the last label to the first.
    for label in reversed(labels):
        phase = label
        if label in _PHASE_BY_NEXT:
            phase = _PHASE_BY_NEXT[label].get(following, OTHER)
        receiving_phase = phase
        if phase in (DATA, LOSS, OTHER) and following in (FORWARD, BACKWARD):
            receiving_phase = following
        elif label == AFTER_BACKWARD:
            # After backward, the data that a stage has sent is still in transit.
            receiving_phase = BACKWARD
        intervals.append(_Interval(phase, receiving_phase))
        following = _following(label, phase, following)
    return intervals[::-1]


def _following(label: str, phase: str, following: str | None) -> str | None:
    """Return the work that follows a mark and its time, given the work that follows after them.

    Marks are resolved backwards. Example: of the labels `forward`, `<after forward>`, `backward`,
    `<after backward>`, the last is first, and nothing follows. Then `backward` returns itself, so
    the time after forward, before it, is `loss`.
    """
    top_level = phase.partition("/")[0]
    if label in (AFTER_UPDATE, LEFT):
        # Only the end of an update is marked, so code between backward and update, such as
        # clipping, counts as `optimizer`.
        return AFTER_UPDATE
    if label == GRAD:
        # A gradient that precedes this one must not count as `loss`.
        return BACKWARD if phase == LOSS else GRAD
    if label not in _PHASE_BY_NEXT and top_level in (FORWARD, BACKWARD, OPTIMIZER):
        return top_level
    if top_level == DATA or label == CALLBACKS:
        # Another micro-batch follows. A callback may run inside this callback.
        return None
    return following


def is_wait(name: str) -> bool:
    """Return whether a phase is a wait for other ranks."""
    return name.endswith(f"/{COMM}")


def in_order(names: Sequence[str]) -> list[str]:
    """Sort phases in execution order: custom phases last, sub-phases after their parent.

    Sub-phases are in alphabetical order.
    """
    tops = list(dict.fromkeys([*PHASES, *(name.partition("/")[0] for name in names)]))
    return sorted(names, key=lambda name: (tops.index(name.partition("/")[0]), name))


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each phase. Custom phases cycle through a few colours."""
    custom = itertools.cycle(_CUSTOM_COLOURS)
    return {name: COLOURS.get(name) or next(custom) for name in names}


def label_of_callback(callback: object, hook: str) -> str:
    """Return the sub-phase of `callbacks` for a hook of a callback."""
    # "/" would separate a further sub-phase.
    return f"{CALLBACKS}/{type(callback).__name__.replace('/', '_')}.{hook}"


def of_one_callback(name: str) -> str:
    """Return the callback and hook whose time a phase is; empty if it is no such sub-phase.

    Such sub-phases appear in the verdict and in `history`, but not in logs.
    """
    top, _, part = name.partition("/")
    return part if top == CALLBACKS and name != CALLBACK_WAIT else ""


def check_name(name: str) -> str:
    """Return `name` if it is a valid phase name; else raise ValueError with the reason."""
    problem = _problem_of(name) if isinstance(name, str) else _INVALID
    if problem:
        raise ValueError(f"phase name {name!r} {problem}")
    return name


@lru_cache(maxsize=256)
def _problem_of(name: str) -> str:
    """Return why a name is not a valid phase name; empty if it is."""
    first = name.partition("/")[0]
    if first in _RESERVED:
        return f"is taken by the key '{first}_ms': choose another"
    return "" if _NAME.fullmatch(name) else _INVALID


def is_metric(found: object) -> bool:
    """Return True for a metric of torchmetrics."""
    # Compare the module's name, because importing torchmetrics takes seconds.
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(found).__mro__)
