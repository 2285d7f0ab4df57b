"""Check the decisions of `bench` as a gate in CI, on an idle and on a busy machine.

    python benchmarks/gates.py --out benchmarks/results/gates.json
    python benchmarks/gates.py --slower 0 --slower 15 --load 4 --rounds 10 --cores 0-1

Each gate has two cores, shared with a number of busy processes. It compares two versions of a
training script, of which the second has slower steps by a known amount. It passes (exit code 0),
fails (1), or cannot tell (3).
"""

import os
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from record import environment, new_parser, save

BOUND = "7.5%"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
"""Program of a busy process, which ends with its parent."""
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
    auxiliary = nn.Sequential(*[nn.Linear(192, 192) for _ in range(round(slower / 3))])
    batches = [(torch.randn(128, 192), torch.randint(10, (128,))) for _ in range(250)]
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        if slower:
            loss = loss + 1e-3 * auxiliary(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def load(n: int, command: Sequence[str] = ()) -> Iterator[None]:
    """Run n busy processes, with a command in front of each."""
    processes = [subprocess.Popen([*command, sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def gate(slower: int, busy: int, cores: set[int], log: Path) -> tuple[str, float]:
    """Return the decision on a version that is slower by a percentage, and its duration in s."""
    on_cores = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
    script = f"{Path(__file__)} --train"
    bench = [sys.executable, "-m", "lightning_gputime", "bench", f"{script} 0"]
    bench += [f"{script} {slower}", "--fail-above", f"step:{BOUND}"]
    start_s = time.perf_counter()
    with load(busy, on_cores), log.open("a") as output:
        done = subprocess.run([*on_cores, *bench], stdout=output, stderr=output)
    return DECISIONS[done.returncode], time.perf_counter() - start_s


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--train", type=int, help="run the training script")
    parser.add_argument("--slower", type=int, action="append", help="percentage")
    parser.add_argument("--load", type=int, action="append", help="busy processes on two cores")
    parser.add_argument("--rounds", type=int, default=5, help="number of gates of each kind")
    parser.add_argument("--cores", help="such as 0-7, for a gate on each two; all by default")
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    first, _, last = (arguments.cores or f"0-{(os.cpu_count() or 1) - 1}").partition("-")
    pairs = queue.SimpleQueue[set[int]]()
    for core in range(int(first), int(last), 2):
        pairs.put({core, core + 1})
    logs = Path(tempfile.mkdtemp(prefix="gates-"))
    found = dict[tuple[int, int], list[tuple[str, float]]]()

    def decide(kind: tuple[int, int]) -> None:
        cores = pairs.get()
        try:
            decision = gate(kind[1], kind[0], cores, logs / f"cores-{min(cores)}.txt")
        finally:
            pairs.put(cores)
        found.setdefault(kind, []).append(decision)
        print(*kind, *decision, flush=True)

    kinds = [*product(arguments.load or [0, 4], arguments.slower or [0, 5, 15, 40])]
    with ThreadPoolExecutor(pairs.qsize()) as pool:
        list(pool.map(decide, kinds * arguments.rounds))
    rows = [
        {
            "load": busy,
            "slower_percent": slower,
            **Counter(decision for decision, _ in found[busy, slower]),
            "max_s": round(max(seconds for _, seconds in found[busy, slower])),
        }
        for busy, slower in sorted(found)
    ]
    print(*rows, sep="\n")
    header = environment("host", "python", "torch", "command") | {"bound": BOUND}
    save(arguments.out, {**header, "gates": rows})


if __name__ == "__main__":
    main()
