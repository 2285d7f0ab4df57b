"""Run the tests of Lightning's Trainer with a callback in every Trainer.

    python benchmarks/foreign lightning_suite CHECKOUT --scratch DIR --out FILE

Lightning adds the callbacks of the entry point `lightning.pytorch.callbacks_factory` to each
Trainer. What fails with the timer runs once more, and has failed where it failed both times; beside
it with a callback that does nothing, and with one that logs as many keys.

What DIR has of a run before, `WAY-FOLDER.xml`, is taken as it is.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGES = ("lightning", "torchmetrics", "pytest", "numpy", "matplotlib")

HOOKED = ("loops", "trainer", "callbacks", "loggers", "profilers")
"""The folders whose tests run the most hooks."""

FOLDERS = (
    *HOOKED,
    "tuner",
    "core",
    "checkpointing",
    "utilities",
    "overrides",
    "plugins",
)

WAYS = ("default", "all", "every_3", "nothing", "keys")
"""The callbacks of `lightning_callbacks`. The last two run in what fails with the others."""

Outcomes = dict[str, str]
"""By test, how it failed; "" where it passed, and "skipped"."""


def write_entry_point(folder: Path) -> None:
    """Write what makes Lightning find the callback, where the folder is on the path."""
    package = folder / "foreign_timer-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign_timer\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[lightning.pytorch.callbacks_factory]\ntimer = foreign.lightning_callbacks:make\n"
    )


class Suite:
    """A copy of the tests, since some write beside themselves."""

    def __init__(
        self, checkout: Path, scratch: Path, timeout_s: int, workers: int, keywords: str
    ) -> None:
        self._scratch, self._timeout_s, self._workers = scratch, timeout_s, workers
        self._keywords = keywords
        self._root = scratch / "copy"
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(checkout / "tests", self._root / "tests")
        shutil.copy(checkout / "pyproject.toml", self._root)
        write_entry_point(scratch / "entry")
        (scratch / "tmp").mkdir(exist_ok=True)

    def run(self, way: str, name: str, tests: Iterable[str]) -> Outcomes:
        """Return the outcomes of tests, folders or single ones, with a callback."""
        file = self._scratch / f"{way}-{name}.xml"
        if not file.exists():
            benchmarks = Path(__file__).resolve().parents[1]
            path = [
                self._root / "tests",
                self._scratch / "entry",
                benchmarks,
                benchmarks.parent,
            ]
            environment = {
                **os.environ,
                "FOREIGN_CALLBACK": way,
                "PYTHONPATH": os.pathsep.join(map(str, path)),
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "agg",
                "TMPDIR": str(self._scratch / "tmp"),
            }
            # In a process of its own, which a test may end: xdist then goes on with another.
            pytest = f"pytest -q -p no:cacheprovider -n {self._workers} --timeout {self._timeout_s}"
            # What reads checkpoints that are to be downloaded, and are none of the repository.
            pytest += " --deselect tests/tests_pytorch/checkpointing/test_legacy_checkpoints.py"
            pick = ["-k", self._keywords] if self._keywords else []
            report = [*pick, "-o", "junit_family=xunit1", f"--junitxml={file}", "--tb=line"]
            subprocess.run(
                [sys.executable, "-m", *pytest.split(), *report, *tests],
                cwd=self._root,
                env=environment,
                stdout=(self._scratch / f"{way}-{name}.log").open("w"),
                stderr=subprocess.STDOUT,
            )
        return dict(_outcomes(file, self._root))


def _outcomes(file: Path, root: Path) -> Iterable[tuple[str, str]]:
    """Yield each test of a report, as pytest takes it, and how it failed."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(file).iter("testcase"):
        module = case.get("classname", "")
        # A class within a module stands behind it.
        parts = module.split(".")
        depth = next(
            (n for n in range(len(parts), 0, -1) if (root / f"{'/'.join(parts[:n])}.py").exists()),
            len(parts),
        )
        names = [f"{'/'.join(parts[:depth])}.py", *parts[depth:], case.get("name", "")]
        test = "::".join(names)
        failed = case.find("failure")
        failed = case.find("error") if failed is None else failed
        if failed is not None:
            # Of a test and its teardown the first.
            message = re.sub(r"#x1B\[\d+m", "", failed.get("message", "failed"))
            outcomes[test] = outcomes.get(test) or message[:150]
        else:
            skipped = "skipped" if case.find("skipped") is not None else ""
            outcomes.setdefault(test, skipped)
    return outcomes.items()


def _failed(outcomes: Outcomes) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome not in ("", "skipped")}


def measure(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the tests that fail with each callback, and not with the one that does nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--folders", nargs="*", default=[*FOLDERS], choices=FOLDERS)
    parser.add_argument("--hooked", nargs="*", default=[*HOOKED], choices=FOLDERS)
    parser.add_argument("--timeout", type=int, default=120, help="of one test, in seconds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keywords", default="", help="pytest's -k, such as 'not ddp'")
    options = parser.parse_args(arguments)
    scratch = options.scratch.resolve()
    suite = Suite(checkout, scratch, options.timeout, options.workers, options.keywords)
    found: dict[str, Outcomes] = {way: {} for way in WAYS}
    folders = {
        "default": options.folders,
        "all": options.hooked,
        "every_3": options.hooked,
    }
    for way, several in folders.items():
        for folder in several:
            found[way] |= suite.run(way, folder, [f"tests/tests_pytorch/{folder}"])
            print(f"{way} {folder}: {len(found[way])}, {len(_failed(found[way]))} failed")
    suspects = sorted(set[str]().union(*map(_failed, found.values())))
    for way, outcomes in found.items():
        tests = [test for test in suspects if test in outcomes or way not in folders]
        for test, outcome in suite.run(way, "again", tests).items() if tests else ():
            if outcome in ("", "skipped") or test not in outcomes:
                outcomes[test] = outcome
    failed = sorted(set[str]().union(*map(_failed, found.values())))
    return {
        "ways": {
            way: {
                "tests": len(outcomes),
                "skipped": sum(outcome == "skipped" for outcome in outcomes.values()),
                "failed": len(_failed(outcomes)),
            }
            for way, outcomes in found.items()
        },
        "folders": folders,
        "failed_with_nothing": sorted(_failed(found["nothing"])),
        "differ": {
            test: {
                way: outcomes[test] or "passed"
                for way, outcomes in found.items()
                if test in outcomes
            }
            for test in failed
            if test not in _failed(found["nothing"])
        },
    }
