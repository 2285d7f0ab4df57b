"""Base of timers of loops over loaders: a step ends where the next batch is requested."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from threading import get_ident
from typing import Any, Generic, TypeVar

import torch

from lightning_gputime._culprits.places import (
    AfterLoop,
    Frames,
    Here,
    Passage,
    PlaceTimer,
    frames_here,
)
from lightning_gputime._instrumentation.arguments import check_loader
from lightning_gputime._instrumentation.loop import Loop, is_training
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.wall_clock import (
    BETWEEN_LOOPS,
    EVALUATION,
    SET_UP,
    STEPS,
    WallClock,
)
from lightning_gputime._messages import HOMES, messages
from lightning_gputime._options import Options, check_int
from lightning_gputime._output.loggers import LogWriter, MetricsLogger
from lightning_gputime._phases import DATA, OTHER
from lightning_gputime._record.clock import Clock
from lightning_gputime._session.null import NullSession
from lightning_gputime._session.session import Session
from lightning_gputime._session.state import NEW, NOT_ATTACHED, OFF
from lightning_gputime._timer import Timer, never_raises

T = TypeVar("T")


class _Seen(Enum):
    """State of the batches of a loop over `steps`."""

    NOTHING = 0
    AHEAD = 1  # The loop fetches a batch before it works on the previous batch.
    EVALUATION = 2  # Nothing else, as far as it was timed: a body may decide whether to train.
    TRAINING = 3


_NO_STEP = "iterate over steps(loader), or call step() at the end of the loop's body. " + HOMES

_ALTERNATING_THREADS = (
    "several threads train alternately, and a timer times one thread. Give each thread its timer"
)

_UNTOLD = (
    "The last %d updates are in no step. Iterate over timer.steps(loader), and over nothing around"
    " it: timer.steps(itertools.cycle(loader)). Or call step() after each update."
)

_MAX_IDLE = 20  # Number of skipped batches from which a warning is logged.
_UNSEEN = (
    "%d batches in a row have neither a call of the model nor an update, and are in no step. If"
    " they train in a way that is not seen, such as by a graph that was captured before attach(),"
    " call step() at the end of the body."
)

_LEFT_OVER = (
    "A loop ends with %d of %d micro-batches, which are in no step. Pass"
    ' accumulate_grad_batches="auto": a step then ends with its update, in whichever loop that is.'
)


class Steps(Generic[T]):
    """A loader whose loops are timed: iterate over it as often as over the loader."""

    def __init__(self, iterate: Callable[[], Iterator[T]], loader: Iterable[T]) -> None:
        self._iterate, self._loader = iterate, loader
        self._begun: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        # A `for` runs over the iterator itself, at no further cost.
        begun, self._begun = self._begun, None
        return self._iterate() if begun is None else begun

    def __next__(self) -> T:
        # A `for` loop continues with the step that this starts.
        if self._begun is None:
            self._begun = self._iterate()
        return next(self._begun)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # says so itself

    def __getattr__(self, name: str) -> Any:
        # A copy asks before it has a loader, and must not copy that instead.
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


class LoopTimer(Timer):
    """The part that timers of loops over loaders share; a front end calls `_start_loop`."""

    _loop: Loop

    def __init__(self, options: Options, log_every_n_steps: int) -> None:
        super().__init__(options)
        self._log_every_n_steps = check_int(
            "log_every_n_steps", log_every_n_steps, 1, "steps in one logged mean"
        )
        # Larger than any number of micro-batches: only an update ends a step.
        self._accumulate_grad_batches = sys.maxsize
        # State of accelerate's optimizers: whether this batch is the last of an update.
        self._gradient_state: Any = None
        self._first_step = self._step = self._micro_batches = 0
        self._is_evaluating = self._had_batch = False  # The batch that an evaluation interrupts.
        # The step and the micro-batch in whose body a loop over `steps` is; None outside.
        self._body: tuple[int, int] | None = None
        self._reset_places()

    def __getstate__(self) -> dict[str, Any]:
        # Places refer to code, which cannot be pickled.
        names = ("_attached_at", "_between", "_evaluation")
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_places()

    def _reset_places(self, now_ns: Callable[[], int] = int) -> None:
        """Forget the places of the last measurement. `now_ns` is the clock of the next."""
        self._attached_at: Frames = ()
        # Code outside of loops over `steps`, and evaluations.
        self._between = PlaceTimer(self._culprits, now_ns, self._wall_clock)
        self._evaluation = PlaceTimer(self._culprits, now_ns, self._wall_clock)

    def _start_loop(self, clock: Clock, loggers: Sequence[MetricsLogger], **known: Any) -> None:
        """Start a new measurement, see `_start`."""
        options = self._options
        writer = LogWriter(options.prefix, loggers, groups=options.logged_groups)
        means = MeanLog(self._log_every_n_steps, writer)
        self._step, self._micro_batches, self._body = self._first_step, 0, None
        self._wall_clock, self._culprits = WallClock(clock.host_ns), CulpritSums()
        self._reset_places(clock.host_ns)
        self._attached_at = frames_here()
        self._between.start(None)
        self._start(clock, self._loop, means, self._wall_clock, **known)
        self._time_loader()
        self._results.update_setup(is_own_loop=True)
        self._session.steps.begin()

    def _forget(self, session: Session | NullSession) -> None:
        self._wall_clock.stop(session.steps.ended_ns)
        if self._wall_clock.entry == BETWEEN_LOOPS:
            self._between.end(BETWEEN_LOOPS)
        super()._forget(session)

    def _forget_loop(self) -> None:
        """Release the model and the optimizers; the timer cannot be attached again."""
        del self._loop

    def remove(self) -> None:
        """Read and log the last steps, then remove all hooks. Safe to call twice."""
        try:
            if self._session.is_attached:
                self._remove()
        except BaseException:
            self._detach()  # As Ctrl-C, anywhere in between.
            raise

    @never_raises
    def _remove(self) -> None:
        in_turns = self._session.recorder.threads.was_elsewhere
        try:
            self._leave_loop()
        finally:
            self._finish()
        if self._step == self._first_step:
            messages.warning(
                "No step has ended: %s", _ALTERNATING_THREADS if in_turns else _NO_STEP
            )

    def steps(self, iterable: Iterable[T]) -> Steps[T]:
        """Yield the items of a loader, and end a step (or a micro-batch) after each.

        Time between two such loops, such as a validation, belongs to no step. Nor does a loop in
        eval mode without grad, if the model was trained. Steps are counted through all loops until
        `attach`. A body that calls `step` ends no further step here.

        A loop that is left (`break`, `islice`, `zip`, `remove`) has a last step if no model was
        called after its last update. That step ends with the update; in inference, with the last
        call of the model. Several loaders may be read in turn: a step ends where one of them is
        asked for a batch after work on the batch before.

        Args:
            iterable: Loader, or another iterable of batches.

        Returns:
            An iterable with the length and the attributes of the loader.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` the loop runs untimed.
            TypeError: If it cannot be iterated, or is the model.
        """
        check_loader(iterable)
        return Steps(partial(self._iterate, iterable, iterable), iterable)

    def _iterate(self, iterable: Iterable[T], loader: object) -> Generator[T, None, None]:
        if self._is_evaluation(loader):
            yield from self._evaluate(iterable)
            return
        if not self._session.was_attached:
            raise RuntimeError(f"steps() needs an attached timer. {self._USE}")
        if self._body is not None:
            self._session.steps.keep_hooks()  # Another loop over `steps` may continue.
        self._begin()
        self._know_loader(loader, in_data=True)
        seen, batch, wall_clock = _Seen.NOTHING, self._loop.batch, self._wall_clock
        batch.is_fetched = True
        self._leave_between()
        wall_clock.start_loop()
        try:
            for item in iterable:
                batch.is_fetched = False
                session = self._session
                if session.steps.state is not OFF:
                    try:
                        session.open_step.batch_begins(item)
                    except Exception as error:
                        self._give_up(error)
                if self._body is None:
                    self._body = self._step, self._micro_batches
                body = self._body
                try:
                    yield item
                except GeneratorExit:
                    if self._body is body:
                        self._leave_body()
                    raise
                try:
                    # The body has removed or attached the timer: this is another session.
                    label = self._session.recorder.label
                    is_usual = label != OTHER if seen is _Seen.TRAINING else label is None
                    if is_usual and seen is not _Seen.NOTHING and self._body is body:
                        self._body = None
                        is_attached = self._session.steps.state not in NOT_ATTACHED
                        if body == (self._step, self._micro_batches) and is_attached:
                            self.step()
                    else:
                        seen = self._end_odd_body(seen)
                except Exception as error:
                    self._give_up(error)
                batch.is_fetched = True
        finally:
            wall_clock.end_loop()
        self._enter_between()
        batch.is_fetched = False
        self._end_loop(seen)

    @never_raises
    def _enter_between(self) -> None:
        if self._wall_clock.entry == BETWEEN_LOOPS:
            self._between.start(AfterLoop(frames_here()))

    @never_raises
    def _leave_between(self) -> None:
        entry = self._wall_clock.entry
        if entry == SET_UP:
            self._between.end(entry, Passage(self._attached_at, frames_here()))
        elif entry == BETWEEN_LOOPS:
            self._between.end(entry)

    @never_raises
    def _end_loop(self, seen: _Seen) -> None:
        if seen is _Seen.AHEAD and self._body is None:
            # The work on the last batch is still to come.
            self._body = self._step, self._micro_batches
        if self._body is not None:
            self._session.open_step.batch_begins()
        if self._micro_batches:
            self._session.open_step.wait_for_loop()
        self._session.compare_ranks()

    def _end_odd_body(self, seen: _Seen) -> _Seen:
        """End the work on a batch, which may be an evaluation or nothing. Return its kind."""
        session = self._session
        if self._has_idled(is_first=seen is _Seen.NOTHING):
            # As in a look-ahead, a group, or a `zip` of loops, or where a batch is passed over: it
            # belongs to the next step.
            session.open_step.batch_ends()
            return _Seen.AHEAD if seen is _Seen.NOTHING else seen
        body, self._body = self._body, None
        is_timed, is_evaluation = (
            session.recorder.label is not None,
            session.open_step.has_evaluated,
        )
        if is_evaluation and seen is not _Seen.TRAINING:
            session.steps.begin()
        elif body == (self._step, self._micro_batches) and session.is_attached:
            self.step()
        if seen in (_Seen.AHEAD, _Seen.TRAINING):
            return seen
        return _Seen.TRAINING if is_timed and not is_evaluation else _Seen.EVALUATION

    def _evaluate(self, iterable: Iterable[T]) -> Generator[T, None, None]:
        """Yield the items of an evaluation, which belongs to no step."""
        if self._is_evaluating:
            yield from iterable  # The evaluation around this one excludes all of its time.
            return
        self._start_evaluation()
        try:
            for item in iterable:
                yield item
                if self._is_evaluating:
                    self._session.recorder.pause(now=True)
                else:
                    self._start_evaluation()  # Steps of the training came in between.
        finally:
            self._end_evaluation()

    @never_raises
    def _start_evaluation(self) -> None:
        self._is_evaluating, self._had_batch = True, self._loop.batch.is_open
        self._loop.batch.is_open = False
        self._wall_clock.enter_phase(EVALUATION)
        self._evaluation.start(Here(frames_here()))
        self._session.recorder.pause(now=True)

    @never_raises
    def _end_evaluation(self) -> None:
        if self._is_evaluating:
            self._is_evaluating, self._loop.batch.is_open = False, self._had_batch
            self._wall_clock.leave_phase(EVALUATION)
            self._evaluation.end(EVALUATION)
            self._session.recorder.resume(DATA if self._body is None else OTHER)

    def _is_evaluation(self, loader: object) -> bool:
        if torch.is_grad_enabled() or not self._session.open_step.has_trained:
            return False
        return not is_training(self._loop.model)

    @never_raises
    def _leave_body(self) -> None:
        """End the step in which the loop is left, if it was over."""
        body, self._body = self._body, None
        # Gradients that were left may be used after the loop.
        is_over = body == (self._step, self._micro_batches) or (
            self._micro_batches > 0 and self._session.open_step.has_updated
        )
        session = self._session
        if is_over and session.steps.leave(self._step):
            self._step += 1
            self._micro_batches = 0
        elif body == (self._step, self._micro_batches) and session.open_step.leave_gradients():
            self._micro_batches += 1

    def _leave_loop(self) -> None:
        """End a loop with its last step. Micro-batches of a known number go into no other loop."""
        session = self._session
        # A step that was left has a few, if there are several optimizers.
        if (untold := session.open_step.updates) > 2 * (1 + len(self._loop.optimizers)):
            session.recorder.warn_once(_UNTOLD, untold)
            self._body, self._micro_batches = None, 0
        # Each batch has two marks; the end of the loop has a single mark.
        passed_over = (len(session.recorder.open.labels) - 1) // 2 if self._body else 0
        if passed_over >= _MAX_IDLE and self._has_idled(is_first=True):
            session.recorder.warn_once(_UNSEEN, passed_over)
        self._leave_body()
        if self._micro_batches and 1 < self._accumulate_grad_batches < sys.maxsize:
            left, self._micro_batches = self._micro_batches, 0
            session.recorder.warn_once(_LEFT_OVER, left, self._accumulate_grad_batches)

    def step(self) -> None:
        """End a step (or a micro-batch). Call it at the end of the loop's body.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` it does nothing.
        """
        session = self._session
        if session.steps.state is NEW:
            raise RuntimeError(f"step() needs an attached timer. {self._USE}")
        try:
            if get_ident() != session.recorder.threads.home:
                # The loop runs in another thread than the call that attached the timer.
                self._begin()
                return
            self._micro_batches += 1
            batches, accelerate = self._accumulate_grad_batches, self._gradient_state
            if batches > 1:
                is_last = self._micro_batches >= batches
            else:
                is_last = accelerate is None or accelerate.sync_gradients
            if not (is_last or session.open_step.has_updated):
                session.open_step.batch_ends()
                return
            if self._is_evaluating:
                self._end_evaluation()  # Its iterator was left, and may be continued later.
            session.steps.end_step(self._step)
            wall_clock = self._wall_clock
            if not wall_clock.has_stepped:
                wall_clock.end_first_step()
                session.steps.first_step_ended()
            elif wall_clock.entry is not STEPS:
                wall_clock.resume_steps()  # A loop by `step()` follows loops over `steps()`.
            self._step += 1
            self._micro_batches = 0
        except Exception as error:
            self._give_up(error)

    def _has_idled(self, *, is_first: bool) -> bool:
        session = self._session
        return session.steps.state is not OFF and session.open_step.has_idled(is_first=is_first)

    @never_raises
    def _begin(self) -> None:
        self._leave_loop()
        session = self._session
        # Batches that were looked at alone, as for a mean, belong to no step.
        accumulates = self._micro_batches and not self._has_idled(is_first=True)
        if accumulates and session.recorder.threads.home == get_ident():
            session.open_step.continue_in_loop()
        elif session.is_attached:
            session.steps.begin()
        self._micro_batches = 0
