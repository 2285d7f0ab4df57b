"""Which modules the option `modules` means: names, patterns, a depth, or all."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getattr_static
from itertools import accumulate
from typing import TypeGuard

from torch import nn

from lightning_gputime._boundaries.forward import is_metric
from lightning_gputime._phases import COMM, UNUSABLE, check_name

Modules = int | str | Sequence[str] | Mapping[str, nn.Module]

ALL = "all"
"""The option `modules` for all modules inside the model."""

MOST = 100
"""So many modules a depth or patterns may mean: each has four boundaries and two logged means."""

# What torch puts around a module is called with it, and adds nothing to its name.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def resolve(modules: Modules, model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that shall be timed as parts, by name, in the order of the model.

    Args:
        modules: The option, checked.
        model: Where they are looked up.

    Raises:
        ValueError: If the model has none of a name or a pattern, or too many of a pattern.
    """
    if isinstance(modules, Mapping):
        return {check_name(name): module for name, module in modules.items()}
    inner = getattr(model, "module", model)  # What DistributedDataParallel wraps.
    inner = getattr(inner, "_orig_mod", inner)  # What torch.compile wraps.
    # A module that the model holds twice has two names.
    called, named = _called(inner), dict(inner.named_modules(remove_duplicate=False))
    asked = [modules] if isinstance(modules, int | str) else modules
    # Of a module that is asked for twice, the name counts that was given in full.
    chosen = {id(called[name]): name for name in _of_patterns(asked, called)}
    if len(chosen) > MOST:
        raise ValueError(_too_many(modules, len(chosen), called))
    for name in filter(_is_name, asked):
        if not name or name not in named:
            known = ", ".join(name for name, _ in inner.named_children()) or "none inside"
            raise ValueError(f"modules: the model has no module {name!r}; it has {known}")
        if not _is_callable(named[name]):
            raise ValueError(
                f"modules: {name!r} only holds modules, and is never called: give '{name}.*'"
            )
        chosen[id(named[name])] = name
    return {_usable(chosen[id(one)]): one for one in inner.modules() if id(one) in chosen}


def _called(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules inside a model that can be called, by their names without wrappers."""
    called: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        plain = _WRAPPERS.sub("", name).strip(".")
        if plain and _is_callable(module) and not is_metric(module):
            called.setdefault(plain, module)
    return called


def _is_callable(module: nn.Module) -> bool:
    # Not so a ModuleList or ModuleDict. A scripted module cannot be asked the usual way.
    forward = getattr_static(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _of_patterns(asked: Iterable[int | str], called: Mapping[str, nn.Module]) -> list[str]:
    """Returns the names that are meant by a depth or by patterns."""
    found: list[str] = []
    for one in asked:
        if isinstance(one, int):
            names = [name for name in called if _depth(name, called) <= one]
        elif not _is_name(one):
            pattern = ["**"] if one == ALL else one.split(".")
            names = [name for name in called if _matches(name.split("."), pattern)]
        else:
            continue
        if not names:
            some = ", ".join([*called][:20]) or "none inside"
            raise ValueError(
                f"modules: no module of the model matches {one!r} ('*' stands for one part of a"
                f" name, '**' for any number of them); it has {some}"
            )
        found += names
    return found


def _is_name(one: int | str) -> TypeGuard[str]:
    return isinstance(one, str) and one != ALL and not set(one) & set("*?[")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _depth(name: str, called: Mapping[str, nn.Module]) -> int:
    # A ModuleList is no depth of its own: nobody calls it.
    return sum(outer in called for outer in accumulate(name.split("."), "{}.{}".format))


def _too_many(modules: object, n: int, called: Mapping[str, nn.Module]) -> str:
    depths = [_depth(name, called) for name in called]
    few = [
        f"modules={depth}, which means {sum(one <= depth for one in depths)}"
        for depth in range(1, max(depths) + 1)
        if sum(one <= depth for one in depths) <= MOST
    ]
    layer = next((name for name in called if name.rpartition(".")[2].isdecimal()), "layers.0")
    pattern = f"{layer.rpartition('.')[0]}.*".removeprefix(".")
    fixes = [*few[-1:], f"a pattern such as {pattern!r}", "names in full, which have no limit"]
    return (
        f"modules={modules!r} means {n} modules of this model, and may mean {MOST}, because each"
        f" takes the host some tens of microseconds a call: give {', or '.join(fixes)}"
    )


def _usable(name: str) -> str:
    # What a ModuleDict was given as a key may be no name of a phase; `comm` is a wait.
    usable = re.sub(f"[{UNUSABLE}]", "_", name)
    return f"{usable}_" if usable == COMM else usable
