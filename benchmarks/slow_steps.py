"""Measures how often the cause of a slow step is named, and how often a wrong one is.

In small nets on the CPU, whose batches vary as those of a training do, something is made to happen
in steps drawn by chance, each kind of cause 200 times: in a plain loop a garbage collection, a
compilation, a process that is stopped, an item that is late and a logger that is slow; under
Lightning a checkpoint; under DDP a rank that is late. With `--cuda` the plain loop trains on the
GPU, and `torch.cuda.empty_cache()` is called as well. Then a run in which nothing happens. On the
host's clock all of a delay reaches the step. Beside that, what looking costs the host.

A step counts as found with the kind of its largest cause. That other processes had the processor
is no injection, but the count of the machine's own scheduler: such steps stand apart, as
`preempted`.

    python benchmarks/slow_steps.py --out benchmarks/results/slow_steps.json
"""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from loops import bare_trainer, be_quiet
from models import Batch, Repeat
from record import environment, new_parser, save
from slow_judged import cost_us, main_kind, score
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, SlowStep

LATE_S = 0.03
GAP = (6, 14)
"""The fewest and the most steps from one injection to the next."""

STOPPER = f"""
import os, random, signal, sys, time
for line in sys.stdin:
    time.sleep(random.uniform(0.0, 0.003))
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep({LATE_S})
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def new_net(device: str = "cpu") -> nn.Module:
    """Returns a net whose step takes some milliseconds."""
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device)


def new_batch(device: str = "cpu") -> Tensor:
    """Returns a batch of a size that varies by some percents."""
    return torch.randn(random.randint(60, 68), 512, device=device)


def plan(kinds: list[str], each: int) -> dict[int, str]:
    """Draws the steps in which something happens, and what."""
    what = random.sample(kinds * each, len(kinds) * each)
    steps, number = {}, 60
    for kind in what:
        number += random.randint(*GAP)
        steps[number] = kind
    return steps


class Late:
    """A logger that is late in some of its calls."""

    is_late = False

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self.is_late:
            self.is_late = False
            time.sleep(LATE_S)


class Injections:
    """What happens in a plain loop."""

    def __init__(self) -> None:
        self.logger = Late()
        self._ballast: list[list[int]] = [[] for _ in range(100_000)]
        stopper = [sys.executable, "-c", STOPPER, str(os.getpid())]
        self._stopper = subprocess.Popen(stopper, stdin=subprocess.PIPE, text=True, bufsize=1)
        gc.disable()

    def now(self, kind: str) -> None:
        """Lets something happen inside a step."""
        {
            "garbage_collection": self.collect,
            "compilation": self.compile,
            "off_cpu": self.stop,
            "allocator": torch.cuda.empty_cache,
        }[kind]()

    def collect(self) -> None:
        gc.collect()

    def compile(self) -> None:
        # A function of its own: after eight shapes torch compiles one no more.
        code = (lambda x: (x * 2 + 1).sum()).__code__.replace(co_name=f"f{time.time_ns()}")
        torch.compile(FunctionType(code, globals()), backend="eager")(torch.ones(3))

    def stop(self) -> None:
        assert self._stopper.stdin is not None
        self._stopper.stdin.write("\n")

    def end(self) -> None:
        """Ends what helps."""
        assert self._stopper.stdin is not None
        self._stopper.stdin.close()
        self._stopper.wait()
        gc.enable()


def train_plain(steps: dict[int, str], n: int, device: str) -> list[SlowStep]:
    """Trains in a plain loop; returns the slow steps."""
    net = new_net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    injections = Injections()

    def loader() -> Iterator[Tensor]:
        for number in range(n):
            if steps.get(number) == "dataloader":
                time.sleep(LATE_S)
            yield new_batch(device)

    found: list[SlowStep] = []
    # Each step is read, and logged, on its own: so the logger is called in every step.
    with GPUPhaseHooks(
        net,
        optimizer,
        logger=injections.logger,
        log_every_n_steps=1,
        observers=[SimpleNamespace(on_slow_step=found.append)],
    ) as timer:
        for number, x in enumerate(timer.steps(loader())):
            loss = net(x).square().mean()
            kind = steps.get(number, "")
            if kind == "callback":
                injections.logger.is_late = True
            elif kind and kind != "dataloader":
                injections.now(kind)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    injections.end()
    return found


class Task(pl.LightningModule):
    """Training of the net in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_net()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(new_batch()).square().mean()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = torch.zeros(2, 2**20)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train_with_checkpoints(each: int, every: int = 10) -> tuple[dict[int, str], list[SlowStep]]:
    """Trains under Lightning, which saves a checkpoint every few steps."""
    found: list[SlowStep] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = pl.callbacks.ModelCheckpoint(
            folder, every_n_train_steps=every, filename="{step}"
        )
        timer = GPUPhaseTimer(
            print_summary=False, observers=[SimpleNamespace(on_slow_step=found.append)]
        )
        trainer = bare_trainer(
            accelerator="cpu",
            max_steps=each * every + 1,
            max_epochs=1,
            callbacks=[timer, checkpoints],
            enable_checkpointing=True,
        )
        trainer.fit(Task(), Repeat((torch.zeros(1), torch.zeros(1)), each * every + 9))
    # It follows the end of its batch, and is part of the next step.
    return dict.fromkeys(range(every, each * every + 1, every), "callback"), found


def train_rank(rank: int, port: int, steps: dict[int, str], n: int, out: str) -> None:
    """Trains one of two ranks, of which the second is late in some steps."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(new_net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    found: list[SlowStep] = []
    with GPUPhaseHooks(
        ddp,
        optimizer,
        observers=[SimpleNamespace(on_slow_step=found.append)],
        sync_ranks=False,
    ) as timer:
        for number in timer.steps(range(n)):
            loss = ddp(new_batch()).square().mean()
            if rank == 1 and number in steps:
                time.sleep(2 * LATE_S)  # Two ranks disturb each other on a small machine.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, out)


def train_ranks(each: int) -> tuple[dict[int, str], list[SlowStep]]:
    """Trains two ranks under DDP; returns when the second was late, and what the first says."""
    steps = plan(["ranks"], each)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.pt"
        port = random.randint(20_000, 60_000)
        spawn(train_rank, (port, steps, max(steps) + 20, out), nprocs=2)
        return steps, torch.load(out, weights_only=False)


def measure(each: int, device: str) -> dict[str, Any]:
    """Measures everything; returns what was found."""
    kinds = ["garbage_collection", "compilation", "off_cpu", "dataloader", "callback"]
    steps = plan(kinds + ["allocator"] * (device != "cpu"), each)
    plain = score(steps, train_plain(steps, max(steps) + 20, device), {"off_cpu", "callback"})
    lightning = score(*train_with_checkpoints(each), set())
    ranks = score(*train_ranks(each), set())
    n = 20 * each
    clean = Counter(map(main_kind, train_plain({}, n, device)))
    return {
        "cost_us": cost_us(),
        "plain loop": plain,
        "Lightning, a checkpoint": lightning,
        "DDP, a late rank": ranks,
        "clean": {"steps": n, "slow": dict(clean)},
    }


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--each", type=int, default=200, help="injections of each kind")
    parser.add_argument("--cuda", action="store_true", help="train on the GPU")
    arguments = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    random.seed(0)
    results = measure(arguments.each, "cuda" if arguments.cuda else "cpu")
    print(json.dumps(results, indent=2))
    header = (
        environment("gpu", "torch", "command")
        if arguments.cuda
        else environment("host", "python", "torch", "lightning", "command")
    )
    save(arguments.out, {**header, **results})
