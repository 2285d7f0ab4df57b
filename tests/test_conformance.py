"""Exact times of each loop of `conformance.py`, in each front end that can run it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conformance import (
    CASES,
    LIGHTNING,
    MANUAL,
    PLAIN,
    README,
    SAMPLED,
    STEP,
    STEPS,
    TRANSFORMERS,
    WRAPPED,
    Case,
    Phases,
    with_table,
)
from conftest import hooks_of, installed
from fake_gpu import FakeGPU, steps
from fake_lightning import Loader, timer_of, trainer
from fake_loop import Loop, training_arguments
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer


class Module(pl.LightningModule):
    """A LightningModule whose training step is the body of a loop."""

    def __init__(self, case: Case, loop: Loop, front_end: str) -> None:
        super().__init__()
        self.case, self.loop, self.net = case, loop, loop.model
        self.automatic_optimization = front_end == LIGHTNING
        self.is_wrapped = front_end == WRAPPED

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.is_wrapped and self.loop.optimizers:
            self.loop.optimizers = self.optimizers()  # type: ignore[assignment]
        elif self.is_wrapped:
            self.loop.optimizer = self.optimizers()
        loss = self.case.run_body(self.loop, batch, batch_idx)
        if self.automatic_optimization or self.case.updates:
            return loss
        self.manual_backward(loss)
        if (batch_idx + 1) % self.case.micro_batches == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        return self.loop.optimizers or self.loop.optimizer


def run_lightning(case: Case, loop: Loop, front_end: str, **options: Any) -> GPUPhaseTimer:
    timer = timer_of(loop.gpu, **options)
    micro_batches = case.micro_batches if front_end == LIGHTNING else 1
    runner = trainer(timer, accumulate_grad_batches=micro_batches)
    runner.fit(Module(case, loop, front_end), Loader(loop.gpu, case.batches))
    return timer


def run_plain(case: Case, loop: Loop, front_end: str, **options: Any) -> GPUPhaseHooks:
    options = {"accumulate_grad_batches": case.micro_batches, **case.options, **options}
    if front_end == SAMPLED:
        options["every_n_steps"] = 4
    optimizers = loop.optimizers or loop.optimizer
    with GPUPhaseHooks(loop.model, optimizers, _clock=loop.gpu, warmup_steps=0, **options) as timer:
        loader = Loader(loop.gpu, case.batches * (4 if front_end == SAMPLED else 1))
        for number, x in enumerate(loader if front_end == STEP else timer.steps(loader)):
            loss = case.run_body(loop, x, number)
            if not case.updates:
                loss.backward()
                if (number + 1) % case.micro_batches == 0:
                    loop.update()
            if front_end == STEP:
                timer.step()
    return timer


def run_transformers(case: Case, loop: Loop, path: Path) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    from lightning_gputime.huggingface import TransformersPhaseTimer

    def collate(rows: list[Any]) -> Any:
        loop.gpu.work(1.0)
        return {"x": torch.ones(1, 2)}

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # has no types
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            loss: Tensor = case.run_body(loop, inputs["x"], self.state.global_step)
            return loss

    loop.optimizer.param_groups[0]["lr"] = 1.0
    timer = TransformersPhaseTimer(_clock=loop.gpu, print_summary=False, warmup_steps=0)
    arguments = training_arguments(path, max_steps=case.batches)
    Trainer(
        loop.model, arguments, data_collator=collate, train_dataset=[0] * 40,
        optimizers=(loop.optimizer, None), callbacks=[timer],
    ).train()  # fmt: skip
    return timer


def expected_steps(case: Case, front_end: str) -> list[Phases]:
    n = case.batches // case.micro_batches
    rows = [
        dict(row) for row in (case.phases if isinstance(case.phases, list) else [case.phases] * n)
    ]
    lead_ms = case.lead_ms * case.micro_batches
    if front_end == STEP:
        for row in rows:
            row["data"] += lead_ms
            row["other"] -= lead_ms
    if front_end == TRANSFORMERS:
        rows[0]["data"] += 1.0  # Accelerate's loader prefetches one batch.
    return [{name: ms for name, ms in row.items() if ms} for row in rows]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:`torch.jit")
@pytest.mark.parametrize(
    ("case", "front_end"),
    [
        pytest.param(case, front_end, id=f"{case.name}, {front_end}")
        for case in CASES
        for front_end in case.front_ends
    ],
)
def test_each_step_has_the_expected_phases(
    case: Case, front_end: str, gpu: FakeGPU, tmp_path: Path, one_thread: None
) -> None:
    loop = case.build(gpu)
    optimizers = loop.optimizers or [loop.optimizer]
    bare = hooks_of(loop.model), installed(*optimizers)
    timer: Any
    if front_end == TRANSFORMERS:
        timer = run_transformers(case, loop, tmp_path)
    elif front_end in PLAIN:
        timer = run_plain(case, loop, front_end)
    else:
        timer = run_lightning(case, loop, front_end)
    found = steps(timer)
    assert [{name: ms for name, ms in row.items() if ms} for row in found] == expected_steps(
        case, front_end
    )
    assert not [row for row in found if case.absent & row.keys()]
    numbers = timer.history()["step"].tolist()
    if front_end == SAMPLED:
        assert len(numbers) == len(found)
    else:
        # In manual optimization, a step has the number of its last batch.
        batches = case.micro_batches if front_end == MANUAL else 1
        first = batches - 1 + (front_end == TRANSFORMERS)  # Transformers counts from 1.
        assert numbers == [*range(first, first + batches * len(found), batches)]
    assert len(gpu.waits) <= len(found)
    step_ms = [sum(ms for name, ms in row.items() if "/" not in name) for row in found]
    assert timer.history()["step_ms"].tolist() == step_ms
    assert timer.summary().skipped_updates == case.skipped_updates
    assert (hooks_of(loop.model), installed(*optimizers)) == bare


def test_readme_has_the_table_of_loops() -> None:
    text = README.read_text()
    assert text == with_table(text), "run `python tests/conformance.py`"


class Regression(pl.LightningModule):
    """A training with dropout and shuffled data, which a seed determines."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, shuffle=True)


def regress(front_end: str, is_timed: bool) -> list[Tensor]:
    """Train for three epochs, and return all losses and weights."""
    module = Regression()
    if front_end == LIGHTNING:
        trainer(*[GPUPhaseTimer(print_summary=False)] * is_timed, max_epochs=3).fit(module)
        return [*module.losses, *module.state_dict().values()]
    loader, backward = module.train_dataloader(), torch.autograd.backward
    optimizer: Any = module.optimizer
    if front_end == "Fabric":
        fabric = Fabric(accelerator="cpu", devices=1)
        net, optimizer = fabric.setup(module.net, optimizer)
        module.net, loader = net, fabric.setup_dataloaders(loader)
        backward = fabric.backward  # type: ignore[assignment]
    with GPUPhaseHooks(module.net, optimizer) if is_timed else nullcontext() as timer:
        for _ in range(3):
            for x in timer.steps(loader) if timer and front_end != STEP else loader:
                loss = module.training_step(x)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                if timer and front_end == STEP:
                    timer.step()
    if timer:
        found = timer.summary().measurement
        assert found.warmup_steps + found.steps + found.untimed_steps == 24
        assert found.examined_steps == 3
    return [*module.losses, *module.state_dict().values()]


@pytest.mark.parametrize("front_end", [STEP, STEPS, LIGHTNING, "Fabric"])
def test_losses_and_weights_are_bitwise_the_same_with_the_timer(front_end: str) -> None:
    without, with_timer = (regress(front_end, is_timed) for is_timed in (False, True))
    assert len(without) == 24 + 4  # Losses, and weights and biases.
    assert all(map(torch.equal, without, with_timer))
