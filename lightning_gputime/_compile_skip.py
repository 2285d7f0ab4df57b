"""Code that torch.compile leaves alone."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_pending: list[FunctionType] = []


def skip_compile(one: T) -> T:
    """Let compiled code call a function, or the methods of a class, without tracing into them.

    As `torch.compiler.disable`, but at no cost in the call: what is called from there must be
    skipped as well. It holds from the next `apply_compile_skips` on.
    """
    for function in vars(one).values() if isinstance(one, type) else [one]:
        if isinstance(function, FunctionType):
            _pending.append(function)
    return one


def apply_compile_skips() -> None:
    """Call before the code may run. Not at import: torch's compiler takes a second."""
    from torch._dynamo.decorators import skip

    while _pending:
        skip(_pending.pop())
