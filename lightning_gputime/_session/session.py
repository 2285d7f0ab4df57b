"""Session of a timer: from attaching it to a loop until its removal."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._instrumentation import named
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import Loop, Search
from lightning_gputime._instrumentation.patching import Attachment, Attachments
from lightning_gputime._instrumentation.work import WorkCounter
from lightning_gputime._ledger.examiner import Examiner
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import call_safely, methods
from lightning_gputime._measurement.results import Results
from lightning_gputime._options import Options
from lightning_gputime._record.annotator import Annotator
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._session import attached
from lightning_gputime._session.hooks_off import HooksOff
from lightning_gputime._session.logs import LogSchedule
from lightning_gputime._session.open_step import OpenStep
from lightning_gputime._session.rank_comparer import RankComparer
from lightning_gputime._session.reading import StepReader, UserCalls
from lightning_gputime._session.self_check import SelfCheck
from lightning_gputime._session.state import ENDED, IDLE, NEW, NOT_ATTACHED
from lightning_gputime._session.steps import StepParts, Steps
from lightning_gputime._session.timing_plan import TimingPlan


class Session:
    """Session of a timer: attaches it to a loop, reads its steps, and removes it.

    Front ends report the events of the loop to `steps`, `open_step` and `recorder`, in the timed
    thread: the thread that runs the loop. `flush`, `drain` and the methods that end the session can
    be called from any thread.

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
        self._results, self._observers = results, options.observers
        wall_clock = results.wall_clock
        assert wall_clock is not None  # Only evaluations lack it.
        self._analyzer = analyzer = SlowStepAnalyzer(clock, results.slow, results.culprits)
        self._comparison = RankComparer(results, means, options)
        user_calls = UserCalls(options.observers, analyzer)

        # Choose the timed steps. Each log interval needs some of them.
        is_logged = means.writer.has_destination or len(options.observers) > 0
        has_logs = is_logged or self._comparison.is_on
        plan = TimingPlan(
            options,
            clock,
            results,
            log_every_n_steps=means.every_n_steps if has_logs else None,
            each_timed_for=_option_that_times_every_step(
                options, user_calls, logs_every_step=is_logged and means.every_n_steps == 1
            ),
        )

        # Record them: hooks call the recorder, which passes the steps that were read to `reader`.
        reader = StepReader(plan, results, wall_clock, options.timed_warmup_steps)
        self.recorder = recorder = Recorder(
            clock,
            lag=options._lag,
            emit=reader.take,
            batch=user_calls.batch,
            annotate=Annotator() if options.annotate else None,
        )
        self.recorders = [recorder]
        """Recorders for the phases that users name."""
        work = WorkCounter(options.items, options.flops, loop, recorder)
        self._examiner = Examiner(clock, recorder.pending.free, recorder.warn_once)
        self._examiner.watch.follow(functions)
        results.ledger.operations = self._examiner.operations
        results.ledger.busy_functions = self._examiner.watch.busy_functions
        self._boundaries = Boundaries(recorder, loop, work.on_call, wall_clock, self._examiner)
        self.open_step = OpenStep(
            recorder, self._boundaries, work, needs_updates=loop.needs_updates
        )

        # Process the steps that were read.
        means.connect(results, is_sampled=not plan.times_all, is_logged=is_logged)
        read_peaks = getattr(clock, "peak_memory", None)
        self._memory = MemoryWatch(read_peaks) if read_peaks is not None else None
        results.connect(
            work.reference,
            observers=options.observers,
            logs_slow_steps="slow" in options.logged_groups,
            memory=self._memory,
        )
        self._self_check = SelfCheck(results, self._boundaries, recorder, loop, options)
        self._logs = LogSchedule(
            means,
            results,
            self._comparison,
            analyzer,
            lag=options._lag,
            is_sampled=not plan.times_all,
        )
        # Collectors come first, because the others use what they have collected.
        collectors = [results, self._comparison, analyzer]
        reader.connect([*collectors, user_calls, self._logs, self._self_check])

        # Start and end the steps.
        self.steps = Steps(
            StepParts(
                recorder=recorder,
                boundaries=self._boundaries,
                open_step=self.open_step,
                work=work,
                analyzer=analyzer,
                examiner=self._examiner,
                ledger=results.ledger,
                plan=plan,
                hooks_off=HooksOff(
                    plan,
                    self._boundaries,
                    # A plain loop needs hooks in the step before, to tell evaluations from steps.
                    margin=int(loop.search is not Search.NEVER),
                    lag=options._lag,
                ),
                logs=self._logs,
                comparison=self._comparison,
                untimed=results.untimed,
                wall_clock=wall_clock,
                host_ns=clock.host_ns,
            )
        )
        self._until_end = Attachments()
        self._to_remove = [self._comparison, analyzer, *options.observers]

    # Attach

    @property
    def is_attached(self) -> bool:
        return self.steps.state not in NOT_ATTACHED

    @property
    def was_attached(self) -> bool:
        """True from the first successful `attach` on."""
        return self.steps.state is not NEW

    def attach(self) -> None:
        """Attach the hooks. If that fails or is interrupted, remove all of them."""
        try:
            self._boundaries.attach()
            self.open_step.attach()
            self._analyzer.attach()
            call_safely(methods(self._observers, "attach"))
            # Python may delete a timer at any moment, even inside a hook, so its hooks are only
            # removed here.
            attached.remove_lost()
            attached.add(self)
            self.steps.enter(IDLE)
        except BaseException:
            self.remove()
            raise

    def attach_until_end(self, attachment: Attachment) -> None:
        """Attach something until the timer is removed. It also stays attached in untimed steps."""
        self._until_end.add(attachment)

    def wake(self) -> None:
        """Attach the hooks again at the end of the open step, for another timer."""
        self.steps.wake()

    # Events outside of steps

    def set_loader(self, loader: object, in_data: bool = False) -> None:
        """Set the loader of the batches. With `in_data`, fetches are `data`, not `data/fetch`."""
        self._analyzer.set_loader(loader, in_data)

    def start_epoch(self, first_step: int, epoch: int) -> None:
        """Record that an epoch starts with the step `first_step`. Call it before that step ends."""
        self._results.slowdowns.series.start_epoch(first_step, epoch)

    def publish(self) -> None:
        """Read the steps that have ended, and publish their means to other callbacks."""
        self.recorder.pending.flush()
        self._logs.publish(self.steps.newest, self.steps.index)

    def log_means(self) -> None:
        """Log the steps since the last log, as far as they can be read without waiting."""
        self.drain()
        self._logs.means.log_means()

    def compare_ranks(self) -> None:
        """Compare the ranks over all steps so far. All ranks must call it."""
        if self._comparison.is_on:
            self.flush()
            self._comparison.compare_all(self.steps.newest)

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
            ended_steps = self.steps.index - self.recorder.pending.count
            self._results.count_ended(ended_steps)

    def _may_read(self) -> bool:
        # Two threads would read steps out of order. `home` is -1 once the thread of the loop ended.
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
        attached.discard(self)
        attached.remove_lost()
        self._until_end.remove()
        self._examiner.stop()
        self._boundaries.remove()
        self.recorder.stop()
        try:
            if self.is_attached:
                if self._memory is not None:
                    self._memory.end()
                self._results.count_ended(self.steps.index)
                self.steps.enter(ENDED)
                log = partial(self._logs.finish, self.steps.newest, self.steps.index)
                call_safely([log, self._self_check.end])
        finally:
            while self._to_remove:
                call_safely(methods(self._to_remove[:1], "remove"))
                del self._to_remove[:1]
            self.recorder.pending.end()

    def abandon(self) -> list[Any]:
        """End all timing in a forked process, or once the timer was deleted.

        The hooks stay attached, but do nothing. Return the objects that refer to events.
        """
        # Neither read events nor compare ranks: in a forked process, both belong to the parent,
        # which may have forked at any moment.
        attached.discard(self)
        if self.is_attached:
            self.steps.enter(ENDED)
        named.deactivate(self.recorder)
        self._examiner.stop()
        self._analyzer.remove()
        self._comparison.remove()
        self._to_remove.clear()
        return self.recorder.abandon()

    def lose(self) -> None:
        """End all timing, because the timer was deleted. The next session removes the hooks."""
        attached.lose(self)


def _option_that_times_every_step(
    options: Options, user_calls: UserCalls, *, logs_every_step: bool
) -> str:
    """Return the first option that requires timing every step; empty if none."""
    requires = {
        "observers=": user_calls.takes_steps,
        "annotate=True": options.annotate,
        "lag=0": options._lag == 0,
        "a log at each step": logs_every_step,
    }
    return next((option for option, is_set in requires.items() if is_set), "")
