"""Base class of all timers: start and end of a measurement, and its results."""

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy.typing as npt
import torch

from lightning_gputime._compat.python_ import code_of, running_functions
from lightning_gputime._compat.torch_ import CHECKPOINT, unwrapped
from lightning_gputime._instrumentation.loop import Loop, loaders_in
from lightning_gputime._instrumentation.patching import Attachments, Subscription
from lightning_gputime._instrumentation.traced import NamedPhase
from lightning_gputime._ledger.examiner import forwards_of
from lightning_gputime._ledger.ledger import Ledger, OutsideLines
from lightning_gputime._loader import CulpritSums
from lightning_gputime._loader.stages import StagedLoaders
from lightning_gputime._measurement.measurement import CostlySetting, Environment
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._messages import HOMES, WarnOnce, messages
from lightning_gputime._options import AUTO, Options, check_bool, check_int, flag_note
from lightning_gputime._output.loggers import MeanLog
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._output.table import Table, Tabular, show
from lightning_gputime._phases import EXCLUDED, SAVES, StepTimes
from lightning_gputime._record.clock import Clock, HostClock, clock_for, loop_time
from lightning_gputime._runs import saved
from lightning_gputime._runs.environment import (
    CostlySettings,
    environment_of,
    loader_settings,
    merge,
    setup_of,
)
from lightning_gputime._runs.saved import LiveFile, Run
from lightning_gputime._session.evaluation import Evaluations
from lightning_gputime._session.session import NEVER_ATTACHED, NEW, REMOVED, AnySession, Session

Hook = TypeVar("Hook", bound=Callable[..., None])

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")

_NO_INSTANCE = (
    "callbacks must be instances, got the class of a timer: write it with parentheses, as in"
    " Trainer(callbacks=[GPUPhaseTimer()])"
)

_NESTED = (
    "A training inside another training has ended the timing of the outer training. Give each"
    " trainer a separate timer."
)


def _is_loader_of(owner: Callable[[], object], name: str, loader: object) -> bool:
    """Return whether `owner().name` is `loader`, or a list or dict that contains it."""
    found = loaders_in(getattr(owner(), name, None))
    # accelerate wraps the loader: `base_dataloader` is the original.
    return any(loader is getattr(outer, "base_dataloader", outer) for outer in found)


def never_raises(hook: Hook) -> Hook:
    """Decorate a hook that a trainer calls: an error in it ends the timing, not the training."""

    @functools.wraps(hook)
    def guarded(self: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(self, Timer):
                # The trainer was given the class instead of an instance.
                raise TypeError(_NO_INSTANCE) from None
            self._give_up(error)

    return cast("Hook", guarded)


class Timer(Tabular):
    """Base class of all timers.

    A front end calls `_start`, notifies `self._session` of the loop's steps, and calls `_finish` at
    the end. While the timer is not attached, `self._session` ignores notifications. Other ends of a
    measurement:

    - `_abort`: after an error in the training. It waits neither for the device nor for other ranks.
    - `_detach`: `_abort`, also for evaluations and the state of the front end.
    - `_give_up`: `_detach` with a warning, after an error in a hook of the timer.
    """

    _USE = "The timer was never attached."  # How to use the timer, shown instead of results.
    _runs_in_trainer = False  # True if a trainer calls the user's code.
    # Libraries whose private names the timer uses. Missing names are listed in the summary.
    _libraries: tuple[str, ...] = ("torch",)
    _trainer_name = "the loop"  # Name of the code that runs the loop, if it is not the user's.
    _logs_fit = False  # True if the timer logs the wall clock, the group "fit".
    _is_aborted = False  # True if an exception has left the `with` block of the timer.
    _prints_on_stderr = False  # True if `run` added the timer to a script with its own output.

    def __init__(self, options: Options, *, print_summary: bool = True) -> None:
        check_bool("print_summary", print_summary)
        if "fit" in options.asked_groups and not self._logs_fit:
            raise ValueError(
                "log must not contain 'fit', which only GPUPhaseTimer logs; got"
                f" {options.asked_groups}"
            )
        self._options = options
        self._prints_table = print_summary
        self._results = Results(options.history_size, options.timed_warmup_steps, hint=self._USE)
        self._session: AnySession = NEVER_ATTACHED
        self._patches = Attachments()  # Patches of the trainer and of objects that belong to it.
        self._warn_once = WarnOnce()
        self._environment = Environment()
        self._costly_settings = CostlySettings()
        self._evaluations = Evaluations(options)
        self._wall_clock = WallClock(None)
        self._culprits = CulpritSums()
        self._outside_lines = OutsideLines()
        self._loader: object = None  # The newest loader.
        self._live_file = LiveFile()
        self._loop_time: Callable[[], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled, so a copy is not attached. `ddp_spawn` pickles before `setup`.
        detached = {
            "_session": NEVER_ATTACHED,
            "_patches": Attachments(),
            "_loader": None,
            "_wall_clock": WallClock(None),
        }
        return {**self.__dict__, **detached}

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():
            return  # Python may already have deleted the globals of modules.
        # The timer may still be attached, for example if a notebook cell ran twice. `_session` is
        # missing if `__init__` raised.
        vars(self).get("_session", NEVER_ATTACHED).lose()
        if (lines := vars(self).get("_outside_lines")) is not None:
            lines.stop()

    if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute.

        def __getattr__(self, name: str) -> Any:
            is_hook = name == "setup" or name.startswith("on_")
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{missing}: {HOMES}" if is_hook else missing)

    # For front ends

    def _print_on_stderr(self) -> None:
        """Print tables on stderr, so that the output of the script is unchanged."""
        self._prints_on_stderr = True

    def _start(
        self,
        clock: Clock,
        loop: Loop,
        means: MeanLog,
        functions: Iterable[Any] = (),
        **known: Any,
    ) -> Session:
        """Start a new measurement with the current wall clock, and attach the hooks.

        Args:
            clock: Clock of the device.
            loop: The loop.
            means: Log of the means.
            functions: Functions of libraries to name as the reason for time, such as the methods of
                loggers.
            known: Fields of the `Environment` from the front end; None if a value is unknown.
        """
        if self._session.is_attached:
            self._warn_once(_NESTED)
            self._detach()
        options = self._options
        on_host = isinstance(clock, HostClock)
        forwards = forwards_of(unwrapped(loop.model))
        codes = [*filter(None, [*map(code_of, functions), CHECKPOINT])]
        # Name the modules of models from other libraries, such as transformers.
        codes += [code for code in forwards if not code.co_filename.startswith(_TORCH)]
        self._outside_lines.functions = codes
        n = options.every_n_steps
        hint = "" if n in (1, AUTO) else f"1 of every {n:,} steps is timed (every_n_steps)."
        self._environment = environment_of(loop, options, **known)
        self._results = Results(
            options.history_size,
            options.timed_warmup_steps,
            on_host_clock=on_host,
            hint=hint,
            culprits=self._culprits,
            libraries=self._libraries,
            wall_clock=self._wall_clock,
            setup=setup_of(self._environment, loop, has_precision="precision" in known),
            ledger=Ledger(
                on_host_clock=on_host,
                trainer=self._trainer_name,
                # In a trainer, no line of these functions is the reason for anything.
                outside=running_functions() if self._runs_in_trainer else frozenset(),
                forwards=forwards,
                outside_lines=self._outside_lines,
            ),
        )
        self._evaluations.means.clear()
        means.writer.begin()
        self._costly_settings = CostlySettings.of(self._environment, loop)
        self._read_costly_settings()
        # Set `_session` before `attach`, so that `_detach` finds it if `attach` is interrupted.
        self._session = session = Session(options, clock, loop, self._results, means, codes)
        try:
            session.attach()
        except BaseException:
            self._forget(session)
            raise
        return session

    def _clock_for(self, device: torch.device, *, report_cpu: bool = False) -> Clock:
        """Return the clock of a device, or the clock that replaces it in tests."""
        return self._options._clock or clock_for(device, self._host_ns, report_cpu=report_cpu)

    @property
    def _host_ns(self) -> Callable[[], int]:
        """The host's clock; available before there is a device."""
        clock = self._options._clock
        if clock is not None:
            return clock.host_ns
        if self._loop_time is None:
            self._loop_time = loop_time()
        return self._loop_time

    def _start_wall_clock(self, start_ns: int | None = None, functions: Iterable[Any] = ()) -> None:
        """Start the wall clock of a run, and examine what runs outside of its steps.

        Args:
            start_ns: Start of the run; now by default.
            functions: See `_start`.
        """
        self._wall_clock = WallClock(self._host_ns, start_ns)
        self._culprits = CulpritSums()
        codes = [*filter(None, map(code_of, functions))]
        now_ns = self._host_ns if self._options.lines else None
        self._outside_lines = OutsideLines(now_ns, codes)
        self._wall_clock.follow(self._outside_lines.switch_to)

    def _staged_loaders(self, owner: object, name: str) -> StagedLoaders:
        """Return a timer of the stages of the loader that is the attribute `name` of `owner`."""
        # All loaders of the process call `includes`, so it must not keep a timer or a model alive.
        includes = partial(_is_loader_of, weakref.ref(owner), name)
        return StagedLoaders(includes, self._host_ns, self._culprits.add_loader)

    def _time_loader(self) -> None:
        self._session.attach_until_end(self._staged_loaders(self, "_loader"))

    def _time_saves(self, trainer: Any, name: str) -> None:
        """Time the method by which a trainer saves checkpoints, inside and outside of steps."""
        saves = NamedPhase(SAVES, [*self._session.recorders, self._wall_clock])
        self._patches.add(Subscription(trainer, name, saves))

    def _finish(self) -> None:
        """End the measurement: read the last steps, compare the ranks, and remove the hooks."""
        session = self._session
        try:
            self._costly_settings = replace(self._costly_settings, not_updated=session.not_updated)
            # The training may have enabled some settings.
            self._read_costly_settings(self._results.setup.costly_settings)
            session.finish()
        finally:
            self._forget(session)

    def _abort(self) -> None:
        """End the measurement after an error, without waiting for the device or other ranks."""
        session = self._session
        try:
            session.abort()
        finally:
            self._forget(session)

    def _forget(self, session: AnySession) -> None:
        """Remove a session that has ended, and drop the reference to it."""
        session.remove()
        if self._session is session:  # Otherwise an observer has attached the timer again.
            self._session = NEVER_ATTACHED if session.mode is NEW else REMOVED

    def _detach(self) -> None:
        try:
            self._evaluations.abort()
        finally:
            self._abort()

    def _give_up(self, error: Exception) -> None:
        """End all timing with a warning. Never raise an Exception."""
        messages.warning("Steps are no longer timed, because a hook failed: %r", error)
        try:
            self._detach()
        except Exception as another:
            messages.warning("The timer could not be removed: %r", another)
        if self._session is NEVER_ATTACHED:
            self._session = REMOVED  # With `NEVER_ATTACHED`, `step()` would raise.

    @never_raises
    def _read_loader(self, loader: object, *, in_data: bool = False, prefix: str = "") -> None:
        """Read a loader's settings.

        Args:
            loader: The loader.
            in_data: True if `data` contains nothing but fetches from this loader.
            prefix: Prefix of the loader's options in the trainer, such as "dataloader_".
        """
        self._session.set_loader(loader, in_data)
        self._loader = loader
        settings = loader_settings(loader)
        self._results.update_setup(**settings, loader_prefix=prefix)
        if not self._wall_clock.has_stepped:
            self._read_costly_settings()  # Scripts often change torch's settings after `attach`.
        if settings["batch_size"] is not None:
            self._environment = replace(self._environment, batch_size=settings["batch_size"])

    def _read_costly_settings(self, known: Iterable[CostlySetting] = ()) -> None:
        """Read the settings that cost time. They replace all that are not `known`."""
        settings = merge(known, self._costly_settings.read(self._results.setup))
        self._results.update_setup(costly_settings=settings)

    # For users

    def phase(self, name: str) -> NamedPhase:
        """Return a context manager that attributes the time of its code to `name`.

        Like `lightning_gputime.phase`, but for this timer only.

        Args:
            name: A name such as "augment". "forward/body" is a sub-phase: `forward` includes it.

        Raises:
            ValueError: If the name or a part of it is empty, or has "<", ">" or control characters.
                Also if the part before the first "/" is "step", "host_wait", "slow", "slow_excess",
                "lasting_change" or "local".
        """
        return NamedPhase(name, self._session.recorders)

    def paused(self) -> NamedPhase:
        """Return a context manager that excludes the time of its code from all steps.

        Use it for validation inside a training loop. A loop over `steps` in a paused block is not
        timed. Outside of such blocks, the timer excludes calls of the whole model in eval mode
        without gradients if any of these conditions applies:

        - They run under `torch.inference_mode`.
        - They come after the last update of a step, or after every call of `step()`.
        - At most half of the last ten steps contain such calls.

        Examples:
            >>> with timer.paused():
            ...     evaluate(model)
        """
        return NamedPhase(EXCLUDED, [*self._session.recorders, self._wall_clock])

    def flush(self) -> None:
        """Wait for the steps that have ended, and read them.

        In another thread than the loop's, do nothing while the loop's thread is alive.
        """
        self._session.flush()

    @property
    def last_step(self) -> StepTimes | None:
        """The newest timed step that the device has finished, or None."""
        return self._read().last

    def history(self) -> npt.NDArray[Any]:
        """Return the newest timed steps, warm-up included, as a structured array (steps,).

        Its fields are `step` (int), `step_ms`, `host_wait_ms` and `<phase>_ms` (in milliseconds;
        NaN if a phase did not run). `pandas.DataFrame(timer.history())` converts it to a DataFrame,
        and `numpy.save(path, timer.history())` saves only this array.
        """
        return self._read().history_and_warmup()[0]

    def summary(self) -> PhaseSummary:
        """Return the statistics of the steps after the warm-up, or of the warm-up if none ran."""
        return summary_of(self._read())

    def _table(self) -> Table:
        summary = summary_of(self._read())
        return summary._table()

    def slow_steps(self, n: int = 10) -> list[SlowStep]:
        """Return the slow steps since the warm-up with their causes, worst first.

        A step is slow if it exceeds the median of the 50 steps before it (updated every 25 steps)
        by more than each of five median absolute deviations, 10 % of the median, and 0.5 ms.
        Printing a step shows it as a sentence.

        Args:
            n: Maximum number of steps to return; at most 1,000 are kept.

        Raises:
            TypeError: If `n` is not an integer.
            ValueError: If `n` is below 1.
        """
        n = check_int("n", n, 1, "the number of slow steps to return")
        return self._read().slow.slow_steps(n)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the run to one JSON file, which `lightning_gputime.load` reads.

        The file contains the history, the summary and the environment (device, versions, options).
        Show and compare such files with `python -m lightning_gputime`.

        Args:
            path: The file to write or replace, such as "run.json.gz"; ".gz" compresses it.

        Raises:
            OSError: If the file cannot be written.
        """
        run = self._run()
        if not len(run.history):
            messages.warning("The saved run has no steps. Save it after the training.")
        saved.save(run, path)

    def _save_if_due(self, *, is_epoch_end: bool = False) -> None:
        """Rewrite the live file if a new version is due and a step was read. Report errors once."""
        file = self._live_file
        if file.is_due(is_epoch_end=is_epoch_end) and self.last_step is not None:
            # Record the save as a possible cause of a slow step.
            self._session.call_own(partial(file.rewrite, self.save), "the timer's saving")

    def _run(self) -> Run:
        results = self._read()
        history, warmup_steps = results.history_and_warmup()
        return Run(
            self._environment,
            history,
            warmup_steps,
            summary_of(results),
            slow_steps=results.slow.slow_steps(100),
            evaluations=[*self._evaluations.means],
            warnings=self._warn_once.warnings_since(),
        )

    def _show(self, is_wanted: bool) -> None:
        """Print the table if it is wanted and `print_summary` is set. Never raise an Exception."""
        try:
            if is_wanted and self._prints_table:
                summary, on_stderr = summary_of(self._read()), self._prints_on_stderr
                note = flag_note(str(summary)) if on_stderr else ""
                show(summary, on_stderr=on_stderr, note=note)
        except Exception as error:
            # Ctrl-C may also have ended a reader such as `tee`. The run must still be saved.
            messages.warning("The table could not be shown: %r", error)

    def _read(self) -> Results:
        """Read the finished steps without waiting. Only the loop's thread reads new steps."""
        self._session.drain()
        return self._results
