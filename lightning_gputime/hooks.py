"""The timer for a plain PyTorch loop: a step ends when the next batch is requested."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from threading import get_ident
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

import torch
from torch import nn

from lightning_gputime._instrumentation.loop import (
    BatchState,
    Loop,
    Search,
    check_loader,
    check_model,
    check_optimizers,
    is_engine,
    is_training,
)
from lightning_gputime._measurement.wall_clock import EVALUATION, STEPS
from lightning_gputime._messages import HOMES, messages
from lightning_gputime._options import AllOptions, Options, check_int, takes_options
from lightning_gputime._output.loggers import LogWriter, MeanLog, MetricsLogger, check_loggers
from lightning_gputime._phases import BACKWARD, BETWEEN, DATA, OTHER
from lightning_gputime._record.clock import check_device, device_of
from lightning_gputime._session.self_check import (
    warn_of_other_parameters,
    warn_of_several_devices,
)
from lightning_gputime._session.session import NEW, OFF, AnySession
from lightning_gputime._timer import Timer, never_raises

T = TypeVar("T")

_NO_STEP = "iterate over steps(loader), or call step() at the end of the loop's body. " + HOMES

_ALTERNATING_THREADS = (
    "several threads train alternately, but a timer times a single thread. Use a separate timer"
    " for each thread"
)

_UNCOUNTED = (
    "The last %d updates are not in any step, because the loop got its batches without"
    " timer.steps(). Pass the outermost iterable to it, as in timer.steps(itertools.cycle(loader)),"
    " or call step() after each update."
)

_MIN_UNTRAINED = 20  # Number of batches without training, in a row, that causes a warning.
_UNTRAINED = (
    "%d batches in a row have neither a model call nor an update, and are not in any step. If"
    " they train without calling hooks, such as by a CUDA graph that was captured before attach(),"
    " call step() at the end of the loop body."
)

_LEFT_OVER = (
    "A loop ended after %d of the %d micro-batches of a step. They are not in any step. Pass"
    ' accumulate_grad_batches="auto" to end each step with its update, even in a later loop.'
)


class _Use(Enum):
    """Use that a loop over `steps` makes of its batches, as the batches so far show.

    | use | batch | next use |
    |---|---|---|
    | `UNKNOWN` | was only fetched | `AHEAD` |
    | `UNKNOWN`, `NOT_TRAINED` | has trained | `TRAINING` |
    | `UNKNOWN` | was evaluated, or is not timed | `NOT_TRAINED` |

    `AHEAD` and `TRAINING` are final.
    """

    UNKNOWN = 0  # No batch has ended.
    AHEAD = 1  # The loop fetches a batch before it works on the previous batch.
    NOT_TRAINED = 2  # No batch so far is known to train: the loop may be an evaluation.
    TRAINING = 3


class _Body:
    """Running body of a loop over `steps`: the work on one batch."""

    has_called_step = False
    """True once the body has called `step`, which has ended the batch."""


class Steps(Generic[T]):
    """Wrapper of a loader that times loops over it. Like the loader, it can be iterated again."""

    def __init__(self, iterate: Callable[[], Iterator[T]], loader: Iterable[T]) -> None:
        self._iterate, self._loader = iterate, loader
        # Iterator that `next(steps)` has started, and that the next `for` loop continues.
        self._iterator: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        # Return the iterator itself, so that a `for` loop has no extra call per batch.
        iterator, self._iterator = self._iterator, None
        return self._iterate() if iterator is None else iterator

    def __next__(self) -> T:
        if self._iterator is None:
            self._iterator = self._iterate()
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises TypeError without a length

    def __getattr__(self, name: str) -> Any:
        # `copy` looks up special methods, even before `_loader` is set. It must not find those of
        # the loader.
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


class _PlainLoop(BatchState):
    """Batches, micro-batches and steps of a plain loop: it decides where each step ends.

    The body is `none` if no batch is open (`_body is None`), else `open`, or `stepped` if it has
    called `step()` (`_body.has_called_step`): then only such calls end its batches. Events:

    - `yield`: a loop over `steps` yields a batch. `next`: it asks for the next batch.
    - `step`: the loop calls `step()`.
    - `leave`: the loop is left early, or another loop starts.
    - `restart`: another loop starts after a batch has ended, in a step that has not.

    The end of a micro-batch is also the end of its step if it was the last, or if an optimizer has
    updated. The last column names functions of `tests/test_steps.py`.

    | body | event | next body | ends | shown by |
    |---|---|---|---|---|
    | none | yield | open | | each loop over `steps()` |
    | none | step | none | micro-batch | each loop that only calls `step()` |
    | open | next, after work | none | micro-batch | each loop over `steps()` |
    | open | next, but no work | open | | `batch_without_work_is_part_of_the_next_step` |
    | open | next, after an evaluation | none | step, dropped | `evaluation_in_the_body_of_steps` |
    | open | step | stepped | micro-batch | `step_called_inside_steps` |
    | stepped | next, if the step has work | none | | `step_called_inside_steps` |
    | stepped | next, if it has none | stepped | | `step_called_inside_steps` |
    | open | leave, after the update | none | step | `loop_left_early` |
    | open | leave, if the update may follow | none | micro-batch | `accumulation_left_early` |
    | open | leave, otherwise | none | | `loop_left_before_its_update` |
    | none | end of a loop that looks ahead | open | | `prefetching_iterator` |
    | none | restart, after a late update | none | step | `update_after_the_loop` |
    | none | restart, otherwise | none | | `accumulation_across_epochs` |

    Args:
        accumulate_grad_batches: Micro-batches per step; `sys.maxsize` if only an update ends a
            step.
        gradient_state: Object of accelerate that knows if an update follows a batch, or None.
        first_step: Number of the first step.
        n_optimizers: Number of optimizers.
    """

    def __init__(
        self,
        accumulate_grad_batches: int,
        gradient_state: Any,
        first_step: int,
        n_optimizers: int,
    ) -> None:
        self._accumulate_grad_batches = accumulate_grad_batches
        self._gradient_state = gradient_state
        self._first_step, self._n_optimizers = first_step, n_optimizers
        self.start()

    def start(self) -> None:
        """Start a new measurement."""
        self.open()
        self._step = self._first_step  # Number of the open step.
        self._micro_batches = 0  # Number of micro-batches of the open step that have ended.
        self._body: _Body | None = None  # Of the loop that was asked for a batch last.

    @property
    def is_in_body(self) -> bool:
        """True in the body of a loop over `steps`."""
        return self._body is not None

    @property
    def has_stepped(self) -> bool:
        return self._step > self._first_step

    # Batches

    def iterate(self, timer: "GPUPhaseHooks", iterable: Iterable[T]) -> Generator[T, None, None]:
        """Yield the items of a loader, and end a batch after each."""
        if timer._session.mode is NEW:
            raise RuntimeError(f"steps() needs an attached timer. {timer._USE}")
        if self._body is not None:
            # A loop runs in the body of another loop over `steps`. Only with hooks can
            # `has_only_fetched` tell which of the two loops trains.
            timer._session.keep_hooks()
        timer._safely(self.begin)
        timer._read_loader(iterable, in_data=True)
        use, wall_clock = _Use.UNKNOWN, timer._wall_clock
        is_batch_a_step = self._accumulate_grad_batches == 1 and self._gradient_state is None
        counter = timer._session.counter
        # A local name: Python clears the names of modules before it ends generators at its exit.
        is_exiting = sys.is_finalizing
        self.is_fetching = True
        wall_clock.start_loop()
        try:
            for item in iterable:
                self.is_fetching = False
                if not counter.is_on and timer._session.mode is not OFF:
                    try:
                        timer._session.batch_begins(item)
                    except Exception as error:
                        timer._give_up(error)
                if self._body is None:  # Otherwise a batch that was only fetched is still open.
                    self._body = _Body()
                body = self._body
                try:
                    yield item
                except GeneratorExit:
                    # Another loop may have ended this body.
                    if self._body is body and not is_exiting():
                        timer._safely(self._leave_body)
                    raise
                try:
                    if (
                        counter.is_on
                        and is_batch_a_step
                        and use is not _Use.UNKNOWN
                        and self._body is body
                        and not body.has_called_step
                        and self.is_open  # Else an evaluation was left early.
                    ):
                        # The most common case by far, in as few lines and objects as possible.
                        self._body = None
                        if counter.count(self._step):
                            timer._session.check_without_hooks()
                            timer._save_if_due()
                        self._step += 1
                        self.is_fetching = True
                        continue
                    # The body may have removed or attached the timer.
                    session = timer._session
                    counter = session.counter
                    label = session.recorder.label  # None in an untimed step.
                    if use is _Use.TRAINING:
                        # `batch_begins` has marked `other`. If that is still the label, the body
                        # may have skipped the batch.
                        is_usual = label != OTHER
                    else:
                        # Only a timed batch shows whether it trains.
                        is_usual = label is None and use is not _Use.UNKNOWN
                    if is_usual and self._body is body:
                        # The most common of the other cases. `_end_unusual_batch` decides the rest.
                        self._body = None
                        if session.is_attached and not body.has_called_step:
                            self.end_batch(timer)
                    else:
                        use = self._end_unusual_batch(timer, use)
                except Exception as error:
                    timer._give_up(error)
                self.is_fetching = True
        finally:
            self.is_fetching = False
            if not is_exiting():
                wall_clock.end_loop()
        timer._safely(self._end_loop, use)

    def _end_unusual_batch(self, timer: "GPUPhaseHooks", use: _Use) -> _Use:
        """End a batch that may be an evaluation, or skipped. Return the use of all batches so far.

        `use` is the use of the batches before it.
        """
        session = timer._session
        if session.has_only_fetched(is_first=use is _Use.UNKNOWN):
            # The loop looks ahead, groups or zips batches, or skips this batch. Its time belongs to
            # the next step.
            session.batch_ends()
            return _Use.AHEAD if use is _Use.UNKNOWN else use
        is_timed = session.recorder.label is not None
        is_evaluation = session.has_evaluated
        body, self._body = self._body, None
        if is_evaluation and use is not _Use.TRAINING:
            session.begin_step()  # Drops the evaluation.
        elif session.is_attached and body is not None and not body.has_called_step:
            self.end_batch(timer)
        if use in (_Use.AHEAD, _Use.TRAINING):
            return use
        # An untimed batch does not show whether it trains, so leave that to a later batch.
        has_trained = is_timed and not is_evaluation
        return _Use.TRAINING if has_trained else _Use.NOT_TRAINED

    def end_batch(self, timer: "GPUPhaseHooks") -> None:
        """End a batch, and the step if it was its last micro-batch."""
        session = timer._session
        if self._body is not None:
            self._body.has_called_step = True
        self._micro_batches += 1
        if self._accumulate_grad_batches > 1:
            is_last = self._micro_batches >= self._accumulate_grad_batches
        else:
            # With accelerate, an update follows this batch if gradients are synchronized.
            is_last = self._gradient_state is None or self._gradient_state.sync_gradients
        if not (is_last or session.optimizer.has_updated):
            session.batch_ends()
            return
        if not self.is_open:
            timer._safely(timer._end_evaluation)  # Its loop was left early, or continues later.
        if session.counter.is_on:  # `end_step` would do the same, with two more calls.
            if session.counter.count(self._step):
                session.check_without_hooks()
        else:
            session.end_step(self._step)
        wall_clock = timer._wall_clock
        if not wall_clock.has_stepped:
            wall_clock.end_first_step()
            session.restart_second_step()
        elif wall_clock.entry is not STEPS:
            wall_clock.resume_steps()  # A loop that calls `step()` follows loops over `steps()`.
        self._step += 1
        self._micro_batches = 0
        if timer._live_file.path is not None:
            timer._save_if_due()

    # Loops

    def begin(self, session: AnySession) -> None:
        """Start a loop. It continues the open step if the loop before it has left gradients."""
        if session.is_attached:
            self.leave(session)
            # Batches that were only read, such as to compute a mean, have left no gradients.
            has_gradients = self._micro_batches and not session.has_only_fetched(is_first=True)
            is_same_thread = session.recorder.threads.home == get_ident()
            if has_gradients and is_same_thread:
                session.continue_in_loop()
            elif session.is_attached:  # An observer may have removed the timer meanwhile.
                session.begin_step()
        self._body, self._micro_batches = None, 0

    def _end_loop(self, session: AnySession, use: _Use) -> None:
        """End a loop that has read all batches. Its step continues if work or an update follows."""
        if use is _Use.AHEAD and self._body is None:
            # The work on the last batch is still to come.
            self._body = _Body()
        if self._body is not None:
            session.batch_begins()
        if self._micro_batches:
            session.recorder.mark_instead(BETWEEN, of=DATA)
        session.compare_ranks()

    def _leave_body(self, session: AnySession) -> None:
        """End the step in which the loop was left, if its work was complete.

        Otherwise, end the open batch if a later loop may run the update that uses its gradients.
        """
        body, self._body = self._body, None
        is_batch_open = body is not None and not body.has_called_step
        has_late_update = self._micro_batches > 0 and session.optimizer.has_updated
        has_ended = (is_batch_open or has_late_update) and session.leave_loop(self._step)
        if has_ended:
            self._step += 1
            self._micro_batches = 0
        elif is_batch_open and session.needs_updates and BACKWARD in session.recorder.open.phases:
            # A later loop may run the update that uses the gradients of this batch.
            session.batch_ends(BETWEEN)
            self._micro_batches += 1

    def leave(self, session: AnySession) -> None:
        """End the last step of a loop.

        With a fixed `accumulate_grad_batches`, leftover micro-batches are dropped.
        """
        updates = session.optimizer.updates
        # A step that was left early may contain two updates of each optimizer that was passed, and
        # of one that was not. With more updates, the loop has run steps that were not counted.
        max_updates = 2 * (self._n_optimizers + 1)
        if updates > max_updates:
            session.recorder.warn_once(_UNCOUNTED, updates)
            self._body = None
            self._micro_batches = 0
        # `_body` is set only if the loop was left inside a batch. A batch that is not trained on
        # has two marks, `data/fetch` and `other`, so the number of marks counts such batches. The
        # last mark is the end of the loop.
        n_untrained = (len(session.recorder.open.labels) - 1) // 2 if self._body else 0
        if n_untrained >= _MIN_UNTRAINED and session.has_only_fetched(is_first=True):
            session.recorder.warn_once(_UNTRAINED, n_untrained)
        self._leave_body(session)
        if self._micro_batches and 1 < self._accumulate_grad_batches < sys.maxsize:
            left, self._micro_batches = self._micro_batches, 0
            session.recorder.warn_once(_LEFT_OVER, left, self._accumulate_grad_batches)


@takes_options
class GPUPhaseHooks(Timer):
    """Time the phases of each step in a plain PyTorch training loop, with device events.

    While attached, it has hooks on the model and the optimizers, and replaces the function that
    runs torch's autograd engine. Each boundary between phases is one event; the host waits for at
    most one event per step. Each `attach` starts a new measurement.

    Args:
        model: Model whose calls are `forward`. For several models, such as a GAN's, pass
            `torch.nn.ModuleList([generator, discriminator])`.
        optimizers: Optimizer or list of optimizers whose updates are `optimizer`; None for
            inference, or if the model is a DeepSpeed engine, which contains its optimizer.
        device: Device to time, which must be available. The default is the device of the model's
            parameters.
        accumulate_grad_batches: Number of micro-batches per optimizer update, that is, per step.
            With "auto", a step ends with the update, and a skipped update is part of the next step.
            With Accelerate's `accumulate`, leave the default.
        logger: Destination of the means: one or several objects with `log_metrics(metrics, step)`.
        log_every_n_steps: Number of steps averaged into one log.
        first_step: Number of the first step after `attach`, to resume training. Steps are numbered
            across epochs; each `attach` starts from this number again.
        **options: Options of all timers, see `TimerOptions`.

    Examples:
        >>> with GPUPhaseHooks(model, optimizer) as timer:
        ...     for x, y in timer.steps(loader):
        ...         loss = loss_fn(model(x), y)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> print(timer.summary())
    """

    _USE = (
        "The timer was never attached: call attach(), or use 'with GPUPhaseHooks(...) as timer:'."
    )

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = None,
        *,
        device: torch.device | str | int | None = None,
        accumulate_grad_batches: int | Literal["auto"] = 1,
        logger: MetricsLogger | Sequence[MetricsLogger] | None = None,
        log_every_n_steps: int = 50,
        first_step: int = 0,
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(Options(**options))
        self._log_every_n_steps = check_int(
            "log_every_n_steps", log_every_n_steps, 1, "steps in one logged mean"
        )
        first_step = check_int("first_step", first_step, 0, "the first step after attach()")
        given = check_optimizers(optimizers, check_model(model, optimizers))
        if is_engine(model) and accumulate_grad_batches == 1:
            accumulate_grad_batches = int(model.gradient_accumulation_steps())  # type: ignore[operator]
        warn_of_other_parameters(model, given)
        self._loggers = check_loggers(logger)
        self._device = None if device is None else check_device(device)
        if self._device is not None:
            self._clock_for(self._device)  # Raises if the device is not available.
        batches = _check_accumulation(accumulate_grad_batches, has_optimizers=len(given) > 0)
        # Optimizers of accelerate know how many micro-batches accumulate.
        states = [getattr(optimizer, "gradient_state", None) for optimizer in given]
        gradient_state = next((state for state in states if state is not None), None)
        self._batches_per_step = getattr(gradient_state, "num_steps", batches)
        self._plain = _PlainLoop(batches, gradient_state, first_step, len(given))
        self._loop = Loop(
            model,
            given,
            search=Search.ACTIVE if given else Search.AFTER_BACKWARD,
            batch=self._plain,
            needs_updates=accumulate_grad_batches != 1,
        )

    def attach(self) -> Self:
        """Attach the hooks and start a new measurement. Safe to call twice."""
        if self._session.is_attached:
            return self
        try:
            self._attach()
            return self
        except BaseException:
            # After an error or Ctrl-C, the caller has no timer to remove.
            self._detach()
            raise

    @never_raises
    def _attach(self) -> None:
        device = self._device or device_of(self._loop.model)
        if self._device is None:
            warn_of_several_devices(self._loop.model, device)
        clock, options = self._clock_for(device, report_cpu=True), self._options
        self._start_wall_clock()
        self._plain.start()
        writer = LogWriter(options.prefix, self._loggers, groups=options.logged_groups)
        self._start(
            clock,
            self._loop,
            MeanLog(self._log_every_n_steps, writer),
            [type(optimizer).step for optimizer in self._loop.optimizers],
            accumulate_grad_batches=self._batches_per_step,
        )
        self._time_loader()
        self._results.update_setup(is_own_loop=True)
        # Attaching takes longer than many set-ups.
        self._wall_clock.begin()
        self._outside_lines.occurrences.clear()
        self._session.begin_step()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                self.remove()
                return
            self._is_aborted = True
            try:
                self._abort()
            except Exception as error:
                self._give_up(error)
        except BaseException:
            self._detach()  # Ctrl-C may have interrupted any line above.
            raise

    def remove(self) -> None:
        """Read and log the last steps, then remove all hooks. Safe to call twice."""
        try:
            if self._session.is_attached:
                self._remove()
        except BaseException:
            self._detach()  # Ctrl-C may have interrupted any line above.
            raise

    @never_raises
    def _remove(self) -> None:
        has_other_threads = self._session.recorder.threads.was_elsewhere
        try:
            self._plain.leave(self._session)
        finally:
            self._finish()
        if not self._plain.has_stepped:
            why = _ALTERNATING_THREADS if has_other_threads else _NO_STEP
            messages.warning("No step has ended: %s", why)

    def steps(self, iterable: Iterable[T]) -> Steps[T]:
        """Yield the items of a loader, and end a step (or a micro-batch) after each.

        Time between two such loops, such as a validation, is not part of any step. Once the model
        was trained, a loop in eval mode without grad is not part of any step either. Steps are
        numbered across loops until the next `attach`. If the loop body calls `step`, only that call
        ends the step.

        If a loop is left early (`break`, `islice`, `zip`, `remove`), its last step counts if no
        model was called after the last update. The step then ends with that update or, in
        inference, with the last call of the model. Several loaders may be read in turn: a step ends
        when any of them is asked for a batch after the work on the previous batch.

        Args:
            iterable: Loader, or another iterable of batches.

        Returns:
            An iterable with the length and the attributes of the loader.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` the loop runs untimed.
            TypeError: If `iterable` is not iterable, or is a model or an optimizer.
        """
        check_loader(iterable)
        return Steps(partial(self._iterate, iterable), iterable)

    def _iterate(self, iterable: Iterable[T]) -> Iterator[T]:
        # A model that was never trained may be used for inference, whose batches are steps.
        is_evaluation = (
            not torch.is_grad_enabled()
            and self._session.forward.has_trained
            and not is_training(self._loop.model)
        )
        return self._evaluate(iterable) if is_evaluation else self._plain.iterate(self, iterable)

    def step(self) -> None:
        """End a step (or a micro-batch). Call it at the end of the loop's body.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` it does nothing.
        """
        session = self._session
        if session.mode is NEW:
            raise RuntimeError(f"step() needs an attached timer. {self._USE}")
        try:
            if get_ident() == session.recorder.threads.home:
                self._plain.end_batch(self)
            else:
                # The loop runs in a different thread from the call that attached the timer.
                self._plain.begin(session)
        except Exception as error:
            self._give_up(error)

    # Called by the loop

    def _safely(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function with the session. An error in it ends the timing, not the loop."""
        try:
            function(self._session, *args)
        except Exception as error:
            self._give_up(error)

    # In a loop over `steps` that evaluates the model, no batch is open (`BatchState.is_open`).
    # Neither is one during a `generate` of transformers: there, such a loop only yields its items.

    def _evaluate(self, iterable: Iterable[T]) -> Generator[T, None, None]:
        """Yield the items of an evaluation, which is not part of any step."""
        if not self._plain.is_open:
            yield from iterable  # The outer evaluation already excludes this time.
            return
        self._safely(self._start_evaluation)
        try:
            for item in iterable:
                yield item
                if self._plain.is_open:
                    # The body has run training steps, which ended the evaluation.
                    self._safely(self._start_evaluation)
                else:
                    self._session.recorder.pause(now=True)
        finally:
            self._safely(self._end_evaluation)

    def _start_evaluation(self, session: AnySession) -> None:
        self._plain.close()
        self._wall_clock.enter_phase(EVALUATION)
        session.recorder.pause(now=True)

    def _end_evaluation(self, session: AnySession) -> None:
        """End the running evaluation, if any. The training continues."""
        if not self._plain.is_open:
            self._plain.open()
            self._wall_clock.leave_phase(EVALUATION)
            session.recorder.resume(OTHER if self._plain.is_in_body else DATA)

    def _forget(self, session: AnySession) -> None:
        if self._session is session:  # Otherwise an observer has attached the timer again.
            self._wall_clock.stop(session.ended_ns)
        super()._forget(session)


def _check_accumulation(batches: int | str, *, has_optimizers: bool) -> int:
    if batches != "auto":
        meaning = "micro-batches in one update, or 'auto' to end a step with the update"
        return check_int("accumulate_grad_batches", batches, 1, meaning)
    if not has_optimizers:
        raise ValueError(
            "accumulate_grad_batches must be a number if no optimizer is passed, because no update"
            " can end a step; got 'auto'"
        )
    # Larger than any number of micro-batches: only an update ends a step.
    return sys.maxsize
