"""Fine-tunes a small transformer with random weights by Hugging Face's Trainer, and checks it.

    python benchmarks/hf_trainer.py --out benchmarks/results/hf_trainer.json
    torchrun --nproc-per-node 2 benchmarks/hf_trainer.py --ddp
    torchrun --nproc-per-node 2 benchmarks/hf_trainer.py --fsdp2

On one device it trains in rounds with the callback and without it, in random order. It compares the
losses bit by bit, what a step takes, and what the Trainer wrote for TensorBoard with the history
and the wall. On several it prints the table, which has what they wait for each other. Without a GPU
it trains a tiny model on the CPU.
"""

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import environment, new_parser, save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from lightning_gputime.huggingface import TransformersPhaseTimer

PHASES = ("data", "callbacks", "forward", "loss", "backward", "optimizer", "other")
SETTLE, EVERY = 20, 10
"""Steps that are in no figure, and steps in one log."""

NONE, AGAIN, TIMER = "no timer", "no timer, again", "TransformersPhaseTimer()"

IS_CUDA, IS_SHARED = torch.cuda.is_available(), "LOCAL_RANK" in os.environ
SIZE: dict[str, Any] = (
    {"n_layer": 8, "n_head": 12, "n_embd": 768, "n_positions": 512, "vocab_size": 32_000}
    if IS_CUDA
    else {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": 256}
)


class Wall(TrainerCallback):
    """Takes the time of the steps after those that settle, on the wall."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Waits for the device, twice in a training."""
        if state.global_step in (SETTLE, args.max_steps):
            if IS_CUDA:
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def step_ms(self, steps: int) -> float:
        """Returns the mean time of a step (in milliseconds)."""
        return (self.ends[1] - self.ends[0]) * 1e3 / (steps - SETTLE)


def new_trainer(
    callbacks: list[TrainerCallback], folder: str, steps: int, **others: Any
) -> Trainer:
    """Returns a Trainer of a model that is always the same."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0))
    rows = torch.randint(0, SIZE["vocab_size"], (256, SIZE["n_positions"]))
    options: dict[str, Any] = {
        "report_to": ["tensorboard"],
        "save_strategy": "no",
        "per_device_train_batch_size": 8 if IS_CUDA else 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": EVERY,
        "disable_tqdm": True,
        "bf16": IS_CUDA,
        "use_cpu": not IS_CUDA,
        "dataloader_pin_memory": IS_CUDA,
        # On the CPU it makes a process group even of one process.
        "ddp_backend": "gloo" if IS_SHARED and not IS_CUDA else None,
    }
    return Trainer(
        model,
        TrainingArguments(folder, max_steps=steps, **{**options, **others}),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=callbacks,
    )


def logged(folder: str) -> dict[str, list[float]]:
    """Reads the scalars that the Trainer wrote for TensorBoard."""
    [path] = Path(folder).glob("runs/*")
    events = EventAccumulator(str(path))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def run(way: str, steps: int, **others: Any) -> dict[str, Any]:
    """Trains once, and returns what was found."""
    wall, timer = Wall(), TransformersPhaseTimer(print_summary=False, warmup_steps=SETTLE)
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer([timer, wall] if way == TIMER else [wall], folder, steps, **others)
        trainer.train()
        scalars = logged(folder)
    found: dict[str, Any] = {
        "wall_ms": wall.step_ms(steps),
        "loss": [one["loss"] for one in trainer.state.log_history if "loss" in one],
    }
    if way == TIMER:
        windows = [scalars[f"train/phase_time/{name}_ms"] for name in (*PHASES, "step")]
        rows = timer.summary().rows
        found |= {
            # The file has 32 bits.
            "adds_up_to": max(
                abs(sum(one[:-1]) / one[-1] - 1) for one in zip(*windows, strict=True)
            ),
            "file_ms": statistics.fmean(windows[-1][SETTLE // EVERY :]),
            "step_ms": timer.summary().step.mean_ms,
            "phases_ms": {name: row.mean_ms for name, row in rows.items()},
            "logs": len(windows[-1]),
        }
    return found


def on_one_device(steps: int, rounds: int) -> dict[str, Any]:
    """Trains in rounds, and compares."""
    ways = [NONE, AGAIN, TIMER]
    run(TIMER, SETTLE + EVERY)  # The first training is slow.
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(ways, len(ways)):
            found[way].append(run(way, steps))
            print(f"{way}: {found[way][-1]['wall_ms']:.3f} ms a step", flush=True)
    walls = {way: statistics.median(one["wall_ms"] for one in found[way]) for way in ways}
    last = found[TIMER][-1]
    # Else a GPU's kernels do not even give the same losses twice.
    exact = [run(way, steps, full_determinism=True)["loss"] for way in ways]
    return {
        "steps": steps,
        "rounds": rounds,
        "wall_ms": walls,
        "adds": {way: walls[way] / walls[NONE] - 1 for way in (AGAIN, TIMER)},
        "losses_are_equal": all(losses == exact[0] for losses in exact),
        "file_against_history": last["file_ms"] / last["step_ms"] - 1,
        "history_against_wall": last["step_ms"] / last["wall_ms"] - 1,
        **{name: last[name] for name in ("adds_up_to", "logs", "phases_ms")},
    }


def on_several(steps: int, fsdp2: bool) -> None:
    """Trains once, and prints the table of all ranks."""
    others: dict[str, Any] = {}
    if fsdp2:
        config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
        others = {"fsdp": True, "fsdp_config": config}
    with tempfile.TemporaryDirectory() as folder:
        timer = TransformersPhaseTimer(warmup_steps=SETTLE, log="all")
        trainer = new_trainer([timer], folder, steps, **others)
        trainer.train()
        if trainer.is_world_process_zero():
            print(type(trainer.model_wrapped).__name__)
            print(*sorted(tag for tag in logged(folder) if "phase_time" in tag), sep="\n")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measures what was asked for."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--fsdp2", action="store_true")
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # has no hints
    if arguments.fsdp2 and not IS_CUDA:
        parser.error("--fsdp2 needs GPUs: on the CPU accelerate takes DDP")
    if arguments.ddp or arguments.fsdp2:
        on_several(arguments.steps, arguments.fsdp2)
        return
    found = on_one_device(arguments.steps, arguments.rounds)
    print(found)
    keys = ("gpu", "torch", "command") if IS_CUDA else ("host", "torch", "command")
    save(arguments.out, {**environment(*keys), "results": found})


if __name__ == "__main__":
    main()
