"""Plants losses in a fit, takes them away, and holds what that brings against what was promised.

    python benchmarks/planted_losses.py --rounds 3

Each fit runs in turns with the loss and without. Promised is `at_most` of the planted loss, in
the summary of the fit that has it. Got is the time of that fit by that of the next without it. A
loss that only a GPU has is left out: `.item()`, copies from memory that is not pinned, small
kernels. A step is mostly a sleep, so that a busy machine measures the same.
"""

import gc
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gputime import GPUPhaseTimer
from lightning_gputime._results.losses import Losses

STEPS = 40
WIDTH = 100
STEP_S = 0.06
PLANTED_S = 0.08


class Data(Dataset[Tensor]):
    """Random items, each of which may take some time to load."""

    def __init__(self, n: int, load_s: float = 0.0) -> None:
        self.n, self.load_s = n, load_s

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.load_s)
        return torch.ones(64, WIDTH)


class Net(pl.LightningModule):
    """Some linear layers; `each_step` runs in each training step."""

    def __init__(self, each_step: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.each_step = each_step
        self.called: Callable[[Tensor], Tensor] = self.net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss."""
        self.each_step(batch_idx)
        time.sleep(STEP_S)  # In place of work, which other processes would make longer.
        loss = self.called(self.batch(batch, batch_idx)).square().mean()
        self.log("loss", loss)
        return loss

    def batch(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns what the net is called with."""
        return batch

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Calls the net."""
        time.sleep(STEP_S / 3)
        self.net(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes as long as a large file."""
        time.sleep(PLANTED_S)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Recompiles(Net):
    """A net that is compiled for each length of a batch, of which there is a new one at times."""

    def __init__(self, lengths: int) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.lengths = lengths
        self.called = torch.compile(self.net, dynamic=False, backend="aot_eager")

    def batch(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns a batch that is a little shorter, at times for the first time."""
        return batch[:, : 64 - min(max(batch_idx - 15, 0) // 6, self.lengths)]


class SlowLogger(pl.loggers.logger.DummyLogger):
    """A logger that takes some time for each log."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Takes its time."""
        time.sleep(PLANTED_S)


def collect(batch_idx: int) -> None:
    """Leaves cyclic garbage at times, and has it collected."""
    if batch_idx > 15 and batch_idx % 6 == 0:
        junk: list[Any] = [[i] for i in range(400_000)]
        for one in junk:
            one.append(one)
        del junk, one
        gc.collect()


def prints(*_: Any) -> None:
    """Prints a large tensor, to nowhere."""
    with open(os.devnull, "w") as nowhere:
        print(torch.ones(200, 200).tolist(), torch.rand(30, 30), file=nowhere)


def fit(folder: str, **plant: Any) -> Losses:
    """Returns the losses of a fit."""
    model = plant.pop("model", Net)()
    loaded: dict[str, Any] = {
        "train_dataloaders": DataLoader(Data(STEPS, plant.pop("load_s", 0.0)))
    }
    if "val_check_interval" in plant:
        loaded["val_dataloaders"] = DataLoader(Data(10))
    timer = GPUPhaseTimer(print_summary=False, every_n_steps=1)
    callbacks = [timer, *plant.pop("callbacks", list)()]
    options = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **plant}
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **options,
    ).fit(model, **loaded)
    losses = timer.summary().losses
    assert losses is not None
    return losses


def cases(folder: str) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns by what is planted: the loss, and the options of a fit with it and without."""

    def saves() -> list[Any]:
        return [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1)]

    def after_each(call: Callable[..., Any]) -> Callable[[], list[Any]]:
        return lambda: [LambdaCallback(on_train_batch_end=call)]

    slow = after_each(lambda *_: time.sleep(PLANTED_S))
    return {
        "slow dataset": ("data/fetch", {"load_s": PLANTED_S}, {}),
        "slow callback": ("callbacks", {"callbacks": slow}, {}),
        "print": ("callbacks", {"callbacks": after_each(prints)}, {}),
        "slow logger": ("callbacks", {"logger": SlowLogger()}, {}),
        "evaluation too often": ("validation", {"val_check_interval": 5}, {}),
        "checkpoints": ("checkpoints", {"callbacks": saves, "enable_checkpointing": True}, {}),
        "garbage_collection": (
            "slow steps: garbage collection",
            {"model": lambda: Net(collect)},
            {},
        ),
        "recompilation": (
            "slow steps: compilation",
            {"model": lambda: Recompiles(4)},
            {"model": lambda: Recompiles(0)},
        ),
        "nothing": ("", {}, {}),
    }


def measure(folder: str, loss: str, with_it: Any, without: Any, rounds: int) -> dict[str, Any]:
    """Returns what was promised and got, by rounds that follow each other."""
    promised, got, largest = [], [], []
    for _ in range(rounds):
        found, base = fit(folder, **with_it), fit(folder, **without)
        promised.append(1 / (1 - found[loss]))
        got.append(found.wall_s / base.wall_s)
        if not loss:
            largest.append(max((row.at_most, row.name) for row in found.rows))
    result = {
        "loss": loss,
        "promised": statistics.median(promised),
        "got": statistics.median(got),
        "rounds_promised": promised,
        "rounds_got": got,
    }
    if not loss:
        return {"largest": sorted(largest)[len(largest) // 2], "rounds_got": got}
    # Of the time that was promised to be saved.
    kept = [(1 - 1 / one) / (1 - 1 / of) for one, of in zip(got, promised, strict=True)]
    error = statistics.stdev(kept) / len(kept) ** 0.5 if len(kept) > 1 else None
    return {**result, "kept": statistics.mean(kept), "kept_error": error, "rounds_kept": kept}


def main() -> None:
    """Writes the results, and prints a line for each loss."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the name of what is planted")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        fit(folder)  # So that nothing is imported or allocated for the first time.
        for name, (loss, with_it, without) in cases(folder).items():
            if args.only in name:
                results[name] = measure(folder, loss, with_it, without, args.rounds)
                brief = {k: v for k, v in results[name].items() if not k.startswith("rounds_")}
                print(name, brief, flush=True)
    found = environment("host", "python", "torch", "lightning", "command")
    save(args.out, {**found, "steps": STEPS, "results": results})


if __name__ == "__main__":
    main()
