"""Content of the batches of each timed step, from shapes and from masks on the CPU."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gputime._attribution.overlap import Candidate
from lightning_gputime._compat.torch_ import function_modes, without_function_modes

MASK = "attention_mask"
_MAX_STEPS = 4000  # Number of newest steps whose content is kept.
_OF_TOKENS = (torch.int64, torch.int32)
_MAX_MASK = 100_000  # Larger masks are not summed, which would take 0.1 ms or more.
_MIN_PADDING = 0.2  # Minimum share of padding that is reported.


class Content(NamedTuple):
    """Content of the batches of a step."""

    tokens: int = 0  # Elements of the largest int32 or int64 tensor of each batch, with padding.
    used: int = 0  # Tokens without padding; 0 if unknown.
    elements: int = 0  # Elements of the largest tensor of another type of each batch.


_UNKNOWN = Content()  # Of a step with a batch that could not be read.


class BatchLog:
    """Content of the newest timed steps. `add` and `end_step` are called in each of them."""

    def __init__(self) -> None:
        self.open: Content | None = None
        """Content of the open step so far."""
        self.steps: deque[tuple[int, Content]] = deque(maxlen=_MAX_STEPS)
        """Number and content of each step."""

    def __getstate__(self) -> dict[str, Any]:
        # Another thread may copy the timer while steps are added.
        return {**self.__dict__, "steps": self.steps.copy()}

    def add(self, batch: Any) -> None:
        """Add a batch of the open step. It may be of any type, and is not kept."""
        found = self.open or Content()
        if found is _UNKNOWN:
            return
        try:
            if type(batch) is Tensor and not function_modes() and batch.is_floating_point():
                # The most common case of a small model, without more calls.
                elements = found.elements + batch.numel()
                self.open = Content(found.tokens, found.used, elements)
                return
            # Modes of functions, such as a FLOP counter, must not see these calls. Leaving them
            # takes longer than the rest.
            if function_modes():
                with without_function_modes():
                    tokens, used, elements = _content_of(batch)
            else:
                tokens, used, elements = _content_of(batch)
            self.open = Content(found.tokens + tokens, found.used + used, found.elements + elements)
        except Exception:  # Objects of users may raise anything.
            self.open = _UNKNOWN

    def end_step(self, number: int) -> None:
        """End the open step. It does nothing if no batch was added."""
        if self.open is not None and self.open is not _UNKNOWN:
            self.steps.append((number, self.open))
        self.open = None

    def drop_step(self) -> None:
        self.open = None

    @property
    def padding(self) -> float:
        """Fraction of the tokens that are padding; 0 if it is small or unknown."""
        known = [content for _, content in [*self.steps] if content.used]
        tokens = sum(content.tokens for content in known)
        share = 1.0 - sum(content.used for content in known) / tokens if tokens else 0.0
        return share if share >= _MIN_PADDING else 0.0

    def mean_content(self) -> tuple[str, float]:
        """Return the most specific unit that all steps have, and its mean amount per step."""
        steps = [content for _, content in [*self.steps]]
        for unit, amounts in (
            ("non-padding tokens", [content.used for content in steps]),
            ("tokens", [content.tokens for content in steps]),
            ("elements", [content.elements for content in steps]),
        ):
            if amounts and all(amounts):
                return unit, round(sum(amounts) / len(amounts), 1)
        return "", 0.0

    def candidates(self, numbers: Sequence[int]) -> list[Candidate]:
        """Return the contents that vary between the steps with these numbers."""
        content = dict(self.steps)
        found = []
        for index, name in enumerate(("tokens", "non-padding tokens", "elements")):
            values = [content[n][index] if n in content else np.nan for n in numbers]
            found.append(Candidate(name, np.array(values, float), kind="batch"))
        return found


def _content_of(batch: Any) -> Content:
    tokens, elements, used = 0, 0, 0
    for name, tensor in _tensors(batch, 0):
        # Reading a tensor on a device would make the host wait for it.
        if name == MASK and tensor.device.type == "cpu" and tensor.numel() <= _MAX_MASK:
            used = int(torch.count_nonzero(tensor))
        if tensor.dtype not in _OF_TOKENS:
            elements = max(elements, tensor.numel())
        elif tensor.dim() >= 2 or name == "input_ids":
            tokens = max(tokens, tensor.numel())
    return Content(tokens, used, elements)


def _tensors(batch: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a batch with their keys, down to three levels."""
    if isinstance(batch, Tensor):
        yield "", batch
    elif isinstance(batch, Mapping) and depth < 3:
        for key in batch.keys():  # noqa: SIM118 - iterating over a TensorDict yields its rows
            for name, tensor in _tensors(batch[key], depth + 1):
                yield name or str(key), tensor
    elif isinstance(batch, list | tuple) and depth < 3:
        for item in batch[:64]:
            yield from _tensors(item, depth + 1)
