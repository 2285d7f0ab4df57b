"""Compare sampled shares with true shares, in loops in which every n-th step is long.

Each loop is host-bound, with 0.8 ms per step. Every n-th step is long in the fetch, the body, a
logger or a callback. The timer has its default options. The clock is simulated: it advances only by
the work of the loop and the cost of events. So the true shares follow exactly, and results are the
same on every machine.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --loops 6     # a quick look
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from record import environment, new_parser, save
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, phase
from lightning_gputime.testing import MS, Adder, FakeEvent, FakeGPU, Layer

EVENT_US = 4.0
BASE_MS = {"data": 0.05, "other": 0.05, "forward": 0.25, "backward": 0.35}
"""Time of each phase of an ordinary step. In a loop of `patterns`, `other` varies by 20 %."""
PERIODS = (7, 10, 25, 49, 50, 51, 64, 100, 500)
PHASE_OF = {"fetch": "data", "body": "other", "logger": "logger", "callback": "callback"}
THRESHOLDS = (0.05, 0.2)  # Shares at which the verdict on a phase changes.
WARMUP = 5


class HostClock(FakeGPU):
    """Host clock that advances by work. Events cost `EVENT_US`, which is part of no phase."""

    def __init__(self) -> None:
        super().__init__()
        self.worked_ns = 0

    def host_work(self, ms: float) -> None:
        super().host_work(ms)
        self.worked_ns += round(ms * MS)

    def work(self, device_ms: float, host_ms: float = 0.0) -> None:
        self.host_work(device_ms + host_ms)

    def event(self) -> FakeEvent:
        return HostEvent(self)


class HostEvent(FakeEvent):
    """Event that is finished as soon as it is recorded."""

    def record(self) -> None:
        assert isinstance(self._gpu, HostClock)
        self._gpu.now += round(EVENT_US * 1e3)
        self._at = self._gpu.worked_ns

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class Pattern:
    place: str
    period: int
    offset: int
    extra_ms: float
    steps: int


def patterns(n: int) -> Iterator[Pattern]:
    """Yield n loops that differ in period, offset, place, length and size."""
    rng = np.random.default_rng(0)
    sizes, lengths = cycle((2.0, 8.0, 40.0)), cycle((2_000, 2_000, 5_000, 20_000))
    pairs = [(period, offset) for period in PERIODS for offset in (0, -1, None)]
    everywhere = [(place, *pair) for pair, place in product(pairs, PHASE_OF)]
    for place, period, offset in islice(
        (everywhere[i] for i in rng.permutation(len(everywhere))), n
    ):
        offset = int(rng.integers(period)) if offset is None else offset % period
        yield Pattern(place, period, offset, next(sizes), next(lengths))


@dataclass
class Trained:
    """A timer after training, and the true time of each phase in each step (in milliseconds)."""

    timer: GPUPhaseHooks
    times_ms: dict[str, npt.NDArray[np.float64]]

    @property
    def steps_ms(self) -> npt.NDArray[np.float64]:
        """Time of each step after the warm-up."""
        steps_ms: npt.NDArray[np.float64] = sum(self.times_ms.values(), np.zeros(1))
        return steps_ms[WARMUP:]

    @property
    def phases_ms(self) -> dict[str, float]:
        """Time of each phase after the warm-up."""
        return {name: float(times[WARMUP:].sum()) for name, times in self.times_ms.items()}


def train(
    n: int,
    place: str = "fetch",
    extra: Callable[[int], float] = lambda step: 0.0,
    other: Callable[[], float] = lambda: 1.0,
    **options: Any,
) -> Trained:
    """Train n steps, which take `extra(step)` ms longer at a place.

    The time of the phase `other` is multiplied by `other()`.
    """
    clock = HostClock()
    model = Layer(clock, BASE_MS["forward"], BASE_MS["backward"])
    optimizer = Adder(model.parameters(), clock, 0.0)
    times_ms = {name: np.zeros(n) for name in (*BASE_MS, PHASE_OF[place])}
    for name in ("forward", "backward"):
        times_ms[name] += BASE_MS[name]

    def work(at: str, step: int, ms: float) -> None:
        if at == place:
            ms += extra(step)
        clock.host_work(ms)
        times_ms[PHASE_OF[at]][step] += ms

    def loader() -> Iterator[tuple[int, Tensor]]:
        for step in range(n):
            work("fetch", step, BASE_MS["data"])
            yield step, torch.ones(1, 2)

    with GPUPhaseHooks(model, optimizer, _clock=clock, **options) as timer:
        for step, x in timer.steps(loader()):
            work("body", step, BASE_MS["other"] * other())
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if place == "callback":
                with phase("callback"):
                    work("callback", step, 0.02)
            elif place == "logger" and (ms := extra(step)) > 0:
                with phase("logger"):
                    clock.host_work(ms)
                    times_ms["logger"][step] += ms
    return Trained(timer, times_ms)


def check(pattern: Pattern) -> dict[str, Any]:
    """Train a loop, and compare the shares of the summary with the true shares."""
    rng = np.random.default_rng(pattern.period)

    def extra(step: int) -> float:
        is_due = step % pattern.period == pattern.offset
        return pattern.extra_ms * float(rng.normal(1.0, 0.1)) if is_due else 0.0

    trained = train(pattern.steps, pattern.place, extra, lambda: float(rng.uniform(0.8, 1.2)))
    summary, true_ms = trained.timer.summary(), trained.phases_ms
    all_ms = sum(true_ms.values())
    planted = PHASE_OF[pattern.place]
    off, errors = {}, {}
    for name in ("data", "other", "forward", "backward", planted):
        row = summary.rows.get(name)
        share, errors[name] = (row.share, row.share_error) if row is not None else (0.0, 0.0)
        off[name] = share - true_ms[name] / all_ms
    true = true_ms[planted] / all_ms
    is_clear = all(abs(true - bound) >= 0.05 for bound in THRESHOLDS)
    same_side = all((true + off[planted] >= bound) == (true >= bound) for bound in THRESHOLDS)
    return {
        "off": [abs(share) for share in off.values()],
        "is_close": all(abs(off[name]) <= max(0.03, errors[name]) for name in off),
        "is_covered": [abs(off[name]) <= errors[name] + 0.002 for name in off],
        "is_right": same_side or not is_clear,
        "mean_off": abs(summary.step.mean_ms * (pattern.steps - WARMUP) / all_ms - 1),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--loops", type=int, default=60)
    arguments = parser.parse_args()
    loops = []
    for pattern in patterns(arguments.loops):
        loops.append(check(pattern))
        if not loops[-1]["is_close"] or not loops[-1]["is_right"]:
            print("WRONG", pattern, loops[-1])
    off = np.concatenate([loop["off"] for loop in loops])
    covered = np.concatenate([loop["is_covered"] for loop in loops])
    results = {
        "loops": len(loops),
        "within_3_points_or_error": sum(loop["is_close"] for loop in loops),
        "intervals_that_cover": round(float(covered.mean()), 3),
        "right_side_of_thresholds": sum(loop["is_right"] for loop in loops),
        "rms_off_points": round(100 * float(np.sqrt(np.mean(np.square(off)))), 2),
        "max_off_points": round(100 * float(off.max()), 2),
        "max_mean_off_percent": round(100 * max(loop["mean_off"] for loop in loops), 2),
    }
    print(results)
    save(arguments.out, {**environment("machine", "torch", "command"), **results})


if __name__ == "__main__":
    main()
