"""Calls that torch.compile leaves alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame


def untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, for compiled code to call without tracing it or what it calls.

    As `torch.compiler.disable`, in a fraction of the instructions: hooks pay for it at every step,
    also where nothing is compiled.
    """
    set_eval_frame = eval_frame.set_eval_frame

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        callback = set_eval_frame(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_eval_frame(callback)

    alone: Callable[..., Any] = torch.compiler.disable(run, recursive=False)
    return alone
