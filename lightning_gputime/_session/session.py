"""A timer at work on one loop: from the attaching of its hooks to their removal."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from threading import get_ident
from typing import Any, cast
from weakref import WeakSet

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._compat.torch_ import has_compiled
from lightning_gputime._culprits.blocking import BlockingCalls
from lightning_gputime._culprits.places import Frames, PlaceReader, frames_here
from lightning_gputime._instrumentation import named
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.patching import Attachment, Attachments
from lightning_gputime._instrumentation.work import WorkCounter
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, step_calls
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_clock import EVALUATION, FIRST_STEP, STEPS, WallClock
from lightning_gputime._options import AUTO, Options
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    BETWEEN,
    BETWEEN_BATCHES,
    DATA,
    EVALUATED,
    EVALUATES,
    OPTIMIZER,
    OTHER,
    StepRecord,
)
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.recorder import LOCATED, PAUSED, Annotator, Recorder
from lightning_gputime._session.rank_comparer import RankComparer, open_exchange
from lightning_gputime._session.schedule import (
    LONGEST_STRETCH,
    PROBED,
    TIMED,
    UNTIMED,
    AutoSchedule,
    Plan,
    Probe,
    Schedule,
    StepKind,
)
from lightning_gputime._session.self_check import SelfCheck

_PACE_STEPS = 50  # After this many timed steps it is asked whether the CPU blocks on the GPU.
_LONG_TO_LOCATE = 10  # Number of blocks around recurring long steps that are located in the code.
# In this many first steps hooks stay on: they find what the loop calls, and graphs it captures.
_SEARCH_STEPS = 20


class Session:
    """What a timer holds while it is attached. Its methods are what a loop tells it.

    `begin` decides which thread is timed, and only that one may tell what the loop does. A user may
    ask from any thread; beside a loop that runs in another one, that reads no steps.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        loop: Loop,
        results: Results,
        means: MeanLog,
        outside: Frames = (),
        blocks: Callable[[], bool] = lambda: False,
    ) -> None:
        self._results = results
        self._now_ns = clock.host_ns
        self.is_attached = self.was_attached = False  # Now, and ever.
        self._newest: int | None = None  # The number of the last step that ended.
        self._ended_ns = 0  # The time of all steps when it ended, if its hooks were on.
        # Numbers and indices of the newest steps that ended and were due. The oldest ended `lag`
        # steps ago: every rank has read it by now, if it was timed.
        self._ended: deque[tuple[int, int]] = deque(maxlen=options._lag + 1)
        self._log_at = -inf  # From this number on a step is the next to be logged; at first, any.
        self._warmup = options.timed_warmup_steps
        self.analyzer = SlowStepAnalyzer(clock, results.slow, results.culprits)
        users = _UserCalls(options.observers, self.analyzer)
        # Which steps are timed. Their index counts all of them; numbers may leave some out.
        is_auto = options.every_n_steps == AUTO
        n = 1 if is_auto else int(options.every_n_steps)
        self._untimed = results.untimed
        self._wall_clock = results.wall_clock or WallClock.of_steps(clock.host_ns)
        # Ranks must time the same steps: each would predict other long ones.
        predicts = {} if is_distributed() else {"next_long": self._untimed.next_long}
        self._schedule = Schedule(
            Plan(window=n),
            probe_every_n_steps=options.probe_every_n_steps,
            warmup_steps=options.warmup_steps,
            **predicts,
        )
        self._auto: AutoSchedule | None = None
        if is_auto:
            reason = _who_looks_at_each(options, means, users)
            results.update_sampling(each_timed_for=reason)
            if not reason:
                self._auto = AutoSchedule(means.every_n_steps or 50)
        self._agreement = open_exchange("agreement") if self._auto and options.sync_ranks else None
        self._long_to_locate = _LONG_TO_LOCATE
        self.times_all = self._auto is None and self._schedule.times_all
        """Whether every step is timed, and all alike."""
        self._has_read = False  # True once a step was read.
        self._index = 0
        self._kind: StepKind = UNTIMED
        self.is_off = False
        """Whether the hooks are off, as in most untimed steps: only ends of steps are counted."""
        self.needs_updates = loop.needs_updates  # Only they tell where steps end.
        # While off: the index of the step that turns the hooks on again, and of the next in which
        # something is due.
        self._on_at = self._due_at = 0
        # What is an evaluation the step before a timed one must show.
        self._lead_in = int(loop.pause_evaluation is not False)
        self._looked = (0, 0)  # When, and with which index, the host's time was last looked at.
        self._lag = options._lag
        self._first_label = DATA
        self._stays_on = False
        self._probe = Probe(clock, results) if options.probe_every_n_steps else None
        self._means = means
        means.connect(results, is_sampled=not self.times_all)
        self.recorder = Recorder(
            clock,
            lag=options._lag,
            emit=self._steps_read,
            batch=users.batch,
            annotate=Annotator() if options.annotate else None,
            locate=frames_here,
        )
        self.recorders = [self.recorder]
        self.work = WorkCounter(options.items, options.flops, loop, self.recorder)
        self._boundaries = Boundaries(
            self.recorder, loop, self.work.on_call, self._wall_clock.shorten_step
        )
        self._comparison = RankComparer(results, means, options)
        self._self_check = SelfCheck(results, self._boundaries, self.recorder, loop, options)
        # The log asks for metrics of the steps that the others have been told of.
        places = PlaceReader(results.culprits, _name_of_update(loop), outside)
        self._memory = MemoryWatch(getattr(clock, "peak_memory", lambda: None))
        results.connect(
            self.work.reference,
            observers=options.observers,
            logs_slow_steps="slow" in options.logged_groups,
            memory=self._memory,
        )
        # Readers get steps in any order. Observers, logs and checks follow: they read the readers.
        readers = [results, places, self._comparison, self.analyzer]
        self._readers = methods(readers, "steps_read")
        logs = _Logs(means, self.analyzer)
        self._followers = [users.steps_read, logs.steps_read, self._self_check.steps_read]
        self._blocks, self._is_pace_known = blocks, False
        self._is_slowdown_located = False
        self._blocking = BlockingCalls(results.culprits, self.recorder)
        self._until_end = Attachments()
        self._observers = options.observers
        self._to_remove = [self._comparison, self.analyzer, *options.observers]

    def attach(self) -> None:
        """Attach the hooks. If that fails or is interrupted, none of them stays."""
        boundaries = self._boundaries
        try:
            boundaries.attach()
            self.forward, self.optimizer = boundaries.forward, boundaries.optimizer
            self.analyzer.attach()
            call_safely(methods(self._observers, "attach"))
            # Here, and not where a timer is lost: Python may notice that at any moment.
            _take_off_lost()
            for other in _attached:
                other.wake()  # Each must know of the calls of the other's model.
            _attached.add(self)
            self.is_attached = self.was_attached = True
        except BaseException:
            self.remove()
            raise

    def attach_until_end(self, attachment: Attachment) -> None:
        """Attach something that stays on in untimed steps, too, until the timer is removed."""
        self._until_end.add(attachment)

    # What a loop tells

    def begin(self) -> None:
        """Start a step here, in the calling thread. Drop what is open."""
        self._boundaries.step_ended(timed=False, is_dropped=True)
        self.work.reset()
        self.analyzer.loop_begins()
        self._untimed.restart(self._wall_clock.steps_ns(self._now_ns()))
        if self.is_off:
            self.recorder.rest()  # In this thread from now on.
            return
        # Only at the end of a step is one probed: the fetch of an epoch's first batch takes any
        # time.
        self._kind = self._unprobed_kind()
        if self._kind is TIMED:
            self.recorder.begin()
        else:
            self.recorder.rest()
        if self._probe is not None:
            self._probe.step_begins()

    def batch_begins(self) -> None:
        """Mark that the batch is there: its fetch, or a pause, is over."""
        recorder = self.recorder
        if recorder.named:
            recorder.end_fetch()
        if recorder.state is PAUSED:
            recorder.resume(OTHER)
        else:
            recorder.mark(OTHER)

    def update_begins(self) -> None:
        """Mark that an optimizer is about to run its update; then it may still skip it."""
        self.optimizer.was_tried = True
        # Where there was no backward, nothing else tells it.
        if self.recorder.label != AFTER_BACKWARD:
            self.recorder.mark(OPTIMIZER)

    def has_idled(self, *, is_first: bool) -> bool:
        """Return whether nothing was done in the open step but to fetch.

        It says so only where all that a training does would have been seen; and beside the first
        batch of a loop, where some training was.
        """
        recorder = self.recorder
        is_blind = self.is_off or has_compiled() or recorder.has_captured
        if is_blind or recorder.was_elsewhere or not self.optimizer.has_any:
            return False
        is_idle = (is_first or self.forward.has_trained) and not self._boundaries.has_worked
        return is_idle and recorder.phases <= {*BETWEEN_BATCHES, OTHER, BETWEEN}

    @property
    def ended_ns(self) -> int:
        """The time of all steps at the end of the last one (in nanoseconds)."""
        return max(self._ended_ns, self._untimed.since_ns)

    def first_step_ended(self) -> None:
        """Start the next step, once the wall clock knows what belongs to the first."""
        self._ended_ns = self._wall_clock.steps_ns(self._now_ns())
        self._untimed.restart(self._ended_ns)

    @property
    def has_evaluated(self) -> bool:
        """Whether nothing was done in the open step but to evaluate a model that was trained."""
        if self.recorder.label not in EVALUATES or not self.forward.has_trained:
            return False
        is_idle = not self._boundaries.has_worked
        return is_idle and self.recorder.phases <= {*BETWEEN_BATCHES, OTHER, *EVALUATES}

    def stay_on(self) -> None:
        """Keep the hooks on in untimed steps, too, as `has_idled` needs them."""
        self._stays_on = True
        self.wake()

    def batch_ends(self, label: str = DATA) -> None:
        self.work.end_batch()
        self.recorder.resume_or_mark(label)  # A validation at the end of the body is over.

    def end_step(self, number: int, label: str = DATA) -> bool:
        """End the open step, and start the next with `label`. Return whether hooks are on."""
        self._first_label = label
        if self.is_off:
            return self._end_step_off(number)
        self._newest = number
        if self._blocking.steps_left:
            self._blocking.end_step()
        now_ns = self._now_ns()
        self.analyzer.step_ends(now_ns)
        recorder = self.recorder
        items = self.work.take_items()
        if number >= self._log_at:
            self._end_due_step(number, self._index)
        reads = self._means.is_owed
        if self.times_all:
            skipped_update = self._boundaries.step_ended()
            self._ended_ns = now_ns - self._wall_clock.outside_ns
            recorder.end_step(number, skipped_update, reads, label, items=items)
        else:
            self._end_planned_step(number, items, reads)
            self._ended_ns = now_ns - self._wall_clock.outside_ns
            if reads:
                self._log_sampled()
        if self._comparison.due_step is not None:
            # It is no part of the step that has begun.
            recorder.pause()
            self._comparison.compare_if_due()
            recorder.resume(label)
        # A user's function may have removed the timer.
        if not self.times_all and self.is_attached:
            self._start_planned_step()
        return not self.is_off

    def is_left(self, number: int) -> bool:
        """Handle an exit inside a step. Return whether that had ended, under `number`.

        It had if no model was called after its last update, or, in inference, its last call; it
        ended there. Nothing is waited for: the loop may have raised.
        """
        if get_ident() != self.recorder.home:
            return False
        items = self.work.take_items()
        if self.is_off:
            has_ended = self.optimizer.has_updated or not self.needs_updates
        elif self._kind is TIMED:
            if self.forward.evaluation.is_pending:
                self.forward.settle_evaluations()
            last = AFTER_UPDATE if self.optimizer.has_any else AFTER_FORWARD
            if not self.optimizer.has_any and BACKWARD in self.recorder.phases:
                # An update by hand shows nowhere: it is over here, and is `other`.
                self.recorder.mark_instead(AFTER_BACKWARD, OTHER)
                self.recorder.mark(AFTER_UPDATE)
                last = AFTER_UPDATE
            has_ended = self.recorder.end_at(last, number, self._index, items)
        else:
            has_ended = self.optimizer.has_updated
        if has_ended:
            self._newest = number
            self._untimed.end_step(self._now_ns() - self._wall_clock.outside_ns)
            self._end_due_step(number, self._index)
            self._boundaries.step_ended()
            self._index += 1
            if not self.is_off:
                if not self.times_all:
                    self._start_planned_step()
            elif self._index >= self._on_at:
                self._turn_on()
        return has_ended

    def keeps_gradients(self) -> bool:
        """Handle an exit inside a step that only an update ends, perhaps in another loop.

        Return whether gradients wait for that.
        """
        accumulates = self.needs_updates and BACKWARD in self.recorder.phases
        if accumulates:
            self.work.end_batch()
            self.recorder.resume_or_mark(BETWEEN)
        return accumulates

    def start_epoch(self, first_step: int, epoch: int) -> None:
        """Note that an epoch starts with the step of this number, which has not ended."""
        self._results.slowdowns.series.start_epoch(first_step, epoch)

    def loop_ends(self, *, accumulates: bool) -> None:
        """Note that a loop over batches has ended, perhaps with gradients that are not used yet."""
        if accumulates:
            self.recorder.mark_instead(DATA, BETWEEN)
        self.compare_ranks()

    def loop_goes_on(self) -> None:
        """Go on with the open step in another loop; what was between belongs to no step."""
        self.recorder.pause(since=BETWEEN)
        self.recorder.resume()

    def publish(self) -> None:
        """Read the steps that have ended, and let other callbacks find their means."""
        self.recorder.flush()
        if not self.times_all and self._newest is not None:
            self._settle()
            if self._newest >= self._log_at > -inf:
                # Later its row would be one of the next epoch.
                self._log_at = self._means.next_due(self._newest)
                self._means.log_at(self._newest)
        self._means.log_means(only_publish=True)

    def log_means(self) -> None:
        """Log the steps since the last log, as far as they are read without a wait."""
        self.drain()
        self._means.log_means()

    def compare_ranks(self) -> None:
        if self._comparison.is_on:
            self.flush()
            self._comparison.compare_all(self._newest)

    # Steps that are not all alike

    def _end_planned_step(self, number: int, items: float, reads: bool) -> None:
        kind = self._kind
        is_usual = True
        if self._probe is not None:
            is_usual = kind is not PROBED and not self._schedule.is_probed(self._index - 1)
            # Before all else: reading and logging are no part of the launches.
            self._probe.step_ends(usual=is_usual and self._index >= self._schedule.warmup_steps)
        is_timed = kind in (TIMED, PROBED)
        skipped_update = self._boundaries.step_ended(timed=is_timed)
        if is_usual:
            self._untimed.end_step(self._now_ns() - self._wall_clock.outside_ns)
        else:
            self._untimed.leave_out(self._now_ns() - self._wall_clock.outside_ns)
        if is_timed:
            index, first = self._index, self._first_label
            self.recorder.end_step(number, skipped_update, reads, first, index=index, items=items)
        else:
            self.recorder.end_untimed(reads)
        self._index += 1
        if self._auto is not None:
            before_ns, _ = self._looked
            self._looked = self._now_ns(), self._index
            if kind is UNTIMED:
                self._auto.add_untimed(before_ns, self._looked[0], 1)

    def _start_planned_step(self) -> None:
        """Start a step; where the last one was timed, its last mark is the first of this one."""
        if self._auto is not None and self._index >= self._auto.due:
            self._decide(self._auto)
        before, self._kind = self._kind, self._next_kind()
        if self._kind is UNTIMED:
            self.recorder.rest()
            if self._can_turn_off():
                self._turn_off()
        elif before is UNTIMED:
            if self._schedule.expects_long and self._long_to_locate:
                self._long_to_locate -= 1
                self.recorder.locate_next(self._schedule.plan.block)
            self.recorder.begin(self._first_label)
        if self._probe is not None:
            if self._kind is PROBED:
                self.recorder.start_probe(self._probe.keep_busy)
            self._probe.step_begins()

    def _next_kind(self) -> StepKind:
        if self._kind is PROBED:
            return UNTIMED  # It starts with an empty queue.
        probe = self._probe
        if probe is not None and self._schedule.is_probed(self._index) and probe.is_ready():
            return PROBED
        return self._unprobed_kind()

    def _unprobed_kind(self) -> StepKind:
        return TIMED if self._schedule.is_timed(self._index) else UNTIMED

    def _decide(self, auto: AutoSchedule) -> None:
        n, recurrence = auto.decide(self._index), None
        if self._agreement is not None:
            # It may wait for others, once: that is no part of the step that has begun.
            self.recorder.pause()
            wish = [n, *(self._untimed.next_long() or ())]
            n, *agreed = self._agreement.agree(wish)
            recurrence = (agreed[0], agreed[1]) if agreed else None
            self.recorder.resume(self._first_label)
        plan = replace(auto.plan(n), recurrence=recurrence)
        if plan != self._schedule.plan:
            self._schedule.follow(plan, self._index)
        self._results.update_sampling(every_n_steps=n, timing_share=auto.share)

    # Off: no hooks, between blocks of timed steps

    def _can_turn_off(self) -> bool:
        if self._index < _SEARCH_STEPS or self._probe is not None or self._stays_on:
            return False  # A step that is probed starts in the one before.
        if self._schedule.next_timed(self._index) - self._lead_in <= self._index:
            return False
        # Where compiled code guards hooks, taking them off compiles anew. And of two timers each
        # must know of the calls of the other's model, whose backward is not its own.
        return not has_compiled() and len(_attached) <= 1

    def wake(self) -> None:
        """Turn the hooks on at the end of the open step: another timer is attached."""
        if self.is_off:
            self._on_at = self._due_at = self._index + 1

    def _turn_off(self) -> None:
        begin_ns = self._now_ns()
        self._boundaries.suspend(keep_updates=self.needs_updates)
        self.is_off = True
        self._on_at = self._schedule.next_timed(self._index) - self._lead_in
        # The wait for the last timed steps may be due before.
        is_pending = self.recorder.pending.count > 0
        end_ns = self._now_ns()
        if self._auto is not None:
            self._auto.add_switch(end_ns - begin_ns)
        self._looked = end_ns, self._index
        self._look_again_at(self._index + self._lag if is_pending else self._on_at)

    def _look_again_at(self, index: int) -> None:
        self._due_at = min(index, self._on_at, self._index + LONGEST_STRETCH)

    def _end_step_off(self, number: int) -> bool:
        """Count a step while off. Return whether hooks are on again."""
        self._index += 1
        self._newest = number
        if self._blocking.steps_left:
            self._blocking.end_step()
        self._untimed.end_step(self._now_ns() - self._wall_clock.outside_ns)
        if self.needs_updates:
            optimizer = self.optimizer
            optimizer.updates, optimizer.depth, optimizer.was_tried = 0, 0, False
        if self._index < self._due_at and number < self._log_at:
            return False
        before_ns, before = self._looked
        now_ns, steps = self._now_ns(), self._index - before
        self._end_due_step(number, self._index - 1)
        reads = self._means.is_owed
        self.recorder.end_untimed(reads, steps=steps)
        if reads:
            self._log_sampled()
        if not self.is_attached:
            return False
        if self._auto is not None:
            self._auto.add_untimed(before_ns, now_ns, steps)
        if self._index >= self._on_at:
            self._turn_on()
            return True
        self._looked = self._now_ns(), self._index
        self._look_again_at(self._on_at)
        return False

    def _turn_on(self) -> None:
        begin_ns = self._now_ns()
        self._boundaries.reattach()
        self.is_off = False
        self.analyzer.timing_resumes()
        self._kind = self._unprobed_kind()
        if self._auto is not None:
            end_ns = self._now_ns()
            self._auto.add_switch(end_ns - begin_ns)
            self._looked = end_ns, self._index
        self.work.reset()
        if self._kind is TIMED:
            self.recorder.begin(self._first_label)

    # Steps that were read, and logs

    def _end_due_step(self, number: int, index: int) -> None:
        """Note the end of the first step, or of one that is due: others need not be noted."""
        if self._log_at == -inf:
            self._means.start(number - 1)
            self._log_at = self._means.next_due(number - 1)
        self._ended.append((number, index))
        finished, _ = self._ended[0]
        if len(self._ended) == self._ended.maxlen and finished >= self._log_at:
            self._log_at = self._means.next_due(finished)
            self._means.note_finished(finished)
            self._comparison.log_is_due(finished)

    def _log_sampled(self) -> None:
        """Log the steps up to the one that is due, of which all that were timed are read."""
        number, index = self._ended[0]
        self._results.settle(number, until=index + 1)
        self.analyzer.start_own_call()
        self._means.log_at(number)
        self.analyzer.end_own_call("the timer's logging")

    def _settle(self) -> None:
        """Estimate the untimed steps up to the last one that has ended."""
        if self._newest is not None:
            self._results.settle(self._newest, until=self._index)

    def _log_rest(self) -> None:
        """Log the steps since the last log, of which all that were timed are read."""
        if self.times_all or self._newest is None:
            self._means.log_means()
        else:
            self._means.log_at(self._newest)

    def _steps_read(self, records: list[StepRecord]) -> None:
        auto, since_ns = self._auto, self.recorder.pending.reading_since_ns
        for record in records:
            if EVALUATED in record.labels:
                is_first = not self._has_read and record is records[0]
                source = FIRST_STEP if is_first else STEPS
                self._wall_clock.move(source, EVALUATION, record.evaluation_ms)
        self._has_read = True
        self.analyzer.reading_since_ns = since_ns
        if self._probe is not None:
            records = self._probe.take(records)
        if records:
            warmup = min(self._warmup, len(records))
            self._warmup -= warmup
            steps = ReadSteps(records, warmup)
            call_safely(self._readers, steps)
            call_safely(self._followers, steps)
        if auto is not None:
            auto.add_timed(records, self._now_ns() - since_ns)
        if self._results.slowdown is not None and not self._is_slowdown_located:
            self._is_slowdown_located = True
            self.recorder.locate_next(LOCATED)
        if not self._is_pace_known and self._results.sums.step.n >= _PACE_STEPS:
            self._is_pace_known = True
            self.analyzer.start_own_call()
            if self._blocks():
                self._blocking.start()
            self.analyzer.end_own_call("the timer's search for blocking calls")

    # What a user asks, from any thread

    def flush(self) -> None:
        """Wait for the steps that have ended, and read them; not beside the thread that runs."""
        if self._may_read():
            self.recorder.flush()

    def drain(self) -> None:
        """Read what the device has finished, without a wait; not beside the thread that runs."""
        if self._may_read():
            self.recorder.drain()
            self._comparison.compare_arrived()
            ended_steps = self._index - self.recorder.pending.count
            self._results.update_sampling(ended_steps=ended_steps)

    def _may_read(self) -> bool:
        """Return whether steps can be read here: else two threads would, in no order."""
        # While the timed thread lives, no other may read.
        return self.recorder.home in (-1, get_ident())

    # The end

    def finish(self) -> None:
        """Read and compare the last steps, and take everything off. Safe to call twice."""
        try:
            if not self._may_read():
                self.recorder.rest()  # The loop goes on beside this thread, without marks.
            self.recorder.flush()
            # Before `remove`, which tells the other ranks that this one leaves.
            self.compare_ranks()
            self._comparison.finish()
        finally:
            self.remove()

    def abort(self) -> None:
        """As `finish`, after an error: the device may never finish the rest of the steps."""
        try:
            self.drain()
        finally:
            self.remove()

    def remove(self) -> None:
        """Take everything off the model, the optimizers and torch.

        Safe to call twice, also after a call that was interrupted.
        """
        _attached.discard(self)
        _take_off_lost()
        self._until_end.remove()
        self._blocking.stop()
        self._boundaries.remove()
        self.recorder.rest()
        try:
            if self.is_attached:
                self._memory.end()
                self._results.update_sampling(ended_steps=self._index)
                self.is_attached = self.is_off = False
                self._agreement = None
                ends = [self._log_rest, self._self_check.end]
                call_safely([self._settle, *ends])
        finally:
            while self._to_remove:
                call_safely(methods(self._to_remove[:1], "remove"))
                del self._to_remove[:1]
            self.recorder.pending.end()

    def abandon(self) -> list[Any]:
        """End all timing in a process that was forked off; leave hooks that do nothing.

        Return what holds its events.
        """
        # Its events and ranks are its parent's, and this may be any moment.
        _attached.discard(self)
        self.is_attached = False
        named.deactivate(self.recorder)
        self.analyzer.remove()
        self._comparison.remove()
        self._to_remove.clear()
        return self.recorder.abandon()

    def lose(self) -> None:
        """As `abandon`, when nobody has the timer any more; the next one takes the hooks off."""
        self.abandon()
        _lost.append(self)


# Module state, because a fork and the loss of a timer happen to no session in particular.
_attached = WeakSet[Session]()
_lost: list[Session] = []
_kept: list[Any] = []


def _take_off_lost() -> None:
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    # Over a copy: each takes itself out. Where an event is destroyed torch calls CUDA, which cannot
    # be used in that process, and aborts: they are kept.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(named.abandon_all())  # Those of evaluations, too.
    _lost.clear()


# A process that is forked off, such as a data loader's worker, has the hooks and no timer.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class _UserCalls:
    """Call the observers of the user's with the steps that were read.

    The analyzer notes when the calls run: that may be why a step is slow.
    """

    def __init__(self, observers: Sequence[Any], analyzer: SlowStepAnalyzer) -> None:
        self._on_step = step_calls(observers)
        self.takes_steps = bool(self._on_step)
        self._on_slow_step = methods(observers, "on_slow_step")
        self._analyzer = analyzer
        # Number of steps that may be handed over together: an observer shall have each step as soon
        # as it can be read.
        self.batch = 1 if self._on_step else BATCH

    def steps_read(self, steps: ReadSteps) -> None:
        """Call them, just after the analyzer. They may read the timer, or remove it."""
        slow = self._analyzer.newest
        if not self._on_step and not slow:
            return
        for step in steps if self._on_step else ():
            call_safely(self._on_step, step.times())
        for one in slow:
            call_safely(self._on_slow_step, one)
        self._analyzer.end_own_call("observers")
        self._analyzer.start_own_call()  # Loggers are next.


class _Logs:
    """Log the means of steps. The analyzer notes when: that may be why a step is slow."""

    def __init__(self, means: MeanLog, analyzer: SlowStepAnalyzer) -> None:
        self._means, self._analyzer = means, analyzer

    def steps_read(self, steps: ReadSteps) -> None:
        if self._means.take(steps):
            self._analyzer.end_own_call("the timer's logging")


def _name_of_update(loop: Loop) -> str:
    kinds = dict.fromkeys(type(optimizer).__name__ for optimizer in loop.optimizers)
    return " and ".join(f"{kind}.step" for kind in kinds)


def _who_looks_at_each(options: Options, means: MeanLog, users: _UserCalls) -> str:
    """Return for what each step must be timed; empty for nothing."""
    looks = {
        "observers=": users.takes_steps,
        "annotate=True": options.annotate,
        "lag=0": options._lag == 0,
        "probe_every_n_steps=": options.probe_every_n_steps > 0,
        "a log at each step": means.every_n_steps == 1,
    }
    return next((who for who, is_so in looks.items() if is_so), "")


class _NoSession:
    """Stand in for a session, and its parts, while a timer is not attached: calls do nothing.

    If it `was_attached`, a loop may still run that does not know of the end.
    """

    home = -1
    recorders: Sequence[Recorder] = ()  # For phases that are named by hand.
    is_attached = is_off = has_updated = has_any = has_trained = False
    updates = 0

    def __init__(self, was_attached: bool) -> None:
        self.was_attached = was_attached

    def __getattr__(self, name: str) -> "_NoSession":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


NEVER_ATTACHED = cast("Session", _NoSession(False))
REMOVED = cast("Session", _NoSession(True))
