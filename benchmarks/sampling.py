"""Compare sampled shares with true shares, in loops in which every n-th step is long.

Each loop is host-bound, with 0.8 ms per step. Every n-th step is long in the fetch, the body, a
logger or a callback. The timer has its default options. The clock is simulated: it advances only by
the work of the loop and the cost of events. So the true shares follow exactly, and results are the
same on every machine.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --loops 6     # a quick look
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice, product
from typing import Any

import numpy as np
import torch
from record import environment, new_parser, save
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, phase

MS = 1_000_000
EVENT_US = 4.0
PERIODS = (7, 10, 25, 49, 50, 51, 64, 100, 500)
PLACES = ("fetch", "body", "logger", "callback")
PHASE_OF = {"fetch": "data", "body": "other", "logger": "logger", "callback": "callback"}
THRESHOLDS = (0.05, 0.2)  # Shares at which the verdict on a phase changes.
WARMUP = 5


class ExactClock:
    """Host clock that advances by `work`. Events cost `EVENT_US`, which is part of no phase."""

    def __init__(self) -> None:
        self.ns = self.worked_ns = 0

    def work(self, ms: float) -> None:
        self.ns += round(ms * MS)
        self.worked_ns += round(ms * MS)

    def event(self) -> "ExactEvent":
        return ExactEvent(self)

    def host_ns(self) -> int:
        return self.ns

    def is_capturing(self) -> bool:
        return False


class ExactEvent:
    """Event on an `ExactClock`. It is finished as soon as it is recorded."""

    def __init__(self, clock: ExactClock) -> None:
        self._clock, self._at = clock, 0

    def record(self) -> None:
        self._clock.ns += round(EVENT_US * 1e3)
        self._at = self._clock.worked_ns

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "ExactEvent", /) -> float:
        return (end_event._at - self._at) / MS


class Work(torch.autograd.Function):
    """Identity that takes time in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Any, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.clock, ctx.backward_ms = clock, backward_ms
        clock.work(forward_ms)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.work(ctx.backward_ms)
        return grads[0], None, None, None


class Model(nn.Module):
    def __init__(self, clock: ExactClock) -> None:
        super().__init__()
        self._clock = clock
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Work.apply(x * self.weight, self._clock, 0.25, 0.35)  # type: ignore[no-untyped-call]
        return found


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
    everywhere = [(place, *pair) for pair, place in product(pairs, PLACES)]
    for place, period, offset in islice(
        (everywhere[i] for i in rng.permutation(len(everywhere))), n
    ):
        offset = int(rng.integers(period)) if offset is None else offset % period
        yield Pattern(place, period, offset, next(sizes), next(lengths))


def train(pattern: Pattern) -> tuple[GPUPhaseHooks, dict[str, float]]:
    """Return the timer, and the true time of each phase without the warm-up (in milliseconds)."""
    clock = ExactClock()
    rng = np.random.default_rng(pattern.period)
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    true_ms = dict.fromkeys(("data", "other", "forward", "backward", "logger", "callback"), 0.0)

    def work(name: str, step: int, ms: float) -> None:
        clock.work(ms)
        if step >= WARMUP:
            true_ms[name] += ms

    def extra(place: str, step: int) -> float:
        is_due = place == pattern.place and step % pattern.period == pattern.offset
        return pattern.extra_ms * float(rng.normal(1.0, 0.1)) if is_due else 0.0

    def loader() -> Iterator[tuple[int, Tensor]]:
        for step in count():
            work("data", step, 0.05 + extra("fetch", step))
            yield step, torch.ones(1)

    with GPUPhaseHooks(model, optimizer, _clock=clock) as timer:
        for step, x in timer.steps(islice(loader(), pattern.steps)):
            work("other", step, 0.05 * float(rng.uniform(0.8, 1.2)) + extra("body", step))
            loss = model(x).sum()
            loss.backward()
            if step >= WARMUP:
                true_ms["forward"] += 0.25
                true_ms["backward"] += 0.35
            optimizer.step()
            optimizer.zero_grad()
            if pattern.place == "callback":
                with phase("callback"):
                    work("callback", step, 0.02 + extra("callback", step))
            elif (ms := extra("logger", step)) > 0:
                with phase("logger"):
                    work("logger", step, ms)
    return timer, true_ms


def judge(pattern: Pattern, timer: GPUPhaseHooks, true_ms: dict[str, float]) -> dict[str, Any]:
    """Compare the shares of the summary with the true shares."""
    summary = timer.summary()
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
        loops.append(judge(pattern, *train(pattern)))
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
