"""Apply changes in the process of a script, observe it, and end it after some steps."""

import functools
import inspect
import json
import os
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lightning_gputime._compat.python_ import running_line

LOADER = "torch.utils.data:DataLoader"
LIGHTNING = "lightning.pytorch:Trainer"
TRANSFORMERS = "transformers:TrainingArguments"
_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")


class TunedProcess:
    """The process of a script under `tune`: it obeys the orders of `Script`, and reports."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders, self._changes = orders, orders["changes"]
        self._sites: dict[str, list[str]] = {}
        self._site_of = WeakKeyDictionary[Any, str]()
        # Sites and options of two loaders. Copied, because a loader may be temporary.
        self._newest_loader: tuple[str, dict[str, Any]] = ("", {})
        self._training_loader = self._newest_loader
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
        for name, kind in vars(torch.optim).items():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                self._patch(f"torch.optim:{name}", kind)
        iterate, backward = DataLoader.__iter__, torch.autograd.backward

        @functools.wraps(iterate)
        def watched_iter(loader: Any) -> Any:
            options = {name: getattr(loader, name) for name in _OPTIONS}
            self._newest_loader = self._site_of.get(loader, ""), options
            return iterate(loader)

        @functools.wraps(backward)
        def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._losses.append(tensors.detach().clone())
            return backward(tensors, *args, **kwargs)

        loader: Any = DataLoader
        loader.__iter__ = watched_iter
        torch.autograd.backward = watched_backward
        register_optimizer_step_post_hook(self._end_update)
        for change in self._changes:
            if value := change["settings"].get("float32_matmul_precision"):
                torch.set_float32_matmul_precision(value)
            if change["settings"].get("cudnn.benchmark"):
                torch.backends.cudnn.benchmark = True
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
            fit = trainer.fit

            @functools.wraps(fit)
            def compiling(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
                return fit(trainer, torch.compile(model), *args, **kwargs)

            trainer.fit = compiling

    def patch_transformers(self) -> None:
        """Patch `TrainingArguments` of transformers. Call once they are imported."""
        kind: Any = sys.modules["transformers"].TrainingArguments
        # Patch `__post_init__`: a derived dataclass has another `__init__`, but calls this method.
        post_init = kind.__post_init__

        @functools.wraps(post_init)
        def patched(instance: Any) -> None:
            vars(instance).update(self._new_arguments(TRANSFORMERS, self._add_site(TRANSFORMERS)))
            post_init(instance)

        kind.__post_init__ = patched

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

        kind.__init__ = patched

    def _add_site(self, target: str) -> str:
        """Record the line of the script that constructs an object of the target; return it."""
        found = running_line()
        site = f"{os.path.relpath(found[0])}:{found[1]}" if found is not None else ""
        sites = self._sites.setdefault(target, [])
        if site and site not in sites:
            sites.append(site)
        return site

    def _new_arguments(self, target: str, site: str) -> dict[str, Any]:
        """Return the arguments that replace those of the script, and record their changes.

        `site` is the line of the script that creates the loader or the optimizer.
        """
        found: dict[str, Any] = {}
        # Only the loader of the training, if its site is known from an earlier run.
        if target == LOADER and self._orders["loader_site"] not in ("", site):
            return found
        for change in self._changes:
            if change["target"] == target:
                found |= change["arguments"]
                self._applied.add(change["code"])
        return found

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._training_loader = self._newest_loader  # It has fetched the first batch.
        if optimizer is self._optimizer:
            self._updates += 1
            if self._updates == self._orders["steps"]:
                raise SystemExit(0)  # Let the script clean up, as at its normal end.

    def _write_report(self) -> None:
        if not self._updates:  # A launcher, or a worker of a loader.
            return
        site, options = self._training_loader
        report = {
            "sites": self._sites,
            "loader_site": site,
            "loader": options,
            "applied": sorted(self._applied),
            "losses": [float(loss) for loss in self._losses],
            "steps": self._updates,
        }
        Path(self._orders["report"]).write_text(json.dumps(report))
