"""A timer at work on one loop: from the attaching of its hooks to their removal."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import current_thread, get_ident

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._boundaries.named import deactivate
from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._options import Options
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    DATA,
    FETCH,
    OPTIMIZER,
    OTHER,
    StepTimes,
)
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import PAUSED
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._run import lifetimes
from lightning_gputime._run.asked import Asked
from lightning_gputime._run.checkup import Checkup
from lightning_gputime._run.delivery import Delivery
from lightning_gputime._run.probe import Probe
from lightning_gputime._run.rank_comparer import RankComparer
from lightning_gputime._run.recording import recorder_for
from lightning_gputime._run.schedule import Schedule
from lightning_gputime._run.selection import Selection
from lightning_gputime._work.work import WorkCounter


class Session(Asked):
    """What a timer holds while it is attached. Its methods are what a loop tells it.

    `begin` decides which thread is timed, and only that one may tell what the loop does. A user may
    ask from any thread; beside a loop that runs in another one, that reads no steps.

    Args:
        options: How steps are timed.
        clock: Where events and host times come from.
        loop: What is hooked.
        results: Keep every step for the user.
        means: Log every step.
        on_step: Functions that are called with every step.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        loop: Loop,
        results: Results,
        means: MeanLog,
        on_step: Sequence[Callable[[StepTimes], object]],
    ) -> None:
        schedule = Schedule.of(options)
        probe = Probe(clock, results) if options.probe_every_n_steps else None
        self._comparison = RankComparer(results, means, options)
        self._now_ns = clock.host_ns
        self._analyzer = SlowStepAnalyzer(clock, results.slow)
        means.slow = results.slow
        self.loads = self._analyzer.set_loader
        """Says what loads the batches, and whether `data` has no part for its fetches."""
        self.loader_is_asked = self._analyzer.fetch_starts
        self._delivery = Delivery(
            results, means, self._comparison, self._analyzer, options, on_step=on_step, probe=probe
        )
        self._recorder = recorder_for(
            options, clock, results, means, self._analyzer, self._delivery
        )
        self.fetch_begins = partial(self._recorder.resume_or_mark, FETCH)
        """Says that the next batch is fetched, which ends a pause."""
        self.evaluation_begins = self._recorder.pause_now
        """As `pause`, but what was before, such as callbacks, is still the step's."""
        self.part_begins = self._recorder.mark
        """Says that from here on the time belongs to a part of `data`, or to `other`."""
        self._is_plain = schedule.is_plain
        super().__init__(self._recorder)
        # The number of the last step that ended.
        self._newest: int | None = None
        self._tried_update = False
        self.is_attached = self.was_attached = True
        """Whether the hooks are on, and whether they ever were."""
        self._work = WorkCounter(options, loop, self._recorder)
        self.takes, self.worked = self._work.add_batch, self._work.end_batch
        """Say what the batch is, when it has begun; that it is over, and the step has another."""
        results.yardstick = means.yardstick = self._work.reference
        self._boundaries = Boundaries(self._recorder, loop, self._work.add_call)
        self._checkup = Checkup(results, self._boundaries, self._recorder)
        self._delivery.look = self._checkup.look
        self._comparison.boundaries = self._boundaries
        self._selection = Selection(
            schedule,
            probe,
            self._recorder,
            self._boundaries,
            has_others=not results.on_host_clock and is_distributed(),
            waits_before_batch=loop.waits_before_batch,
        )
        self._analyzer.attach()
        lifetimes.attached(self)

    # What a loop tells

    def begin(self, number: int) -> None:
        """Starts the step `number` here, in the calling thread. What is open is dropped."""
        self.thread, self._runner = get_ident(), current_thread()
        self._boundaries.step_ended(timed=False)
        self._tried_update = False
        self._work.reset()
        self._analyzer.loop_begins()
        self._selection.begin()

    def part_began(self, label: str) -> None:
        """As `part_begins`, but from the end of the last step or micro-batch on."""
        self._recorder.mark_instead(DATA, label)

    def batch_begins(self) -> None:
        """Says that the batch is there: its fetch, or a pause, is over."""
        if self._recorder.state is PAUSED:
            self._recorder.resume(OTHER)
        else:
            self._recorder.mark(OTHER)
        if not self._is_plain:
            self._selection.batch_begins()

    def update_begins(self) -> None:
        """Says that an optimizer is about to run its update; then it may still skip it."""
        self._tried_update = True
        # Where there was no backward, nothing else tells it.
        if self._recorder.label != AFTER_BACKWARD:
            self._recorder.mark(OPTIMIZER)

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has run, or tried, its update in the open step."""
        return self._tried_update or self._boundaries.updates > 0

    @property
    def ran_update(self) -> bool:
        """Whether an optimizer has run its update in the open step."""
        return self._boundaries.updates > 0

    @property
    def sees_updates(self) -> bool:
        """Whether there are optimizers whose updates are seen."""
        return self._boundaries.has_optimizers

    def batch_ends(self) -> None:
        """Says that a micro-batch is over, and that the step goes on with the next one."""
        self._work.end_batch()
        self._recorder.resume_or_mark(DATA)  # A validation at the end of the body is over.

    def end_step(self, number: int) -> bool:
        """Ends the open step under `number`, and begins the next. Tells if that may be timed."""
        self._newest = number
        self._tried_update = False
        self._analyzer.step_ends(self._now_ns())
        recorder = self._recorder
        recorder.load = self._work.take_step_work()
        if self._is_plain:
            reads = self._delivery.step_ends(number)
            recorder.end_step(number, self._boundaries.step_ended(), reads)
        else:
            self._selection.end_step(number, self._delivery.step_ends(number))
        if self._comparison.due_step is not None or self._work.is_due:
            # None of it is part of the step that has begun.
            recorder.pause()
            self._comparison.compare_if_due()
            self._work.measure()
            recorder.resume()
        # A user's function may have removed the timer.
        if not self._is_plain and self.is_attached:
            self._selection.begin_next()
        return True

    def is_left(self, number: int) -> bool:
        """Says that the loop is left inside a step. Tells if that ended, under `number`.

        It did if no model was called after its last update, or, in inference, its last call; it
        ended there. Nothing is waited for: the loop may have raised.
        """
        if get_ident() != self.thread:
            return False
        self._recorder.load = self._work.take_step_work()
        if self._selection.is_timing:
            last = AFTER_UPDATE if self.sees_updates else AFTER_FORWARD
            has_ended = self._recorder.end_at(last, number)
        else:
            has_ended = self.has_updated
        if has_ended:
            self._newest = number
            self._tried_update = False
            self._delivery.step_ends(number)
            self._boundaries.step_ended()
            self._selection.leave_step()
        return has_ended

    def pause(self) -> None:
        """Lets the time until `resume` belong to no step, as that of an evaluation."""
        self._recorder.pause()

    def resume(self) -> None:
        """Ends a pause: what follows is the next fetch."""
        self._recorder.resume()

    def publish(self) -> None:
        """Reads the steps that have ended, and lets other callbacks find their means."""
        self._recorder.flush()
        self._delivery.publish()

    def compare_ranks(self) -> None:
        """Compares the ranks of a distributed run, in all steps that have ended."""
        if self._comparison.is_on:
            self.flush()
            self._comparison.compare_all(self._newest)

    def finish(self) -> None:
        """Reads and compares the last steps, and takes everything off. Safe to call twice."""
        if not self._may_read():
            self._recorder.rest()  # The loop goes on beside this thread, without marks.
        self._recorder.flush()
        # Before `remove`, which tells the other ranks that this one leaves.
        self.compare_ranks()
        self.remove()

    def abort(self) -> None:
        """Reads what the device has finished, and takes everything off. Safe to call twice.

        After an error, after which the device may never finish the rest.
        """
        self.drain()
        self.remove()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        lifetimes.detached(self)
        self._boundaries.remove()
        self._analyzer.remove()
        self._recorder.rest()
        if self.is_attached:
            self.is_attached = False
            self._delivery.end()
            self._comparison.remove()
            self._checkup.end()

    def abandon(self) -> None:
        """Ends all timing in a process that was forked off; leaves hooks that do nothing."""
        # Its events and ranks are its parent's, and this may be any moment.
        lifetimes.detached(self)
        self.is_attached, self.thread = False, -1
        deactivate(self._recorder)
        self._analyzer.remove()
        self._recorder.abandon()
        self._comparison.abandon()

    def lose(self) -> None:
        """As `abandon`, when nobody has the timer any more; the next one takes the hooks off."""
        self.abandon()
        lifetimes.lost(self)
