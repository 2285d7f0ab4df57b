"""Imports of the package and its public names."""

import pickle

import pytest
from processes import run

import lightning_gputime


@pytest.mark.slow
def test_plain_loop_imports_neither_lightning_nor_the_compiler() -> None:
    code = """
import sys, torch
from lightning_gputime import GPUPhaseHooks
assert "torch._dynamo" not in sys.modules
model = torch.nn.Linear(2, 2)
with GPUPhaseHooks(model, torch.optim.SGD(model.parameters())) as timer:
    for x in timer.steps([torch.ones(1, 2)] * 3):
        model(x).sum().backward()
print({"lightning", "torchmetrics"} & set(sys.modules))
"""
    assert run("-c", code) == "set()\n"


def test_every_public_name_can_be_imported() -> None:
    for name in lightning_gputime.__all__:
        found = getattr(lightning_gputime, name)
        assert found.__doc__
        if isinstance(found, type):
            assert pickle.loads(pickle.dumps(found)) is found
            assert found.__module__ == "lightning_gputime"


def test_unknown_name_raises_with_the_closest_name() -> None:
    with pytest.raises(AttributeError, match="'GpuPhaseTimer': did you mean GPUPhaseTimer"):
        lightning_gputime.GpuPhaseTimer  # noqa: B018
