"""Join the times of steps with what ran next to them, their batches, and the GPU's clock.

`BatchLog` has the content of the batches, from shapes and from masks on the CPU. `machine` has the
rest.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gputime._attribution import MIN_ADVICE_SHARE, OutsideCause, OutsideSummary
from lightning_gputime._attribution.machine import (
    BLOCKED,
    WAITED,
    GPUClock,
    MachineLog,
    Threads,
    system_sources,
)
from lightning_gputime._attribution.overlap import (
    FALSE_ALARMS,
    MIN_SHARE,
    MIN_STEPS,
    Attribution,
    Candidate,
    attribute,
)
from lightning_gputime._compat.torch_ import function_modes, without_function_modes
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import (
    MIN_EXCESS_DEVIATIONS,
    MIN_EXCESS_MS,
    MIN_EXCESS_SHARE,
    SlowLog,
)
from lightning_gputime._measurement.untimed import MAX_NEWEST, MIN_WAIT_SHARE, UntimedSteps
from lightning_gputime._measurement.wall_clock import MIN_CORE_WAIT_SHARE, WallClock
from lightning_gputime._record.clock import Clock, HostClock, LoopTime

_MASK = "attention_mask"
_OF_TOKENS = (torch.int64, torch.int32)
_MAX_MASK = 100_000  # Larger masks are not summed, which would take 0.1 ms or more.
_MIN_PADDING = 0.2  # Minimum share of padding that is reported. Chosen: less gains little.
# Maximum number of steps before a step, and after it, whose medians are its baseline; and minimum
# number. A cause that lasts for half of them would be the baseline. Chosen; drift counts if longer.
_NEIGHBORS, _MIN_NEIGHBORS = 250, 25
# Minimum fraction of the time for which a thread may block the loop. Chosen: a smaller one blames
# threads of loggers for other waits, a larger one misses threads with the GIL.
_MIN_BLOCKED = 0.3
# Minimum probability that a value after a slowdown is larger than one before it, and maximum
# distance of its own change from the slowdown, as a fraction of the steps. Chosen: looser
# ones name values that change by chance.
_MIN_ORDERED, _MAX_DISTANCE = 0.97, 0.05
_MIN_GROWTH = 0.1  # Minimum change of a value at a slowdown, as a fraction of the value. Chosen.


class Content(NamedTuple):
    """Content of the batches of a step."""

    tokens: int = 0  # Elements of the largest int32 or int64 tensor of each batch, with padding.
    used: int = 0  # Tokens without padding; 0 if unknown.
    elements: int = 0  # Elements of the largest tensor of another type of each batch.


_UNKNOWN = Content()  # Of a step with a batch that could not be read.


class BatchLog:
    """Content of the newest timed steps. `add` and `end_step` are called in each of them."""

    def __init__(self) -> None:
        self.open: Content | None = None
        """Content of the open step so far."""
        self.steps: deque[tuple[int, Content]] = deque(maxlen=MAX_NEWEST)
        """Number and content of each step."""

    def __getstate__(self) -> dict[str, Any]:
        # Another thread may copy the timer while steps are added.
        return {**self.__dict__, "steps": self.steps.copy()}

    def add(self, batch: Any) -> None:
        """Add a batch of the open step. It may be of any type, and is not kept."""
        found = self.open or Content()
        if found is _UNKNOWN:
            return
        try:
            if type(batch) is Tensor and not function_modes() and batch.is_floating_point():
                # The most common case of a small model, without more calls.
                elements = found.elements + batch.numel()
                self.open = Content(found.tokens, found.used, elements)
                return
            # Modes of functions, such as a FLOP counter, must not see these calls. Leaving them
            # takes longer than the rest.
            if function_modes():
                with without_function_modes():
                    tokens, used, elements = _content_of(batch)
            else:
                tokens, used, elements = _content_of(batch)
            self.open = Content(found.tokens + tokens, found.used + used, found.elements + elements)
        except Exception:  # Objects of users may raise anything.
            self.open = _UNKNOWN

    def end_step(self, number: int) -> None:
        """End the open step. It does nothing if no batch was added."""
        if self.open is not None and self.open is not _UNKNOWN:
            self.steps.append((number, self.open))
        self.open = None

    def drop_step(self) -> None:
        self.open = None

    @property
    def padding(self) -> float:
        """Fraction of the tokens that are padding; 0 if it is small or unknown."""
        known = [content for _, content in [*self.steps] if content.used]
        tokens = sum(content.tokens for content in known)
        share = 1.0 - sum(content.used for content in known) / tokens if tokens else 0.0
        return share if share >= _MIN_PADDING else 0.0

    def mean_content(self) -> tuple[str, float]:
        """Return the most specific unit that all steps have, and its mean amount per step."""
        steps = [content for _, content in [*self.steps]]
        for unit, amounts in (
            ("non-padding tokens", [content.used for content in steps]),
            ("tokens", [content.tokens for content in steps]),
            ("elements", [content.elements for content in steps]),
        ):
            if amounts and all(amounts):
                return unit, round(sum(amounts) / len(amounts), 1)
        return "", 0.0

    def candidates(self, numbers: Sequence[int]) -> list[Candidate]:
        """Return the contents that vary between the steps with these numbers."""
        content = dict(self.steps)
        found = []
        for index, name in enumerate(("tokens", "non-padding tokens", "elements")):
            values = [content[n][index] if n in content else np.nan for n in numbers]
            found.append(Candidate(name, np.array(values, float), kind="batch"))
        return found


def _content_of(batch: Any) -> Content:
    tokens, elements, used = 0, 0, 0
    for name, tensor in _tensors(batch, 0):
        # Reading a tensor on a device would make the host wait for it.
        if name == _MASK and tensor.device.type == "cpu" and tensor.numel() <= _MAX_MASK:
            used = int(torch.count_nonzero(tensor))
        if tensor.dtype not in _OF_TOKENS:
            elements = max(elements, tensor.numel())
        elif tensor.dim() >= 2 or name == "input_ids":
            tokens = max(tokens, tensor.numel())
    return Content(tokens, used, elements)


def _tensors(batch: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a batch with their keys, down to three levels."""
    if isinstance(batch, Tensor):
        yield "", batch
    elif isinstance(batch, Mapping) and depth < 3:
        for key in batch.keys():  # noqa: SIM118 - iterating over a TensorDict yields its rows
            for name, tensor in _tensors(batch[key], depth + 1):
                yield name or str(key), tensor
    elif isinstance(batch, list | tuple) and depth < 3:
        for item in batch[:64]:
            yield from _tensors(item, depth + 1)


class Surroundings:
    """What ran next to the steps of a session, and what was in the batches of timed steps.

    Times are cumulative times of all steps, in which evaluations and pauses take no time.

    Args:
        clock: Clock of the device.
        wall_clock: Counts the time of all steps.
        slow: Log of slow steps.
        untimed: Durations of all steps if only some are timed.
    """

    def __init__(
        self,
        clock: Clock,
        wall_clock: WallClock,
        slow: SlowLog,
        untimed: UntimedSteps,
    ) -> None:
        self._slow, self._untimed = slow, untimed
        self._wall_clock: WallClock | None = wall_clock  # None in a copy.
        self._host_ns = clock.host_ns
        self.batches, self.gpu = BatchLog(), GPUClock(clock)
        # True if the device may still run a step while the host is in the next one.
        self._runs_ahead = not isinstance(clock, HostClock)
        # Nothing on the machine can be compared with a simulated clock.
        is_real = clock.host_ns is time.perf_counter_ns or isinstance(clock.host_ns, LoopTime)
        device: Any = getattr(clock, "device", None)
        gpu = (device.index or 0) if device is not None and device.type == "cuda" else None
        self._sources = system_sources(gpu) if is_real else {}
        self._machine: MachineLog | None = None
        # Number, index, start and end of each timed step, and its time (in milliseconds).
        self._timed: deque[tuple[int, int, int, int, float]] = deque(maxlen=MAX_NEWEST)
        self._newest_ended_ns = 0  # Cumulative time at the end of the newest of them.
        # Time of all timed steps, and the time in which the host waited for the device.
        self._step_ms = self._wait_ms = 0.0
        self._cached: tuple[Any, OutsideSummary | None] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no thread, no clock, and no sources that name threads of this process. It keeps
        # the summary so far.
        objects = ("_machine", "_host_ns", "_slow", "_untimed", "_wall_clock")
        cleared: dict[str, Any] = {**dict.fromkeys(objects), "_sources": {}}
        kept = {"_timed": self._timed.copy(), "_cached": (None, self._summary())}
        return {**self.__dict__, **cleared, **kept}

    def steps_read(self, read: ReadSteps) -> None:
        """Add timed steps. Call it in the thread of the loop."""
        if self._runs_ahead:
            self.gpu.steps_read()
        all_ms = read.sums.each_ms
        self._step_ms += sum(all_ms)
        self._wait_ms += sum([step.wait_ms for step in read.records])
        for step, ms in zip(read.records, all_ms, strict=True):
            if step.lines is None:
                # A pause inside the step is in its host time, but not in the cumulative time.
                since_ns = step.ended_ns - (step.host_ns[-1] - step.host_ns[0])
                self._timed.append(
                    (
                        *(step.number, step.step_index),
                        *(max(since_ns, self._newest_ended_ns), step.ended_ns),
                        ms,
                    )
                )
            self._newest_ended_ns = step.ended_ns
        self.look()

    def look(self) -> None:
        """Read the machine. If steps are slow, timed or not, sample it often from now on."""
        # Created at the first look, because its sources follow the thread that runs the loop.
        if self._machine is None:
            host_ns, wall_clock = self._host_ns, self._wall_clock
            assert wall_clock is not None
            self._machine = MachineLog(lambda: wall_clock.steps_ns(host_ns()), self._sources)
        self._machine.read()
        untimed = self._untimed
        is_slow = self._slow.excess_ms > MIN_ADVICE_SHARE * self._step_ms
        has_long = untimed.n and untimed.long_share > MIN_ADVICE_SHARE
        if is_slow or has_long or untimed.unsettled_long_share > MIN_ADVICE_SHARE:
            self._machine.sample_often()

    def remove(self) -> None:
        """End the thread and the measurements of the GPU's clock. Safe to call twice."""
        self.gpu.stop()
        if self._machine is not None:
            self._machine.stop()

    @property
    def core_wait(self) -> float | None:
        """Mean fraction of the timed steps in which the loop waited for a CPU core.

        None if unknown, and on the host's clock, which excludes these waits.
        """
        if self._machine is None or not self._runs_ahead or not self._timed:
            return None
        _, _, starts_ns, ends_ns, _ = np.array([*self._timed], float).T
        for found in self._machine.candidates(starts_ns, ends_ns):
            if found.name == WAITED and np.isfinite(found.values).any():
                return round(float(np.nanmean(found.values)), 3)
        return None

    def explain(self, m: Measurement) -> Measurement:
        """Return a measurement with the causes outside of the loop. Any thread may call it."""
        slowdown = m.slowdown
        if slowdown is not None and slowdown.change > 0 and slowdown.until_step is None:
            slowdown = replace(slowdown, reason=self._reason_of(slowdown))
        key = m.steps, m.untimed_steps
        if self._cached[0] != key:
            self._cached = key, self._summary()
        return replace(m, slowdown=slowdown, outside=self._cached[1], gpu_mhz=self.gpu.median_mhz)

    @property
    def _is_gpu_bound(self) -> bool:
        """True if the host waits for the device. Then its single steps have no meaning."""
        return self._wait_ms >= MIN_WAIT_SHARE * self._step_ms

    def _summary(self) -> OutsideSummary | None:
        """Return the causes of the slow steps; None if the steps are few, or nothing was found."""
        if self._wall_clock is None:
            return self._cached[1]
        # Number, index, start, end and time of each timed step.
        timed = np.array([*self._timed], float).reshape(-1, 5)
        numbers, indices = timed[:, 0].astype(int).tolist(), timed[:, 1].astype(int).tolist()
        # The part of the excess of timed steps without a cause in the loop.
        unexplained_ms = self._slow.unexplained_ms()
        timed_excess_ms = np.array([unexplained_ms.get(number, 0.0) for number in numbers])
        batches = self.batches.candidates(numbers)
        every = np.array([*self._untimed.newest], float).reshape(-1, 3)
        if len(every) <= len(timed) or self._is_gpu_bound:
            steps, all_ms, excess_ms = timed[:, 1:4], timed[:, 4], timed_excess_ms
            found, max_false_alarms = list[Attribution](), FALSE_ALARMS
        else:
            # Search all steps, timed or not. The batches of untimed steps are unknown, so there are
            # two tests, and each may have half of the false alarms. Shares of batches are those of
            # the excess of timed steps.
            steps, all_ms = every, (every[:, 2] - every[:, 1]) / 1e6
            excess_ms = _excess(all_ms)
            timed_ms = dict(zip(indices, timed_excess_ms.tolist(), strict=True))
            for i, index in enumerate(every[:, 0].astype(int).tolist()):
                excess_ms[i] = min(excess_ms[i], timed_ms.get(index, np.inf))
            max_false_alarms = FALSE_ALARMS / 2
            found, batches = attribute(timed_excess_ms, batches, max_false_alarms), []
        if len(steps) < MIN_STEPS:
            return None

        # The most specific candidates are first.
        of_machine = self._of_machine(steps)
        placed = [candidate for candidate in of_machine if candidate.place]
        others = [candidate for candidate in of_machine if not candidate.place]
        # Two tests can find more than there is.
        left = max(1.0 - sum(each.share for each in found), 0.0)
        for each in attribute(excess_ms, [*placed, *batches, *others], max_false_alarms):
            share = min(each.share, left)
            if share >= MIN_SHARE:
                found.append(replace(each, share=share, low=min(each.low, share)))
                left -= share
        missing = tuple(self._machine.missing) if self._machine is not None else ()
        blocking, waited = self._in_all_steps(steps)
        if not (found or blocking or waited or missing):
            return None
        return OutsideSummary(
            n=int(np.count_nonzero(excess_ms)),
            steps=len(steps),
            share=float(excess_ms.sum() / all_ms.sum()),
            causes=tuple(map(self._cause, found)),
            not_checked=missing,
            blocking=blocking,
            core_wait_share=waited,
        )

    def _in_all_steps(self, steps: Any) -> tuple[OutsideCause | None, float]:
        """Return the thread that may block the loop, and the share of time of waits for a core.

        Both are means over the time of steps, slow or not. What grew between them does not count.
        """
        if self._machine is None:
            return None, 0.0
        found = self._machine.candidates(steps[:, 1], steps[:, 2])
        known = [each for each in found if np.isfinite(each.values).sum() >= MIN_STEPS]
        shares = {each.name: min(float(np.nanmean(each.values)), 1.0) for each in known}
        # Without a device, times exclude these waits.
        waited = shares.get(WAITED, 0.0) if self._runs_ahead else 0.0
        waited = waited if waited >= MIN_CORE_WAIT_SHARE else 0.0
        # If the device sets the pace, the host is blocked while it waits for the device.
        threads = [
            each
            for each in known
            if each.kind == Threads.kind and each.name not in (BLOCKED, WAITED)
        ]
        if self._is_gpu_bound or not threads:
            return None, waited
        busiest = max(threads, key=lambda each: shares[each.name])
        # The loop may have been blocked by something else, or at other times.
        share = min(shares[busiest.name], shares.get(BLOCKED, 0.0))
        if share < _MIN_BLOCKED:
            return None, waited
        cause = OutsideCause(Threads.kind, busiest.name, busiest.place, share, 0.0, share, 1.0)
        return cause, waited

    def _of_machine(self, steps: Any) -> list[Candidate]:
        """Return what ran next to steps, given index, start and end of each."""
        if self._machine is None or not len(steps):
            return []
        ends = steps[:, 2].copy()
        if self._runs_ahead:  # Include what ran while the device was still in the step.
            follows = np.diff(steps[:, 0]) == 1
            ends[:-1] = np.where(follows, ends[1:], ends[:-1])
        found = self._machine.candidates(steps[:, 1], ends)
        # That the loop's thread was blocked is no cause. Without a device, times exclude its waits
        # for a core.
        names = {BLOCKED} if self._runs_ahead else {BLOCKED, WAITED}
        return [each for each in found if each.name not in names]

    def _cause(self, found: Attribution) -> OutsideCause:
        candidate = found.candidate
        name, padding = candidate.name, 0.0
        if candidate.kind == "batch":
            name = f"batches with more than {found.threshold:,.0f} {candidate.name}"
            padding = 0.0 if candidate.name == "elements" else self.batches.padding  # Of tokens.
        # The loop's thread itself is no cause.
        kind = "core" if candidate.name == WAITED else candidate.kind
        interval = found.share, found.low, found.high
        return OutsideCause(kind, name, candidate.place, *interval, found.exposed, padding)

    def _reason_of(self, slowdown: Slowdown) -> str:
        """Return what has changed at the same time; empty if nothing has."""
        # Where the host sets the pace, a GPU with less work may lower its clock by itself.
        if self._is_gpu_bound and (change := self.gpu.change_at(slowdown.since_step)):
            return f"{change}, not your code"
        timed = np.array([*self._timed], float).reshape(-1, 5)
        is_after = timed[:, 0] >= slowdown.since_step
        if slowdown.kind != "jump" or min(is_after.sum(), (~is_after).sum()) < MIN_STEPS:
            return ""
        batches = self.batches.candidates(timed[:, 0].astype(int).tolist())
        of_machine = [each for each in self._of_machine(timed[:, 1:4]) if each.place]
        candidates = [*of_machine, *batches]
        changes = (_change_of(candidate, is_after) for candidate in candidates)
        return next(filter(None, changes), "")


def _excess(all_ms: Any) -> Any:
    """Return the time of each step above its baseline; 0 for steps that are not slow.

    The baseline is the larger of two medians, over the steps before and after it. So steps that
    stay long, as after a slowdown, are not slow.
    """
    if len(all_ms) < MIN_STEPS:
        return np.zeros(len(all_ms))
    baseline = np.maximum(_medians_before(all_ms), _medians_before(all_ms[::-1])[::-1])
    away = all_ms - baseline
    min_ms = np.maximum(MIN_EXCESS_SHARE * baseline, MIN_EXCESS_MS)
    min_ms = np.maximum(min_ms, MIN_EXCESS_DEVIATIONS * np.median(np.abs(away)))
    return np.where(away > min_ms, away, 0.0)


def _medians_before(all_ms: Any) -> Any:
    """Return the median of the steps before each step; that of the first steps for these."""
    n = min(_NEIGHBORS, len(all_ms) // 3)
    first = min(_MIN_NEIGHBORS, n)
    medians = np.full(len(all_ms), np.median(all_ms[:first]))
    for i in range(first, n):
        medians[i] = np.median(all_ms[:i])
    windows = np.lib.stride_tricks.sliding_window_view(all_ms, n)
    # The median changes slowly, so compute every eighth.
    medians[n:] = np.repeat(np.median(windows[:-1:8], axis=1), 8)[: len(all_ms) - n]
    return medians


def _change_of(candidate: Candidate, is_after: Any) -> str:
    """Return how a value has grown at a slowdown, as part of a sentence; empty if it has not."""
    is_known = np.isfinite(candidate.values)
    values, is_after = candidate.values[is_known], is_after[is_known]
    before, after = np.sort(values[~is_after]), values[is_after]
    if min(len(before), len(after)) < MIN_STEPS:
        return ""
    was, now = float(np.median(before)), float(np.median(after))
    is_larger = np.searchsorted(before, after, side="left").mean() / len(before)
    if is_larger < _MIN_ORDERED or now - was < _MIN_GROWTH * max(was, 1e-9) or not isfinite(now):
        return ""
    # The change of the value is where its mean before and after differs most, by standard errors.
    n, sums = len(values), np.cumsum(values - values.mean())[:-1]
    at = np.arange(1, n)
    change = int(at[np.argmax(np.abs(sums) / np.sqrt(at * (n - at)))])
    if abs(change - len(before)) > max(_MAX_DISTANCE * n, 5):
        return ""
    place = f" ({candidate.place})" if candidate.place else ""
    if candidate.kind == "batch":
        return f"batches have {now:,.0f} {candidate.name} since then, and {was:,.0f} before"
    return f"{candidate.name}{place} since then"
