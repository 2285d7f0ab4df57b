"""Run transformers' tests of its Trainer with a timer in every Trainer.

    python benchmarks/foreign transformers_trainer CHECKOUT --out ...

The timer joins the Trainer's default callbacks. What fails is held against the same tests without
it, and against a callback that adds keys to the logs alone. `src` of the checkout is on the path.
Nothing is downloaded: what needs that fails either way.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("accelerate", "huggingface-hub", "numpy", "tokenizers")

WAYS: dict[str, dict[str, Any]] = {
    "without": {},
    "keys": {},
    "default": {},
    "every step": {"every_n_steps": 1, "warmup_steps": 0},
    "all options": {
        "every_n_steps": 1,
        "warmup_steps": 0,
        "modules": "all",
        "memory": True,
        "annotate": True,
        "probe_every_n_steps": 3,
        "sync_ranks": "log",
        "flops": 1e9,
    },
}
"""The options of each timer."""


def measure(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the tests in each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", default="tests/trainer", help="what pytest runs")
    parser.add_argument("--ways", nargs="+", default=[*WAYS][1:], choices=[*WAYS])
    known = parser.parse_args(arguments)
    ways = ["without", *known.ways]
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda way: _run(checkout, known.tests, way), ways)
        found = dict(zip(ways, runs, strict=True))
    without = found["without"]["outcomes"]
    result: dict[str, Any] = {"transformers": found["without"]["transformers"], "ways": {}}
    for way, one in found.items():
        result["ways"][way] = {
            **Counter(one["outcomes"].values()),
            "differ": {
                test: outcome
                for test, outcome in one["outcomes"].items()
                if outcome != without.get(test)
            },
            **{key: one[key] for key in ("trainings", "steps", "wrong", "messages")},
        }
    return result


def _run(checkout: Path, tests: str, way: str) -> dict[str, Any]:
    benchmarks = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        # The tests write files beside themselves.
        for name in ("tests", "examples", "utils"):
            shutil.copytree(checkout / name, Path(folder, name), symlinks=True)
        for name in ("conftest.py", "pyproject.toml", "setup.py"):
            shutil.copy(checkout / name, folder)
        Path(folder, "src").symlink_to(checkout / "src")
        path = [str(benchmarks), str(benchmarks.parent), str(checkout / "src")]
        environment = {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "FOREIGN_OUT": str(Path(folder, "foreign.json")),
            "FOREIGN_WAY": way,
        }
        plugin = ["-p", "foreign.transformers_trainer", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "300", *plugin, tests]
        subprocess.run(command, cwd=folder, env={**os.environ, **environment})
        found: dict[str, Any] = json.loads(Path(folder, "foreign.json").read_text())
        return found


# What follows runs inside of pytest, as a plugin.

_found: dict[str, Any] = {"trainings": 0, "steps": 0, "wrong": {}}
_outcomes: dict[str, str] = {}
_messages = Counter[str]()


def pytest_configure() -> None:
    """Put the timer into the Trainer's default callbacks."""
    import logging

    import transformers

    _found["transformers"] = transformers.__version__
    way = os.environ["FOREIGN_WAY"]
    if way != "without":
        kind = _keys_class() if way == "keys" else _timer_class(WAYS[way])
        transformers.trainer.DEFAULT_CALLBACKS.append(kind)
        logger, handler = logging.getLogger("lightning_gputime"), logging.Handler()
        handler.emit = lambda record: _messages.update([str(record.msg)])  # type: ignore[method-assign]
        logger.addHandler(handler)


def _keys_class() -> Any:
    from transformers import TrainerCallback

    class Keys(TrainerCallback):
        """Add a number that differs from run to run, where the timer adds some."""

        def on_log(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if {"loss", "train_runtime"} & {*known["logs"]}:
                state.log_history[-1]["phase_time/step_ms"] = time.perf_counter()

    return Keys


def _timer_class(options: dict[str, Any]) -> Any:
    from lightning_gputime.huggingface import TransformersPhaseTimer

    class Timer(TransformersPhaseTimer):
        """The Trainer makes it, and so without arguments."""

        def __init__(self) -> None:
            super().__init__(**options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self._first = state.global_step
            super().on_train_begin(args, state, control, **known)

        def on_train_end(self, args: Any, state: Any, *more: Any, **known: Any) -> None:
            is_first = self._session.is_attached
            super().on_train_end(args, state, *more, **known)
            if is_first and options.get("every_n_steps") == 1:
                _check(self, state.global_step - self._first)

    return Timer


def _check(timer: Any, updates: int) -> None:
    """Note the trainings whose steps are not their updates, or whose phases do not add up."""
    history = timer.history()
    steps, names = len(history), [name for name in history.dtype.names if "/" not in name]
    phases = [history[name] for name in names[1:] if name not in ("step_ms", "host_wait_ms")]
    adds_up = np.allclose(np.nansum(phases, axis=0), history["step_ms"], rtol=1e-6)
    _found["trainings"] += 1
    _found["steps"] += steps
    if steps != updates or not adds_up:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        _found["wrong"][test] = f"{steps} steps, {updates} updates, phases add up: {adds_up}"


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome of a test's parts."""
    if report.outcome != "passed" or report.nodeid not in _outcomes:
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Leave what was found for the process that started this one."""
    found = {**_found, "outcomes": _outcomes, "messages": _messages}
    Path(os.environ["FOREIGN_OUT"]).write_text(json.dumps(found))
