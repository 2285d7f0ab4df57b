"""How exact are shares that are sampled, in loops that do something every n-th step?

Each loop is host-bound and takes 0.8 ms a step. Every n-th step it does something long, in the
fetch, in the body, in a logger or in a callback. The timer has its default options. The clock is
exact: it moves only when the loop says so, and by what an event costs. So the true share of each
phase is known, and results are the same on every machine.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --loops 6     # fewer, for a look
    python benchmarks/sampling.py --real        # a few of them on the real clock, with sleeps
"""

import time
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


class ExactClock:
    """A host's clock that moves when it is told to; an event costs it `EVENT_US`, and no phase."""

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
    """An event on an `ExactClock`: finished when it is recorded."""

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


class RealClock:
    """The real clock, which the timer then takes by itself."""

    def work(self, ms: float) -> None:
        end = time.perf_counter() + ms / 1e3
        if ms > 1:
            time.sleep(ms / 1e3)
        while time.perf_counter() < end:
            pass


class Work(torch.autograd.Function):
    """The identity, which takes time in both directions."""

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
    """A model whose forward and backward take a known time."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self._clock = clock
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Work.apply(x * self.weight, self._clock, 0.25, 0.35)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True)
class Pattern:
    """A loop that does something long in some of its steps."""

    place: str
    period: int
    offset: int
    extra_ms: float
    steps: int


def patterns(n: int) -> Iterator[Pattern]:
    """Yields the loops: periods and offsets by places, with lengths and sizes in turn."""
    rng = np.random.default_rng(0)
    sizes, lengths = cycle((2.0, 8.0, 40.0)), cycle((2_000, 2_000, 5_000, 20_000))
    both = [(period, offset) for period in PERIODS for offset in (0, -1, None)]
    everywhere = [(place, *one) for one, place in product(both, PLACES)]
    for place, period, offset in islice(
        (everywhere[i] for i in rng.permutation(len(everywhere))), n
    ):
        offset = int(rng.integers(period)) if offset is None else offset % period
        yield Pattern(place, period, offset, next(sizes), next(lengths))


def train(pattern: Pattern, clock: Any, **options: Any) -> tuple[GPUPhaseHooks, dict[str, float]]:
    """Trains, and returns the timer and the true time of each phase without the warm-up (in ms)."""
    rng = np.random.default_rng(pattern.period)
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    true_ms = dict.fromkeys(("data", "other", "forward", "backward", "logger", "callback"), 0.0)
    warmup = 5

    def work(name: str, step: int, ms: float) -> None:
        clock.work(ms)
        if step >= warmup:
            true_ms[name] += ms

    def extra(place: str, step: int) -> float:
        is_due = place == pattern.place and step % pattern.period == pattern.offset
        return pattern.extra_ms * float(rng.normal(1.0, 0.1)) if is_due else 0.0

    def loader() -> Iterator[tuple[int, Tensor]]:
        for step in count():
            work("data", step, 0.05 + extra("fetch", step))
            yield step, torch.ones(1)

    timer = GPUPhaseHooks(model, optimizer, **options)
    with timer:
        for step, x in timer.steps(islice(loader(), pattern.steps)):
            work("other", step, 0.05 * float(rng.uniform(0.8, 1.2)) + extra("body", step))
            loss = model(x).sum()
            loss.backward()
            if step >= warmup:
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
    """Compares the shares of the summary with the true ones."""
    summary = timer.summary()
    all_ms = sum(true_ms.values())
    rows: dict[str, Any] = {}
    for name in ("data", "other", "forward", "backward", PHASE_OF[pattern.place]):
        row = summary.rows.get(name)
        share, error = (row.share, row.share_error) if row is not None else (0.0, 0.0)
        true = true_ms[name] / all_ms
        rows[name] = {"true": true, "share": share, "error": error, "off": abs(share - true)}
    unsampled = summary.not_sampled_share
    planted = rows[PHASE_OF[pattern.place]]
    is_clear = all(abs(planted["true"] - bound) >= 0.05 for bound in THRESHOLDS)
    same_side = all((planted["share"] >= b) == (planted["true"] >= b) for b in THRESHOLDS)
    true_mean_ms = all_ms / (pattern.steps - 5)
    return {
        "rows": rows,
        "unsampled": unsampled,
        "is_close": all(r["off"] <= max(0.03, r["error"]) for r in rows.values()),
        "is_covered": [r["off"] <= r["error"] + 0.002 for r in rows.values()],
        "is_right": same_side or not is_clear,
        "is_silent": not same_side and unsampled > 0.03,
        "mean_off": abs(summary.step.mean_ms / true_mean_ms - 1),
        "timed": summary.steps,
    }


def main() -> None:
    """Train all loops, and print how exact the shares are."""
    parser = new_parser(__doc__)
    parser.add_argument("--loops", type=int, default=60)
    parser.add_argument("--real", action="store_true", help="on the real clock")
    parser.add_argument("--each", action="store_true", help="print a line for each loop")
    arguments = parser.parse_args()
    found = []
    for pattern in patterns(arguments.loops):
        clock: Any = RealClock() if arguments.real else ExactClock()
        options = {} if arguments.real else {"_clock": clock}
        timer, true_ms = train(pattern, clock, **options)
        one = judge(pattern, timer, true_ms)
        found.append(one)
        planted = one["rows"][PHASE_OF[pattern.place]]
        if arguments.each or not one["is_close"] or not one["is_right"]:
            print(
                f"{pattern.place:9}{pattern.period:4}{pattern.offset:4}{pattern.extra_ms:5.0f} ms"
                f"{pattern.steps:7} steps, timed {one['timed']:5}: true {planted['true']:6.1%}"
                f" read {planted['share']:6.1%} ± {planted['error']:5.1%}"
                f" unsampled {one['unsampled']:5.1%} mean off {one['mean_off']:5.1%}"
                f"{'' if one['is_close'] else '  NOT CLOSE'}{'' if one['is_right'] else '  WRONG'}"
            )
    covered = [is_covered for one in found for is_covered in one["is_covered"]]
    off = [row["off"] for one in found for row in one["rows"].values()]
    result = {
        "loops": len(found),
        "within_3_points_or_error": sum(one["is_close"] for one in found),
        "intervals_that_cover": round(float(np.mean(covered)), 3),
        "right_side_of_thresholds": sum(one["is_right"] for one in found),
        "rms_off_points": round(100 * float(np.sqrt(np.mean(np.square(off)))), 2),
        "max_off_points": round(100 * max(off), 2),
        "max_mean_off_percent": round(100 * max(one["mean_off"] for one in found), 2),
    }
    print(result)
    save(arguments.out, {**environment("machine", "torch", "command"), **result})


if __name__ == "__main__":
    main()
