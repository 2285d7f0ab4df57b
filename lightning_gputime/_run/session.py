"""A timer at work on one loop: from the attaching of its hooks to their removal."""

from collections.abc import Callable, Sequence
from threading import get_ident

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._boundaries.named import NamedPhase
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    BACKWARD,
    DATA,
    FETCH,
    OPTIMIZER,
    OTHER,
    StepTimes,
)
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.ranges import Annotator
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import PAUSED
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._run.comparison import Comparison
from lightning_gputime._run.delivery import Delivery
from lightning_gputime._run.probe import Probe
from lightning_gputime._run.schedule import LEFT_OUT, PROBED, SKIPPED, TIMED, Kind, Schedule


class Session:
    """What a timer holds while it is attached. Its methods are what a loop tells it.

    Args:
        options: How steps are timed.
        clock: Where events and host times come from.
        loop: What is hooked.
        results: Get every step.
        means: Log every step.
        on_step: Are called with every step.
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
        self._results = results
        self._schedule = Schedule(
            options.every_n_steps, options.probe_every_n_steps, options.warmup_steps
        )
        self._probe = Probe(clock, results) if options.probe_every_n_steps else None
        # Whether other ranks may probe a step that this one does not.
        self._has_others = not results.on_host_clock and is_distributed()
        lag = options.lag
        self._comparison = Comparison(results, means, sync_ranks=options.sync_ranks, lag=lag)
        self._delivery = Delivery(
            results, means, self._comparison, lag=lag, on_step=on_step, probe=self._probe
        )
        self._recorder = Recorder(
            clock,
            lag=lag,
            emit=self._delivery.add,
            batch=self._delivery.batch,
            annotate=Annotator() if options.annotate else None,
        )
        self.part_begins = self._recorder.mark
        """Says that from here on the time belongs to a part of `data`, or to `other`."""
        self._lag = lag
        self._is_plain = self._schedule.is_plain
        self.thread = -1
        """The thread that is timed; -1 before the first step."""
        # The number of the last step that ended.
        self._newest: int | None = None
        # Of all steps, and of the last one that was timed; numbers may leave some out, or repeat.
        self._index = 0
        self._timed_at: int | None = None
        # What the open step is.
        self._kind = SKIPPED
        # The steps before this index are not timed, nor is the next, and nothing waits to be read.
        # Known by the index alone: all ranks must pass over the same ones.
        self._quiet_until = 0
        self._tried_update = False
        self.is_attached = True
        """Whether the hooks are on."""
        self._boundaries = Boundaries(self._recorder, loop)

    # What a loop tells

    def begin(self, number: int) -> None:
        """Starts the step `number` here, in the calling thread. What is open is dropped."""
        self.thread = get_ident()
        self._boundaries.step_ended()
        self._tried_update = False
        self._quiet_until = 0
        # Only at the end of a step is one probed: the fetch of an epoch's first batch takes any
        # time. So no other rank does it either.
        self._kind = self._schedule.kind_unprobed(self._index)
        if self._kind is TIMED:
            self._recorder.begin()
        else:
            self._recorder.rest()
        if self._probe is not None:
            self._probe.step_begins()

    def fetch_begins(self) -> None:
        """Says that the next batch is fetched, which ends a pause."""
        if self._recorder.state is PAUSED:
            self._recorder.resume(FETCH)
        else:
            self._recorder.mark(FETCH)

    def part_began(self, label: str) -> None:
        """As `part_begins`, but from the end of the last step or micro-batch on."""
        self._recorder.mark_instead(DATA, label)

    def batch_begins(self) -> None:
        """Says that the batch is there: its fetch, or a pause, is over."""
        if self._recorder.state is PAUSED:
            self._recorder.resume(OTHER)
        else:
            self._recorder.mark(OTHER)

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
        self._recorder.mark(DATA)

    def end_step(self, number: int) -> None:
        """Ends the open step under `number`, and begins the next one."""
        if self._newest is None:
            self._delivery.starts(number)
        self._newest = number
        self._tried_update = False
        recorder = self._recorder
        if self._index < self._quiet_until:
            self._end_quiet_step()
            return
        reads = self._delivery.step_ends(number)
        if self._is_plain:
            recorder.end_step(number, self._boundaries.step_ended(), reads)
        else:
            self._end_one_of_some(number, reads)
        if self._comparison.owed is not None:
            # The exchange is no part of the step that has begun.
            recorder.pause()
            self._comparison.pay()
            recorder.resume()
        # A user's function may have removed the timer.
        if not self._is_plain and self.is_attached:
            self._begin_next()

    def pause(self) -> None:
        """Lets the time until `resume` belong to no step, as that of an evaluation."""
        self._recorder.pause()

    def resume(self) -> None:
        """Ends a pause: what follows is the fetch of the next batch."""
        self._recorder.resume()

    def publish(self) -> None:
        """Reads the steps that have ended, and lets other callbacks find their means."""
        self._recorder.flush()
        self._delivery.publish()

    def compare_ranks(self) -> None:
        """Compares the ranks of a distributed run, in all steps that have ended."""
        if self._comparison.is_on:
            self._recorder.flush()
            self._comparison.sync(self._newest)

    def finish(self) -> None:
        """Reads and compares the last steps, and takes everything off. Safe to call twice."""
        self._recorder.flush()
        self.compare_ranks()
        self.remove()

    def abort(self) -> None:
        """Reads what the device has finished, and takes everything off. Safe to call twice.

        After an error, after which the device may never finish the rest.
        """
        self._recorder.drain()
        self.remove()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        self.is_attached = False
        self._boundaries.remove()
        self._recorder.rest()
        self._delivery.end()
        self._comparison.end()
        ran = self._results.sums.phases
        if BACKWARD in ran and OPTIMIZER in ran and not self._boundaries.model_was_called:
            messages.warning("No call of the model was seen: is it the module that the loop calls?")

    # What a user asks

    def phase(self, name: str) -> NamedPhase:
        """Returns the context manager of a phase that is named by hand."""
        return NamedPhase(name, [self._recorder])

    def flush(self) -> None:
        """Waits for the steps that have ended, and reads them."""
        self._recorder.flush()

    def drain(self) -> None:
        """Reads what the device has finished, without a wait; not from another thread."""
        if get_ident() == self.thread:
            self._recorder.drain()

    # Steps that are not all alike

    def _end_quiet_step(self) -> None:
        self._index += 1
        self._boundaries.step_ended(timed=False)
        self._recorder.end_untimed()
        if self._recorder.label is not None:
            self._recorder.rest()  # It recorded a graph.

    def _end_one_of_some(self, number: int, reads: bool) -> None:
        kind = self._kind
        if self._probe is not None:
            usual = kind in (TIMED, SKIPPED) and self._index >= self._schedule.warmup_steps
            self._probe.step_ends(usual=usual)
        is_timed = kind in (TIMED, PROBED)
        skipped_update = self._boundaries.step_ended(timed=is_timed)
        if is_timed:
            self._timed_at = self._index
            self._recorder.end_step(number, skipped_update, reads)
        else:
            self._recorder.end_untimed(reads)
        self._index += 1

    def _begin_next(self) -> None:
        """Begins a step; where the last one was timed, its last mark is the first of this one."""
        kind, self._kind = self._kind, self._next_kind()
        if self._kind in (SKIPPED, LEFT_OUT):
            self._recorder.rest()
            is_read = self._timed_at is None or self._index > self._timed_at + self._lag
            if self._probe is None and is_read:
                self._quiet_until = self._schedule.next_timed(self._index) - 1
        elif kind in (SKIPPED, LEFT_OUT):
            self._recorder.begin()
        if self._probe is not None:
            if self._kind is PROBED:
                self._recorder.fill(self._probe.keep_busy)
            self._probe.step_begins()

    def _next_kind(self) -> Kind:
        """Returns what becomes of the step that begins: what is planned, if it can be."""
        kind = self._schedule.kind(self._index)
        if kind is PROBED and self._probe is not None and not self._probe.is_ready():
            return LEFT_OUT if self._has_others else self._schedule.kind_unprobed(self._index)
        if kind is LEFT_OUT and self._kind not in (PROBED, LEFT_OUT):
            return self._schedule.kind_unprobed(self._index)
        return kind
