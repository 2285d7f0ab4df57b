"""Timers that are added to a script by an environment variable or `lightning_gputime run`.

Lightning's Trainer and Fabric load callbacks from the entry points of installed packages, see
`callbacks_factory` in their documentation. A Fabric loop is timed as a plain loop. For plain loops
and the transformers Trainer, `run` adds the folder `site` to PYTHONPATH. The `sitecustomize` in it
calls `watch_imports` when Python starts. `plain` then finds plain loops by their first update.
"""

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any, cast

from lightning_gputime._auto_instrumentation.environment import TUNE, options, suppress_errors
from lightning_gputime._messages import messages

_MISSED = (
    "No step is timed: another import hook imported %s before lightning_gputime could watch it."
    " Add a timer to the script."
)


# Every Trainer and Fabric calls these two functions, also without `run`, so they import lazily.


def trainer_callbacks() -> list[Any]:
    """Return a callback that adds a timer to a Lightning Trainer if `LIGHTNING_GPUTIME` is set."""
    if (wanted := options()) is None:
        return []
    from lightning_gputime._auto_instrumentation.lightning import TrainerAdder

    return [TrainerAdder(wanted)]


def fabric_callbacks() -> list[Any]:
    """Time Fabric's loop as a plain loop if `LIGHTNING_GPUTIME` is set. Return no callbacks."""
    if options() is not None:
        with suppress_errors():
            _watch_loops()
    return []


def watch_imports() -> None:
    """Add timers to libraries without entry points as soon as the script imports them."""
    if options() is None:
        return
    calls: dict[str, Callable[[], None]] = {
        "torch": _watch_loops,
        "transformers.trainer": _watch_trainers,
    }
    if TUNE in os.environ:
        calls |= {
            "torch": _tune_loops,
            "lightning.pytorch": lambda: _tuned_process().patch_lightning(),
            "transformers.training_args": lambda: _tuned_process().patch_transformers(),
        }
    finder = _WatchingFinder(calls)
    # The user's `sitecustomize`, for example, may have imported some of these modules.
    for name in finder.calls.keys() & sys.modules.keys():
        finder.imported(name)
    sys.meta_path.insert(0, finder)
    # Pass the process id, so that processes forked by the script do not report.
    atexit.register(_report_unwatched, finder, os.getpid())


class _WatchingFinder:
    """Meta path finder that calls a function after a module has been executed.

    The other finders find the module. A lookup alone, such as `importlib.util.find_spec("torch")`,
    does not trigger the call.
    """

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self.calls = calls  # Functions to call, by module name.

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None or (spec := find(name, path, target)) is None:
                continue
            with suppress(AttributeError):  # An unusual loader: the import is not noticed.
                self._watch(spec.loader)
            return cast("ModuleSpec", spec)
        return None

    def _watch(self, loader: Any) -> None:
        """Replace a method of this loader until the loader has executed a module."""
        execute = loader.exec_module

        def execute_and_notice(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self.imported(module.__spec__.name)

        loader.exec_module = execute_and_notice

    def imported(self, name: str) -> None:
        """Call the function for an imported module, once. Never raise an Exception."""
        with suppress_errors():
            self.calls.pop(name, lambda: None)()


def _report_unwatched(finder: _WatchingFinder, process: int) -> None:
    """Warn about modules that another import hook imported, so that their training has no timer."""
    missed = finder.calls.keys() & sys.modules.keys()
    if missed and os.getpid() == process:
        messages.warning(_MISSED, " and ".join(sorted(missed)))


@functools.cache  # Fabric calls it again if `run` has called it at the import of torch.
def _watch_loops() -> None:
    from lightning_gputime._auto_instrumentation.plain import PlainLoops

    PlainLoops(options() or {})


@functools.cache
def _tuned_process() -> Any:
    from lightning_gputime._auto_instrumentation.tuned import TunedProcess  # Imports torch.

    return TunedProcess(json.loads(os.environ[TUNE]))


def _tune_loops() -> None:
    _watch_loops()  # First, so that its hook ends the step before `tune` ends the script.
    _tuned_process().start()


def _watch_trainers() -> None:
    from lightning_gputime._auto_instrumentation.transformers import TrainerAdder
    from lightning_gputime._compat.transformers_ import default_callbacks

    default_callbacks().append(TrainerAdder)
