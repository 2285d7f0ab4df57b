"""What all timers are: how a measurement starts and ends."""

import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy.typing as npt
from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._boundaries.modules import resolve
from lightning_gputime._boundaries.named import NamedPhase
from lightning_gputime._boundaries.patching import Attachments
from lightning_gputime._compile_skip import skip_compile
from lightning_gputime._messages import HOMES, WarnOnce, messages
from lightning_gputime._options import AUTO, Options, check_int
from lightning_gputime._phases import EXCLUDED, StepTimes
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._results import files
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.table import Table, Tabular, show
from lightning_gputime._saved_runs import saved
from lightning_gputime._saved_runs.environment import (
    Environment,
    environment_of,
    known_of_loader,
    setup_of,
)
from lightning_gputime._saved_runs.saved import Run
from lightning_gputime._session.session import NEVER_ATTACHED, REMOVED, Session

if TYPE_CHECKING:
    from pandas import DataFrame


Hook = TypeVar("Hook", bound=Callable[..., None])

_NO_INSTANCE = (
    "callbacks must be instances, got the class of a timer: write it with parentheses, as in"
    " Trainer(callbacks=[GPUPhaseTimer()])"
)


def callers() -> Iterator[dict[str, Any]]:
    """Yield the variables of the functions that call the one that asks, from the inside out.

    Some hooks are not told what their caller has at hand.
    """
    # Not of who asks: a frame that reads its own variables holds itself, and all callers.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def never_raises(hook: Hook) -> Hook:
    """End the timing, and let the training go on, where a hook that a trainer calls fails."""

    @functools.wraps(hook)
    def guarded(self: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(self, Timer):
                # A trainer has called the function of the class itself.
                raise TypeError(_NO_INSTANCE) from None
            self._give_up(error)

    # A step that is compiled calls some of them.
    skip_compile(hook)
    return cast("Hook", skip_compile(guarded))


class Timer(Tabular):
    """The part that all timers share.

    A front end calls `_start`, then tells `self._session` where the loop begins and ends its steps,
    and calls `_finish` or `_abort` at the end. While no session runs, to tell it does nothing.
    """

    _USE = "The timer was never attached."
    _prints_on_stderr = False  # Where it was added to a script, whose output stays as it is.

    def __init__(self, options: Options) -> None:
        self._options = options
        self._results = Results(options.history_size, options.timed_warmup_steps, hint=self._USE)
        self._session: Session = NEVER_ATTACHED
        self._patches = Attachments()  # What is on the objects of a trainer.
        self._warn_once = WarnOnce()
        self._environment = Environment()
        self._evaluated: deque[dict[str, Any]] = deque(maxlen=1000)  # JSON objects.

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled: a copy is not attached. `ddp_spawn` pickles before `setup`.
        return {**self.__dict__, "_session": NEVER_ATTACHED, "_patches": Attachments()}

    def __del__(self) -> None:
        # As where a cell of a notebook is run twice. `__init__` may have raised.
        vars(self).get("_session", NEVER_ATTACHED).lose()

    if not TYPE_CHECKING:  # Else no type checker would miss any attribute.

        def __getattr__(self, name: str) -> Any:
            """Answer for what there is not, as by a trainer that needs a callback of its own."""
            is_hook = name == "setup" or name.startswith("on_")
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{missing}: {HOMES}" if is_hook else missing)

    # For front ends

    def _start(
        self,
        clock: Clock,
        loop: Loop,
        means: MeanLog,
        bars: Sequence[Callable[[StepTimes], object]] = (),
        **known: Any,
    ) -> None:
        """Start a new measurement, and put the hooks on.

        `known` has fields of the `Environment` that the front end knows better; None if not.
        """
        options = self._options
        on_host = isinstance(clock, HostClock)
        n = options.every_n_steps
        hint = "" if n in (1, AUTO) else f"Of each {n:,} steps one is timed (every_n_steps)."
        self._results = Results(
            options.history_size, options.timed_warmup_steps, on_host, hint=hint
        )
        self._evaluated.clear()
        self._environment = environment_of(loop, options, **known)
        means.begin()
        self._results.setup = setup_of(self._environment, loop, "precision" in known)
        self._session = Session(options, clock, loop, self._results, means, bars)

    def _finish(self) -> None:
        """End the measurement: read and compare the last steps, and take the hooks off."""
        self._take_session().finish()

    def _abort(self) -> None:
        """End the measurement after an error, without a wait for the device or other ranks."""
        self._take_session().abort()

    def _take_session(self) -> Session:
        # Before it ends: an observer may end it while it reads.
        session = self._session
        self._session = REMOVED if session.was_attached else NEVER_ATTACHED
        return session

    def _detach(self) -> None:
        """End whatever runs, as `_abort` does; a front end may run more than a measurement."""
        self._abort()

    def _give_up(self, error: Exception) -> None:
        """End all timing, and say so, after an error in a hook that a trainer calls."""
        messages.warning("Steps are no longer timed, because a hook failed: %r", error)
        self._detach()

    def _keep_evaluation(self, stage: str, step: int, means: Mapping[str, float]) -> None:
        self._evaluated.append({"stage": stage, "step": step, **means})

    def _know_loader(self, loader: object, *, in_data: bool = False) -> None:
        """Take from a loader what it says of itself, such as the number of items in a batch.

        Its fetches are `data` as a whole if `in_data`, and else a part of that.
        """
        self._session.analyzer.set_loader(loader, in_data)
        known = known_of_loader(loader)
        self._results.setup = replace(self._results.setup, **known)
        if known["batch_size"] is not None:
            self._environment = replace(self._environment, batch_size=known["batch_size"])

    def _submodules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the option `modules`, looked up in a model. Raise ValueError if one is wrong."""
        return resolve(self._options.modules, model)

    # For users

    def phase(self, name: str) -> NamedPhase:
        """Return a context manager: the time of its code belongs to `name`.

        As `lightning_gputime.phase`, for this timer alone.

        Args:
            name: A name such as "augment". "forward/body" is a sub-phase: its time is also part of
                `forward`.

        Raises:
            ValueError: If the name is empty, begins with "step", "host_wait", "slow" or "local", or
                has "<", ">" or control characters.
        """
        return NamedPhase(name, self._session.recorders)

    def paused(self) -> NamedPhase:
        """Return a context manager: the time of its code belongs to no step.

        For a validation or the like inside a loop. What is certainly one is left out without it:
        calls of the whole model in eval mode without grad, at least two more than in any of the
        ten steps before, or under `torch.inference_mode`. It may hold a loop over `steps`, too,
        which is then not timed.

        Examples:
            >>> with timer.paused():
            ...     evaluate(model)
        """
        return NamedPhase(EXCLUDED, self._session.recorders)

    def flush(self) -> None:
        """Wait for the steps that have ended and are unread, and read them."""
        self._session.flush()

    @property
    def last_step(self) -> StepTimes | None:
        """The newest step that the device has finished, or None."""
        return self._read().last

    def history(self) -> npt.NDArray[Any]:
        """Return the newest steps, as a structured array of shape (steps,).

        Its fields are `step` (int), `step_ms`, `host_wait_ms` and `<phase>_ms` (in milliseconds);
        NaN where a phase did not run. Warm-up steps are included.
        """
        return self._read().history_and_warmup()[0]

    def summary(self) -> PhaseSummary:
        """Return the statistics of the steps read so far, warm-up left out."""
        return self._read().summary()

    def _table(self) -> Table:
        return self._read().summary_to_print()._table()

    def slow_steps(self, n: int = 10) -> list[SlowStep]:
        """Return the slow steps since the warm-up with their causes, the worst first.

        A step is slow if it exceeds the median of the 50 steps before it (updated every 25 steps)
        by more than five median absolute deviations, 10 % of it and 0.5 ms. Steps that are not slow
        are never returned. `print` shows each as a sentence.

        Args:
            n: Maximum number of steps; 1,000 are kept.

        Raises:
            TypeError: If `n` is no integer.
            ValueError: If `n` is below 1.
        """
        n = check_int("n", n, 1, "the number of slow steps to return")
        return self._read().slow.slow_steps(n)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the history as CSV: a row a step, empty where a phase did not run.

        Args:
            path: The file; it is replaced whole.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
        """
        files.write(path, files.csv_text(self.history()))

    def to_pandas(self) -> "DataFrame":
        """Return the history as a `pandas.DataFrame`, with the number of the step as its index.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: python -m pip install pandas") from error
        return pandas.DataFrame.from_records(self.history(), index="step")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was measured to one file, which `lightning_gputime.load` reads.

        It has the history, the summary, the environment (device, versions, options and the like),
        and is JSON, some bytes a step and phase. `python -m lightning_gputime` shows it, compares
        it with others, and makes a page of it.

        Args:
            path: The file, such as "run.json.gz", compressed if it ends in ".gz"; it is replaced
                whole.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
        """
        saved.save(self._run(), path)

    def _run(self) -> Run:
        results = self._read()
        return Run(
            self._environment,
            *results.history_and_warmup(),
            results.summary_to_print(),
            slow_steps=[one.to_dict() for one in results.slow.slow_steps(100)],
            evaluations=[*self._evaluated],
        )

    def _print_table(self) -> None:
        try:
            show(self._read().summary_to_print(), on_stderr=self._prints_on_stderr)
        except Exception as error:
            # As where Ctrl-C has ended `tee`, too: the run is still to be saved.
            messages.warning("The table could not be shown: %r", error)

    def _read(self) -> Results:
        """Read what the device has finished, without a wait; not from another thread."""
        self._session.drain()
        return self._results
