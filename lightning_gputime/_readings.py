"""What both timers let their users do with what was measured."""

import csv
import io
import os
from typing import Any

import numpy.typing as npt

from lightning_gputime import _files
from lightning_gputime._named import NamedPhase
from lightning_gputime._phases import StepTimes
from lightning_gputime._results import Results
from lightning_gputime._session import Session
from lightning_gputime._summary import PhaseSummary


class Readings:
    """The part that both timers share: it reads, and knows nothing of how steps are timed."""

    _results: Results
    _session: Session | None

    def phase(self, name: str) -> NamedPhase:
        """Returns a context manager: the time of its code belongs to `name`.

        As `lightning_gputime.phase`, for this timer alone.

        Args:
            name: Any name, such as "augment". "forward/body" is a sub-phase: its time is also part
                of `forward`.

        Raises:
            ValueError: If no key can be made of the name.
        """
        return NamedPhase(name, [] if self._session is None else [self._session.recorder])

    @property
    def last(self) -> StepTimes | None:
        """The newest step that the device has finished, or None."""
        return self._read().last

    def _read(self) -> Results:
        """Reads what the device has finished, without a wait; not from another thread."""
        if self._session is not None and self._session.is_here():
            self._session.recorder.drain()
        return self._results

    def flush(self) -> None:
        """Waits for the steps that have ended and are unread, and reads them."""
        if self._session is not None:
            self._session.recorder.flush()

    def history(self) -> npt.NDArray[Any]:
        """Returns the newest steps, as a structured array of shape (steps,).

        Its fields are `step` (int), `step_ms`, `host_wait_ms` and `<phase>_ms` (in milliseconds);
        NaN where a phase did not run. Warm-up steps are included.
        """
        return self._read().history()

    def summary(self) -> PhaseSummary:
        """Returns the statistics of the steps read so far, warm-up left out."""
        return self._read().summary()

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the history as CSV: a row a step, empty where a phase did not run.

        Args:
            path: The file; it is replaced whole.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
        """
        history = self.history()
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(history.dtype.names or ())
        for row in history.tolist():
            writer.writerow("" if value != value else value for value in row)
        _files.write(path, text.getvalue())

    def to_pandas(self) -> Any:
        """Returns the history as a `pandas.DataFrame`, with the number of the step as its index.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: python -m pip install pandas") from error
        return pandas.DataFrame.from_records(self.history(), index="step")

    def plot(self, step: int | None = None, ax: Any = None) -> tuple[Any, Any]:
        """Draws the phases of each step, stacked, or one step with its GPU and its host lane.

        Args:
            step: The number of one step in the history; by default all are drawn.
            ax: The matplotlib axes to draw on; by default of a new figure.

        Returns:
            The matplotlib figure and axes.

        Raises:
            ImportError: If matplotlib is not installed (extra `plot`).
            ValueError: If the history has no such step.
        """
        from lightning_gputime import _plot

        if step is None:
            return _plot.plot_steps(self._read().newest(), ax)
        for times in self._read().newest():
            if times.step == step:
                return _plot.plot_step(times, ax)
        raise ValueError(f"step {step} is not in the history of {len(self.history())} steps")

    def save_trace(self, path: str | os.PathLike[str], steps: int = 1000) -> None:
        """Writes the newest steps as a trace that Perfetto and chrome://tracing open.

        It has a lane for the device and one for the host. A step takes about 1 kB, and as much
        again for each of the timer's `modules`.

        Args:
            path: The file, such as "trace.json"; it is replaced whole.
            steps: How many of the newest steps.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
        """
        from lightning_gputime._trace import trace

        _files.write(path, trace(self._read().newest()[-steps:]))
