"""`<phase>/comm` of a pipeline: what a stage receives is for the pass that follows."""

import pytest
from fake_gpu import FakeGPU
from fake_ranks import Ranks, Shared, from_module, launch, train, waiting

PIPELINE = from_module("torch.distributed.pipelining.stage")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("data", "forward"),
        ("other", "forward"),
        ("forward", "forward"),
        ("loss", "backward"),
        ("backward", "backward"),
        ("optimizer", "optimizer"),
    ],
)
def test_what_a_pipeline_receives_is_the_comm_of_the_pass_it_is_for(
    ranks: Ranks, gpu: FakeGPU, place: str, name: str
) -> None:
    loop = Shared(gpu, place, lambda: PIPELINE(launch().wait))
    assert train(loop) == [waiting(name)] * 3
