"""Keeps a count apart from what is around the loop: random numbers, modes, hooks on all modules."""

import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch._C import _autograd, _len_torch_function_stack
from torch.nn.modules import module as of_modules
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def undisturbed() -> Iterator[None]:
    """Lets random numbers stay as they are, warnings be silent, and nobody hear of what runs.

    Somebody's own counter around the loop would count it, and hooks would keep fake tensors.
    """
    python, of_numpy = random.getstate(), np.random.get_state()
    # On a device checkpointing would set the state of random numbers by a fake one.
    states = checkpoint.get_device_states
    # What it says of an operator that has refused a fake is told by us.
    says = logging.getLogger("torch._subclasses.fake_tensor")
    was_silent, says.disabled = says.disabled, True
    checkpoint.get_device_states = lambda *_: ([], [])
    try:
        with ExitStack() as stack:
            if _compiles():
                # What is compiled would be compiled again, for fakes.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_disable_current_modes())
            stack.enter_context(_without_function_modes())
            stack.enter_context(_without_hooks_on_all_modules())
            stack.enter_context(_without_hooks_on_saved_tensors())
            # It looks for NaN, which a fake does not tell.
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            yield
    finally:
        says.disabled = was_silent
        checkpoint.get_device_states = states
        random.setstate(python)
        np.random.set_state(of_numpy)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Leaves those alone that say on which device tensors are made."""
    modes = [overrides._pop_mode() for _ in range(_len_torch_function_stack())][::-1]
    kept = [one for one in modes if isinstance(one, DeviceContext)]
    try:
        for one in kept:
            overrides._push_mode(one)
        yield
    finally:
        for _ in kept:
            overrides._pop_mode()
        for one in modes:
            overrides._push_mode(one)


@contextmanager
def _without_hooks_on_all_modules() -> Iterator[None]:
    names = vars(of_modules)
    hooks: dict[str, Any] = {
        name: one
        for name, one in names.items()
        if name.startswith("_global_") and isinstance(one, dict)
    }
    try:
        names.update({name: type(one)() for name, one in hooks.items()})
        yield
    finally:
        names.update(hooks)


@contextmanager
def _without_hooks_on_saved_tensors() -> Iterator[None]:
    hooks = []
    try:
        while (one := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            hooks.append(one)
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _compiles() -> bool:
    # Who has compiled nothing has not imported it, which takes a second.
    return "torch._dynamo" in sys.modules
