"""Timers for scripts that have none: by an environment variable, and by `lightning_gputime run`.

A Trainer of Lightning and a Fabric ask installed packages for callbacks, see `callbacks_factory` in
their documentation. For the Trainer of transformers, and a plain loop, `run` puts the folder `site`
on Python's path, whose `sitecustomize` calls `watch_imports` when Python starts.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from lightning_gputime._messages import WarnOnce

# The environment variable: unset, empty or "0" for no timer, "1", or options as JSON.
VARIABLE = "LIGHTNING_GPUTIME"
BEGAN = f"{VARIABLE}_BEGAN"  # That which has the time at which `run` began.

tell_once = WarnOnce()


def options() -> dict[str, Any] | None:
    """Return the options of the timer to add; None if no timer is to be added."""
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if found == 1 or isinstance(found, dict):
        return {} if found == 1 else found
    tell_once("%s must be 1, or options as JSON; no timer is added for %r", VARIABLE, text)
    return None


def options_of_all(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the options that all timers have."""
    return {name: value for name, value in wanted.items() if name != "save_path"}


@contextlib.contextmanager
def tells_errors() -> Iterator[None]:
    """Say an error, and go on: the script runs without a timer."""
    try:
        yield
    except Exception as error:
        tell_once("No timer is added, because this failed: %r", error)


# Called in each Trainer and each Fabric, wanted or not: nothing is imported without need.


def trainer_callbacks() -> list[Any]:
    """Return what adds a timer to a Trainer of Lightning, if that is wanted."""
    if (wanted := options()) is None:
        return []
    from lightning_gputime._auto_instrumentation.lightning import TrainerAdder

    return [TrainerAdder(wanted)]


def fabric_callbacks() -> list[Any]:
    """Return what adds a timer to a Fabric, if that is wanted."""
    if (wanted := options()) is None:
        return []
    from lightning_gputime._auto_instrumentation.lightning import FabricAdder

    return [FabricAdder(wanted)]


def watch_imports() -> None:
    """Add timers to what needs no Lightning, once the script has imported it."""
    if (wanted := options()) is None:
        return
    calls = {
        "torch": lambda: _watch_updates(wanted),
        "transformers.trainer": lambda: _watch_trainers(wanted),
    }
    sys.meta_path.insert(0, _AfterImport(calls))
    # What is imported already, as by a `sitecustomize` of the user's.
    for name in calls.keys() & sys.modules.keys():
        with tells_errors():
            calls.pop(name)()


class _AfterImport:
    """A finder of modules that finds none, and calls a function after one is imported."""

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name not in self._calls:
            return None
        call = self._calls.pop(name)
        spec = importlib.util.find_spec(name)  # Asks the other finders.
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                with tells_errors():
                    call()

            vars(spec.loader)["exec_module"] = execute_and_call
        return spec


def _watch_updates(wanted: dict[str, Any]) -> None:
    from lightning_gputime._auto_instrumentation.plain import PlainLoop

    PlainLoop(wanted)


def _watch_trainers(wanted: dict[str, Any]) -> None:
    import transformers

    class TrainerAdder(transformers.TrainerCallback):
        """A callback whose place a `TransformersPhaseTimer` takes when training begins."""

        @tells_errors()
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            # Not above: a script may be importing it now, which imports the Trainer.
            from lightning_gputime._auto_instrumentation import adding
            from lightning_gputime.huggingface import TransformersPhaseTimer, find_trainer

            timer = TransformersPhaseTimer(**options_of_all(wanted))
            timer._submodules(known["model"])  # Raises if a name is wrong.
            trainer = find_trainer(self)
            if trainer and adding.take_place(self, trainer.callback_handler.callbacks, timer):
                timer.on_train_begin(args, state, control, **known)
                adding.show_at_exit(timer, wanted, prints=False)

    defaults: list[Any] = transformers.trainer.DEFAULT_CALLBACKS
    defaults.append(TrainerAdder)
