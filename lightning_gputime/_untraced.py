"""Code that torch.compile leaves alone."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._dynamo.decorators import skip

T = TypeVar("T", bound=Callable[..., Any])


def untraced(one: T) -> T:
    """Lets compiled code call a function, or the methods of a class, without tracing into them.

    As `torch.compiler.disable`, but at no cost in the call: what is called from there must be
    untraced as well.
    """
    for function in vars(one).values() if isinstance(one, type) else [one]:
        if isinstance(function, FunctionType):
            skip(function)
    return one
