"""Slowdowns reported in real loops: three that get slower, and a steady one.

    python benchmarks/slowdown_loops.py --rounds 5 --out benchmarks/results/slowdown_loops.json
    python benchmarks/slowdown_loops.py --device cpu

Each loop trains a small net for 3,000 steps of 1.5 to 3 ms, every one of them timed. The host sets
the pace: what it does beside the net grows, or gets longer at once.
"""

import statistics
import time
from collections.abc import Iterator

import torch
from record import environment, new_parser, save
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._measurement.changes import Slowdown

STEPS = 3000
JUMP_STEP = 1800
STEADY, LEAK, GRAPHS, JUMP = (
    "steady",
    "a loader whose items take longer with each one",
    "losses kept with their graphs, some of them read at each step",
    "0.4 ms more from step 1,800 on",
)
PHASES = {LEAK: "data", GRAPHS: "other", JUMP: "other"}
"""Where each loop spends what it takes longer."""


def batches(kind: str) -> Iterator[Tensor]:
    """Yields random batches, each of which takes a millisecond to load, or longer."""
    for step in range(STEPS):
        time.sleep(1e-3 + (2e-7 * step if kind == LEAK else 0.0))
        yield torch.randn(16, 64)


def train(kind: str, device: torch.device) -> tuple[Slowdown | None, float]:
    """Returns the slowdown that is reported, and by how much the last 300 steps were longer."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    # To read one off a GPU takes some ten times as long.
    read_every = 20 if device.type == "cuda" else 2
    kept: list[Tensor] = []
    with GPUPhaseHooks(net, optimizer, every_n_steps=1) as timer:
        for step, x in enumerate(timer.steps(batches(kind))):
            loss = net(x.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if kind == GRAPHS:
                kept.append(loss)
                for one in kept[::read_every]:
                    one.item()
            if kind == JUMP and step >= JUMP_STEP:
                time.sleep(4e-4)
    step_ms = timer.history()["step_ms"]
    first, last = (statistics.median(part) for part in (step_ms[300:600], step_ms[-300:]))
    return timer.summary().slowdown, last / first - 1


def main() -> None:
    """Trains, prints, and writes a file."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = ["gpu"] if options.device.type == "cuda" else []
    header = environment(*on_gpu, "host", "python", "torch", "command")
    found = {}
    for kind in (STEADY, LEAK, GRAPHS, JUMP):
        said, longer = zip(
            *(train(kind, options.device) for _ in range(options.rounds)), strict=True
        )
        phases = [one.phase for one in said if one is not None]
        found[kind] = {
            "reported": len(phases),
            "in the right phase": phases.count(PHASES.get(kind, "")),
            "last 300 steps by the first": [round(float(one), 4) for one in longer],
            "sentences": [str(one) for one in said],
        }
        print(kind, *found[kind].values(), sep="\n  ", flush=True)
        save(options.out, {**header, "loops": found})


if __name__ == "__main__":
    main()
