"""The recipes of CONTRIBUTING.md: each is one file and one line."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gputime import GPUPhaseHooks

CONTRIBUTING = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
RECIPES = {
    title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for title, text in re.findall(r"^### (.+?)\n(.*?)(?=^##)", CONTRIBUTING, re.M | re.DOTALL)
}


def follow(recipe: str, **names: Any) -> dict[str, Any]:
    """Run the file and the line of a recipe, and return the names that they define."""
    file, line = RECIPES[recipe]
    exec(file, names)
    exec(line, names)
    return names


def train(timer: GPUPhaseHooks, net: Any, optimizer: Any, steps: int = 20) -> None:
    for x in timer.steps([torch.randn(4, 4)] * steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.fixture
def net() -> Any:
    return nn.Linear(4, 1)


@pytest.fixture
def optimizer(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def test_every_recipe_is_one_file_and_one_line() -> None:
    assert len(RECIPES) == 3
    for file, line in RECIPES.values():
        compile(file, "recipe", "exec")
        assert len(line.splitlines()) == 1


def test_recipe_adds_a_phase(net: Any, optimizer: torch.optim.Optimizer) -> None:
    model = SimpleNamespace(augment=lambda x: x + 1)
    follow("Add a phase", model=model)
    with GPUPhaseHooks(net, optimizer, every_n_steps=1) as timer:
        for x in timer.steps([torch.randn(4, 4)] * 10):
            net(model.augment(x)).mean().backward()
            optimizer.step()
    assert timer.summary().rows["augment"].n == 5


def test_added_phase_is_a_cause_of_slow_steps(net: Any, optimizer: torch.optim.Optimizer) -> None:
    model = SimpleNamespace(augment=lambda step: time.sleep(0.2 if step == 40 else 0))
    follow("Add a phase", model=model)
    with GPUPhaseHooks(net, optimizer, every_n_steps=1) as timer:
        for step in timer.steps(range(60)):
            model.augment(step)
            net(torch.randn(4, 4)).mean().backward()
            optimizer.step()
    # A busy machine may slow other steps even more.
    [planted] = [slow for slow in timer.slow_steps() if slow.step == 40]
    assert planted.causes[0].name == "phase augment"


def test_recipe_adds_a_front_end(
    net: Any, optimizer: torch.optim.Optimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SimpleNamespace(net=net, optimizer=optimizer, callbacks=[])
    follow("Add a front end", engine=engine)
    [callback] = engine.callbacks
    callback.on_start()
    for _ in range(20):
        net(torch.randn(4, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end()
    callback.on_end()
    assert "backward" in capsys.readouterr().out


def test_recipe_adds_a_feature(net: Any, optimizer: torch.optim.Optimizer) -> None:
    logged: dict[str, float] = {}
    logger = SimpleNamespace(log_metrics=lambda *, metrics, step: logged.update(metrics))
    names: dict[str, Any] = {"net": net, "optimizer": optimizer}
    # Make the timer of the recipe log.
    names["GPUPhaseHooks"] = lambda *args, **options: GPUPhaseHooks(
        *args, **options, logger=logger, log_every_n_steps=10
    )
    timer = follow("Add a feature", **names)["timer"]
    with timer:
        train(timer, net, optimizer)
    assert logged["phase_time/longest_ms"] > 0
    assert "longest step:" in str(timer.summary())
