"""Holds work per second against what is known: formulas, the wall clock, Lightning's own monitor.

Of a GPT of 12 layers and a ResNet-50, in bfloat16: the FLOPs that torch's counter finds, as the
manual counts them, against the formula; the items in a second against the wall clock's; what
`flops=` adds to a step, in turns with no timer; and Lightning's `ThroughputMonitor` in the same run
as ours. On a CPU a small GPT takes their place.

    python benchmarks/work.py --out benchmarks/results/work.json
    python benchmarks/work.py --device cpu --steps 20 --rounds 2
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import turns
from loops import AGAIN, NONE, bare_trainer, be_quiet, in_rounds
from models import GPT, MODELS, Batch, Repeat, Task, load
from overhead import summarize
from record import environment, new_parser, save
from torch.utils.flop_counter import FlopCounterMode

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._record.clock import clock_for

WARMUP = 10
WITH_FLOPS = "GPUPhaseTimer(flops=...)"
MONITOR = "Lightning ThroughputMonitor"
OURS = "GPUPhaseTimer()"


def small_gpt() -> tuple[torch.nn.Module, Batch]:
    """Returns a GPT for a CPU, and a batch."""
    tokens = torch.randint(0, 256, (4, 33))
    return GPT(2, 128, 2, 256, 32), (tokens[:, :-1], tokens[:, 1:])


def gpt_flops(layers: int, width: int, vocabulary: int, length: int, batch: int) -> float:
    """Returns FLOPs of forward and backward of a batch: 6 N + 12 L T d for each token.

    N are the parameters of its products of matrices; L, T and d are layers, length and width.
    Attention counts as if each token saw all others, as PaLM's MFU has it, causal or not.
    """
    n = layers * 12 * width**2 + vocabulary * width
    return float((6 * n + 12 * layers * length * width) * batch * length)


def resnet50_flops(batch: int) -> float:
    """Returns FLOPs of forward and backward of a batch: 3 x 2 x 4.09 GMAC for each image.

    Less the gradient of the image itself, which nobody needs: 0.118 GMAC of the first layer.
    """
    multiplications, of_first = 4_089_184_256, 118_013_952
    return 2.0 * (3 * multiplications - of_first) * batch


FORMULAS: dict[str, Callable[[int], float]] = {
    "gpt12": partial(gpt_flops, 12, 768, 32768, 512),
    "resnet50": resnet50_flops,
    "small gpt": partial(gpt_flops, 2, 128, 256, 32),
}


def count_flops(task: Task, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Returns the FLOPs of an item, forward and backward, by torch's counter."""
    task.to(device)
    x, y = batch
    with FlopCounterMode(display=False) as forward:
        loss = task.loss(task.net(x), y)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    task.zero_grad()
    return forward.get_total_flops() / len(x), backward.get_total_flops() / len(x)


def in_plain_loop(task: Task, batch: Batch, device: torch.device, steps: int) -> dict[str, Any]:
    """Returns what our timer finds in a plain loop, and what the wall clock says of its steps."""
    flops = count_flops(task, batch, device)
    optimizer = task.configure_optimizers()
    timer = GPUPhaseHooks(
        task.net,
        optimizer,
        flops=flops,
        probe_every_n_steps=0,
        warmup_steps=WARMUP,
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    begin = 0.0
    with timer:
        for number, (x, y) in enumerate(timer.steps(Repeat(batch, WARMUP + steps))):
            if number == WARMUP:
                wait()
                begin = time.perf_counter()
            loss = task.loss(task.net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wait()
        wall_s = time.perf_counter() - begin
    summary = timer.summary()
    print(summary, flush=True)
    work = summary.work
    assert work is not None
    assert work.items_per_sec is not None
    wall = steps * len(batch[0]) / wall_s
    return {
        "flops_a_batch": sum(flops) * len(batch[0]),
        "items_per_sec": work.items_per_sec,
        "wall_items_per_s": wall,
        "to_wall": work.items_per_sec / wall,
        "mfu": work.mfu,
        "peak_tflops": work.peak_tflops,
        "forward_tflops": summary.rows["forward"].tflops,
        "backward_tflops": summary.rows["backward"].tflops,
    }


def with_probes(task: Task, batch: Batch, device: torch.device, steps: int) -> dict[str, Any]:
    """Returns where the time of the steps went, with the part at the peak."""
    flops = count_flops(task, batch, device)
    optimizer = task.configure_optimizers()
    with GPUPhaseHooks(task.net, optimizer, flops=flops, probe_every_n_steps=10) as timer:
        for x, y in timer.steps(Repeat(batch, steps)):
            loss = task.loss(task.net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    summary = timer.summary()
    print(summary, flush=True)
    return {"mfu": summary.mfu, "diagnosis": summary.to_dict()["diagnosis"]}


class Kept(pl.loggers.logger.DummyLogger):
    """A logger that keeps the newest of each metric."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keeps metrics."""
        self.newest.update({key: float(value) for key, value in metrics.items()})


def beside_the_monitor(
    task: Task, batch: Batch, accelerator: str, steps: int, flops: float
) -> dict[str, Any]:
    """Returns what Lightning's monitor and our timer log of the same run."""
    logger = Kept()
    task.flops_per_batch = int(flops)  # type: ignore[assignment]  # what the monitor asks for
    # It tells nothing before so many batches.
    monitor = pl.callbacks.ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch[0]), window_size=steps // 2
    )
    timer = GPUPhaseTimer(print_summary=False, flops=flops / len(batch[0]))
    trainer = bare_trainer(
        accelerator=accelerator,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=steps // 2,
        callbacks=[monitor, timer],
    )
    trainer.fit(task, Repeat(batch, steps))
    wanted = ("per_sec", "mfu", "items_per_sec", "tflops", "phase_time/step_ms")
    return {key: one for key, one in logger.newest.items() if any(part in key for part in wanted)}


def in_turns(
    task: Task, batch: Batch, accelerator: str, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Returns what ways of timing add to a step."""
    turns.PEERS[WITH_FLOPS] = partial(GPUPhaseTimer, print_summary=False, flops=1e9)
    ways = in_rounds([NONE, AGAIN, OURS, WITH_FLOPS, MONITOR], rounds)
    clock = clock_for(device)
    return summarize(
        turns.in_lightning(task, batch, ways, accelerator=accelerator, new_event=clock.event)
    )


def _nothing() -> None:
    pass


def measure(model: str, device: torch.device, steps: int, rounds: int) -> dict[str, Any]:
    """Measures everything of one model."""
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    if model == "small gpt":
        MODELS[model] = small_gpt
    task, batch = load(model, device)
    plain = in_plain_loop(task, batch, device, steps)
    formula = FORMULAS[model](len(batch[0]))
    found: dict[str, Any] = {
        "formula_flops": formula,
        "counted_to_formula": plain["flops_a_batch"] / formula,
        "plain": plain,
    }
    if device.type == "cuda":
        found["with probes"] = with_probes(task, batch, device, 2 * steps)
    found["beside the monitor"] = beside_the_monitor(task, batch, accelerator, steps, formula)
    found["added"] = in_turns(task, batch, accelerator, rounds, device)
    return found


def main(device: str, steps: int, rounds: int, out: Path | None) -> None:
    """Measures all models, and saves what was found after each."""
    models = ["gpt12", "resnet50"] if device == "cuda" else ["small gpt"]
    keys = ("gpu", "torch", "lightning", "host", "command")
    header = environment(*(keys if device == "cuda" else keys[1:]))
    results: dict[str, Any] = {}
    begin = time.monotonic()
    for model in models:
        results[model] = measure(model, torch.device(device), steps, rounds)
        found = results[model]
        print(f"{model}: counted {found['counted_to_formula']:.4f} of the formula", flush=True)
        print(f"items/s {found['plain']['to_wall']:.4f} of the wall clock's", flush=True)
        for key, value in found["beside the monitor"].items():
            print(f"  {key} {value:.6g}", flush=True)
        for way, row in found["added"].items():
            added, error = (row["ratio"] - 1) * 100, row["error"] * 100
            print(f"  {way:32} {added:+.2f} ± {error:.2f} %", flush=True)
        seconds = round(time.monotonic() - begin)
        save(out, header | {"seconds": seconds, "results": results})


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=100, help="steps of each loop")
    parser.add_argument("--rounds", type=int, default=6, help="how many turns each way has")
    be_quiet()
    main(**vars(parser.parse_args()))
