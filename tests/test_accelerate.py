"""The loops of other libraries, unchanged: Accelerate and Hugging Face's Trainer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, steps
from fake_loop import Loop
from processes import run
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks

accelerate: Any = pytest.importorskip("accelerate")


def train(
    loop: Loop, epochs: Iterable[Any], accumulate: int = 1, loader: Any = None, **options: Any
) -> GPUPhaseHooks:
    """Train in a loop of Accelerate, and check that no update is skipped.

    Work after each epoch belongs to no step.
    """
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer, loader = accelerator.prepare(loop.model, loop.optimizer, loader)
    with GPUPhaseHooks(model, optimizer, _clock=loop.gpu, warmup_steps=0, **options) as timer:
        for batches in epochs:
            for x in timer.steps(loader if batches is None else batches):
                with accelerator.accumulate(model):
                    loop.gpu.work(0.125)
                    out = model(x)
                    loop.gpu.work(0.5)
                    accelerator.backward(out.sum())
                    optimizer.step()
                    optimizer.zero_grad()
            loop.gpu.work(100.0)
    assert timer.summary().skipped_updates == 0
    return timer


STEP = {**STEP_MS, "backward": 7.75}  # The loss has no backward work.


def accumulated(n: int, **phases_ms: float) -> dict[str, float]:
    """Return the phases of a step of n micro-batches and one update."""
    return {**{name: n * ms for name, ms in STEP.items()}, "optimizer": 2.0, **phases_ms}


def test_accelerate_without_accumulation_has_one_step_per_batch(loop: Loop) -> None:
    assert steps(train(loop, [loop.batches(3)])) == [STEP] * 3


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": "auto"}], ids=str)
def test_accelerate_accumulation_ends_steps_at_updates(loop: Loop, options: Any) -> None:
    def collate(rows: list[Tensor]) -> Tensor:
        loop.gpu.work(1.0)
        return torch.ones(1, 2)

    data: Any = [torch.ones(2)] * 5
    loader = DataLoader(data, batch_size=1, collate_fn=collate)
    timer = train(loop, [None, None], accumulate=3, loader=loader, **options)
    # The last two batches of an epoch are also an update. The loader prefetches one batch.
    assert steps(timer) == [accumulated(3, data=4.0), accumulated(2, data=1.0)] * 2


def test_accelerate_accumulation_continues_across_epochs(loop: Loop) -> None:
    # Accelerate does not know where these epochs end.
    timer = train(loop, [loop.batches(3), loop.batches(3)], accumulate=2)
    assert steps(timer) == [accumulated(2)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "updates"), [("test_sync", [2] * 4 + [3] * 4 + [2]), ("test_script", [12] * 8)]
)
def test_accelerate_test_scripts_have_one_step_per_update(script: str, updates: list[int]) -> None:
    pytest.importorskip("accelerate.test_utils")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run(*ranks, Path(__file__).parent / "accelerate_run.py", script)
    assert json.loads(printed.splitlines()[-1]) == updates
