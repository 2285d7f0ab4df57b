"""`<phase>/comm` of a pipeline: a stage receives data for the next pass."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining._backward as _backward
from fake_gpu import FakeGPU, Layer, steps
from fake_ranks import Ranks, Shared, from_module, launch, train, waiting
from processes import finish, start

from lightning_gputime import GPUPhaseHooks

PIPELINE = from_module("torch.distributed.pipelining.stage")
SCRIPT = Path(__file__).with_name("pipeline_run.py")
MANUAL = Path(__file__).parents[1] / "docs/how-to/trainers/megatron-torchtitan.md"


@pytest.mark.parametrize("place", ["data", "other", "forward", "loss", "backward", "optimizer"])
def test_pipeline_receive_is_comm_of_the_next_pass(ranks: Ranks, gpu: FakeGPU, place: str) -> None:
    loop = Shared(gpu, place, lambda: PIPELINE(launch().wait))
    next_pass = "forward" if place in ("data", "other", "forward") else "backward"
    assert train(loop) == [waiting(next_pass)] * 3


def test_autograd_grad_of_a_pipeline_is_backward(ranks: Ranks, gpu: FakeGPU) -> None:
    net = Layer(gpu, 4.0, 8.0)
    call = from_module(_backward.__name__)
    with GPUPhaseHooks(net, _clock=gpu, warmup_steps=0, sync_ranks=False) as timer:
        for is_pipeline in (True, False):
            x = torch.ones(1, 2, requires_grad=True)
            y = net(x).sum()
            grad = functools.partial(torch.autograd.grad, y, [x], retain_graph=True)
            call(grad) if is_pipeline else grad()
            y.backward()
            timer.step()
    of_pipeline, of_penalty = steps(timer)
    assert of_pipeline["backward"] == 16.0
    assert of_penalty["loss"] == 8.0


@pytest.mark.slow
def test_megatron_and_torchtitan_recipes_time_every_stage(tmp_path: Path) -> None:
    ranks = finish(*(start(SCRIPT, MANUAL, tmp_path, rank) for rank in range(2)))
    # Two stages, two micro-batches of 4 and 8 ms, an update of 2 ms, and two batches of 1 ms.
    first = {"data": 2.0, "forward": 16.0, "loss": 0.0, "backward": 32.0, "optimizer": 2.0}
    first |= {"other": 0.0, "forward/comm": 0.0, "backward/comm": 0.0}
    # The last stage has the loss, of 0.5 and 0.25 ms. In Megatron, the loss between two model calls
    # is `forward`.
    last = first | {"loss": 1.0, "backward": 32.5}
    between = last | {"forward": 16.5, "loss": 0.5}
    assert [json.loads(printed) for printed in ranks] == [
        {"megatron": [first] * 4, "torchtitan": [first] * 4},
        {"megatron": [between] * 4, "torchtitan": [last] * 4},
    ]
