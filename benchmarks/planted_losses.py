"""Plant a time loss in a fit, remove it, and compare the gain with the promised maximum speed-up.

Fits with and without the loss alternate; the first round is not measured. `promised` is the
maximum speed-up of the planted entries, from the time breakdown of the fit with the loss. `gained`
is the time of that fit divided by the time of the next fit without the loss. On a GPU, a step is
12 ms of matrix products. On a CPU, it is mostly sleep, so that a busy machine gives equal results.

    python benchmarks/planted_losses.py --rounds 2 --out benchmarks/results/planted_losses.json
"""

import gc
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gputime import GPUPhaseTimer, PhaseSummary

CUDA = torch.cuda.is_available()
STEPS = 100 if CUDA else 40
ROWS, WIDTH, LAYERS = (4096, 1024, 24) if CUDA else (64, 100, 4)
STEP_S = 0.0 if CUDA else 0.06
PLANTED_S = 0.02 if CUDA else 0.08
EVALUATION_S = 0.01 if CUDA else 0.02
PREPARATION_S = 0.004
COLLECTION = "slow steps: garbage collection"


class Data(Dataset[Tensor]):
    """Batches that take `load_s` to load."""

    def __init__(self, n: int, load_s: float = 0.0, rows: int = ROWS, pinned: bool = CUDA) -> None:
        self.n, self.load_s = n, load_s
        batch = torch.ones(rows, WIDTH)
        self.batch = batch.pin_memory() if pinned else batch

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.load_s)
        return self.batch


def layers(n: int, width: int) -> nn.Sequential:
    """Return n layers that share the weights of four."""
    four = [nn.Linear(width, width) for _ in range(4)]
    return nn.Sequential(*four * (n // 4))


class Net(pl.LightningModule):
    """Linear layers. Each training step calls `each_step`, and may wait for the training loss."""

    def __init__(
        self, each_step: Callable[[int], object] = lambda _: None, waits: bool = False
    ) -> None:
        super().__init__()
        self.net = layers(LAYERS, WIDTH)
        self.each_step, self.waits = each_step, waits
        self.called: Callable[[Tensor], Tensor] = self.net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.each_step(batch_idx)
        time.sleep(STEP_S)
        loss = self.loss(batch, batch_idx)
        if self.waits:
            loss.item()
        self.log("loss", loss)
        return loss

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.called(batch[:ROWS]).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(EVALUATION_S)
        self.net(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(PLANTED_S)  # Take as long as a large file.

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Recompiles(Net):
    """Net that is compiled for each batch length. New lengths appear during the fit."""

    def __init__(self, lengths: int) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.lengths = lengths
        self.called = torch.compile(self.net, dynamic=False, backend="aot_eager")

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = ROWS - min(max(batch_idx - 15, 0) // 6, self.lengths)
        return self.called(batch[:rows]).square().mean()


class SmallKernels(Net):
    """Layers that take the host longer than the GPU, with or without a CUDA graph.

    With more layers, the kernels of a step would not fit into the GPU's queue, so that it could not
    be probed.
    """

    def __init__(self, as_graph: bool) -> None:
        super().__init__()
        self.net = layers(100, 64).cuda()
        if as_graph:
            sample = (torch.ones(64, 64, device="cuda"),)
            torch.cuda.make_graphed_callables(self.net, sample)  # Replaces its `forward`.

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[:64, :64]).square().mean()
        return loss


class SlowLogger(pl.loggers.logger.DummyLogger):
    """A logger that takes `log_s` per log."""

    def __init__(self, log_s: float) -> None:
        super().__init__()
        self.log_s = log_s

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.log_s)


def collect(batch_idx: int, collects: bool) -> None:
    """Create many objects in some steps, and collect garbage if `collects`."""
    if batch_idx > 15 and batch_idx % 6 == 0:
        gc.disable()
        junk = [[i] for i in range(400_000)]
        if collects:
            gc.collect()
        del junk
        gc.enable()


def prints(trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
    with open(os.devnull, "w") as nowhere:
        print(batch[:200, :200].tolist(), torch.rand(30, 30), file=nowhere)


def item(trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
    outputs["loss"].item()


def fit(folder: str, **plant: Any) -> PhaseSummary:
    model = plant.pop("model", Net)()
    data = Data(STEPS, **plant.pop("data", {}))
    loaders: dict[str, Any] = {"train_dataloaders": DataLoader(data, batch_size=None)}
    if "val_check_interval" in plant:
        loaders["val_dataloaders"] = DataLoader(Data(10), batch_size=None)
    # Probed steps take longer on the host, so probe few steps.
    probe = 50 if CUDA else 0
    timer = GPUPhaseTimer(print_summary=False, every_n_steps=1, probe_every_n_steps=probe)
    callbacks = [timer, *plant.pop("callbacks", list)()]
    options = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **plant}
    pl.Trainer(
        **options,
        devices=1,
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
    ).fit(model, **loaders)
    return timer.summary()


Case = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]
"""Planted entries, options of a fit with the loss, and options of a fit without it."""


def cases(folder: str) -> dict[str, Case]:
    def saves() -> list[Any]:
        return [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1)]

    def after_each(call: Callable[..., Any]) -> Callable[[], list[Any]]:
        return lambda: [LambdaCallback(on_train_batch_end=call)]

    slow = after_each(lambda *_: time.sleep(PLANTED_S))
    makes_junk = [{"model": partial(Net, partial(collect, collects=now))} for now in (True, False)]
    # The GPU waits for this only if the host is not ahead of it.
    prepares = partial(Net, lambda _: time.sleep(PREPARATION_S))
    items = {"model": prepares, "callbacks": after_each(item)}
    large = {"rows": 4 * ROWS}
    kernels, graph = (
        {"model": partial(SmallKernels, as_graph=as_graph), "data": {"rows": 64}}
        for as_graph in (False, True)
    )
    gaps, compilation = ("launch gaps",), ("slow steps: compilation",)
    on_gpu: dict[str, Case] = {
        ".item() in a callback": (gaps, items, {"model": prepares}),
        ".item() in the step": (
            gaps,
            {"model": partial(prepares, waits=True)},
            {"model": prepares},
        ),
        "unpinned copies": (("data/copy",), {"data": {**large, "pinned": False}}, {"data": large}),
        "small kernels": (gaps, kernels, graph),
    }
    loggers = [{"logger": SlowLogger(seconds)} for seconds in (PLANTED_S, 0.0)]
    recompiles = [{"model": partial(Recompiles, lengths)} for lengths in (4, 0)]
    return {
        "slow dataset": (("data/fetch",), {"data": {"load_s": PLANTED_S}}, {}),
        "slow callback": (("callbacks",), {"callbacks": slow}, {}),
        # The printed lists become garbage.
        "print": (("callbacks", COLLECTION), {"callbacks": after_each(prints)}, {}),
        "slow logger": (("callbacks",), loggers[0], loggers[1]),
        "evaluation too often": (("validation",), {"val_check_interval": 5}, {}),
        "checkpoints": (("checkpoints",), {"callbacks": saves, "enable_checkpointing": True}, {}),
        "garbage": ((COLLECTION,), makes_junk[0], makes_junk[1]),
        "recompilation": (compilation, recompiles[0], recompiles[1]),
        **(on_gpu if CUDA else {}),
        "nothing": ((), {}, {}),
    }


def measure(folder: str, case: Case, rounds: int) -> dict[str, Any]:
    """Return medians of `promised`, `gained` and the gained fraction of the promised time."""
    entries, with_it, without = case
    promised, gained, largest = [], [], []
    for i in range(rounds + 1):
        losses = fit(folder, **with_it).time_breakdown
        base = fit(folder, **without).time_breakdown
        assert losses is not None
        assert base is not None
        if i:  # The first round imports and compiles modules.
            promised.append(1 / (1 - sum(losses[entry].share for entry in entries)))
            gained.append(losses.wall_s / base.wall_s)
            rows = losses.rows
            largest.append(max((row.speed_up, row.name) for row in rows if row.speed_up))
    if not entries:
        return {"largest_promise": sorted(largest)[rounds // 2]}
    found: dict[str, Any] = {"entries": entries, "promised": "unknown"}
    if statistics.median(promised) > 1:
        found["promised"] = round(statistics.median(promised), 4)
    found["gained"] = round(statistics.median(gained), 4)
    pairs = zip(promised, gained, strict=True)
    parts = [(1 - 1 / got) / (1 - 1 / most) for most, got in pairs if most > 1]
    if len(parts) > 1:
        error = statistics.stdev(parts) / len(parts) ** 0.5
        found["of_promised_time"] = round(statistics.mean(parts), 4)
        found["error"] = round(error, 4)
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the name of a loss")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    keys = ("gpu", "host", "python", "torch", "lightning", "command")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(folder).items():
            if arguments.only in name:
                results[name] = measure(folder, case, arguments.rounds)
                print(name, results[name], flush=True)
                header = environment(*keys[not CUDA :])
                save(arguments.out, {**header, "steps": STEPS, "results": results})


if __name__ == "__main__":
    main()
