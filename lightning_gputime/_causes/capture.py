"""Traces of slow steps: where some have been, the next ones are caught with `torch.profiler`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_gputime._messages import messages
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.slow import SlowStep

_RECUR = 2
_WITHIN = 500
"""So many slow steps within so many steps let it catch the next ones."""

_WINDOW = 50
"""For so many steps."""

_SETTLE = 5
"""After so many of them it is known how long a step takes with the profiler."""

_COOL_DOWN = 1_000
"""For so many steps after that it rests."""

_AT_ONCE = 2
_FILES = 10
_MOST_BYTES = 100_000_000
"""It keeps so many traces in one window, so many in a run, and none that is larger."""


class Capture:
    """Profiles each step of a window on its own, and keeps the traces of slow ones alone.

    A step that is profiled is slower than others: it is part of no statistics.

    Args:
        folder: Where the traces go; None to take none.
        now_ns: Returns the host's time (in nanoseconds).
        new_profiler: Returns a profiler, with `start`, `stop` and `export_chrome_trace`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        now_ns: Callable[[], int],
        new_profiler: Callable[[], Any] | None = None,
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._now_ns = now_ns
        self._new_profiler = new_profiler or _new_profiler
        self.is_due = False
        """Whether `turn` must be called between two steps."""
        self._left = 0
        self._rests_until = 0
        self._slow: list[SlowStep] = []
        self._profiler: Any = None
        self._began_ns = 0
        self._took_ms: list[float] = []
        self._kept = self._files = 0
        # The steps that were profiled and are not read yet, with the traces of the slow ones.
        self._profiled: dict[int, str] = {}

    def saw(self, slow: Sequence[SlowStep]) -> None:
        """Must be told of slow steps. Where they recur, a window begins."""
        if self._folder is None or self.is_due or not slow:
            return
        newest = slow[-1].step
        self._slow = [one for one in [*self._slow, *slow] if one.step > newest - _WITHIN]
        if len(self._slow) >= _RECUR and newest >= self._rests_until and self._files < _FILES:
            self.is_due, self._left = True, _WINDOW
            self._took_ms, self._kept = [], 0

    def turn(self, number: int) -> None:
        """Must be called after the end of a step, where it `is_due`.

        Args:
            number: The number of the step that has ended.
        """
        if not self.is_due:
            return
        try:
            if self._profiler is not None:
                self._end(number)
            self._left -= 1
            if self._left < 0 or self._kept >= _AT_ONCE or self._files >= _FILES:
                self.is_due, self._slow = False, []
                self._rests_until = number + _COOL_DOWN
            elif torch._C._autograd._profiler_enabled():
                # Somebody else's: two do not run together.
                self.is_due = False
            else:
                self._profiler = self._new_profiler()
                self._profiler.start()
                self._began_ns = self._now_ns()
        except Exception as error:
            messages.warning("Slow steps are no longer traced: %r", error)
            self._folder, self._profiler, self.is_due = None, None, False

    def _end(self, number: int) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        took_ms = (self._now_ns() - self._began_ns) / 1e6
        self._profiled[number] = ""
        # As much longer than others with the profiler as the slow ones were without it.
        usual_ms = sorted(self._took_ms)[len(self._took_ms) // 2] if self._took_ms else 0.0
        excess_ms = min(slow.excess_ms for slow in self._slow) / 2
        if len(self._took_ms) >= _SETTLE and took_ms > usual_ms + excess_ms:
            self._keep(profiler, number)
        self._took_ms.append(took_ms)

    def _keep(self, profiler: Any, number: int) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{number}.json.gz"
        profiler.export_chrome_trace(str(path))
        if path.stat().st_size > _MOST_BYTES:
            path.unlink()
            return
        self._kept += 1
        self._files += 1
        self._profiled[number] = str(path)

    def remove(self) -> None:
        """Ends what runs. Safe to call twice."""
        profiler, self._profiler = self._profiler, None
        self.is_due, self._folder = False, None
        if profiler is not None:
            profiler.stop()

    def take_out(
        self, steps: list[StepRecord]
    ) -> tuple[list[StepRecord], list[tuple[StepRecord, str]]]:
        """Parts steps that were read into those without a profiler and those with a trace."""
        if not self._profiled:
            return steps, []
        others = [step for step in steps if step.number not in self._profiled]
        traced = [(step, path) for step in steps if (path := self._profiled.pop(step.number, ""))]
        return others, traced


def _new_profiler() -> Any:
    return torch.profiler.profile(record_shapes=True)
