"""The calls of models in a step, by the sizes of what they are given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[Any, ...]
"""What decides how many FLOPs a call has: the module, what of it is trained, and what it gets."""

ALIKE = 4
"""So many of the first parts of two keys are equal where only the arguments differ."""

_TRAINED = 3

_requires_grad = attrgetter("requires_grad")

# Arguments that choose what is computed; numbers may be others in each step, and choose little. So
# may strings inside of a batch, as the names of its files.
_FLAGS = (bool, type(None))
_CHOICES = (*_FLAGS, str)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Like:
    """What is kept of a tensor: enough to make one like it, and none of its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """What stands for an argument that nothing like it can be made of."""

    kind: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module, to be made once more with tensors that have no memory.

    Attributes:
        module: What was called.
        args: Its arguments, with a `Like` for each tensor.
        kwargs: Those with a name.
        with_grad: Whether it was recorded for a backward.
        trained: Which parameters of the module needed a gradient, see `trained`.
        autocast: The type of the device and the dtype of autocast; None where that was off.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    with_grad: bool
    trained: bytes
    autocast: tuple[str, torch.dtype | None]


def trained(parameters: Iterable[Tensor]) -> bytes:
    """Returns of each parameter whether it needs a gradient, for little: at each call."""
    return bytes(map(_requires_grad, parameters))


def key_of(module: nn.Module, needs_grad: bytes, args: Any, kwargs: Any) -> Key:
    """Returns what two calls have in common that have the same FLOPs.

    Args:
        module: What is called.
        needs_grad: Which of its parameters need a gradient, see `trained`.
        args: Its arguments.
        kwargs: Those with a name.
    """
    shapes: list[Any] = [id(module), module.training, torch.is_grad_enabled(), needs_grad]
    for one in args:
        _add_shapes(one, shapes, _CHOICES)
    for name, one in (kwargs or {}).items():
        shapes.append(name)
        _add_shapes(one, shapes, _CHOICES)
    return tuple(shapes)


def elements(key: Key) -> int:
    """Returns the number of elements of the first tensor of a call."""
    for one in key:
        if isinstance(one, torch.Size):
            return one.numel()
    return 0


def call_of(key: Key, module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Call:
    """Returns what is needed to make the call of a key again."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with_grad = torch.is_grad_enabled()
    return Call(module, _like(args), _like(kwargs), with_grad, key[_TRAINED], (kind, dtype))


def _add_shapes(value: Any, shapes: list[Any], choices: tuple[type, ...] = _FLAGS) -> None:
    if isinstance(value, Tensor):
        shapes.append(value.shape)
        shapes.append(value.requires_grad)
    elif isinstance(value, choices):
        shapes.append(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            shapes.append(key)
            _add_shapes(one, shapes)
    elif isinstance(value, list | tuple):
        for one in value:
            _add_shapes(one, shapes)


def _like(value: Any) -> Any:
    # Not the value itself: a batch must not live on for this.
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
        return Like(value.shape, value.dtype, value.device, value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _like(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        several = [_like(one) for one in value]
        if hasattr(value, "_fields"):
            return type(value)(*several)
        return several if isinstance(value, list) else tuple(several)
    if isinstance(value, _PLAIN):
        return value
    is_sparse = type(value) is Tensor
    return Opaque(f"{value.layout} tensor" if is_sparse else type(value).__name__)
