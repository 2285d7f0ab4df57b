"""Session of a timer: from attaching it to a loop until its removal."""

import math
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from threading import get_ident
from types import CodeType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch.distributed

from lightning_gputime._attribution.surroundings import Surroundings
from lightning_gputime._causes import SlowStepAnalyzer
from lightning_gputime._compat.torch_ import has_compiled
from lightning_gputime._instrumentation import traced
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import Loop, Search, is_distributed
from lightning_gputime._instrumentation.patching import Attachment, Attachments, do_nothing
from lightning_gputime._instrumentation.work import WorkCounter
from lightning_gputime._ledger.examiner import ExaminationSchedule, Examiner
from lightning_gputime._ledger.ledger import MIN_EXAMINED
from lightning_gputime._ledger.rows import LONG_STEP
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, step_calls
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.untimed import Recurrence
from lightning_gputime._measurement.wall_clock import EVALUATION, FIRST_STEP, STEPS, WallClock
from lightning_gputime._options import AUTO, Options
from lightning_gputime._output.loggers import MeanLog
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    BETWEEN,
    BETWEEN_BATCHES,
    DATA,
    EVALUATION_IN_STEP,
    EXCLUDED,
    MAY_EVALUATE,
    OTHER,
    StepRecord,
)
from lightning_gputime._ranks.exchange import Agreement, RankComparer, open_store
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.pending_steps import READ_SIZE, Wait
from lightning_gputime._record.recorder import OPEN, PAUSED, Annotator, Recorder
from lightning_gputime._session.schedule import Schedule, TimingCost, Windows
from lightning_gputime._session.self_check import SelfCheck

_FIRST_STEPS = 5  # Number of steps that may take longer than the others, in the cost of examining.
_MIN_COMPARED = 50  # Timed steps to compare examined steps with. Chosen: fewer add noise.
# Examine more steps once this number of timed steps takes `LONG_STEP` times as long as the first of
# them. Each time, the next multiple is twice as large. Chosen: with fewer, one slow step decides.
_N_COMPARED = 20
_MIN_INDEX_OFF = 20  # Index of the first step that may run without hooks: later than `_FIRST`.
# Time between two looks at what runs next to steps without hooks. Chosen: a thread that slows the
# loop is sampled from the next look on.
_LOOK_NS = 1_000_000_000
_CHECK_STEPS = 25  # Steps without hooks between two checks of steps to be read: half of a read.
_NO_BATCH = object()


class Mode(Enum):
    """Mode of a session: whether it is attached, and how it records the open step.

    | mode | event | next mode | shown by |
    |---|---|---|---|
    | `NEW` | `attach` | `ATTACHED` | each loop |
    | any but `OFF` | a loop starts, in a window | `TIMED` | each loop |
    | any but `OFF` | a loop starts between windows | `UNTIMED` | conformance, 1 of 4 steps timed |
    | any but `EXAMINED` | end, the next step is in a window | `TIMED` | same |
    | any but `EXAMINED` | end, it is between windows | `UNTIMED` | same |
    | any but `EXAMINED` | end, it is to be examined | `EXAMINED` | `test_ledger` |
    | `UNTIMED` | its start, if hooks are not needed soon | `OFF` | `test_untimed` |
    | `OFF` | a loop starts | `OFF` | `test_untimed` |
    | `EXAMINED` | its start, if lines cannot be followed | `TIMED` | `test_ledger` |
    | `EXAMINED` | end, if all steps are timed | `TIMED` | `test_ledger` |
    | `EXAMINED` | end, if not | `UNTIMED` | `test_ledger` |
    | all but `NEW` | `remove`, `abandon` | `ENDED` | `test_nothing_stays` |

    An end is a call of `end_step`, `end_step_without_hooks` or `leave_loop` that ends a step. In
    `OFF`, it may also be a call of `StepCounter.count`. The last column names files in `tests`.
    """

    NEW = "not attached"
    ATTACHED = "attached, no step is open"
    TIMED = "the step is timed"
    EXAMINED = "the step is timed, with a mark at each line of the user's code"
    UNTIMED = "the step is counted, and hooks record nothing"
    OFF = "the step is counted, without hooks"
    ENDED = "removed"


# Globals, because every step compares modes.
NEW, ATTACHED, TIMED, EXAMINED, UNTIMED, OFF, ENDED = Mode

_MAY_FOLLOW = {
    NEW: {ATTACHED},
    ATTACHED: {TIMED, EXAMINED, UNTIMED, ENDED},
    TIMED: {TIMED, EXAMINED, UNTIMED, ENDED},
    EXAMINED: {TIMED, EXAMINED, UNTIMED, ENDED},
    UNTIMED: {TIMED, EXAMINED, UNTIMED, OFF, ENDED},
    OFF: {TIMED, EXAMINED, UNTIMED, ENDED},
    ENDED: set[Mode](),
}


class StepCounter:
    """Number of steps that have ended, and which steps only need to be counted.

    Front ends call `count` themselves while `is_on`, because most steps end there: an object with
    few attributes is in fewer lines of the CPU's caches, which the training has filled.

    Args:
        ends_ns: See `UntimedSteps`.
        host_ns: Clock of the host (in nanoseconds).
        wall_clock: The wall clock of the run.
    """

    __slots__ = (
        *("index", "number", "is_on", "due_at", "log_due_at"),
        *("_ends_ns", "_host_ns", "_wall_clock"),
    )

    def __init__(
        self, ends_ns: "array[int]", host_ns: Callable[[], int], wall_clock: WallClock
    ) -> None:
        self.index = 0
        """Number of steps that have ended, timed or not: the index of the open step."""
        self.number: int | None = None
        """Number of the last step that ended."""
        self.is_on = False
        """True while steps run without hooks, and end with their batches."""
        self.due_at = 0
        """Index of the step before which more than a count is due."""
        self.log_due_at = -math.inf
        """Number of the step from which a log may be due: at first, of any step."""
        self._ends_ns, self._host_ns, self._wall_clock = ends_ns, host_ns, wall_clock

    def count(self, number: int) -> bool:
        """End a step without hooks. Return True if `check_without_hooks` must be called."""
        self.index = index = self.index + 1
        self.number = number
        self._ends_ns.append(self._host_ns() - self._wall_clock.outside_ns)
        return index >= self.due_at or number >= self.log_due_at


class Session:
    """Session of a timer: attaches it to a loop, times the steps of the loop, and removes it.

    Front ends report the events of the loop to the session and its `recorder`, in the timed thread:
    the thread that called `begin_step`. `flush`, `drain` and the methods that end the session can
    be called from any thread.

    In most loops only some steps are timed, in windows of a few consecutive steps. Between the
    windows, hooks that record nothing would still cost 24 Python calls per step, and 33 under
    Lightning. So the hooks are removed at the end of a step if the next window is at least one step
    away, and return at the first step of that window. In a plain loop they return one step earlier,
    because only the previous step shows which calls in eval mode are an evaluation. Without hooks,
    the end of each step only reads the clock, until the timed steps before can be read. Loops that
    need the hooks in all steps are listed in `_start_planned_step`.

    Args:
        options: Options of the timer.
        clock: Clock of the device.
        loop: Model and optimizers of the loop.
        results: Collects the times of the steps.
        means: Logs mean times.
        functions: Functions of libraries to name as the reason for time.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        loop: Loop,
        results: Results,
        means: MeanLog,
        functions: Sequence[CodeType] = (),
    ) -> None:
        assert results.wall_clock is not None  # Only evaluations lack it.
        self._options, self._results, self._means = options, results, means
        self._wall_clock, self._untimed = results.wall_clock, results.untimed
        self._host_ns = clock.host_ns
        # Not with several ranks: other threads of the process read the clock while it stands still.
        self._time_trial: Callable[[], None] | None = None
        if not is_distributed():
            self._time_trial = getattr(clock.host_ns, "time_trial", None)
        self._analyzer = SlowStepAnalyzer(clock, results.slow, results.culprits)
        self._surroundings = Surroundings(clock, self._wall_clock, results.slow, results.untimed)
        self._batches = self._surroundings.batches
        self._comparison = RankComparer(results, means, options, self._surroundings)
        self._on_step = step_calls(options.observers)
        self._on_slow_step = methods(options.observers, "on_slow_step")

        # Choice of the timed steps. Each log interval needs some of them.
        is_logged = means.writer.has_destination or len(options.observers) > 0
        has_rows = means.writer.has_rows or len(options.observers) > 0
        # False if no log is due after a number of steps: then `publish` logs.
        self._has_logs = has_logs = has_rows or self._comparison.is_on
        requires_all = {
            "observers=": len(self._on_step) > 0,
            "annotate=True": options.annotate,
            "lag=0": options._lag == 0,
            "a log at each step": has_rows and means.every_n_steps == 1,
        }
        each_timed_for = next((option for option, is_set in requires_all.items() if is_set), "")
        n = options.every_n_steps
        # True if the cost of timing determines `n`, to time 1 of `n` steps.
        self._is_auto = n == AUTO and not each_timed_for
        if n == AUTO:
            results.update_facts(each_timed_for=each_timed_for)
        windows = Windows(interval=1 if n == AUTO else int(n))
        self.times_all = not self._is_auto and windows.cover_all
        """True if every step is timed. Then examined steps count in all statistics."""
        # Each rank would predict other long steps, but all ranks must time the same steps. So all
        # use the prediction of rank zero; see `_decide`.
        has_ranks, next_long = is_distributed(), self._untimed.next_long
        self.schedule = Schedule(windows, (lambda _: math.inf) if has_ranks else next_long)
        self._cost = TimingCost(clock.host_ns, means.every_n_steps if has_logs else None)
        store = open_store("agreement") if self._is_auto and options.sync_ranks else None
        rank = torch.distributed.get_rank() if store is not None else 0
        self._agreement = Agreement(store, rank) if store is not None else None
        self._examinations = ExaminationSchedule(next_long, is_distributed=has_ranks)
        if not options.lines:
            self._examinations.stop()

        # Recording of the steps: hooks call the recorder, which passes the steps to `_take` once it
        # has read the times of their events.
        self.recorder = recorder = Recorder(
            clock,
            lag=options._lag,
            emit=self._take,
            read_size=1 if self._on_step else READ_SIZE,
            annotate=Annotator() if options.annotate else None,
        )
        self.recorders = [recorder]
        """Recorders for the phases that users name."""
        self._work = work = WorkCounter(options.items, options.flops, loop, recorder)
        self._examiner = Examiner(clock, recorder.pending.free, recorder.warn_once)
        self._examiner.watch.follow(functions)
        self._ledger = results.ledger
        self._ledger.operations = self._examiner.operations
        self._ledger.busy_functions = self._examiner.watch.busy_functions
        self._boundaries = Boundaries(
            recorder, loop, work.on_call, self._wall_clock, self._examiner
        )

        # Readers of the recorded steps.
        means.set_source(results, is_sampled=not self.times_all, is_logged=is_logged)
        read_peaks = getattr(clock, "peak_memory", None)
        self._memory = MemoryWatch(read_peaks) if read_peaks is not None else None
        results.connect(
            work.reference,
            observers=options.observers,
            logs_slow_steps="slow" in options.logged_groups,
            memory=self._memory,
            explain=self._surroundings.explain,
        )
        self._self_check = SelfCheck(results, self._boundaries, recorder, loop, options)
        # Collectors come first, because the others use what they have collected.
        self._readers: list[Callable[[ReadSteps], None]] = [
            results.steps_read,
            self._comparison.steps_read,
            self._surroundings.steps_read,
            self._analyzer.steps_read,  # Starts a "callback" span for observers and loggers.
            self._call_observers,
            self._log,
            self._self_check.steps_read,
        ]

        # Attachments and objects to remove at the end.
        self._until_end = Attachments()  # See `attach_until_end`.
        self._to_remove = [
            *(self._comparison, self._analyzer, self._surroundings),
            *options.observers,
        ]

        # State of the session. `_enter` sets the first two.
        self.mode = NEW
        self.is_attached = False  # True between `NEW` and `ENDED`.
        self.needs_updates = loop.needs_updates
        """True if a step ends with an update, whatever its number of batches."""
        self._keeps_hooks = False  # True once `keep_hooks` was called.

        # State after the steps that have ended. `end_step`, `end_step_without_hooks` and
        # `leave_loop` set it.
        self.counter = StepCounter(self._untimed.ends_ns, self._host_ns, self._wall_clock)
        self._first_steps_end_ns = 0  # Cumulative time of the first 5 steps.
        # Cumulative time of all steps at the end of the last step that ran with hooks.
        self._ended_ns = 0

        # State of the open step.
        self._first_label = DATA  # Label with which it started, set by `end_step`.
        # True if it follows an examined step, at whose end the host waited until the device had no
        # work queued. Set by `begin_step` and `end_step`.
        self._starts_drained = False
        # Cumulative time of all steps at the start of the newest examined step, set by `_examine`.
        self._examined_from_ns = 0

        # State after the steps that were read, set by `_take`.
        self._warmup_left = options.timed_warmup_steps  # Warm-up steps still to be read.
        self._entry_read = FIRST_STEP  # Entry of the wall clock with the step that is read next.
        # True until the first examined steps were compared with the others.
        self._is_comparison_due = True
        # Number and time of the timed steps whose mean was checked for a slowdown.
        self._compared_n = self._compared_ms = 0.0
        # Mean time from which more steps are examined; 0 before the first mean.
        self._slow_ms = 0.0

        # Untimed steps without hooks: indices, set by `_remove_hooks`. The hooks return `_margin`
        # steps before a window: a plain loop needs them in the step before, to tell evaluations
        # from steps.
        self._margin = int(loop.search is not Search.NEVER)
        self._hooks_return_at = 0  # Index of the first step that has hooks again.
        self._checked_ns = 0  # Time of the last check.
        self._looked_ns = 0  # Time at which the surroundings were last looked at in a check.
        self._checked_at = 0  # Index of the step before which the last check was.

        # Logs, set by `_schedule_log`. All ranks must log means of the same steps, so a log is
        # written `lag` steps after its last step: by then, every rank has read that step.
        # Number and index of the newest steps that `_schedule_log` was called with; loggers use the
        # number, which may start at any value.
        self._newest_steps = deque[tuple[int, int]](maxlen=options._lag + 1)

    # Attach

    def attach(self) -> None:
        """Attach the hooks. If that fails or is interrupted, remove all of them."""
        try:
            self._boundaries.attach()
            self.forward, self.optimizer = self._boundaries.forward, self._boundaries.optimizer
            self._analyzer.attach()
            call_safely(methods(self._options.observers, "attach"))
            # Python may delete a timer at any moment, even inside a hook, so its hooks are only
            # removed here.
            _remove_lost()
            # With several timers, each needs its hooks in all steps, to tell which backward is its
            # own.
            for other in _attached:
                other.wake()
            _attached.add(self)
            self._enter(ATTACHED)
            self._results.update_facts(is_running=True)
        except BaseException:
            self.remove()
            raise

    def attach_until_end(self, attachment: Attachment) -> None:
        """Attach something until the timer is removed. It also stays attached in untimed steps."""
        self._until_end.add(attachment)

    def _enter(self, mode: Mode) -> None:
        if mode not in _MAY_FOLLOW[self.mode]:
            raise RuntimeError(f"a session cannot change from {self.mode.name} to {mode.name}")
        self.mode, self.is_attached = mode, mode is not ENDED
        if mode is ENDED:
            self.counter.is_on = False

    # Steps and their batches, in the order of a step

    def begin_step(self) -> None:
        """Drop the open step, and start a step in the calling thread."""
        self._examiner.stop()
        self._boundaries.step_ended(timed=False, is_dropped=True)
        self._work.reset()
        self._batches.drop_step()
        self._analyzer.loop_begins()
        self._untimed.restart(self._wall_clock.steps_ns(self._host_ns()))
        self._starts_drained = False
        if self.mode is not OFF:
            # Do not examine this step, because the first fetch of an epoch may take long.
            self._enter(UNTIMED if self._next_mode() is UNTIMED else TIMED)
        if self.mode is TIMED:
            self.recorder.begin()
        else:
            self.recorder.stop()  # Also makes the calling thread the timed thread.

    def restart_second_step(self) -> None:
        """Read the start of the second step again, after the wall clock has ended the first step.

        In a loop without `steps()`, the start of the first step is unknown. So the wall clock has
        moved all time before its end into it, which changes the cumulative time of the steps.
        """
        self._ended_ns = self._wall_clock.steps_ns(self._host_ns())
        self._untimed.restart(self._ended_ns)

    def continue_in_loop(self) -> None:
        """Continue the open step in another loop, without the time between the loops."""
        # Exclude the time from the mark `BETWEEN` until now.
        self.recorder.pause(since=BETWEEN)
        self.recorder.resume()

    def fetch_begins(self) -> None:
        """End an evaluation before a fetch in an untimed step, in a loop without `steps()`."""
        self.forward.evaluation.end_untimed_span()

    def batch_begins(self, batch: Any = _NO_BATCH) -> None:
        """End the fetch of a batch, and any pause. Count the items of the batch."""
        recorder = self.recorder
        if recorder.named.names:
            recorder.named.drop_phases_of_step()
        if recorder.state is PAUSED:
            recorder.resume(OTHER)
        else:
            recorder.mark(OTHER)
        if batch is not _NO_BATCH:
            self._work.add_batch(batch)
            if recorder.state is OPEN:
                self._batches.add(batch)

    def add_batches(self, batches: Sequence[Any]) -> None:
        """Count the items of micro-batches that were fetched together."""
        for i, batch in enumerate(batches):
            if i:
                self._work.end_batch()
            self._work.add_batch(batch)
            if self.recorder.state is OPEN:
                self._batches.add(batch)

    def batch_ends(self, label: str = DATA) -> None:
        """End a micro-batch that does not end the step."""
        self._work.end_batch()
        recorder = self.recorder
        if recorder.state is PAUSED:  # A validation at the end of the loop body may have paused it.
            recorder.resume(label)
        else:
            recorder.mark(label)

    def has_only_fetched(self, *, is_first: bool) -> bool:
        """Return True if the open step has certainly only fetched batches.

        Args:
            is_first: True for the first batch of a loop.
        """
        recorder = self.recorder
        # Without hooks, and in these cases, the hooks may have missed training.
        if self.mode is OFF or has_compiled() or recorder.captures.has_captured:
            return False
        if recorder.threads.was_elsewhere or not self.optimizer.has_any:
            return False
        # From its second batch on, a loop without any backward so far may train without hooks.
        if not (is_first or self.forward.has_trained):
            return False
        if self._boundaries.has_training_work:
            return False
        return recorder.open.phases <= {*BETWEEN_BATCHES, OTHER, BETWEEN}

    @property
    def has_evaluated(self) -> bool:
        """True if the open step has only evaluated a model that was trained before."""
        if self.recorder.label not in MAY_EVALUATE or not self.forward.has_trained:
            return False
        if self._boundaries.has_training_work:
            return False
        return self.recorder.open.phases <= {*BETWEEN_BATCHES, OTHER, *MAY_EVALUATE}

    def rely_on_updates(self) -> None:
        """From now on, end steps with updates: the trainer's count of batches was wrong."""
        self.needs_updates = True

    def end_step(self, number: int, label: str = DATA) -> None:
        """End the open step, and start the next with `label`.

        One function, because it runs in every step: calls would cost more than the work.
        """
        self._first_label = label
        if self.mode is OFF:
            self.end_step_without_hooks(number)
            return
        recorder, mode, counter = self.recorder, self.mode, self.counter
        index = counter.index
        is_timed = mode in (TIMED, EXAMINED)

        # Count the step, its work and its duration.
        if mode is EXAMINED:
            self._examiner.stop()
        elif mode is TIMED and self._time_trial is not None:
            self._time_trial()
        now_ns = self._host_ns()
        counter.index, counter.number = index + 1, number
        self._analyzer.allocator.end_step(now_ns)
        items = self._work.take_items()
        if self._batches.open is not None:
            self._batches.end_step(number)
        if number >= counter.log_due_at:
            self._schedule_log(number, index)
        log_is_due = self._means.is_due
        # This may exclude evaluations from the step: read `outside_ns` after it.
        skipped_update = self._boundaries.step_ended(timed=is_timed)
        self._ended_ns = now_ns - self._wall_clock.outside_ns
        if counter.index == _FIRST_STEPS:
            self._first_steps_end_ns = self._ended_ns
        if not self.times_all:
            self._add_duration()
            self._starts_drained = mode is EXAMINED

        # End its marks, or count it as untimed. Both read steps that have finished, and pass them
        # to `_take`.
        if is_timed:
            gpu_clock = self._surroundings.gpu
            if gpu_clock.is_due and not recorder.named.names and mode is TIMED:
                # Exclude it from this step: loops are recognized by the first marks of a step.
                recorder.mark(EXCLUDED)
                gpu_clock.measure(number)
            recorder.end_step(
                number,
                skipped_update,
                read=log_is_due or (self._is_auto and counter.index >= self._cost.due),
                label=label,
                index=-1 if self.times_all else index,  # `Recorder.end_step` explains -1.
                items=items,
                ended_ns=self._ended_ns,
                wait=Wait.FOR_THIS_STEP if mode is EXAMINED else Wait.FOR_EARLIER,
            )
        else:
            recorder.pending.end_untimed(log_is_due)
        if self._is_auto:
            self._cost.end_span(counter.index, is_untimed=mode is UNTIMED)
        if mode is EXAMINED:
            self._step_examined(number, index)

        # Log it, and compare the ranks.
        if log_is_due and not self.times_all:  # If all steps are timed, `_take` has logged it.
            self._write_log()
        if self._comparison.due_step is not None:
            # The next step has started, so exclude the exchange between ranks from it.
            recorder.pause()
            self._comparison.compare_if_due()
            recorder.resume(label)

        # Start the next step.
        if self.mode is ENDED:
            return  # An observer or a logger has removed the timer.
        if not self.times_all:
            self._start_planned_step()
        elif mode is EXAMINED:
            self._enter(TIMED)  # The device has no work queued, so do not examine this step.
        elif mode is TIMED and counter.index >= self._examinations.next_index:
            self._examine()

    # Parts of the end of a step, in the order of their calls

    def _schedule_log(self, number: int, index: int) -> None:
        """Note that a step has ended. Make a log due if one was due `lag` steps ago.

        Only the first step and steps from `counter.log_due_at` on need this call.
        """
        counter = self.counter
        if not self._newest_steps:
            self._means.start(number - 1)
            counter.log_due_at = self._next_log(number - 1)
        steps = self._newest_steps
        steps.append((number, index))
        # If `steps` is full, its first step ended `lag` steps ago, so all ranks have read it.
        number_read, _ = steps[0]
        if len(steps) == steps.maxlen and number_read >= counter.log_due_at:
            counter.log_due_at = self._next_log(number_read)
            self._means.step_finished(number_read)
            self._comparison.schedule(number_read)

    def _next_log(self, number: int) -> float:
        """Return the number of the first step after a step at which a log is due."""
        return self._means.next_due(number) if self._has_logs else math.inf

    def _add_duration(self) -> None:
        """Add the duration of the step that has ended to the statistics of all steps."""
        # An examined step takes longer, and so may a step that starts with an empty queue. Leave
        # both out, unless the step was examined because it was expected to be long: then long steps
        # would be too rare.
        is_unusual = self.mode is EXAMINED and not self._examinations.expects_long
        if is_unusual or self._starts_drained:
            self._untimed.leave_out(self._ended_ns)
        else:
            self._untimed.ends_ns.append(self._ended_ns)

    def _take(self, records: list[StepRecord], since_ns: int) -> None:
        """Pass steps that were read to the ledger, the statistics, the observers and the logs.

        `since_ns` is the host time at which their reading started (in nanoseconds).
        """
        self._looked_ns = since_ns
        for record in records:
            if EVALUATION_IN_STEP in record.labels:
                # The wall clock has counted the evaluation as part of the step.
                self._wall_clock.move(self._entry_read, EVALUATION, record.evaluation_ms)
            self._entry_read = STEPS
        self._ledger.add(records)
        counted = records
        if not self.times_all:  # Examined steps take longer, so they count in the ledger only.
            counted = [record for record in records if record.lines is None]
        if counted:
            warmup = min(self._warmup_left, len(counted))
            self._warmup_left -= warmup
            call_safely(self._readers, ReadSteps(counted, warmup, since_ns))
        if not self._has_logs:  # Otherwise, each log reads it.
            self._results.read_memory()
        if self._is_auto:
            self._cost.add_timed(counted, since_ns)
        # Examine more steps after a slowdown.
        sums = self._results.sums
        step = sums.step
        n_newest = step.n - self._compared_n
        if n_newest >= _N_COMPARED:
            newest_ms = (step.device_ms - self._compared_ms) / n_newest
            self._compared_n, self._compared_ms = step.n, step.device_ms
            if not self._slow_ms:
                self._slow_ms = LONG_STEP * newest_ms
            elif newest_ms >= self._slow_ms:
                self._slow_ms *= 2
                self._examinations.examine_more()
        # Examine more steps if those so far lack work that other steps do.
        if self._is_comparison_due and step.n >= _MIN_COMPARED and self._ledger.n >= MIN_EXAMINED:
            self._is_comparison_due = False
            phases = sums.phases
            phases_ms = {
                name: phases[name].device_ms / step.n for name in phases if "/" not in name
            }
            if self._ledger.differs_from(phases_ms, step.device_ms / step.n):
                self._examinations.examine_more()

    def _call_observers(self, steps: ReadSteps) -> None:
        """Call the user's observers. An observer may read or remove the timer."""
        slow_steps = self._analyzer.newest
        if not self._on_step and not slow_steps:
            return
        if self._on_step:
            for step in steps:
                call_safely(self._on_step, step.times())
        for slow_step in slow_steps:
            call_safely(self._on_slow_step, slow_step)
        # End the span that the analyzer has started, and start another for the loggers.
        self._analyzer.end_callback("observers")
        self._analyzer.start_callback()

    def _log(self, steps: ReadSteps) -> None:
        """Add steps to the means. If every step is timed, also write the logs that are due."""
        if self._means.take(steps):
            self._analyzer.end_callback("the timer's logging")

    def _step_examined(self, number: int, index: int) -> None:
        """Keep what the examiner has found in a step, and choose the next step to examine."""
        # Time that this step took longer than the mean step before it, in mean steps.
        took_ns = self._ended_ns - self._examined_from_ns
        n_before = max(index - _FIRST_STEPS, 1)
        mean_ns = (self._examined_from_ns - self._first_steps_end_ns) / n_before
        cost = max(took_ns / mean_ns - 1, 0.0) if mean_ns else 0.0
        self._ledger.unavailable = self._examiner.unavailable
        self._ledger.trained_tensors[number] = len(self._examiner.trained)
        self._examinations.step_examined(index, cost)

    def _write_log(self) -> None:
        """Log the steps up to the step at which a log is due.

        Call it if not every step is timed, once the timed steps among them have been read.
        """
        number, index = self._newest_steps[0]
        self._analyzer.start_callback()
        self._means.log_at(number, until=index + 1)
        self._analyzer.end_callback("the timer's logging")

    def _start_planned_step(self) -> None:
        """Enter the mode that is planned for the next step, and start it."""
        recorder, index, mode_before = self.recorder, self.counter.index, self.mode
        if self._is_auto and index >= self._cost.due:
            self._decide()
        # After an examined step the device has no work queued, so the next step is not usual.
        self._enter(UNTIMED if self._starts_drained else self._next_mode())
        if self.mode is UNTIMED:
            recorder.stop()
            needs_hooks = (
                self._starts_drained  # Only `end_step` leaves such a step out of the statistics.
                or index < _MIN_INDEX_OFF  # The first steps show what the loop calls and captures.
                or self._keeps_hooks  # Nested loops must see all calls of a model,
                or len(_attached) > 1  # and so must several timers.
                or self.forward.evaluation.has_found  # Hooks time the evaluations inside steps.
            )
            if not needs_hooks:
                next_timed = min(self.schedule.next_timed(index), self._examinations.next_index)
                return_at = int(next_timed) - self._margin
                if return_at > index and not has_compiled():  # Compiled code would recompile.
                    self._remove_hooks(return_at)
        elif mode_before is UNTIMED:  # After a timed step, its last mark has started this step.
            recorder.begin(self._first_label)
        if self.mode is EXAMINED:
            self._examine()

    def _decide(self) -> None:
        """Choose the windows from the next step on. May wait for other ranks."""
        n = self._cost.decide()
        recurrence = None  # See `Windows`.
        if self._agreement is not None:
            # The next step has started, so exclude the wait for other ranks from it.
            self.recorder.pause()
            n, *long_steps = self._agreement.agree([n, *(self._untimed.recurrence() or ())])
            self.recorder.resume(self._first_label)
            if long_steps:
                recurrence = Recurrence(*long_steps)
        index = self.counter.index
        self._cost.schedule_next(n, index)
        windows = replace(self._cost.windows(n), recurrence=recurrence)
        if windows != self.schedule.windows:
            self.schedule.follow(windows, index)
        self._results.update_facts(
            timed_every_n_steps=n,
            timing_share=self._cost.share,
            added_share=self._cost.added_share(n),
        )

    def _next_mode(self) -> Mode:
        """Return the mode of the step that starts next."""
        index = self.counter.index
        if index >= self._examinations.next_index:
            return EXAMINED
        return TIMED if self.schedule.next_timed(index) == index else UNTIMED

    def _examine(self) -> None:
        """Examine the step that has just started. If that is impossible, only time it."""
        self._examined_from_ns = self._wall_clock.steps_ns(self._host_ns())
        mean_ns = self._examined_from_ns / max(self.counter.index, 1)
        lines = self._examiner.start(mean_ns)
        self._ledger.unavailable = self._examiner.unavailable
        if lines is None:
            self._examinations.stop()
            self._enter(TIMED)
            return
        if self.mode is TIMED:
            self._enter(EXAMINED)
        self.recorder.examine(lines)

    def _remove_hooks(self, return_at: int) -> None:
        """Remove the hooks before the next step, until the step of the index `return_at`."""
        self._enter(OFF)
        suspend = partial(self._boundaries.suspend, keep_updates=self.needs_updates)
        counter = self.counter
        self._cost.time_switch(suspend, counter.index)
        self._hooks_return_at, self._checked_at = return_at, counter.index
        self._checked_ns = self._host_ns()
        # The first check is due when the timed steps before can be read.
        first_check = counter.index + min(self._options._lag, _CHECK_STEPS)
        counter.due_at = min(first_check, return_at)
        counter.is_on = not self.needs_updates

    # Steps without hooks

    def end_step_without_hooks(self, number: int) -> None:
        """End a step that ran without hooks. Front ends may instead use `counter`."""
        if self.needs_updates:
            self.optimizer.reset()
        if self.counter.count(number):
            self.check_without_hooks()

    def check_without_hooks(self) -> None:
        """Do more than count the step that has ended, and attach hooks if the next step needs them.

        This is due while timed steps are still to be read, when a log may be due, and when the
        hooks return.
        """
        counter = self.counter
        index, number = counter.index, counter.number
        assert number is not None  # A step has ended.
        now_ns = self._host_ns()
        steps_since_check, self._checked_at = index - self._checked_at, index
        ns_since_check, self._checked_ns = now_ns - self._checked_ns, now_ns
        if self._is_auto:
            self._cost.end_span(index)
        if number >= counter.log_due_at:
            self._schedule_log(number, index - 1)
        log_is_due = self._means.is_due
        is_old = now_ns - self._looked_ns >= _LOOK_NS
        next_check = index + _CHECK_STEPS
        if not self.recorder.pending.end_untimed(log_is_due or is_old, steps=steps_since_check):
            # Once the steps before are read, check only before the hooks return, because the cost
            # of timing is measured against the last steps before a window; and every second.
            steps_per_look = int(steps_since_check * _LOOK_NS / max(ns_since_check, 1))
            last = self._hooks_return_at - _CHECK_STEPS
            next_check = max(next_check, min(last, index + steps_per_look))
            if is_old and self.mode is OFF:  # Else an observer has removed the timer.
                self._looked_ns = now_ns
                self._surroundings.look()
        counter.due_at = min(next_check, self._hooks_return_at)
        if log_is_due:
            self._write_log()
            self._cost.start_span(index)  # Exclude the log from the measured host time.
        # Otherwise an observer or a logger has removed the timer.
        if self.mode is OFF and index >= self._hooks_return_at:
            self._reattach_hooks()

    def _reattach_hooks(self) -> None:
        """Attach the hooks again, and start a step."""
        self.counter.is_on = False
        self._cost.time_switch(self._boundaries.reattach, self.counter.index)
        self._enter(self._next_mode())
        self._analyzer.timing_resumes()
        self._work.reset()
        if self.mode is not UNTIMED:
            self.recorder.begin(self._first_label)
        if self.mode is EXAMINED:
            self._examine()

    def keep_hooks(self) -> None:
        """Keep the hooks in untimed steps from now on, because `has_only_fetched` needs them."""
        self._keeps_hooks = True
        self.wake()

    def wake(self) -> None:
        """Attach the hooks again at the end of the open step."""
        if self.mode is OFF:
            self._hooks_return_at = self.counter.due_at = self.counter.index + 1

    # The last step of a loop

    def leave_loop(self, number: int) -> bool:
        """End the step of this number at its last update, because the loop was left inside it.

        Return False, and leave the step open, if it has no update or if a model was called after
        the last update. In inference, the step ends at the last model call. The host does not wait
        for the device, because the loop may have raised.
        """
        if get_ident() != self.recorder.threads.home:
            return False  # Only the thread of the loop can end its step.
        self._examiner.stop()
        items = self._work.take_items()
        # Calls in eval mode may be an evaluation.
        if self.mode is not OFF and self.forward.evaluation.undecided:
            self.forward.decide_evaluations()
        ended_ns = self._host_ns() - self._wall_clock.outside_ns
        if self.mode in (TIMED, EXAMINED):
            has_ended = self._end_at_last_update(number, items, ended_ns)
        elif self.mode is OFF and not self.needs_updates:
            has_ended = True  # Without hooks, the update was not counted.
        else:
            has_ended = self.optimizer.has_updated
        if not has_ended:
            return False
        counter = self.counter
        counter.number = number
        self._ended_ns = ended_ns
        if not self.times_all:
            self._add_duration()
        self._schedule_log(number, counter.index)
        self._boundaries.step_ended()
        counter.index += 1
        if not self.times_all:
            if self.mode is not OFF:
                self._start_planned_step()
            elif counter.index >= self._hooks_return_at:
                self._reattach_hooks()
        return True

    def _end_at_last_update(self, number: int, items: float, ended_ns: int) -> bool:
        """End the open, timed step at its last update. Return False if it continues after that."""
        recorder = self.recorder
        is_inference = not self.optimizer.has_any and BACKWARD not in recorder.open.phases
        if not self.optimizer.has_any and not is_inference:
            # No hook has marked the update, because the timer has no optimizer. It counts as
            # `other`.
            recorder.mark_instead(OTHER, of=AFTER_BACKWARD)
            recorder.mark(AFTER_UPDATE)
        last_label = AFTER_FORWARD if is_inference else AFTER_UPDATE
        index = -1 if self.times_all else self.counter.index  # `Recorder.end_step` explains -1.
        return recorder.end_at(last_label, number, index, items, ended_ns)

    @property
    def ended_ns(self) -> int:
        """Cumulative time of all steps that have ended (in nanoseconds)."""
        return max(self._ended_ns, self._untimed.since_ns)

    # Logs on request

    def publish(self) -> None:
        """Read the steps that have ended, and publish their means to other callbacks.

        Write a log if it is due.
        """
        self.recorder.pending.flush()
        newest = self.counter.number
        if not self.times_all and newest is not None:
            self._results.settle(newest, until=self.counter.index)
            if newest >= self.counter.log_due_at or not self._has_logs:
                # Log now: loggers would add a later log to their row of the next epoch.
                self.counter.log_due_at = self._next_log(newest)
                self._means.log_at(newest)
        self._means.log_means(only_publish=True)

    def log_means(self) -> None:
        """Log the steps since the last log, as far as they can be read without waiting."""
        self.drain()
        self._means.log_means()

    # Other events

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Set the loader of the batches. `in_data`: its fetches are `data`, not `data/fetch`."""
        self._analyzer.set_loader(loader, in_data)

    def start_epoch(self, first_step: int, epoch: int) -> None:
        """Record that an epoch starts with the step `first_step`. Call it before that step ends."""
        self._results.series.start_epoch(first_step, epoch)

    def compare_ranks(self) -> None:
        """Compare the ranks over all steps so far. All ranks must call it."""
        if self._comparison.is_on:
            self.flush()
            self._comparison.compare_all(self.counter.number)

    @property
    def not_updated(self) -> tuple[str, ...]:
        """Modules and parameters that have gradients, and that no optimizer updates."""
        if is_distributed():  # An optimizer may have only a part of the parameters.
            return ()
        return self.optimizer.not_updated(self._examiner.trained)

    def call_own(self, function: Callable[[], None], name: str) -> None:
        """Call a function of this package. If a step is slow, its time is named as a cause."""
        self._analyzer.start_callback()
        function()
        self._analyzer.end_callback(name)

    # Reading, from any thread

    def flush(self) -> None:
        """Wait for the steps that have ended, and read them. In another thread, do nothing."""
        if self._may_read():
            self.recorder.pending.flush()

    def drain(self) -> None:
        """Read the steps that the device has finished. In another thread, do nothing."""
        if self._may_read():
            self.recorder.pending.drain()
            self._comparison.compare_arrived()
            if not self.times_all:
                self._results.set_ended(self.counter.index - self.recorder.pending.count)

    def _may_read(self) -> bool:
        # Only the thread of the loop may read, because two threads would read steps out of order.
        # Once that thread has ended, `home` is -1, and any thread may read.
        return self.recorder.threads.home in (-1, get_ident())

    # End

    def finish(self) -> None:
        """Read and compare the last steps, and remove all hooks. Safe to call twice."""
        try:
            if not self._may_read():
                self.recorder.stop()  # The loop continues in its thread, untimed.
            self.recorder.pending.flush()
            # Compare now: `remove` ends the exchange with the other ranks.
            self.compare_ranks()
            self._comparison.finish()
        finally:
            self.remove()

    def abort(self) -> None:
        """End the session after an error. Do not wait for the device, which may never finish."""
        try:
            self.drain()
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove all hooks from the model, the optimizers and torch.

        Safe to call twice, even if the first call was interrupted.
        """
        _attached.discard(self)
        _remove_lost()
        self._until_end.remove()
        self._examiner.stop()
        self._boundaries.remove()
        self.recorder.stop()
        try:
            if self.is_attached:
                if self._memory is not None:
                    self._memory.end()
                if not self.times_all:
                    self._results.set_ended(self.counter.index)
                self._results.update_facts(is_running=False)
                self._enter(ENDED)
                call_safely([self._log_last_steps, self._self_check.end])
        finally:
            while self._to_remove:
                call_safely(methods(self._to_remove[:1], "remove"))
                del self._to_remove[:1]
            # These refer to the session: without them, the model is freed with its last reference.
            self._readers = []
            self.recorder.pending.end()

    def _log_last_steps(self) -> None:
        """Log the steps since the last log, at the end of the session."""
        newest = self.counter.number
        if newest is None:  # No step has ended, so this only ends the logs.
            self._means.log_means()
            return
        self._results.settle(newest, until=self.counter.index)
        if self.times_all:
            self._means.log_means()
        else:  # The newest step may be untimed, so give the number to log it under.
            self._means.log_at(newest)

    def abandon(self) -> list[Any]:
        """End all timing in a forked process, or once the timer was deleted.

        The hooks stay attached, but do nothing. Return the objects that refer to events.
        """
        # Neither read events nor compare ranks: in a forked process, both belong to the parent,
        # which may have forked at any moment.
        _attached.discard(self)
        if self.is_attached:
            self._enter(ENDED)
        traced.deactivate(self.recorder)
        self._examiner.stop()
        self._analyzer.remove()
        self._comparison.remove()
        self._to_remove.clear()
        return [*self.recorder.abandon(), self._surroundings.gpu.stop()]

    def lose(self) -> None:
        """End all timing, because the timer was deleted. The next session removes the hooks."""
        # Python may delete a timer at any moment, even while hooks run, so they stay for now.
        self.abandon()
        _lost.append(self)


# Forks and garbage collection affect all sessions of a process.
_attached = WeakSet[Session]()
_lost: list[Session] = []  # Sessions whose timer was deleted, and that still have hooks.
_kept: list[Any] = []  # Events of the parent process, in a forked process.


def _remove_lost() -> None:
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    """End all timing in a forked process."""
    # Keep the events: destroying an event calls CUDA, which aborts a forked process. Iterate over
    # a copy, because each session removes itself from the set.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(traced.abandon_all())  # The recorders of evaluations belong to no session.
    _lost.clear()


# Forked processes, such as workers of a data loader, inherit the hooks but must not time anything.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class NoSession:
    """Session of a timer that is not attached. It ignores all events of the loop.

    Args:
        mode: `ENDED` if the timer was attached before. Its loop may continue, untimed.
    """

    is_attached = times_all = needs_updates = has_evaluated = False
    ended_ns = 0
    not_updated: tuple[str, ...] = ()
    counter = SimpleNamespace(is_on=False)
    recorders: Sequence[Recorder] = ()
    recorder = Recorder(HostClock(), lag=0, emit=do_nothing)  # It never begins a step.
    forward = SimpleNamespace(has_trained=False)
    optimizer = SimpleNamespace(
        updates=0, has_updated=False, has_any=False, update_begins=do_nothing
    )

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def __reduce__(self) -> str:
        # A copy is the same object.
        return "REMOVED" if self.mode is ENDED else "NEVER_ATTACHED"

    def _ignore(self, *_: Any, **__: Any) -> bool:
        return False

    attach_until_end = batch_begins = fetch_begins = add_batches = batch_ends = _ignore
    continue_in_loop = rely_on_updates = has_only_fetched = begin_step = restart_second_step = (
        _ignore
    )
    end_step = end_step_without_hooks = check_without_hooks = leave_loop = keep_hooks = _ignore
    publish = log_means = set_loader = start_epoch = _ignore
    compare_ranks = call_own = flush = drain = finish = abort = remove = lose = _ignore


NEVER_ATTACHED, REMOVED = NoSession(NEW), NoSession(ENDED)
AnySession = Session | NoSession
