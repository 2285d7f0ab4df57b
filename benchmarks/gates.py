"""Check the decisions of `bench` as a gate in CI, on an idle and on a busy machine.

    python benchmarks/gates.py --json benchmarks/results/gates.json
    python benchmarks/gates.py --slower 0 --slower 15 --load 4 --rounds 10

The gate compares two versions of a training script, of which the second has slower steps by a known
amount. It passes (exit code 0), fails (1), or cannot tell (3).
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from answers import load
from record import environment, save

BOUND = "8%"
DECISIONS = {0: "passed", 1: "failed", 3: "could not tell"}


def train(slower: int) -> None:
    """Train a model, whose loss takes longer by a percentage of the step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(20)])
    head = nn.Linear(192, 10)
    model = nn.Sequential(blocks, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    auxiliary = nn.Sequential(*[nn.Linear(192, 192) for _ in range(slower // 5)])
    batches = [(torch.randn(128, 192), torch.randint(10, (128,))) for _ in range(400)]
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        if slower:
            loss = loss + 1e-3 * auxiliary(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gate(slower: int) -> tuple[str, float]:
    """Return the decision on a version that is slower by a percentage, and its duration in s."""
    script = f"{Path(__file__)} --train"
    command = [sys.executable, "-m", "lightning_gputime", "bench", f"{script} 0"]
    command += [f"{script} {slower}", "--fail-above", f"step:{BOUND}"]
    start_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    return DECISIONS.get(done.returncode, done.stderr), time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, help="run the training script")
    parser.add_argument("--slower", type=int, action="append", help="percentage; a multiple of 5")
    parser.add_argument("--load", type=int, action="append", help="number of busy processes")
    parser.add_argument("--rounds", type=int, default=5, help="number of gates of each kind")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    rows = []
    for busy in arguments.load or [0, 4]:
        for slower in arguments.slower or [0, 5, 15, 40]:
            with load(busy):
                found = [gate(slower) for _ in range(arguments.rounds)]
            decisions = Counter(decision for decision, _ in found)
            seconds = round(max(seconds for _, seconds in found))
            rows.append({"load": busy, "slower_percent": slower, **decisions, "max_s": seconds})
            print(rows[-1], flush=True)
    if arguments.json:
        header = environment("host", "python", "torch", "command") | {"bound": BOUND}
        save(arguments.json, {**header, "gates": rows})


if __name__ == "__main__":
    main()
