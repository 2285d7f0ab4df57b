"""Modules and losses that a timer discovers when the loop calls them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import installed
from fake_gpu import Adder, FakeGPU, Layer, batches, steps, work
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks


def train(gpu: FakeGPU, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> GPUPhaseHooks:
    optimizer = Adder(iter([*model.parameters()]), gpu, 2.0)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for x in timer.steps(batches(gpu, 3)):
            loss_of(x).backward()
            optimizer.step()
    return timer


def test_modules_that_the_loop_does_not_call_lose_their_hooks(gpu: FakeGPU) -> None:
    backbone = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 2.0, 3.0))
    net = nn.ModuleDict({"backbone": backbone, "head": Layer(gpu, 1.0, 2.75)})
    hooked: list[set[nn.Module]] = []

    def loss_of(x: Tensor) -> Tensor:
        hooked.append({module for module in net.modules() if module._forward_pre_hooks})
        return net["head"](net["backbone"](x)).sum()  # type: ignore[no-any-return]

    train(gpu, net, loss_of)
    # Only the backbone calls its own modules.
    assert hooked == [{*net.modules()}, *[{net, backbone, net["head"]}] * 2]


def test_teacher_in_eval_mode_keeps_the_fast_path_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = Mock(wraps=torch._transformer_encoder_layer_fwd)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fast)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = nn.ModuleDict({"teacher": teacher, "student": nn.Linear(16, 16)})
    optimizer = torch.optim.SGD(model["student"].parameters())
    x = torch.randn(4, 8, 16)
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in timer.steps(range(3)):
            with torch.no_grad():
                target = teacher(x)
            (model["student"](x) - target).square().mean().backward()
            optimizer.step()
    assert fast.call_count == 2 * 3


def test_model_of_layers_with_a_fast_path_is_timed(gpu: FakeGPU) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)

    model = Layers()
    timer = train(gpu, model, lambda x: work(model.layer(x.unsqueeze(0)), gpu, 4.0, 7.75).sum())
    assert ["forward" in step for step in steps(timer)] == [False, True, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("is_scripted", [True, False], ids=["scripted", "traced"])
def test_scripted_or_traced_child_is_timed_and_keeps_no_hooks(is_scripted: bool) -> None:
    x = torch.ones(1, 2)
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    child: Any = torch.jit.script(inner) if is_scripted else torch.jit.trace(inner, x)
    model = nn.ModuleDict({"child": child, "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters())
    with GPUPhaseHooks(model, optimizer, warmup_steps=0) as timer:
        for _ in timer.steps(range(3)):
            model["head"](model["child"](x)).sum().backward()
            optimizer.step()
    phases = {"data", "other", "forward", "loss", "backward", "optimizer"}
    assert [set(step) for step in steps(timer)] == [phases] * 3
    assert not any(module._forward_pre_hooks for module in (model, child, model["head"]))


class WithLoss(nn.Module):
    """A model that returns its loss. Its first call raises if it `fails_once`."""

    def __init__(self, gpu: FakeGPU, *, fails_once: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = Layer(gpu, 1.0, 1.0), Layer(gpu, 2.0, 2.0)
        self.fails = fails_once

    def forward(self, z: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError
        return self.decoder(z).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_inside", [False, True], ids=["the model", "inside the model"])
def test_model_that_returns_its_loss_is_timed_with_its_parts(gpu: FakeGPU, is_inside: bool) -> None:
    model = WithLoss(gpu)
    bare = installed(*model.modules())
    timed = nn.ModuleList([model]) if is_inside else model
    timer = train(gpu, timed, lambda x: model(model.encoder(x)))
    assert [(step["forward"], step["backward"]) for step in steps(timer)] == [(3.0, 3.0)] * 3
    assert installed(*model.modules()) == bare


def test_model_that_returns_its_loss_is_timed_when_it_is_retried(gpu: FakeGPU) -> None:
    model = WithLoss(gpu, fails_once=True)

    def loss_of(x: Tensor) -> Tensor:
        with suppress(MemoryError):
            return model(x)  # type: ignore[no-any-return]
        return model(x)  # type: ignore[no-any-return]

    timer = train(gpu, model, loss_of)
    assert [(step["forward"], step["backward"]) for step in steps(timer)] == [(2.0, 2.0)] * 3
