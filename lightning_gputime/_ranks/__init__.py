"""Ranks of a distributed run: which one do the others wait for, and why?

Each rank sends its totals to rank zero, which compares them. The waits of a rank are marked in
`_instrumentation`, the advice is in `_diagnosis`.

- `comparison` finds the straggler: read `compare` from the local times to the `RankSummary`.
- `over_time` finds how the straggler changes over the run, and draws it in a terminal.
- `exchange` sends the totals, and makes all ranks time the same steps.

This module has the facts that a rank sends, and packs them.
"""

import json
import math
import statistics
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.sums import STEP, Sums
from lightning_gputime._phases import DATA, StepRecord, is_wait, of_one_callback, resolve_labels

MAX_LINES = 12
"""Number of lines that a rank sends: with these, a rank sends less than 1 KB."""
_MAX_WINDOWS, _N_NEWEST = 64, 32  # Number of windows of steps, and of steps, that a rank sends.

# Total time of each phase and of "step" (in milliseconds), and the number of steps in which it ran.
PhaseTotals = Mapping[str, tuple[float, int]]


class LineTime(NamedTuple):
    """Times of a line or a function on a rank, per step (in milliseconds)."""

    text: str  # Its name, such as "`Augment.__call__` (data.py:31)".
    function: str  # Qualified names of the function, and of the function that calls it.
    caller: str
    host_ms: float  # Local time in which the host set the pace, and in which the GPU did.
    gpu_ms: float
    busy_ms: float  # Time of the host without waits for the GPU.
    error_ms: float  # Half the width of the 95 % interval of the time.
    phases_ms: Mapping[str, float]  # Time by phase. Waits for other ranks, as `forward/comm`, too.

    @property
    def local_ms(self) -> float:
        return self.host_ms + self.gpu_ms

    @property
    def longest_ms(self) -> float:
        """Longest time that the line may have in a comparison: the longest lines are sent."""
        waits_ms = sum(ms for name, ms in self.phases_ms.items() if is_wait(name))
        return max(self.local_ms, self.busy_ms) + waits_ms


class BatchContent(NamedTuple):
    """Mean content of the batches of a timed step on a rank."""

    unit: str = ""  # "non-padding tokens", else "tokens", else "elements"; empty if unknown.
    amount: float = 0.0


_UNKNOWN = BatchContent()


class StepWindows(NamedTuple):
    """Mean times of a rank in windows of consecutive timed steps (in milliseconds)."""

    steps: int  # Number of steps in each window.
    first: Sequence[int]  # Number of the first step of each window; only on rank zero.
    local_ms: Sequence[float]
    wait_ms: Sequence[float]  # Waits for other ranks.
    newest_ms: Sequence[float]  # Local time of each of the newest steps.
    n: int  # Number of all steps.


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Sums over the steps of a rank, which the rank sends to rank zero.

    Attributes:
        phases: See `PhaseTotals`.
        deviation_ms: See `BatchMeans.deviation_ms`.
        host_shares: Fraction of each phase in which the host set the pace; empty if unknown. Then
            the host may have set the pace of all of it.
        lines: Its longest lines; empty if unknown.
        busy_ms: Time of the host per step without waits for the GPU (in milliseconds); None if
            unknown, and without a GPU.
        core_wait: Mean fraction of a step in which the loop waited for a CPU core; None if unknown.
        batch: Content of its batches.
        windows: Its times over the run. None if the details were not sent: these times,
            `host_shares`, `lines`, `busy_ms`, `core_wait` and `batch`.
    """

    phases: PhaseTotals
    deviation_ms: float = 0.0
    host_shares: Mapping[str, float] = field(default_factory=dict)
    lines: Sequence[LineTime] = ()
    busy_ms: float | None = None
    core_wait: float | None = None
    batch: BatchContent = _UNKNOWN
    windows: StepWindows | None = None

    @property
    def steps(self) -> int:
        return self.phases.get(STEP, (0.0, 0))[1]

    @property
    def error_ms(self) -> float:
        """Standard error of the mean local time (in milliseconds); infinite for a single step.

        Example: with a deviation of 1.5 ms, 1.5 / sqrt(36) = 0.25 ms after 36 steps.
        """
        return self.deviation_ms / math.sqrt(self.steps) if self.steps > 1 else math.inf


def encode(totals: RankTotals) -> bytes:
    """Return totals as they are sent to rank zero, which knows the numbers of the steps."""
    windows = totals.windows
    sent = replace(totals, windows=windows and windows._replace(first=()))
    # Level 1 is as small as higher levels here, and the fastest.
    return zlib.compress(json.dumps(astuple(sent), separators=(",", ":")).encode(), 1)


def decode(value: bytes) -> RankTotals:
    phases, deviation_ms, host_shares, lines, busy_ms, core_wait, batch, windows = json.loads(
        zlib.decompress(value)
    )
    return RankTotals(
        phases,
        deviation_ms,
        host_shares,
        [LineTime(*line) for line in lines],
        busy_ms,
        core_wait,
        BatchContent(*batch),
        windows and StepWindows(*windows),
    )


def totals_of(sums: Sums, deviation_ms: float = 0.0) -> RankTotals:
    """Return the totals of a rank, without the sub-phases of single callbacks."""
    phases = {**sums.phases, STEP: sums.step}
    return RankTotals(
        {
            name: (phase.device_ms, int(phase.n))
            for name, phase in phases.items()
            if not of_one_callback(name)
        },
        deviation_ms,
    )


def since(now: RankTotals, before: RankTotals | None) -> RankTotals:
    """Return a rank's totals, with the times of phases since its totals `before`.

    Everything else remains that of the whole run.
    """
    if before is None:
        return now
    phases = {}
    for name, (ms, n) in now.phases.items():
        ms_before, n_before = before.phases.get(name, (0.0, 0))
        if n > n_before:
            phases[name] = ms - ms_before, n - n_before
    return replace(now, phases=phases)


def line_times(rows: Iterable[LineRow]) -> list[LineTime]:
    """Return the times of the longest lines in steps."""
    lines = []
    for row in rows:
        if row.entry or not row.function:
            continue
        host_ms = gpu_ms = 0.0
        phases_ms: dict[str, float] = defaultdict(float)
        for name, part in row.phases.items():
            if is_wait(name):
                phases_ms[name] += part.ms
                continue
            host_ms += part.host_ms
            gpu_ms += part.gpu_ms
            # As in `RankSummary.phase`, only `data` has sub-phases.
            is_of_data = name.startswith(f"{DATA}/")
            phases_ms[name if is_of_data else name.partition("/")[0]] += part.ms
        lines.append(
            LineTime(
                str(row),
                row.function,
                row.path[-1].partition(" (")[0] if row.path else "",
                round(host_ms, 3),
                round(gpu_ms, 3),
                round(row.busy_ms or host_ms, 3),  # Only known on a GPU.
                round(row.error_ms, 3),
                {name: round(ms, 3) for name, ms in phases_ms.items()},
            )
        )
    return sorted(lines, key=lambda line: -line.longest_ms)[:MAX_LINES]


class BatchMeans:
    """Local time of a rank, and its waits for other ranks, in blocks of steps.

    They show the noise of the local time. Delays of a rank may last for hundreds of steps, so
    successive steps are correlated, but means over long blocks are not. The block length doubles as
    the run grows: "dynamic batch means", Yeh and Schmeiser (2000).
    """

    def __init__(self) -> None:
        self._length = 1  # Number of steps in a block.
        # Mean local time and mean wait of each full block, and the number of its first step.
        self._means_ms, self._waits_ms = list[float](), list[float]()
        self._first: list[int] = []
        # Local time, wait, and number of steps after these blocks.
        self._open_ms, self._open_wait_ms, self._n_open = 0.0, 0.0, 0
        self._open_first = 0
        self._newest_ms = deque[float](maxlen=_N_NEWEST)
        self._n = 0

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            local, waits = _local_marks(step.labels)
            ms = step.device_ms
            local_ms = sum(map(ms.__getitem__, local))
            self.take(local_ms, sum(map(ms.__getitem__, waits)) if waits else 0.0, step.number)

    def take(self, local_ms: float, wait_ms: float = 0.0, number: int = 0) -> None:
        """Add the local time and the wait of the next step, which has this number."""
        if not self._n_open:
            self._open_first = number
        self._open_ms += local_ms
        self._open_wait_ms += wait_ms
        self._n_open += 1
        self._n += 1
        self._newest_ms.append(local_ms)
        if self._n_open < self._length:
            return
        self._means_ms.append(self._open_ms / self._length)
        self._waits_ms.append(self._open_wait_ms / self._length)
        self._first.append(self._open_first)
        self._open_ms, self._open_wait_ms, self._n_open = 0.0, 0.0, 0
        if len(self._means_ms) == _MAX_WINDOWS:
            self._means_ms = _pair_means(self._means_ms)
            self._waits_ms = _pair_means(self._waits_ms)
            self._first = self._first[::2]
            self._length *= 2

    @property
    def windows(self) -> StepWindows:
        """The blocks, rounded to microseconds."""
        times_ms = self._means_ms, self._waits_ms, self._newest_ms
        local_ms, waits_ms, newest_ms = ([round(ms, 3) for ms in each_ms] for each_ms in times_ms)
        return StepWindows(self._length, [*self._first], local_ms, waits_ms, newest_ms, self._n)

    @property
    def deviation_ms(self) -> float:
        """Standard deviation of a step, increased to account for correlation (in milliseconds).

        Divided by the square root of n, it is the standard error of the mean over n steps. It is
        the maximum of the estimates from blocks of the current length, twice that length, and so
        on. 0 if there are too few blocks.

        Example: the means of 5 blocks of 16 steps deviate by 0.5 ms. The deviation of a step is
        0.5 * sqrt(16) = 2 ms, and with the margin for 5 blocks 2 * (1 + 2 / 4) = 3 ms.
        """
        means, length = self._means_ms, self._length
        largest_ms = 0.0
        while (n := len(means)) >= (4 if length > 1 else 2):
            # Delays of a rank last for several steps, so count at least 10 steps as one sample.
            deviation_ms = statistics.stdev(means) * math.sqrt(max(length, 10))
            # The deviation of a few blocks may be too small by chance.
            largest_ms = max(largest_ms, deviation_ms * (1 + 2 / (n - 1)))
            means, length = _pair_means(means), 2 * length
        return largest_ms


def _pair_means(means: list[float]) -> list[float]:
    """Return the means of blocks of twice the length, without an odd last block."""
    return [sum(pair) / 2 for pair in zip(means[::2], means[1::2], strict=False)]


@lru_cache(maxsize=256)
def _local_marks(labels: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the marks that start local time, and that start a wait."""
    phases_of_marks = [(i, names) for i, names in enumerate(resolve_labels(labels)) if names]
    waits = tuple(i for i, names in phases_of_marks if is_wait(names[-1]))
    return tuple(i for i, _ in phases_of_marks if i not in waits), waits
