"""Plant twelve problems in DataLoaders, and check whether the default output names them.

If more workers help, set the suggested number and measure the remaining wait.

    python benchmarks/loader.py --out benchmarks/results/loader.json
    python benchmarks/loader.py --plants lock worker
    python benchmarks/loader.py --cost
"""

import argparse
import fcntl
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from models import be_quiet
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._compat.torch_ import fetcher_classes
from lightning_gputime._loader import CulpritSums
from lightning_gputime._loader import stages as workers_module
from lightning_gputime._loader.stages import FIELDS, StagedLoaders

BATCH = 16
SAMPLES = 1600
CORES = len(os.sched_getaffinity(0))


class Photos(Dataset[Tensor]):
    """Samples that take time to read: from a disk or network (sleep), or on a core (spin)."""

    def __init__(
        self, sleep_ms: float = 0.0, spin_ms: float = 0.0, size: int = 64, n: int = SAMPLES
    ) -> None:
        self.sleep_ms, self.spin_ms, self.size, self.n = sleep_ms, spin_ms, size, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        wait(self.sleep_ms)
        end = time.perf_counter() + self.spin_ms / 1e3
        while time.perf_counter() < end:
            pass
        return torch.full((self.size,), float(index))


class SlowWorker(Photos):
    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        wait(4 * self.sleep_ms if info is not None and info.id == 1 else 0.0)
        return super().__getitem__(index)


class SlowSample(Photos):
    def __getitem__(self, index: int) -> Tensor:
        wait(500.0 if index % 500 == 211 else 0.0)
        return super().__getitem__(index)


class Locked(Photos):
    """Samples in a file that only one worker at a time may read."""

    def __init__(self, sleep_ms: float) -> None:
        super().__init__(sleep_ms)
        self.path = tempfile.NamedTemporaryFile(delete=False).name  # noqa: SIM115

    def __getitem__(self, index: int) -> Tensor:
        with open(self.path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().__getitem__(index)


class SlowStart(Photos):
    """Samples that each worker needs 3 s to open."""

    is_open = False

    def __getitem__(self, index: int) -> Tensor:
        if not self.is_open:
            time.sleep(3.0)
            self.is_open = True
        return super().__getitem__(index)


class Unsharded(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(SAMPLES // 2):
            wait(1.0)
            yield torch.arange(64.0) + index


def wait(ms: float) -> None:
    if ms:
        time.sleep(ms / 1e3)


def slow_collate(samples: list[Tensor]) -> Tensor:
    wait(30.0)
    collated: Tensor = default_collate(samples)
    return collated


@dataclass(frozen=True, slots=True)
class Plant:
    """A loader with a problem.

    Attributes:
        dataset: Constructs the dataset.
        named: Regular expression of the output that names the problem.
        options: Options of the loader.
        epochs: Number of epochs.
        gpu: True if the problem exists only on a GPU.
        workers_help: True if more workers remove the wait.
        rest_ms: Time of the rest of the step (in milliseconds).
    """

    dataset: Callable[[], Any]
    named: str
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    gpu: bool = False
    workers_help: bool = False
    rest_ms: float = 4.0


def workers(n: int, **options: Any) -> dict[str, Any]:
    return {"num_workers": n, "persistent_workers": True, **options}


PLANTS = {
    "decode": Plant(
        lambda: Photos(2.0), r"Photos\.__getitem__ +3\d", workers(2), workers_help=True
    ),
    "collate": Plant(
        Photos, r"slow_collate +3\d", workers(2, collate_fn=slow_collate), workers_help=True
    ),
    "few": Plant(
        lambda: Photos(1.0), r"set num_workers=\d+ \(now 1", workers(1), workers_help=True
    ),
    "worker": Plant(lambda: SlowWorker(0.5), "check what worker 1 reads", workers(4)),
    "sample": Plant(
        lambda: SlowSample(0.5),
        r"rare slow samples.* because of sample (211|711|1,211)\b",
        workers(2, shuffle=True),
    ),
    "lock": Plant(lambda: Locked(1.0), r"remove the lock that workers share", workers(4)),
    "huge": Plant(
        lambda: Photos(size=1_000_000),
        r"input-bound(.|\n)*default_collate +[\d.]+ ms +([5-9]\d|3\d) %",
        workers(4),
        rest_ms=0.2,
    ),
    "cores": Plant(
        # An epoch has 8 batches per worker. All cores together need at least 4 ms per batch.
        lambda: Photos(spin_ms=0.25 * CORES, n=8 * 8 * CORES * BATCH),
        r"wait \d+ % of their time for one of",
        workers(8 * CORES),
        epochs=3,
        rest_ms=0.2,
    ),
    "iterable": Plant(Unsharded, "give each worker its part of the IterableDataset", workers(4)),
    "first": Plant(lambda: SlowStart(0.5), "the first batch of a worker takes 3", workers(2)),
    "persist": Plant(
        lambda: Photos(0.2, n=160),
        r"set persistent_workers=True",
        {"num_workers": 4},
        epochs=20,
        rest_ms=1.0,
    ),
    "pinning": Plant(
        lambda: Photos(size=200_000), r"set pin_memory=True", workers(4, pin_memory=False), gpu=True
    ),
}


def train(plant: Plant, n: int | None = None) -> Any:
    """Train with the default timer, and return its summary."""
    device = torch.device("cuda" if plant.gpu else "cpu")
    torch.manual_seed(0)
    dataset = plant.dataset()
    size = 200_000 if plant.gpu else 64
    model = nn.Sequential(nn.Linear(size, 8), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    options = plant.options if n is None else plant.options | {"num_workers": n}
    loader: Any = DataLoader(dataset, BATCH, **options)
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in range(plant.epochs):
            for batch in timer.steps(loader):
                loss = model(batch[:, :size].to(device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                wait(plant.rest_ms)
    return timer.summary()


def data_ms(summary: Any) -> float:
    """Return the wait for data per step (in milliseconds)."""
    row = summary.rows["data"]
    return float(row.frequency * row.mean_ms)


def measure(name: str) -> dict[str, Any]:
    plant = PLANTS[name]
    summary = train(plant)
    text = str(summary)
    found: dict[str, Any] = {"named": re.search(plant.named, text) is not None}
    if not found["named"]:
        print(text, file=sys.stderr)
    advice = [advice for advice in summary.diagnosis.advice if advice.code == "num_workers"]
    if plant.workers_help:
        suggested = advice[0].parameters["suggested"] if advice else None
        before_ms = data_ms(summary)
        after_ms = data_ms(train(plant, suggested)) if suggested else before_ms
        found |= {
            "suggested": suggested,
            "wait_ms": round(before_ms, 2),
            "wait_after_ms": round(after_ms, 2),
            "removed": round(1 - after_ms / before_ms, 3),
        }
    return found


class Tiny(Dataset[Tensor]):
    """Batches that keep a core busy for some time."""

    def __init__(self, ms: float = 1.0) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        end = time.perf_counter_ns() + int(1e6 * self.ms)
        while time.perf_counter_ns() < end:
            pass
        return [torch.zeros(64)] * len(indices)


def cost() -> dict[str, float]:
    """Return the microseconds that timing adds to a batch of 1 ms in a worker."""
    dataset, indices = Tiny(), [*range(16)]
    kind: Any = fetcher_classes()[0]
    plain, timed = (kind(dataset, True, lambda samples: samples[0], False) for _ in range(2))
    row: Any = torch.zeros(FIELDS, dtype=torch.int64).numpy()
    fetch = workers_module.timed_fetch(kind, workers_module.WorkerTimer(memoryview(row), 0))
    added_us = []
    with patch.object(workers_module, "get_worker_info", lambda: SimpleNamespace(dataset=dataset)):
        for _ in range(3000):
            start = time.perf_counter_ns()
            plain.fetch(indices)
            middle = time.perf_counter_ns()
            fetch(timed, indices)
            added_us.append((time.perf_counter_ns() - 2 * middle + start) / 1e3)
    trimmed = sorted(added_us)[300:-300]
    error = statistics.pstdev(trimmed) / len(trimmed) ** 0.5
    return {"worker_us": round(statistics.mean(trimmed), 2), "error_us": round(error, 2)}


def main_cost() -> dict[str, float]:
    """Return the microseconds that timed workers add to `next` in the main process."""
    loader: Any = DataLoader(Photos(spin_ms=0.02, n=64 * BATCH), BATCH, num_workers=1)
    staged = StagedLoaders(lambda _: True, time.perf_counter_ns, CulpritSums().add_loader)
    added_us = []
    for index in range(24):
        means_us = []
        for is_timed in (True, False)[:: 1 - 2 * (index % 2)]:
            if is_timed:
                staged.attach()
            batches = iter(loader)
            if is_timed:
                staged._iter.remove()
            wait(300.0)  # Fill the queue of batches.
            times_ns = []
            for _ in range(60):
                start = time.perf_counter_ns()
                next(batches)
                times_ns.append(time.perf_counter_ns() - start)
                wait(2.0)
            # Use the lower quartile: waking up the process sometimes takes a millisecond.
            means_us.append(statistics.quantiles(times_ns, n=4)[0] / 1e3)
            del batches
        added_us.append((means_us[0] - means_us[1]) * (1 - 2 * (index % 2)))
    error = statistics.stdev(added_us) / len(added_us) ** 0.5
    return {"main_us": round(statistics.mean(added_us), 2), "main_error_us": round(error, 2)}


def spinning_collate(samples: list[Tensor]) -> Tensor:
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    collated: Tensor = default_collate(samples)
    return collated


def stages() -> dict[str, float]:
    """Return the measured times of stages: 8 ms in the dataset and 5 ms in `collate_fn`."""
    options = workers(1, collate_fn=spinning_collate)
    plant = Plant(lambda: Tiny(8.0), "", options, rest_ms=15.0)
    [times] = train(plant).measurement.loaders
    found = {"dataset": times.mean("dataset_ms"), "collate": times.mean("collate_ms")}
    return {f"{name}_ms": round(ms, 2) for name, ms in found.items()}


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--plants", nargs="*", default=[*PLANTS])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cost", action="store_true", help="measure the cost alone")
    arguments = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        sys.exit()
    results: dict[str, Any] = {"cost": cost() | main_cost(), "stages": stages()}
    print(results)
    for name in [] if arguments.cost else arguments.plants:
        if PLANTS[name].gpu and not torch.cuda.is_available():
            continue
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name], flush=True)
    gpu = ["gpu"][: torch.cuda.is_available()]
    keys = [*gpu, "host", "python", "torch", "command"]
    save(arguments.out, environment(*keys) | results)
