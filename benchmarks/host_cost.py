"""Report the CPU time and the calls that the timer adds to a timed and to an untimed step.

The steps are nearly empty and run on the CPU, so the timer's code stays in the processor's cache.
`cold_cost.py` measures the cost in a loop that does real work.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --rounds 3
"""

import argparse
import random
import time

import torch
from host_counts import NEVER, STEPS, WAYS, Batches, HostTime, Net, Task, count_all
from models import bare_trainer, be_quiet

KINDS = {"no timer": 0, "timed": 1, "untimed": NEVER}


class Stopwatch:
    """Stopwatch of the CPU time of this thread, which excludes other processes."""

    seconds = 0.0

    def begin(self) -> None:
        self.seconds = -time.thread_time()

    def end(self) -> None:
        self.seconds += time.thread_time()


def train_without_timer(way: str, watch: Stopwatch) -> None:
    if way == "GPUPhaseTimer":
        bare_trainer(accelerator="cpu", max_epochs=1).fit(Task(HostTime()), Batches(watch))
        return
    net = Net(HostTime())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for x in Batches(watch):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def us_per_step(way: str, kind: str) -> float:
    watch = Stopwatch()
    if kind == "no timer":
        train_without_timer(way, watch)
    else:
        WAYS[way](HostTime(), watch, KINDS[kind])
    return watch.seconds / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    be_quiet()
    counts = count_all()
    for way in WAYS:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in random.sample([*KINDS], len(KINDS)):
                times[kind].append(us_per_step(way, kind))
        us = {kind: min(values) for kind, values in times.items()}
        for kind in ("timed", "untimed"):
            added = us[kind] - us["no timer"]
            print(f"{way}, {kind}: {added:+.1f} us, {counts[way][kind]:.4g} calls")


if __name__ == "__main__":
    main()
