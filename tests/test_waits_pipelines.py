"""`<phase>/comm` of a pipeline: what a stage receives is for the pass that follows."""

import functools

import pytest
import torch
import torch.distributed.pipelining._backward as _backward
from fake_gpu import FakeGPU, Layer, steps
from fake_ranks import Ranks, Shared, from_module, launch, train, waiting

from lightning_gputime import GPUPhaseHooks

PIPELINE = from_module("torch.distributed.pipelining.stage")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("data", "forward"),
        ("other", "forward"),
        ("forward", "forward"),
        ("loss", "backward"),
        ("backward", "backward"),
        ("optimizer", "backward"),
    ],
)
def test_what_a_pipeline_receives_is_the_comm_of_the_pass_it_is_for(
    ranks: Ranks, gpu: FakeGPU, place: str, name: str
) -> None:
    loop = Shared(gpu, place, lambda: PIPELINE(launch().wait))
    assert train(loop) == [waiting(name)] * 3


def test_a_gradient_that_a_pipeline_takes_is_no_loss(ranks: Ranks, gpu: FakeGPU) -> None:
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
