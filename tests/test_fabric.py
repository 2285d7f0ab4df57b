"""Loops with Lightning's Fabric, timed by the recipe of the manual."""

from typing import Any

import pytest
import torch
from fake_gpu import steps
from fake_loop import Logger, Loop
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks

pytestmark = pytest.mark.usefixtures("one_thread")

STEP_MS = {"forward": 4.0, "backward": 7.75, "optimizer": 2.0}


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def loader_of(fabric: Fabric, n: int) -> Any:
    data: Any = [torch.ones(2)] * n
    return fabric.setup_dataloaders(DataLoader(data))


@pytest.mark.parametrize("is_separate", [False, True])
def test_loop_over_a_fabric_loader_is_timed(loop: Loop, fabric: Fabric, is_separate: bool) -> None:
    logger = Logger()
    model: Any
    optimizer: Any
    if is_separate:
        model = fabric.setup_module(loop.model)
        optimizer = fabric.setup_optimizers(loop.optimizer)
    else:
        model, optimizer = fabric.setup(loop.model, loop.optimizer)
    options: Any = {"logger": logger, "log_every_n_steps": 2, "_clock": loop.gpu}
    with GPUPhaseHooks(model, optimizer, **options) as timer:
        for x in timer.steps(loader_of(fabric, 4)):
            out = model(x)
            optimizer.zero_grad()
            fabric.backward(out.sum())
            optimizer.step()
    assert all(STEP_MS.items() <= step.items() for step in steps(timer))
    assert [step for step, _ in logger.calls] == [1, 3]
    assert timer.summary().skipped_updates == 0
    assert not [name for name in vars(optimizer) if "zero_grad" in name]


def test_fabric_micro_batches_without_sync_are_one_step(loop: Loop, fabric: Fabric) -> None:
    model, optimizer = fabric.setup(loop.model, loop.optimizer)
    options: Any = {"accumulate_grad_batches": "auto", "_clock": loop.gpu}
    with GPUPhaseHooks(model, optimizer, **options) as timer:
        for i, x in enumerate(timer.steps(loader_of(fabric, 6))):
            with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                fabric.backward(model(x).sum())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [(step["forward"], step["optimizer"]) for step in steps(timer)] == [(8.0, 2.0)] * 3


def test_fabric_evaluation_belongs_to_no_step(loop: Loop, fabric: Fabric) -> None:
    model, optimizer = fabric.setup(loop.model, loop.optimizer)
    with GPUPhaseHooks(model, optimizer, _clock=loop.gpu) as timer:
        for _ in range(2):
            for x in timer.steps(loader_of(fabric, 3)):
                fabric.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                for x in loader_of(fabric, 2):
                    model(x)
            model.train()
    assert [step["forward"] for step in steps(timer)] == [4.0] * 6
