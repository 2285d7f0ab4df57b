"""Imports of the package and its public names."""

import inspect
import pickle
from typing import get_args, get_type_hints

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


def test_types_of_public_results_are_public() -> None:
    """`NamedPhase` is used only by `with` or as a decorator."""
    types = [getattr(lightning_gputime, name) for name in lightning_gputime.__all__]
    seen, hidden = [], set()
    while types:
        found = types.pop()
        if found in seen or found.__name__ == "NamedPhase":
            continue
        seen.append(found)
        if not isinstance(found, type):
            hints = [get_type_hints(found).get("return")]
        else:
            hidden |= {found.__name__} - {*lightning_gputime.__all__}
            hints = [hint for name, hint in get_type_hints(found).items() if name[0] != "_"]
            for name, member in vars(found).items():
                function = member.fget if isinstance(member, property) else member
                if name[0] != "_" and inspect.isfunction(function):
                    hints.append(get_type_hints(function).get("return"))
        while hints:
            hint = hints.pop()
            hints += get_args(hint)
            if isinstance(hint, type) and hint.__module__.startswith("lightning_gputime"):
                types.append(hint)
    assert not hidden


def test_unknown_name_raises_with_the_closest_name() -> None:
    with pytest.raises(AttributeError, match="'GpuPhaseTimer': did you mean GPUPhaseTimer"):
        lightning_gputime.GpuPhaseTimer  # noqa: B018
