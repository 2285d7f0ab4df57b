"""`loss`: which of the modules that a loop calls compute the loss, and are no `forward`."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_gputime._phases import FORWARD, LOSS
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced

# Between a module that returns a loss and the backward lie a weight, a sum, a scaler, a division.
_NODES = 1000

# Each holds a graph until the next backward.
_CANDIDATES = 8


@untraced
class LossSearch:
    """Finds the modules that are losses, whatever their class.

    A module is a loss if it is called after another one, and returns the scalar that a backward
    begins from, perhaps scaled, or added to others. A model that returns its own loss is no such
    module: nothing is called before it. Each module is judged once.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.known: set[int] = set()
        """The ids of the modules that were judged."""
        self.found: set[int] = set()
        """The ids of those that are losses."""
        self.candidates: list[tuple[nn.Module, Any, int]] = []
        """Modules that may be losses, the graph node of what each returned, and the place of its
        mark in the open step; they must be cleared when that step ends."""

    def judge(self, module: nn.Module, output: Any, *, is_first: bool) -> None:
        """Must be told what a module returned that is not known.

        Args:
            module: What was called, by the loop itself.
            output: What the call returned.
            is_first: Whether no other was called before it in this step.
        """
        if is_first or not isinstance(output, Tensor) or output.dim():
            self.known.add(id(module))
        elif output.grad_fn is not None and len(self.candidates) < _CANDIDATES:
            # The last mark is the end of the call.
            self.candidates.append((module, output.grad_fn, self._recorder.place_before))

    def settle(self, tensors: Any, *, is_last: bool) -> list[nn.Module]:
        """Returns the candidates that are losses, and gives their time to `loss`.

        Args:
            tensors: What a backward begins from: one tensor or several.
            is_last: Whether the other candidates are none.
        """
        candidates, self.candidates = self.candidates, []
        nodes = list(_nodes_behind(tensors))
        found = []
        for module, node, place in candidates:
            if any(node is one for one in nodes):
                self._recorder.rename(place, FORWARD, LOSS)
                found.append(module)
                self.found.add(id(module))
            elif not is_last:
                self.candidates.append((module, node, place))
                continue
            self.known.add(id(module))
        return found


@untraced
def _nodes_behind(tensors: Any) -> Iterator[Any]:
    """Yields the graph nodes that tensors come from, the nearest first."""
    several: Iterable[Any] = tensors if isinstance(tensors, list | tuple) else [tensors]
    nodes = [tensor.grad_fn for tensor in several if isinstance(tensor, Tensor)]
    for count, node in enumerate(nodes):
        if node is not None and count < _NODES:
            yield node
            nodes.extend(before for before, _ in node.next_functions)
