"""TraceML: the same loops of pytorch/examples with it, with `GPUPhaseHooks`, and with neither.

CHECKOUT is that of pytorch/examples. Each way runs in processes of its own, in turns. The added
time of a way is that of a step, from one update to the next by the host's clock.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from foreign.pytorch_examples import PROGRAMS, Copy, Edit, after

PACKAGES = ("traceml-ai", "lightning")

SETTLE = 20

_LOOPS = {
    "mnist": (
        "    for batch_idx, (data, target) in enumerate(train_loader):\n",
        "def test(",
    ),
    "vae": ("    for batch_idx, (data, _) in enumerate(train_loader):\n", "    print('====> Epoch"),
    "imagenet": ("    for i, (images, target) in enumerate(train_loader):\n", "def validate("),
}
"""The loop of each program, and what follows it."""


def traceml_edits(name: str, text: str) -> tuple[Edit, ...]:
    """Return what its documentation says: a call at the start, and each body in a `with`."""
    first, last = _LOOPS[name]
    start = text.index(first) + len(first)
    body = text[start : text.index(last, start)]
    lines = [f"    {line}" if line.strip() else line for line in body.splitlines()]
    inside = "        with traceml.trace_step(model):\n" + "\n".join(lines) + "\n"
    init = 'import traceml_ai as traceml; traceml.init(mode="auto")'
    return after("import argparse", init), (first + body, first + inside)


def step_ms(updates_ns: list[int]) -> float:
    """Return the median step of one process (in milliseconds)."""
    gaps = [b - a for a, b in itertools.pairwise(updates_ns)]
    return statistics.median(gaps[SETTLE:]) / 1e6


def run(checkout: Path, name: str, rounds: int) -> dict[str, Any]:
    """Run one program in turns with each way of timing; return what was found."""
    program = PROGRAMS[name]
    found: dict[str, Any] = {"step_ms": {}}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(checkout, program, Path(folder))
        theirs = traceml_edits(name, (checkout / program.script).read_text())
        ways = {"none": (), "none again": (), "GPUPhaseHooks": program.timer, "TraceML": theirs}
        for turn in range(rounds):
            for way in random.sample([*ways], len(ways)):
                launcher: tuple[str, ...] = (sys.executable,)
                if way == "TraceML":
                    launcher += ("-m", "traceml_ai.launcher.cli", "run", "--run-name", f"{turn}")
                    launcher += ("--logs-dir", str(Path(folder) / "logs"))
                done = copy.run(ways[way], launcher=launcher)
                ms = step_ms(done["ranks"][0]["updates_ns"])
                found["step_ms"].setdefault(way, []).append(round(ms, 4))
                if way == "GPUPhaseHooks":
                    found["ours"] = done["ranks"][0]["table"].splitlines()
        logs = Path(folder) / "logs" / f"{rounds - 1}"
        found["theirs"] = next(iter(logs.rglob("final_summary.txt"))).read_text().splitlines()
        summary = json.loads(next(iter(logs.rglob("final_summary.json"))).read_text())
        found["their_phases"] = summary.get("step_time", summary.get("sections"))
    none = statistics.median(found["step_ms"]["none"])
    found["added_percent"] = {
        way: round(100 * (statistics.median(times) / none - 1), 2)
        for way, times in found["step_ms"].items()
    }
    return found


def measure(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the programs; return what was found of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", nargs="+", default=list(_LOOPS), choices=list(_LOOPS))
    parser.add_argument("--rounds", type=int, default=3)
    known = parser.parse_args(arguments)
    found = {}
    for name in known.programs:
        found[name] = run(checkout, name, known.rounds)
        print(name, *found[name]["ours"], *found[name]["theirs"], sep="\n")
        print(name, found[name]["step_ms"], found[name]["added_percent"], flush=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"gpu": gpu, "results": found}
