"""Wall clock of a training run: the time from its start to its end, by entry."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

from lightning_gputime._phases import EXCLUDED, SAVES

SET_UP = "set-up"
SANITY_CHECK = "sanity check"
FIRST_STEP = "first step"
STEPS = "steps"
VALIDATION = "validation"
EVALUATION = "evaluation"
CHECKPOINTS = "checkpoints"
EPOCH_ENDS = "epoch ends"
PAUSED = "paused"
BETWEEN_LOOPS = "between loops"
TEAR_DOWN = "tear-down"
ONCE = (SET_UP, SANITY_CHECK, FIRST_STEP, TEAR_DOWN)
"""Entries that occur once, regardless of the length of the run."""
MIN_CORE_WAIT_SHARE = 0.2
"""All cores are busy if the loop waits for one for this fraction of the time. Chosen: smaller ones
count short bursts; with larger ones, advice suggests workers that lack a core."""

_ENTRY_OF_PHASE = {EXCLUDED: PAUSED, SAVES: CHECKPOINTS}  # Other nested entries keep their name.


@dataclass(frozen=True, slots=True)
class WallClockBreakdown:
    """Host time of a training run by entry. The entries add up to the duration of the run.

    A run lasts from the call of `fit()` or `train()` to its return, or from `attach` to `remove`.

    Attributes:
        entries_s: Host time of each entry that occurred (in seconds).

            - `set-up`: until the fetch of the first batch starts, without the `sanity check`
            - `first step`: includes compilation and first allocations; in a loop that only calls
              `step()`, also all time before it
            - `steps`: all other steps, including the fetch of their batches and their callbacks
            - `validation`, or `evaluation` outside of Lightning
            - `checkpoints`: inside and outside of steps
            - `epoch ends`: hooks at the start and the end of epochs
            - `paused`: code inside `timer.paused()`
            - `between loops`: between loops over `steps()`, and after the last of several loops
            - `tear-down`: after the last epoch (trainers), after the only loop over `steps()`, or
              after the last `step()`
        saves_in_steps_s: Part of `checkpoints` inside `steps` (in seconds).
        after_batches_s: Part of `validation` or `evaluation` after its last batch, such as metrics
            (in seconds).
        core_wait_share: Fraction of the elapsed time in which the loop's thread was ready to run,
            but had no CPU core; 0.0 if unknown. All other times exclude it.
        trial_ms: Mean time of a fixed calculation, repeated every 0.1 s (in milliseconds): the
            speed of the host, with which `compare` adjusts its times. 0.0 if unknown.
    """

    entries_s: Mapping[str, float]
    saves_in_steps_s: float = 0.0
    after_batches_s: float = 0.0
    core_wait_share: float = 0.0
    trial_ms: float = 0.0

    @property
    def wall_s(self) -> float:
        """Duration of the run so far (in seconds)."""
        return sum(self.entries_s.values())

    def metrics(self) -> dict[str, float]:
        """Return the values to log: the fraction of each entry, and the duration in seconds."""
        keys = {name: name.replace(" ", "_").replace("-", "_") for name in self.entries_s}
        wall_s = self.wall_s or math.inf
        shares = {f"fit/{keys[name]}_share": s / wall_s for name, s in self.entries_s.items()}
        return {**shares, "fit/wall_s": self.wall_s}


@dataclass(frozen=True, slots=True)
class _Account:
    """Times of all entries until `since_ns`, and the entry that has been open since."""

    since_ns: int
    entry: str
    is_step: bool  # True if the open time belongs to a step, including its checkpoints.
    is_save_in_steps: bool = False  # True if the open entry is a checkpoint inside `steps`.
    entries_ns: Mapping[str, int] = field(default_factory=dict)
    steps_ns: int = 0  # Time of all steps, including the first step.
    saves_in_steps_ns: int = 0  # Part of `checkpoints` inside `steps`.

    def until(self, now_ns: int) -> "_Account":
        """Return the account with the time until `now_ns`."""
        elapsed_ns = now_ns - self.since_ns
        total_ns = self.entries_ns.get(self.entry, 0) + elapsed_ns
        return replace(
            self,
            since_ns=now_ns,
            entries_ns={**self.entries_ns, self.entry: total_ns},
            steps_ns=self.steps_ns + elapsed_ns * self.is_step,
            saves_in_steps_ns=self.saves_in_steps_ns + elapsed_ns * self.is_save_in_steps,
        )

    def with_moved(self, entry: str, other: str, ns: int | None = None) -> "_Account":
        """Return the account with the time of one entry, or a part of it, moved to another."""
        entries_ns = dict(self.entries_ns)
        total_ns = entries_ns.get(entry, 0)
        ns = total_ns if ns is None else min(ns, total_ns)
        entries_ns[entry] = total_ns - ns
        entries_ns[other] = entries_ns.get(other, 0) + ns
        return replace(self, entries_ns=entries_ns)


class WallClock:
    """Attribute all time of a training run to the entry that is open.

    Only the training thread opens entries. Any thread may read. The run starts at `since_ns`, now
    by default.
    """

    def __init__(self, now_ns: Callable[[], int] | None, since_ns: int | None = None) -> None:
        self._now_ns = now_ns  # None once stopped.
        # Waits for a core, which a `LoopTime` counts: before the start, and from then on.
        self._waited_before_ns: int = getattr(now_ns, "waited_ns", 0)
        self._waited_ns, self._trial_ms = 0, 0.0
        self._thread = get_ident()  # Training thread.
        self.entry = SET_UP
        """Entry that is open, disregarding nested entries such as checkpoints."""
        self._nested: list[str] = []  # Open nested entries or phases, the innermost last.
        self.has_stepped = False
        """True once the first step has ended."""
        self._after_batches_ns = 0  # Time of evaluations after their last batch.
        self._open_loops = 0  # Number of loops over `steps()` that are running.
        self._started_loops = 0  # Number of all loops over `steps()`, without nested loops.
        if since_ns is None:
            since_ns = now_ns() if now_ns is not None else 0
        # Replaced as one object, so that other threads read consistent times.
        self._account = _Account(since_ns, SET_UP, is_step=False)
        self.outside_ns = since_ns
        """Host clock minus the time of all steps; constant while a step runs."""
        self._follow: Callable[[str], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The clock cannot be pickled, so a copy is stopped.
        return {**self.__dict__, "_account": self._current(), "_now_ns": None, "_follow": None}

    def begin(self) -> None:
        """Start the run now: no entry includes the time so far."""
        if self._now_ns is not None:
            self._put(_Account(self._now_ns(), SET_UP, is_step=False))
            if self._follow is not None:
                self._follow(self.entry_outside)

    def follow(self, switch_to: Callable[[str], object]) -> None:
        """Call a function with the open entry, now and at each change. In steps, it is empty."""
        self._follow = switch_to
        switch_to(self.entry_outside)

    @property
    def entry_outside(self) -> str:
        """Entry that is open now; empty inside all steps but the first."""
        entry = self._nested[-1] if self._nested else self.entry
        return "" if entry == STEPS else _ENTRY_OF_PHASE.get(entry, entry)

    def steps_ns(self, now_ns: int) -> int:
        """Return the time of all steps so far, including the first step and checkpoints in steps.

        Inside a step, `now_ns - outside_ns` has the same value, without a function call.
        """
        account = self._account
        return account.steps_ns + (now_ns - account.since_ns if account.is_step else 0)

    # Events of a run

    def switch_to(self, entry: str) -> None:
        """Attribute time to an entry until the next switch, except for nested entries."""
        if entry != self.entry:
            self.entry = entry
            self._update()

    def resume_steps(self) -> None:
        """Attribute time to steps, because a batch is being fetched or trained on."""
        self.switch_to(STEPS if self.has_stepped else FIRST_STEP)

    def end_first_step(self) -> None:
        self.has_stepped, self._thread = True, get_ident()
        if self.entry == SET_UP:
            # In a loop without `steps()`, the start of the first step is unknown, so all time
            # before its end counts.
            account = self._current()
            self._put(
                replace(
                    account.with_moved(SET_UP, FIRST_STEP),
                    steps_ns=account.steps_ns + account.entries_ns.get(SET_UP, 0),
                )
            )
        self.resume_steps()

    # `NamedPhase` calls these two methods, which recorders also have.

    def enter_phase(self, entry: str) -> None:
        """Attribute time to a nested entry until `leave_phase`. Ignore calls from other threads."""
        if get_ident() == self._thread:
            self._nested.append(entry)
            self._update()

    def leave_phase(self, entry: str) -> None:
        """Close a nested entry. Ignore calls from other threads."""
        if get_ident() == self._thread and entry in self._nested:
            innermost = max(i for i, nested in enumerate(self._nested) if nested == entry)
            del self._nested[innermost]
            self._update()

    def shorten_step(self, ns: int) -> None:
        """Exclude time from the open step, but not from its entry (in nanoseconds)."""
        account = self._current()
        if account.is_step:
            self._put(replace(account, steps_ns=max(account.steps_ns - ns, 0)))

    def move(self, source: str, entry: str, ms: float) -> None:
        """Move time between entries, at most the time of `source` (in milliseconds)."""
        self._put(self._current().with_moved(source, entry, round(1e6 * ms)))

    def add_after_batches(self, ns: int) -> None:
        """Add the time of an evaluation after its last batch (in nanoseconds)."""
        self._after_batches_ns += ns

    # Loops over `steps()`

    def start_loop(self) -> None:
        """Attribute time to steps, unless this loop is nested in another."""
        self._open_loops += 1
        if self._open_loops == 1:
            self._thread = get_ident()
            self._started_loops += 1
            self.resume_steps()

    def end_loop(self) -> None:
        """Attribute time to `between loops` after the outermost loop."""
        self._open_loops -= 1
        if not self._open_loops:
            self.switch_to(BETWEEN_LOOPS)

    def stop(self, ended_ns: int | None = None) -> None:
        """Stop the clock. Safe to call twice.

        `ended_ns` is the value of `steps_ns` at the end of the last step. A loop that only calls
        `step()` does not report its end, so time after its last step counts as tear-down.
        """
        if self._now_ns is None:
            return
        if self._follow is not None:
            self._follow("")
            self._follow = None
        account = self._current()
        if ended_ns is not None and self.has_stepped and not self._started_loops:
            account = account.with_moved(STEPS, TEAR_DOWN, max(account.steps_ns - ended_ns, 0))
        self._account, self._now_ns = account, None

    # Results

    def summary(self) -> WallClockBreakdown:
        account = self._current()
        if self._started_loops == 1:  # Time after the only loop is not between loops.
            account = account.with_moved(BETWEEN_LOOPS, TEAR_DOWN)
        elapsed_ns = sum(account.entries_ns.values()) + self._waited_ns
        return WallClockBreakdown(
            {name: ns / 1e9 for name, ns in account.entries_ns.items() if ns},
            core_wait_share=self._waited_ns / elapsed_ns if elapsed_ns else 0.0,
            saves_in_steps_s=account.saves_in_steps_ns / 1e9,
            after_batches_s=self._after_batches_ns / 1e9,
            trial_ms=self._trial_ms,
        )

    def _current(self) -> _Account:
        """Return the account until now, or until the clock was stopped."""
        now_ns, account = self._now_ns, self._account
        if now_ns is None:
            return account
        account = account.until(now_ns())
        self._waited_ns = getattr(now_ns, "waited_ns", 0) - self._waited_before_ns
        self._trial_ms = getattr(now_ns, "trial_ms", 0.0)
        return account

    def _update(self) -> None:
        """Attribute time from now on to the entry that is open."""
        if self._now_ns is None:
            return
        is_in_step = self.entry in (FIRST_STEP, STEPS)
        entry = self._nested[-1] if self._nested else self.entry
        self._put(
            replace(
                self._current(),
                entry=_ENTRY_OF_PHASE.get(entry, entry),
                # Checkpoints are the only nested entries that are part of a step.
                is_step=is_in_step and self._nested in ([], [SAVES]),
                is_save_in_steps=self.entry == STEPS and self._nested == [SAVES],
            )
        )

    def _put(self, account: _Account) -> None:
        """Replace the account. Before, report an open entry that changes, by its present name."""
        if self._follow is not None and account.entry != self._account.entry:
            self._follow(self.entry_outside)
        self._account = account
        self.outside_ns = account.since_ns - account.steps_ns
