"""Plants losses in a fit, takes them away, and holds what that brings against what was promised.

    python benchmarks/planted_losses.py --rounds 3
    python benchmarks/planted_losses.py --kernels --out planted_losses_kernels.json

Each fit runs in turns with the loss and without, after one round that is not measured. Promised is
`at_most` of the lines of the planted loss, in the summary of the fit that has it. Got is the time
of that fit by that of the next without it. On a GPU a step is 12 ms of products of matrices, behind
which the host hides a part of what it loses. On a CPU it is mostly a sleep, so that a busy machine
measures the same; what only a GPU has is left out there. A late rank needs two GPUs, or no GPU.

With `--kernels` the kernels of each fit are summed instead, in a trace of `torch.profiler`: where
more was gained than promised, this tells whether the GPU itself took less time.
"""

import gc
import json
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from kernels import end_of, of_categories
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from lightning_gputime import GPUPhaseTimer, PhaseSummary

CUDA = torch.cuda.is_available()
STEPS = 100 if CUDA else 40
ROWS, WIDTH, LAYERS = (4096, 1024, 24) if CUDA else (64, 100, 4)
STEP_S = 0.0 if CUDA else 0.06
"""How long the host sleeps in a step, in place of work: other processes would make that longer."""
PLANTED_S = 0.02 if CUDA else 0.08
EVALUATION_S = 0.01 if CUDA else 0.02
PREPARATION_S = 0.004

WAITS = ("data", "data/fetch", "callbacks", "launch gaps") if CUDA else ()
"""Where a GPU waits for the host that has waited itself: the host has lost its lead."""
COLLECTION = "slow steps: garbage collection"
LATE = "a late rank"


class Data(Dataset[Tensor]):
    """Batches, each of which may take some time to load."""

    def __init__(self, n: int, load_s: float = 0.0, rows: int = ROWS, pinned: bool = CUDA) -> None:
        self.n, self.load_s = n, load_s
        batch = torch.ones(rows, WIDTH)
        self.batch = batch.pin_memory() if pinned else batch

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.load_s)
        return self.batch


class Net(pl.LightningModule):
    """Some linear layers; `each_step` runs in each training step, which may wait for the loss."""

    def __init__(
        self, each_step: Callable[[int], object] = lambda _: None, waits: bool = False
    ) -> None:
        super().__init__()
        self.net = layers(LAYERS, WIDTH)
        self.each_step, self.waits = each_step, waits
        self.called: Callable[[Tensor], Tensor] = self.net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss."""
        self.each_step(batch_idx)
        time.sleep(STEP_S)
        loss = self.loss(batch, batch_idx)
        if self.waits:
            loss.item()
        self.log("loss", loss)
        return loss

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        return self.called(batch[:ROWS]).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Calls the net."""
        time.sleep(EVALUATION_S)
        self.net(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes as long as a large file."""
        time.sleep(PLANTED_S)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def layers(n: int, width: int) -> nn.Sequential:
    """Returns layers with the weights of four."""
    four = [nn.Linear(width, width) for _ in range(4)]
    return nn.Sequential(*four * (n // 4))


class Recompiles(Net):
    """A net that is compiled for each length of a batch, of which there is a new one at times."""

    def __init__(self, lengths: int) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.lengths = lengths
        self.called = torch.compile(self.net, dynamic=False, backend="aot_eager")

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns that of a batch that is a little shorter, at times for the first time."""
        rows = ROWS - min(max(batch_idx - 15, 0) // 6, self.lengths)
        return self.called(batch[:rows]).square().mean()


class SmallKernels(Net):
    """Many layers, each of which takes the host longer than the GPU; may be one CUDA graph.

    With more layers a step has more kernels than the GPU's queue holds, and cannot be probed.
    """

    def __init__(self, as_graph: bool) -> None:
        super().__init__()
        self.net = layers(100, 64).cuda()
        if as_graph:
            sample = (torch.ones(64, 64, device="cuda"),)
            torch.cuda.make_graphed_callables(self.net, sample)  # Replaces its `forward`.

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss of a part of a batch."""
        loss: Tensor = self.net(batch[:64, :64]).square().mean()
        return loss


class SlowLogger(pl.loggers.logger.DummyLogger):
    """A logger that takes some time for each log."""

    def __init__(self, log_s: float) -> None:
        super().__init__()
        self.log_s = log_s

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Takes its time."""
        time.sleep(self.log_s)


def collect(batch_idx: int, collects: bool) -> None:
    """Makes many objects at times, and may have them looked through for garbage."""
    if batch_idx > 15 and batch_idx % 6 == 0:
        gc.disable()
        junk = [[i] for i in range(400_000)]
        if collects:
            gc.collect()
        del junk
        gc.enable()


def prints(trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
    """Prints a part of a batch, to nowhere."""
    with open(os.devnull, "w") as nowhere:
        print(batch[:200, :200].tolist(), torch.rand(30, 30), file=nowhere)


def item(trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
    """Has the host wait for the loss."""
    outputs["loss"].item()


def fit(folder: str, **plant: Any) -> PhaseSummary:
    """Returns the summary of a fit."""
    model = plant.pop("model", Net)()
    data = Data(STEPS * plant.get("devices", 1), **plant.pop("data", {}))
    loaded: dict[str, Any] = {"train_dataloaders": DataLoader(data, batch_size=None)}
    if "val_check_interval" in plant:
        loaded["val_dataloaders"] = DataLoader(Data(10), batch_size=None)
    # A probed step is longer by what the host does between two steps: few are.
    probe = 50 if CUDA else 0
    timer = GPUPhaseTimer(print_summary=False, every_n_steps=1, probe_every_n_steps=probe)
    callbacks = [timer, *plant.pop("callbacks", list)()]
    options = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **plant}
    pl.Trainer(
        **{"accelerator": "auto", "devices": 1, **options},
        max_epochs=1,
        # Ranks are compared over the steps of a log.
        log_every_n_steps=10 if "strategy" in options else 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
    ).fit(model, **loaded)
    return timer.summary()


class Late(Net):
    """A net whose second rank is late in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss."""
        time.sleep(PLANTED_S * self.global_rank)
        return super().training_step(batch, batch_idx)


def _of_one_rank(rank: int, port: int, name: str, rounds: int, file: str) -> None:
    ranks = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    be_quiet()
    if CUDA:
        torch.cuda.set_device(rank)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = "gpu" if CUDA else "cpu"
        run = partial(fit, folder, accelerator=accelerator, strategy="ddp", devices=2)
        found = measure(run, cases(folder)[name], rounds)
    if rank == 0:
        with open(file, "w") as out:
            json.dump(found, out)


def measure_two_ranks(folder: str, name: str, rounds: int) -> dict[str, Any]:
    """Return what rank 0 of two measures, in processes of their own."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    file = os.path.join(folder, "found")
    spawn(_of_one_rank, (port, name, rounds, file), nprocs=2)
    with open(file) as found:
        return {**json.load(found)}


Case = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]


def cases(folder: str) -> dict[str, Case]:
    """Returns by what is planted: the lines, and the options of a fit with it and without."""

    def saves() -> list[Any]:
        return [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1)]

    def after_each(call: Callable[..., Any]) -> Callable[[], list[Any]]:
        return lambda: [LambdaCallback(on_train_batch_end=call)]

    slow = after_each(lambda *_: time.sleep(PLANTED_S))
    collects = [partial(Net, partial(collect, collects=one)) for one in (True, False)]
    # The GPU waits for that only where the host has no lead.
    prepares = partial(Net, lambda _: time.sleep(PREPARATION_S))
    large = {"rows": 4 * ROWS}
    on_gpu: dict[str, Case] = {
        ".item() in a callback": (
            ("launch gaps",),
            {"model": prepares, "callbacks": after_each(item)},
            {"model": prepares},
        ),
        ".item() in the step": (
            ("launch gaps",),
            {"model": partial(prepares, waits=True)},
            {"model": prepares},
        ),
        "unpinned copies": (
            ("data/copy",),
            {"data": {**large, "pinned": False}},
            {"data": large},
        ),
        "small kernels": (
            ("launch gaps",),
            {"model": partial(SmallKernels, as_graph=False), "data": {"rows": 64}},
            {"model": partial(SmallKernels, as_graph=True), "data": {"rows": 64}},
        ),
    }
    ranks: dict[str, Case] = {LATE: (("the slowest rank",), {"model": Late}, {"model": Net})}
    return {
        "slow dataset": (("data/fetch",), {"data": {"load_s": PLANTED_S}}, {}),
        "slow callback": (("callbacks",), {"callbacks": slow}, {}),
        # What it makes is garbage, too.
        "print": (("callbacks", COLLECTION), {"callbacks": after_each(prints)}, {}),
        # A log of any kind has the host wait for the GPU.
        "slow logger": (
            ("callbacks",),
            {"logger": SlowLogger(PLANTED_S)},
            {"logger": SlowLogger(0.0)},
        ),
        "evaluation too often": (("validation",), {"val_check_interval": 5}, {}),
        "checkpoints": (("checkpoints",), {"callbacks": saves, "enable_checkpointing": True}, {}),
        "garbage": (
            (COLLECTION,),
            {"model": collects[0]},
            {"model": collects[1]},
        ),
        "recompilation": (
            ("slow steps: compilation",),
            {"model": partial(Recompiles, 4)},
            {"model": partial(Recompiles, 0)},
        ),
        **(on_gpu if CUDA else {}),
        **(ranks if not CUDA or torch.cuda.device_count() > 1 else {}),
        "nothing": ((), {}, {}),
    }


def measure(run: Callable[..., PhaseSummary], case: Case, rounds: int) -> dict[str, Any]:
    """Returns what was promised and got, by rounds that follow each other."""
    lines, with_it, without = case
    found: dict[str, list[Any]] = {
        name: [] for name in ("promised", "with_waits", "got", "largest", "with_it", "without")
    }
    for i in range(rounds + 1):
        summary, base = run(**with_it), run(**without).time_breakdown
        losses = summary.time_breakdown
        assert losses is not None
        assert base is not None
        if i:  # Before, some things were imported or compiled for the first time.
            for key, of in ("promised", lines), ("with_waits", {*lines, *WAITS}):
                found[key].append(1 / (1 - sum(losses[line].share for line in of)))
            found["got"].append(losses.wall_s / base.wall_s)
            promises = [(row.speed_up, row.name) for row in losses.rows if row.speed_up is not None]
            found["largest"].append(max(promises))
            for key, one in ("with_it", losses), ("without", base):
                found[key].append({row.name: round(row.seconds, 4) for row in one.rows})
    fits = [found.pop(key) for key in ("with_it", "without")]
    everything: dict[str, Any] = {"rounds": found, "seconds": seconds_by_line(*fits)}
    if summary.probe_failure:
        everything["cannot_probe"] = summary.probe_failure
    if not lines:
        return {"largest": sorted(found["largest"])[rounds // 2], **everything}
    medians = {name: statistics.median(found[name]) for name in ("promised", "with_waits", "got")}
    if medians["promised"] == 1:
        return {"lines": lines, **medians, **everything}
    # Of the time that was promised to be saved.
    for promised, key in ("promised", "kept"), ("with_waits", "kept_with_waits"):
        pairs = zip(found["got"], found[promised], strict=True)
        kept = [(1 - 1 / got) / (1 - 1 / of) for got, of in pairs if of > 1]
        if len(kept) > 1:
            error = statistics.stdev(kept) / len(kept) ** 0.5
            medians |= {key: statistics.mean(kept), f"{key}_error": error}
    return {"lines": lines, **medians, **everything}


def seconds_by_line(*fits: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the median seconds of each line of the table, with the planted loss and without."""
    names = dict.fromkeys(name for rounds in fits for entry in rounds for name in entry)
    return {
        name: [
            round(statistics.median(entry.get(name, 0.0) for entry in rounds), 4) for rounds in fits
        ]
        for name in names
    }


class KernelTrace(pl.Callback):
    """Traces some steps, none of which is probed."""

    FIRST, LAST = 20, 45

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if batch_idx == self.FIRST:
            torch.cuda.synchronize()
            self.start = time.perf_counter()
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        if batch_idx == self.LAST:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start
            self.profiler.stop()

    def sums(self) -> dict[str, float]:
        """Returns what a step has of kernels, of copies, and of time without either (in ms)."""
        with tempfile.TemporaryDirectory() as folder:
            self.profiler.export_chrome_trace(path := os.path.join(folder, "trace.json"))
            with open(path) as file:
                events = json.load(file)["traceEvents"]
        kernels = of_categories(events, "kernel")
        copies = of_categories(events, "gpu_memcpy", "gpu_memset")
        idle_us, end_us = 0.0, float("inf")
        for one in of_categories(events, "kernel", "gpu_memcpy", "gpu_memset"):
            idle_us += max(one["ts"] - end_us, 0.0)
            end_us = end_of(one) if end_us == float("inf") else max(end_us, end_of(one))
        n = self.LAST - self.FIRST
        each = len(kernels) // n
        durations_us = [one["dur"] for one in kernels]
        # Those of each step, in the order in which they run: is it the first that are longer?
        parts = [
            [us for i, us in enumerate(durations_us) if i % each * 4 // each == part]
            for part in range(4)
        ]
        return {
            "kernels": len(kernels) / n,
            "kernels_ms": sum(durations_us) / n / 1e3,
            **{f"quarter {i + 1}, ms": sum(part) / n / 1e3 for i, part in enumerate(parts)},
            "copies_ms": sum(one["dur"] for one in copies) / n / 1e3,
            "idle_ms": idle_us / n / 1e3,
            "step_ms": self.seconds / n * 1e3,
        }


def sum_kernels(folder: str, plant: dict[str, Any]) -> dict[str, float]:
    """Returns the sums of a fit."""
    trace = KernelTrace()
    callbacks = plant.get("callbacks", list)
    fit(folder, **{**plant, "callbacks": lambda: [*callbacks(), trace]})
    return {name: round(value, 4) for name, value in trace.sums().items()}


def be_quiet() -> None:
    """Leaves out what is said on the way, and computes in one thread."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    """Writes the results, and prints a line for each loss."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the name of what is planted")
    parser.add_argument("--kernels", action="store_true", help="sum the kernels of each fit")
    args = parser.parse_args()
    be_quiet()
    header = environment(
        *(["gpu"] if CUDA else []), "host", "python", "torch", "lightning", "command"
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(folder).items():
            if args.only in name and args.kernels:
                fits = [("with_it", case[1]), ("without", case[2])] * args.rounds
                results[name] = {"with_it": [], "without": []}
                for key, plant in fits:
                    results[name][key].append(sum_kernels(folder, plant))
                    print(name, key, results[name][key][-1], flush=True)
            elif args.only in name:
                if name == LATE:
                    results[name] = measure_two_ranks(folder, name, args.rounds)
                else:
                    results[name] = measure(partial(fit, folder), case, args.rounds)
                brief = {k: v for k, v in results[name].items() if k != "rounds"}
                print(name, brief, flush=True)
            else:
                continue
            save(args.out, {**header, "steps": STEPS, "results": results})


if __name__ == "__main__":
    main()
