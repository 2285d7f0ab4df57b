"""File of a run, rewritten during training."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_gputime._messages import WarnOnce
from lightning_gputime._runs import saved

_NOT_SAVED = (
    "The run is not saved: %s. Its file has the last saved state, or does not exist. Training, its"
    " logs and the table are not affected."
)
_MIN_INTERVAL_S = 10.0  # Minimum time between two files.
_MIN_INTERVAL_RATIO = 100  # Minimum time until the next file, as a multiple of the saving time.


def _identity(path: str) -> tuple[int, int] | None:
    """Return the modification time and the inode of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


class LiveFile:
    """File of a run, rewritten every 10 s and at the end of each epoch.

    It is rewritten less often if saving would take more than 1 % of the time.

    Attributes:
        path: Path of the file; None if no file is written.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        # Earliest times of the next file (`time.perf_counter`): inside and at the end of an epoch.
        self._due_s = 0.0
        self._epoch_due_s = 0.0
        self._written: tuple[int, int] | None = None  # Identity of the newest file.
        self._warn_once = WarnOnce()

    def start(self, path: str | None) -> None:
        """Rewrite this file from now on; None for no file."""
        self.path = path
        if path is not None:
            saved.remove_leftovers(path)
            self._due_s = time.perf_counter() + _MIN_INTERVAL_S

    def is_due(self, *, is_epoch_end: bool = False) -> bool:
        """Return True if it is time to rewrite the file."""
        due_s = self._epoch_due_s if is_epoch_end else self._due_s
        return self.path is not None and time.perf_counter() >= due_s

    def rewrite(self, save: Callable[[str], None]) -> None:
        """Rewrite the file, if any, and set the time at which the next rewrite is due."""
        start_s = time.perf_counter()
        if self.path is not None:
            self.try_to_save(self.path, save)
        end_s = time.perf_counter()
        self._epoch_due_s = end_s + _MIN_INTERVAL_RATIO * (end_s - start_s)
        self._due_s = max(self._epoch_due_s, end_s + _MIN_INTERVAL_S)

    def wrote(self, path: str) -> bool:
        """Return True if the file at this path is the newest file that this object has written."""
        return self._written is not None and self._written == _identity(path)

    def try_to_save(self, path: str, save: Callable[[str], None]) -> bool:
        """Save the run, and return True. If that fails, warn once and return False."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save(path)
            self._written = _identity(path)
        except Exception as error:
            self._warn_once(_NOT_SAVED, error)
            return False
        return True
