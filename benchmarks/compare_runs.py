"""Measures how often two runs are called different that are equal, and that are not.

Really run pairs, one process after the other:

    python benchmarks/compare_runs.py record runs --n 40
    python benchmarks/compare_runs.py judge runs --out benchmarks/results/compare_runs.json

The first trains a small net on the CPU, 1,000 steps of some 15 ms each time, and saves each run. The
second compares them, and what is resampled from them.
"""

import subprocess
import sys
from pathlib import Path

import torch
from record import new_parser
from torch import nn

from lightning_gputime import GPUPhaseHooks

STEPS = 1000


def train(path: Path) -> None:
    """Trains a net, and saves the run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(256, 512)
    with GPUPhaseHooks(net, optimizer, warmup_steps=20) as timer:
        for _ in timer.steps(range(STEPS + 20)):
            loss = (net(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    timer.save(path)
    print(path, timer.summary().step.p50_ms, timer.summary().step.mean_ms, flush=True)


def record(folder: Path, n: int) -> None:
    """Trains so many times, each time in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        path = folder / f"run{i:03}.json.gz"
        subprocess.run([sys.executable, __file__, "train", str(path)], check=True)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=("record", "train", "judge"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--n", type=int, default=40)
    args = parser.parse_args()
    if args.what == "train":
        train(args.path)
    elif args.what == "record":
        record(args.path, args.n)


if __name__ == "__main__":
    main()
