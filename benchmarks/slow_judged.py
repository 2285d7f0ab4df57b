"""How what was found of slow steps is judged, and what looking costs."""

import time
import timeit
from collections import Counter
from functools import partial
from typing import Any

from lightning_gputime import SlowStep
from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import HostClock


def main_kind(slow: SlowStep) -> str:
    """Returns the kind of the largest cause, where that is more than what is unexplained."""
    if not slow.causes or slow.causes[0].exposed_ms <= slow.unexplained_ms:
        return "unexplained"
    largest = slow.causes[0]
    return "preempted" if largest.detail.startswith("others") else largest.kind


def score(steps: dict[int, str], found: list[SlowStep], next_too: set[str]) -> dict[str, Any]:
    """Sets what was found beside what was done.

    Args:
        steps: What happened in which step.
        found: The slow steps.
        next_too: The kinds that may show a step later: a stop takes some time to come, and a logger
            is called when the step is over.
    """
    said = {slow.step: main_kind(slow) for slow in found}
    named = {slow.step: {cause.kind for cause in slow.causes} for slow in found}
    rows: dict[str, Any] = {}
    used = set()
    for kind in dict.fromkeys(steps.values()):
        told: Counter[str] = Counter()
        n_named = 0
        own = [number for number, one in steps.items() if one == kind]
        for number in own:
            # The next step but one: a logger is called when a step is read, one step late.
            places = [number, number + 1, number + 2] if kind in next_too else [number]
            seen = [place for place in places if place in said]
            right = [place for place in seen if said[place] == kind]
            n_named += any(kind in named[place] for place in seen)
            place = (right or seen or [number])[0]
            used.add(place)
            told[said.get(place, "not slow")] += 1
        rows[kind] = {
            "injected": len(own),
            "largest cause": dict(told),
            "recall": told[kind] / len(own),
            "named among the causes": n_named / len(own),
        }
    others = Counter(kind for number, kind in said.items() if number not in used)
    for kind, row in rows.items():
        right = row["largest cause"].get(kind, 0)
        wrong = others[kind] + sum(
            one["largest cause"].get(kind, 0) for name, one in rows.items() if name != kind
        )
        row["precision"] = right / (right + wrong) if right else None
    return {"kinds": rows, "elsewhere": dict(others)}


def cost_us() -> dict[str, float]:
    """Returns what a step pays for that somebody looks, and a slow one for the answer."""
    analyzer = SlowStepAnalyzer(HostClock(), SlowLog())
    analyzer.attach()
    analyzer.loop_begins()
    labels = ("data", "other", "forward", "<after forward>", "backward", "optimizer", "other")
    device_ms = (1.0,) * len(labels)

    def block(last_ms: float) -> float:
        steps = []
        for number in range(25):
            begin = time.perf_counter_ns()
            analyzer.step_ends(begin)
            host_ns = tuple(range(begin, begin + 8_000_000, 1_000_000))
            steps.append(StepRecord(number, labels, device_ms, host_ns, 0.0, 0, False))
        steps[-1] = steps[-1]._replace(device_ms=(*device_ms[1:], last_ms - 6.0))
        read = ReadSteps(steps, 0)
        assert len(read.sums.each_ms) == 25  # Every step pays for these, judged or not.
        start = time.perf_counter()
        analyzer.steps_read(read)
        return (time.perf_counter() - start) * 1e6

    take_us = min(block(7.0) for _ in range(500))
    slow_us = min(block(99.0) for _ in range(100))
    end = partial(analyzer.step_ends, time.perf_counter_ns())
    end_us = min(timeit.repeat(end, number=1000, repeat=50)) * 1e3
    analyzer.remove()
    return {
        "each step": round(end_us + take_us / 25, 2),
        "a slow step": round(slow_us - take_us),
    }
