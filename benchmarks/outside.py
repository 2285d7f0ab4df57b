"""Check which causes outside of the loop's code a timer names, on planted causes.

    python benchmarks/outside.py --device cuda --out benchmarks/results/outside.json

Each cause is planted in a plain loop and under Lightning, with default options. A control plants
nothing. The true share is that of the excess of slow steps, on the host's clock and without a
timer: one minus the excess without the cause divided by the excess with it. On a CPU, as in the
timer, waits for a core are not part of a step.

- named: the text of a cause matches the pattern of the case, or waits for a core are reported
  where the cause takes cores. Runs in which the cause has no effect do not count: less than 10
  points, or less than 2 % of the time.
- share: the sum of such shares is within 10 points of the true share
- false: another cause outside of the loop is named; in a control, any such cause

Causes in the loop (`in_loop`) are the places where the time was lost: only garbage collections are
planted there.

The falling clock is planted by the content of the batches: with zeros in the first half, matrix
products need less power than with random numbers, so the GPU lowers its clock in the second half.
"""

import gc
import logging
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from models import bare_trainer
from record import environment, new_parser, save
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._attribution.surroundings import _excess
from lightning_gputime._record.clock import core_times

TOLERANCE = 0.1
MIN_EFFECT = 0.02  # Fraction of the time of steps.
CORES = len(os.sched_getaffinity(0))
BUSY = "import time\nt = time.time()\nwhile time.time() - t < 1: pass"
BUSY_GPU = """
import time, torch
x = torch.randn(8192, 8192, device="cuda")
for _ in range(20):
    t = time.time()
    while time.time() - t < 0.5: x @ x; torch.cuda.synchronize()
    time.sleep(1.5)
"""


class Plant:
    """State of a planted cause while a loop runs."""

    def __init__(self, folder: str, model: nn.Module) -> None:
        self.folder, self.model = folder, model
        self.is_on, self.is_done = threading.Event(), threading.Event()
        self.messages = queue.Queue[Any]()
        self.due_s: float | None = None
        self.processes, self.threads = list[Any](), list[threading.Thread]()

    def start(self, run: Callable[..., None], *arguments: object) -> None:
        self.threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self.threads[-1].start()

    def spin_in_python(self) -> None:
        while not self.is_done.is_set():
            if self.is_on.wait(0.01):
                sum(range(1000))

    def sort_in_numpy(self) -> None:
        """Sort in as many threads as there are cores; NumPy releases the lock of Python."""
        values = np.random.default_rng(0).random((1500, 1500))
        while not self.is_done.is_set():
            if self.is_on.wait(0.01):
                np.sort(values, axis=1)

    def write_log(self) -> None:
        while self.messages.get() is not None:
            sum(i * i for i in range(3_000_000))

    def save(self, state: dict[str, Tensor]) -> None:
        end_s = time.perf_counter() + 0.25
        while time.perf_counter() < end_s:
            torch.save(state, f"{self.folder}/copy.pt")
            sum(i * i for i in range(200_000))

    def is_due(self, every_s: float) -> bool:
        """Return True once in this time, from a quarter of a second after the first call on."""
        now_s = time.perf_counter()
        if self.due_s is None:
            self.due_s = now_s + 0.25
        if now_s < self.due_s:
            return False
        self.due_s = now_s + every_s
        return True

    def end(self) -> None:
        self.is_done.set()
        self.messages.put(None)
        for process in self.processes:
            process.kill()
            process.wait()
        for thread in self.threads:
            thread.join()


def in_bursts(plant: Plant, step: int) -> None:
    """Let the thread run for 0.15 of 0.75 seconds, but at least for a step."""
    if time.perf_counter() % 0.75 < 0.15:
        plant.is_on.set()
    else:
        plant.is_on.clear()


def save_in_thread(plant: Plant, step: int) -> None:
    if plant.is_due(1.0):
        state = {name: value.detach().cpu() for name, value in plant.model.state_dict().items()}
        plant.start(plant.save, state)


def spawn(*command: str, n: int = 1, every_s: float = 2.0) -> Callable[[Plant, int], None]:
    """Start `n` processes, once in `every_s` seconds."""

    def each(plant: Plant, step: int) -> None:
        words = [part.format(folder=plant.folder) for part in command]
        for _ in range(n if plant.is_due(every_s) else 0):
            plant.processes.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))

    return each


def log_in_thread(plant: Plant, step: int) -> None:
    if plant.is_due(0.75):
        plant.messages.put(step)


def make_garbage(plant: Plant, step: int) -> None:
    if step % 40 == 7:
        lists = [[number] for number in range(200_000)]  # noqa: F841 - they live until the end
        gc.collect()


@dataclass(frozen=True)
class Case:
    """A planted cause, and a pattern of the text that names it; empty for the control."""

    pattern: str
    each: Callable[[Plant, int], None] = lambda plant, step: None
    thread: str = ""  # Method of `Plant` that runs in threads.
    threads: int = 0
    long_batches: bool = False  # True if 1 of 12 batches is 8 times as long as the others.
    is_gpu_bound: bool = False  # On a GPU, the host sets the pace of the other cases.
    steps: int = 1500

    def batches(self, device: str, steps: int) -> Iterator[dict[str, Tensor]]:
        for step in range(steps):
            rows = 512 if self.long_batches and step * 7919 % 12 == 3 else 64
            yield {"input_ids": torch.zeros(rows, 16, dtype=torch.long, device=device)}


DD = ("dd", "if=/dev/zero", "of={folder}/large", "bs=1M", "count=500", "conv=fsync")
CASES = {
    "control": Case(""),
    "spinning Python thread": Case("spin_in_python", in_bursts, "spin_in_python", 1),
    "thread in NumPy": Case("sort_in_numpy|CPU core", in_bursts, "sort_in_numpy", CORES),
    "asynchronous save": Case("save|storage", save_in_thread),
    "dd of a large file": Case("`dd`|storage", spawn(*DD)),
    "process on the GPU": Case(
        "on the GPU|child process",
        spawn(sys.executable, "-c", BUSY_GPU, every_s=math.inf),
        is_gpu_bound=True,
        steps=600,
    ),
    "process on the cores": Case(
        "python|core", spawn(sys.executable, "-c", BUSY, n=CORES, every_s=2.5)
    ),
    "long batches": Case("tokens|elements", long_batches=True),
    "garbage": Case("garbage collection", make_garbage),
    "logger's thread": Case("write_log", log_in_thread, "write_log", 1),
}
"""Not planted here: swap, which may end other processes; and unbalanced ranks, see `ranks.py`."""
CLOCK = "falling clock"


class Task(pl.LightningModule):
    """The model, its optimizer, and the planted cause. Also used without Lightning."""

    def __init__(self, after: Callable[[int], None], width: int, blocks: int) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for _ in range(blocks):
            layers += nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        self.net = nn.Sequential(nn.Embedding(8, width), *layers)
        self.after, self.ended_s, self.waited_s = after, list[float](), list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.after(batch_idx)
        self.ended_s.append(time.perf_counter())
        self.waited_s.append((core_times(threading.get_native_id()) or (0, 0))[1] / 1e9)
        loss: Tensor = self.net(batch["input_ids"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def run(case: Case, front: str, device: str, steps: int, *, timed: bool) -> tuple[Any, Any, float]:
    """Train once.

    Returns:
        The summary; the time of each step on the host (in milliseconds), on a CPU without waits for
        a core; and the fraction of the time in which the loop waited for a core.
    """
    with tempfile.TemporaryDirectory() as folder:
        width, blocks = (2048 if case.is_gpu_bound else 512, 4) if device == "cuda" else (96, 1)
        task = Task(lambda step: case.each(plant, step), width, blocks).to(device)
        plant = Plant(folder, task)
        for _ in range(case.threads):
            plant.start(getattr(plant, case.thread))
        timer: Any = None
        try:
            if front == "lightning":
                timer = GPUPhaseTimer(print_summary=False) if timed else None
                accelerator = "gpu" if device == "cuda" else "cpu"
                options = {"accelerator": accelerator, "callbacks": [timer] if timer else []}
                bare_trainer(max_epochs=1, **options).fit(task, case.batches(device, steps))
            else:
                optimizer = task.configure_optimizers()
                timer = GPUPhaseHooks(task.net, optimizer) if timed else None
                loader = case.batches(device, steps)
                with timer or nullcontext():
                    for step, batch in enumerate(timer.steps(loader) if timer else loader):
                        task.training_step(batch, step).backward()
                        optimizer.step()
                        optimizer.zero_grad()
        finally:
            plant.end()
        all_s, waited_s = np.diff(task.ended_s[20:]), np.diff(task.waited_s[20:])
        all_ms = 1e3 * (all_s - waited_s if device == "cpu" else all_s)
        return timer.summary() if timer else None, all_ms, float(waited_s.sum() / all_s.sum())


def check(case: Case, front: str, device: str) -> dict[str, Any]:
    """Return the causes that the timer names, and which checks passed."""
    steps = case.steps
    summary, _, _ = run(case, front, device, steps, timed=True)
    outside = summary.measurement.outside
    causes = [(str(cause), cause.share) for cause in outside.causes] if outside else []
    in_loop = dict[str, float]()
    if summary.slow is not None:
        shares = summary.slow.cause_shares.items()
        in_loop = {name: round(share / summary.slow.share, 2) for name, share in shares}
        causes += [item for item in in_loop.items() if re.search(case.pattern or "^$", item[0])]
    causes_found = [f"{share:.2f} {text}" for text, share in causes]
    found = {"causes": causes_found, "in_loop": in_loop}
    if not case.pattern:
        return {**found, "false": bool(causes)}
    clean = replace(CASES["control"], is_gpu_bound=case.is_gpu_bound)
    _, all_ms, clean_wait = run(clean, front, device, steps, timed=False)
    clean_ms = float(_excess(all_ms).sum())
    _, all_ms, planted_wait = run(case, front, device, steps, timed=False)
    planted_ms = float(_excess(all_ms).sum())
    truth = float(max(1 - clean_ms / planted_ms, 0.0)) if planted_ms else 0.0
    matched = [share for text, share in causes if re.search(case.pattern, text)]
    checks = {"false": len(causes) > len(matched)}
    has_effect = truth > TOLERANCE and planted_ms - clean_ms > MIN_EFFECT * all_ms.sum()
    takes_cores = planted_wait - clean_wait > TOLERANCE
    if has_effect:
        checks["share"] = abs(sum(matched) - truth) <= TOLERANCE
    if has_effect or takes_cores:
        is_told = takes_cores and "for a CPU core" in "\n".join(summary.notes)
        checks["named"] = bool(matched) or is_told
    waits = {"core_waits": [round(clean_wait, 2), round(planted_wait, 2)]}
    if outside and outside.not_checked:
        waits["not_checked"] = [*outside.not_checked]
    return {**found, "true": round(truth, 2), **waits, **checks}


def check_clock(steps: int) -> dict[str, Any]:
    """Train with batches of zeros, then with random numbers, and compare the GPU's clock."""
    layers = (nn.Linear(8192, 8192, bias=False) for _ in range(6))
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    zeros = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    random = torch.randn_like(zeros)
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = "nvidia-smi", gpu, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms=200"
    with tempfile.TemporaryFile("w+") as file:
        monitor = subprocess.Popen(query, stdout=file)
        n_early = 0
        with GPUPhaseHooks(model, optimizer) as timer:
            for step in timer.steps(range(steps)):
                is_late = step >= steps // 2
                if step == steps // 2:
                    n_early = os.fstat(file.fileno()).st_size
                model(random if is_late else zeros).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        monitor.terminate()
        monitor.wait()
        file.seek(0)
        read = file.read()
    clocks_mhz = read[:n_early].split(), read[n_early:].split()
    was, now = (float(np.median([*map(float, mhz[5:])])) for mhz in clocks_mhz)
    text = str(timer.summary().slowdown)
    named = re.search(r"clock fell from ([\d,]+) to ([\d,]+) MHz", text)
    found_mhz = [float(mhz.replace(",", "")) for mhz in named.groups()] if named else []
    row = {"causes": [text], "true_mhz": [was, now], "named": bool(named)}
    if named:  # The change, because a spin reads up to 5 % less than the true clock.
        change = found_mhz[1] / found_mhz[0] - now / was
        row["share"] = abs(change) <= TOLERANCE
    return row


def save_rows(rows: dict[str, Any], out: Path | None) -> dict[str, str]:
    """Save the rows, and return how many have passed each check."""
    counts = {}
    for key in ("named", "share", "false"):
        passed = [row[key] for row in rows.values() if key in row]
        counts[key] = f"{sum(passed)} of {len(passed)}"
    header = environment(*["gpu"] * torch.cuda.is_available(), "host", "python", "command")
    save(out, {**header, **counts, "rows": rows})
    return counts


def main() -> None:
    parser = new_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--only", default="", help="runs with this in the name, such as 'plain'")
    parser.add_argument("--rounds", type=int, default=1, help="number of runs of each cause")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: dict[str, Any] = {}
    for front, (name, case) in product(("plain", "lightning"), CASES.items()):
        if arguments.only not in f"{front}: {name}" or (case.is_gpu_bound and device == "cpu"):
            continue
        for round_ in range(arguments.rounds):
            row = check(case, front, device)
            rows[f"{front}: {name}, {round_}"] = row
            print(f"{front}: {name}", row, flush=True)
            save_rows(rows, arguments.out)
    if device == "cuda" and arguments.only in f"plain: {CLOCK}":
        rows[f"plain: {CLOCK}, 0"] = check_clock(600)
        print(CLOCK, rows[f"plain: {CLOCK}, 0"], flush=True)
    print(save_rows(rows, arguments.out))


if __name__ == "__main__":
    main()
