"""What a fit leaves behind: the table, the figure, and the file."""

import os
import time
from pathlib import Path
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._messages import messages
from lightning_gputime._results.plot import new_axes
from lightning_gputime._results.table import show
from lightning_gputime._timer import Timer

_PATIENCE = 100
"""Saving while training goes on may take a hundredth of the time."""


class Reports:
    """Show and save what a timer has measured of a fit, on rank zero.

    Args:
        summary: Whether to print the table.
        log_figure: Whether loggers get the figure.
        save: The file, if there shall be one.

    Raises:
        TypeError: If `save` is no path.
        ImportError: If `log_figure` is set and matplotlib is not installed.
    """

    def __init__(self, *, summary: bool, log_figure: bool, save: Any) -> None:
        if save is not None and (not isinstance(save, str | os.PathLike) or not os.fspath(save)):
            raise TypeError(f"save must be a path such as 'run.json.gz', or None, got {save!r}")
        self._summary, self._log_figure = summary, log_figure
        self._path: str | None = None
        if save is not None:
            # Now: training may change the working folder, and would leave two files.
            self._path = os.path.abspath(os.path.expanduser(os.fspath(save)))
        if log_figure:
            new_axes()  # Raises now if matplotlib is missing, not when training ends.
        # When the next file is due while training goes on, and whether one failed.
        self._due = 0.0
        self._failed = False

    def show(self, timer: Timer, trainer: _lightning.Trainer, prefix: str) -> None:
        """Print the table, and log the figure, where they are wanted."""
        if not trainer.is_global_zero:
            return
        try:
            if self._summary:
                show(timer._read().summary_to_print())
            if self._log_figure and timer.last is not None:
                figure, _ = timer.plot(ax=new_axes())
                _lightning.send_figure(trainer, f"{prefix}/steps", figure, timer.last.step)
        except Exception as error:
            # As where Ctrl-C has ended `tee`, too: the run is still to be saved.
            messages.warning("The table or the figure could not be shown: %r", error)

    def save(self, timer: Timer, trainer: _lightning.Trainer) -> None:
        """Write the file, if one is wanted and there is a step. Warn once if it cannot be."""
        if self._path is None or not trainer.is_global_zero:
            return
        if timer.last is None and not timer.summary().probed_steps:
            return  # Without a step a file of before is worth more.
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            timer.save(self._path)
        except Exception as error:
            if not self._failed:
                messages.warning(
                    "The run is not saved: %s. Its file has what was saved before, or is not"
                    " there. Training, its logs and the table are not touched.",
                    error,
                )
            self._failed = True

    def save_if_due(self, timer: Timer, trainer: _lightning.Trainer) -> None:
        """As `save`, unless that would take much of the time: for a run that is killed."""
        if time.perf_counter() >= self._due:
            begin = time.perf_counter()
            self.save(timer, trainer)
            end = time.perf_counter()
            self._due = end + _PATIENCE * (end - begin)
