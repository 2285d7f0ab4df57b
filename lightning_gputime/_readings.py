"""What can be read of a measurement, while it runs and when it is over."""

import os
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lightning_gputime._options import check_int
from lightning_gputime._phases import StepTimes
from lightning_gputime._results import files
from lightning_gputime._results.results import Results
from lightning_gputime._results.slow import SlowSteps
from lightning_gputime._results.summary import PhaseSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Readings:
    """The questions that all timers answer."""

    def _read(self) -> Results:
        """Returns what was measured so far."""
        raise NotImplementedError

    @property
    def last(self) -> StepTimes | None:
        """The newest step that the device has finished, or None."""
        return self._read().last

    def history(self) -> npt.NDArray[Any]:
        """Returns the newest steps, as a structured array of shape (steps,).

        Its fields are `step` (int), `step_ms`, `host_wait_ms` and `<phase>_ms` (in milliseconds);
        NaN where a phase did not run. Warm-up steps are included.
        """
        return self._read().history()

    def summary(self) -> PhaseSummary:
        """Returns the statistics of the steps read so far, warm-up left out."""
        return self._read().summary()

    def _repr_html_(self) -> str:
        """Returns the table of the summary, for a notebook."""
        return self._read().summary_to_print()._repr_html_()

    def slowest(self, n: int = 10) -> SlowSteps:
        """Returns the slowest steps since the warm-up, and why they were slow.

        A step is slow that takes longer than the median of the 50 steps before it (taken anew every
        25 steps) by more than five median deviations, 10 % of it and 0.5 ms. What no detector has
        seen the cause of is unexplained.

        Args:
            n: How many, those first that exceed the usual step most; 1,000 are kept.

        Returns:
            A sequence of `SlowStep`; `print` shows it as a table.

        Raises:
            TypeError: If `n` is no integer.
            ValueError: If `n` is below 1.
        """
        check_int("n", n, 1, "the number of slow steps to return")
        return self._read().slowest(n)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the history as CSV: a row a step, empty where a phase did not run.

        Args:
            path: The file; it is replaced whole.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
        """
        files.write(path, files.csv_text(self.history()))

    def to_pandas(self) -> "DataFrame":
        """Returns the history as a `pandas.DataFrame`, with the number of the step as its index.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: python -m pip install pandas") from error
        return pandas.DataFrame.from_records(self.history(), index="step")

    def plot(self, step: int | None = None, ax: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draws the phases of each step, stacked, or one step with its GPU and its host lane.

        More than 500 steps are drawn in bins: the medians of their phases, stacked, and a line for
        the 95th percentile of their steps.

        Args:
            step: The number of one step in the history; by default all are drawn.
            ax: The matplotlib axes to draw on; by default of a new figure.

        Returns:
            The matplotlib figure and axes. A notebook shows what is returned, once.

        Raises:
            ImportError: If matplotlib is not installed (extra `plot`).
            ValueError: If the history has no such step.
        """
        from lightning_gputime._results import plot

        results = self._read()
        return plot.plot_steps(results, ax) if step is None else plot.plot_step(results, step, ax)

    def save_trace(self, path: str | os.PathLike[str], steps: int = 1000) -> None:
        """Writes the newest steps as a trace that Perfetto and chrome://tracing open.

        It has a lane for the device and one for the host. A step takes about 1 kB, and as much
        again for each of the timer's `modules`.

        Args:
            path: The file, such as "trace.json"; it is replaced whole.
            steps: How many of the newest steps.

        Raises:
            OSError: If it cannot be written. No measurement is lost.
            TypeError: If `steps` is no integer.
            ValueError: If `steps` is below 1.
        """
        from lightning_gputime._results.trace import trace

        check_int("steps", steps, 1, "the number of newest steps to write")
        files.write(path, trace(self._read().newest()[-steps:]))
