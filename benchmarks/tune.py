"""Run `tune` on scripts with planted bottlenecks, and compare it with changes made by hand.

Each script has one bottleneck, and an option `--fixed` that removes it. In a balanced script,
`tune` must not keep any change.

    python benchmarks/tune.py --out benchmarks/results/tune.json
    python benchmarks/tune.py --plants plain_workers --jobs 1
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import environment, new_parser, save

from lightning_gputime._tuning import Script

HEAD = """
import argparse, os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
fixed = parser.parse_args().fixed
torch.manual_seed(0)
torch.set_num_threads(1)
if fixed:
    {setting}
device = "cuda" if {gpu} and torch.cuda.is_available() else "cpu"

class Data(Dataset):
    def __init__(self, seconds=0.0, size=64, n=2560):
        self.seconds, self.size, self.n = seconds, size, n
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if self.seconds:
            time.sleep(self.seconds)
        x = torch.full((self.size,), float(i % 7))
        return x, x[:1]

def mlp(size=64, width=256, depth=2):
    layers = [nn.Linear(size, width)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 1))
"""

PLAIN = """
model = {model}.to(device)
optimizer = {optimizer}
for epoch in range(1000):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

LIGHTNING = """
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {model}
    def training_step(self, batch, i):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return {optimizer}
class Slow(pl.loggers.CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.01)
trainer = pl.Trainer(
    max_epochs=1000, accelerator="cuda" if device == "cuda" else "cpu", devices=1,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, {options}
)
trainer.fit(Net(), loader)
"""

TRANSFORMERS = """
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = {model}
    def forward(self, x, labels):
        return {{"loss": (self.net(x) - labels).square().mean()}}
class Slow(TrainerCallback):
    def on_log(self, *args, **kwargs):
        time.sleep(0.01)
def collate(rows):
    return {{"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}}
arguments = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=1000, per_device_train_batch_size=32, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, {options}
)
Trainer(Net(), arguments, data_collator=collate, train_dataset=data, callbacks=[{callback}]).train()
"""

LOADER = "loader = DataLoader(Data({data}), batch_size={batch}, shuffle=True, {options})\n"


@dataclass(frozen=True, slots=True)
class Plant:
    """A script with a bottleneck.

    Attributes:
        text: The script.
        kept: Names of the options that must be kept; empty for a balanced script.
        tune: Options of `tune`.
        gpu: True if the bottleneck exists only on a GPU.
    """

    text: str
    kept: tuple[str, ...]
    tune: tuple[str, ...] = ()
    gpu: bool = False


def script(
    loop: str,
    *kept: str,
    data: str = "",
    batch: int = 32,
    loader: str = "",
    options: str = "logger=False",
    gpu: bool = False,
    setting: str = "pass",
    model: str = "mlp()",
    optimizer: str = "torch.optim.Adam({owner}.parameters(), lr=1e-5)",
    tune: tuple[str, ...] = (),
) -> Plant:
    optimizer = optimizer.format(owner="self" if loop == LIGHTNING else "model")
    text = HEAD.format(gpu=gpu, setting=setting)
    text += LOADER.format(data=data, batch=batch, options=loader)
    text += loop.format(model=model, optimizer=optimizer, options=options)
    return Plant(text, kept, tune, gpu)


plain, lightning = partial(script, PLAIN), partial(script, LIGHTNING)


def transformers(*kept: str, data: str = "", options: str = "", callback: str = "") -> Plant:
    text = HEAD.format(gpu=False, setting="pass") + f"data = Data({data})\n"
    return Plant(
        text + TRANSFORMERS.format(model="mlp()", options=options, callback=callback), kept
    )


WORKERS = "num_workers=4 if fixed else {}, persistent_workers={}"
# With these, matrix products take most of the step.
BIG: dict[str, Any] = {
    "data": "size=256, n=20480",
    "batch": 1024,
    "model": "mlp(256, 4096, 8)",
    "loader": "num_workers=8, persistent_workers=True, pin_memory=True",
}
PLANTS = {
    "plain_workers": plain("num_workers", data="0.0005", loader="num_workers=4 * fixed"),
    "plain_few_workers": plain("num_workers", data="0.001", loader=WORKERS.format(1, True)),
    "plain_restarts": plain(
        "persistent_workers", data="n=320", loader="num_workers=2, persistent_workers=fixed"
    ),
    "lightning_workers": lightning("num_workers", data="0.0005", loader="num_workers=4 * fixed"),
    "lightning_logs": lightning(
        "log_every_n_steps",
        options='logger=Slow("/tmp/tune-logs"), log_every_n_steps=50 if fixed else 1',
    ),
    "transformers_workers": transformers(
        "dataloader_num_workers", data="0.0005", options="dataloader_num_workers=4 * fixed"
    ),
    "transformers_logs": transformers(
        "logging_steps", options="logging_steps=50 if fixed else 1", callback="Slow()"
    ),
    "fused": plain(
        "(fused=True)",
        gpu=True,
        data="n=100000",
        model="mlp(64, 64, 60)",
        optimizer="torch.optim.Adam(model.parameters(), lr=1e-5, fused=fixed, foreach=False)",
    ),
    "pinned": lightning(
        "pin_memory",
        gpu=True,
        data="size=200_000, n=1280",
        model="mlp(200_000, 64)",
        optimizer="torch.optim.SGD(self.parameters(), lr=1e-9)",
        loader="num_workers=8, persistent_workers=True, pin_memory=fixed",
    ),
    "matmul": lightning(
        "matmul_precision",
        gpu=True,
        setting='torch.set_float32_matmul_precision("high")',
        **BIG,
        options='logger=False, precision="32-true"',
    ),
    "bf16": lightning(
        "bf16",
        gpu=True,
        **BIG,
        options='logger=False, precision="bf16-mixed" if fixed else "32-true"',
        tune=("--allow-numerics",),
    ),
    "cudnn": plain(
        "cudnn.benchmark",
        gpu=True,
        setting="torch.backends.cudnn.benchmark = True",
        data="size=3 * 64 * 64",
        model="nn.Sequential(nn.Unflatten(1, (3, 64, 64)), nn.Conv2d(3, 96, 7, padding=3),"
        " *[nn.Conv2d(96, 96, 5, padding=2) for _ in range(6)], nn.Flatten(), nn.LazyLinear(1))",
        optimizer="torch.optim.SGD(model.parameters(), lr=1e-6)",
    ),
    "balanced": plain(data="n=100000", model="mlp(64, 768, 3)"),
}


def tune(name: str, plant: Plant, options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes that `tune` kept for a plant, and the speed-up by hand."""
    folder = Path(tempfile.mkdtemp())
    script = folder / f"{name}.py"
    script.write_text(plant.text)
    words = ["tune", "--json", "--steps", str(options.steps), "--budget", options.budget]
    command = [sys.executable, "-m", "lightning_gputime", *words, *plant.tune, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found = json.loads(done.stdout)
    kept = [trial["change"] for trial in found["trials"] if trial["is_kept"]]
    # Several changes of an option are fine, such as num_workers=2, then 4.
    right = [change for change in kept if any(name in change for name in plant.kept)]
    result = {
        "kept": kept,
        "is_right": len(right) == len(kept) and bool(kept) == bool(plant.kept),
        "speed_up": round(found["speed_up"], 2),
        "within_promise": all(
            trial["interval"][0] <= (trial["promised"] or math.inf)
            for trial in found["trials"]
            if trial["is_kept"]
        ),
        "others": {t["change"]: t["outcome"] for t in found["trials"] if not t["is_kept"]},
    }
    if plant.kept:
        result["by_hand"] = round(by_hand(script, folder, options), 2)
    return result


def by_hand(script: Path, folder: Path, options: argparse.Namespace) -> float:
    """Return the speed-up that the option `--fixed` of a script gives."""
    logs = []
    for number in range(options.pairs):
        paces = []
        for i, more in enumerate(([], ["--fixed"])):
            runs = Script([str(script), *more], folder, options.steps)
            paces.append(runs.run(2 * number + i, [], "").recurring_s)
        logs.append(math.log(paces[0] / paces[1]))
    return math.exp(statistics.mean(logs))


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--plants", nargs="*", default=[*PLANTS])
    parser.add_argument("--jobs", type=int, default=4, help="scripts on the CPU at a time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--pairs", type=int, default=3, help="of runs by hand")
    parser.add_argument("--balanced", type=int, default=0, help="runs of the balanced script")
    arguments = parser.parse_args()
    chosen = {name: PLANTS[name] for name in arguments.plants}
    chosen |= {f"balanced_{i}": PLANTS["balanced"] for i in range(arguments.balanced)}
    results: dict[str, Any] = {}

    def measure(name: str) -> None:
        results[name] = tune(name, chosen[name], arguments)
        print(name, results[name], flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        [*pool.map(measure, [name for name in chosen if not chosen[name].gpu])]
    if torch.cuda.is_available():
        [*map(measure, [name for name in chosen if chosen[name].gpu])]
    keys = ["host", "python", "torch", "lightning", "command"]
    save(arguments.out, environment(*["gpu"][: torch.cuda.is_available()], *keys) | results)
