"""Hooks that stay on their module: they travel with no copy of it, and into no file."""

from collections import OrderedDict
from typing import Any

from torch.utils.hooks import RemovableHandle


class Uncopied:
    """A hook on a module that no copy of the module has.

    Hooks travel with `copy.deepcopy(model)` and `torch.save(model)`. A copy, such as an EMA, must
    not be timed, and a file with a hook of ours would not load where this package is missing, nor
    with `weights_only=True`. So each dictionary that holds the hook is reduced without it, as if
    the hook were not there: the file is the same to the byte.

    Args:
        handle: What registering the hook has returned.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle
        for hooks in self._dictionaries():
            _reduction(hooks).uncopied.add(handle.id)

    def remove(self) -> None:
        """Takes the hook off. Safe to call twice."""
        for hooks in self._dictionaries():
            reduction = _reduction(hooks)
            reduction.uncopied.discard(self._handle.id)
            if not reduction.uncopied:
                del vars(hooks)[_NAME]
        self._handle.remove()

    def _dictionaries(self) -> list[Any]:
        handle = self._handle
        hooks = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
        # A scripted module has dictionaries of another kind, and cannot be copied so.
        return [one for one in hooks if type(one) is OrderedDict]


# Both `pickle` and `copy` look it up on the object, before its class.
_NAME = "__reduce_ex__"


class _Reduction:
    """How a dictionary of hooks is copied: without some of them.

    Args:
        hooks: The dictionary.
    """

    def __init__(self, hooks: "OrderedDict[int, Any]") -> None:
        self._hooks = hooks
        self.uncopied: set[int] = set()
        """The keys that no copy has."""

    def __call__(self, protocol: Any) -> Any:
        kept = {key: one for key, one in self._hooks.items() if key not in self.uncopied}
        return OrderedDict(kept).__reduce_ex__(protocol)


def _reduction(hooks: "OrderedDict[int, Any]") -> _Reduction:
    reduction: _Reduction = vars(hooks).setdefault(_NAME, _Reduction(hooks))
    return reduction
