"""Apply changes in the process of a script, observe it, and end it after some steps."""

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lightning_gputime._auto_instrumentation import TUNE
from lightning_gputime._compat.user_code import running_line
from lightning_gputime._tuning.change import LIGHTNING, LOADER, TRANSFORMERS

_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")


class _Loader(NamedTuple):
    """A loader that was iterated. Its options are copied, because the loader may be temporary."""

    site: str = ""  # Place where it was constructed; empty if unknown.
    options: Mapping[str, Any] = MappingProxyType({})


class TunedProcess:
    """The process of a script under `tune`: it applies changes, and reports what it observes.

    Args:
        orders: Dict with `steps` (number of updates after which the script ends), `report` (path
            of the report to write), `changes`, and `loader_site` (place of the loader to change;
            empty for all loaders).
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self._changes = orders["changes"]
        self._max_updates: int = orders["steps"]
        self._report: str = orders["report"]
        self._loader_site: str = orders["loader_site"]
        self._sites: dict[str, list[str]] = {}
        self._site_of = WeakKeyDictionary[Any, str]()
        self._newest_loader = _Loader()
        self._training_loader = _Loader()
        self._losses: list[torch.Tensor] = []
        # Ids of objects under construction. The patched `__init__` of a derived class may call the
        # patched `__init__` of its base class for the same object.
        self._under_construction = set[int]()
        self._applied = set[str]()
        self._optimizer: torch.optim.Optimizer | None = None
        self._updates = 0

    def start(self) -> None:
        """Patch torch. Call once it is imported."""
        self._patch(LOADER, DataLoader)
        _replace(DataLoader, "__iter__", self._watched_iter(DataLoader.__iter__))
        for name, kind in vars(torch.optim).items():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                self._patch(f"torch.optim:{name}", kind)
        _replace(torch.autograd, "backward", self._watched_backward(torch.autograd.backward))
        register_optimizer_step_post_hook(self._end_update)
        for change in self._changes:
            if value := change["settings"].get("float32_matmul_precision"):
                torch.set_float32_matmul_precision(value)
            if change["settings"].get("cudnn.benchmark"):
                _replace(torch.backends.cudnn, "benchmark", True)
            if change["settings"]:
                self._applied.add(change["code"])
        # Report only from the process whose run is saved.
        if os.environ.get("RANK", "0") == "0":
            Finalize(None, self._write_report, exitpriority=1)

    def patch_lightning(self) -> None:
        """Patch Lightning's Trainer. Call once it is imported."""
        trainer: Any = sys.modules["lightning.pytorch"].Trainer
        self._patch(LIGHTNING, trainer)
        if any(change["settings"].get("compile") for change in self._changes):
            _replace(trainer, "fit", _compiling(trainer.fit))

    def patch_transformers(self) -> None:
        """Patch `TrainingArguments` of transformers. Call once they are imported."""
        kind: Any = sys.modules["transformers"].TrainingArguments
        # Patch `__post_init__`: a derived dataclass has another `__init__`, but calls this method.
        post_init = kind.__post_init__

        @functools.wraps(post_init)
        def patched(instance: Any) -> None:
            vars(instance).update(self._new_arguments(TRANSFORMERS, self._add_site(TRANSFORMERS)))
            post_init(instance)

        _replace(kind, "__post_init__", patched)

    def _patch(self, target: str, kind: Any) -> None:
        """Patch a class to record where it is constructed, and to replace arguments."""
        construct = kind.__init__
        signature = inspect.signature(construct)

        @functools.wraps(construct)
        def patched(instance: Any, *args: Any, **kwargs: Any) -> None:
            if id(instance) in self._under_construction:
                construct(instance, *args, **kwargs)
                return
            self._under_construction.add(id(instance))
            try:
                site = self._add_site(target)
                if target == LOADER:
                    self._site_of[instance] = site
                if new := self._new_arguments(target, site):
                    bound = signature.bind(instance, *args, **kwargs)
                    bound.arguments.update(new)
                    args, kwargs = bound.args[1:], bound.kwargs
                construct(instance, *args, **kwargs)
            finally:
                self._under_construction.discard(id(instance))

        _replace(kind, "__init__", patched)

    def _add_site(self, target: str) -> str:
        """Record the line of the script that constructs an object of the target; return it."""
        found = running_line()
        site = f"{os.path.relpath(found[0])}:{found[1]}" if found is not None else ""
        sites = self._sites.setdefault(target, [])
        if site and site not in sites:
            sites.append(site)
        return site

    def _new_arguments(self, target: str, site: str) -> dict[str, Any]:
        """Return the arguments that replace those of the script, and record their changes."""
        is_other_loader = target == LOADER and self._loader_site not in ("", site)
        found: dict[str, Any] = {}
        for change in self._changes:
            if change["target"] == target and not is_other_loader:
                found |= change["arguments"]
                self._applied.add(change["code"])
        return found

    def _watched_iter(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(iterate)
        def watched(loader: Any) -> Any:
            options = {name: getattr(loader, name) for name in _OPTIONS}
            self._newest_loader = _Loader(self._site_of.get(loader, ""), options)
            return iterate(loader)

        return watched

    def _watched_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._losses.append(tensors.detach().clone())
            return backward(tensors, *args, **kwargs)

        return watched

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._training_loader = self._newest_loader  # It has fetched the first batch.
        if optimizer is self._optimizer:
            self._updates += 1
            if self._updates == self._max_updates:
                raise SystemExit(0)  # Let the script clean up, as at its normal end.

    def _write_report(self) -> None:
        if not self._updates:  # A launcher, or a worker of a loader.
            return
        report = {
            "sites": self._sites,
            "loader_site": self._training_loader.site,
            "loader": dict(self._training_loader.options),
            "applied": sorted(self._applied),
            "losses": [float(loss) for loss in self._losses],
            "steps": self._updates,
        }
        Path(self._report).write_text(json.dumps(report))


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _compiling(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def compiled(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return fit(trainer, torch.compile(model), *args, **kwargs)

    return compiled


@functools.cache
def tuned_process() -> TunedProcess:
    """Return the only `TunedProcess`, created from the orders in the environment."""
    return TunedProcess(json.loads(os.environ[TUNE]))
