"""Time Fabric's examples, each as it is in plain PyTorch and as it is with Fabric.

    python benchmarks/foreign fabric_examples CHECKOUT --learn2learn DIR --out FILE

`GPUPhaseHooks` is put into one, and Fabric's callback into the other, by the edits below; both run
in turns on small made data. DIR has the folders `learn2learn` and `cherry` of two repositories,
which the example of meta learning imports, and which cannot be built any more.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gputime import Run, load

PACKAGES = ("lightning", "torchvision", "torchmetrics", "gymnasium")

Edits = Sequence[tuple[str, str]]
"""Patterns, each found once, and what takes their place."""

_HOOKS = (r"^import torch\n", r"\g<0>from lightning_gputime import GPUPhaseHooks\n")
_FABRIC = (r"^import torch\n", r"\g<0>from lightning_gputime.fabric import FabricPhaseTimer\n")
_END = "    timer.remove()\n    timer.save('run.json')\n"
_CALLBACK = r"callbacks=[timer := FabricPhaseTimer()]"

TIMER: Mapping[str, Edits] = {
    "image_classifier/train_torch.py": (
        _HOOKS,
        (r"^    optimizer = .*\n", r"\g<0>    timer = GPUPhaseHooks(model, optimizer).attach()\n"),
        (r"enumerate\(train_loader\)", "enumerate(timer.steps(train_loader))"),
        (r"^    if hparams.save_model", _END + r"\g<0>"),
    ),
    "image_classifier/train_fabric.py": (
        _FABRIC,
        (r"Fabric\(\)", f"Fabric({_CALLBACK})"),
        (r"^    if hparams.save_model", _END + r"\g<0>"),
    ),
    "dcgan/train_torch.py": (
        _HOOKS,
        (
            r"^    # Training loop\n",
            "    models = nn.ModuleList([discriminator, generator])\n"
            "    timer = GPUPhaseHooks(models, [optimizer_d, optimizer_g]).attach()\n",
        ),
        (r"enumerate\(dataloader, 0\)", "enumerate(timer.steps(dataloader), 0)"),
        (r"^            iteration \+= 1\n", r"\g<0>" + _END),
    ),
    "dcgan/train_fabric.py": (
        _FABRIC,
        (r"devices=1\)", f"devices=1, {_CALLBACK})"),
        (r"^            iteration \+= 1\n", r"\g<0>" + _END),
    ),
    "meta_learning/train_torch.py": (
        _HOOKS,
        (r"^    loss = .*\n", r"\g<0>    timer = GPUPhaseHooks(maml, optimizer).attach()\n"),
        (r"in range\(num_iterations\)", "in timer.steps(range(num_iterations))"),
        (r"^    meta_test_error = 0.0\n", _END + r"\g<0>"),
    ),
    # Nothing is set up by Fabric there, so its callback has nothing to time.
    "meta_learning/train_fabric.py": (
        _HOOKS,
        (r"^    loss = .*\n", r"\g<0>    timer = GPUPhaseHooks(maml, optimizer).attach()\n"),
        (r"in range\(num_iterations\)", "in timer.steps(range(num_iterations))"),
        (r"^    meta_test_error = 0.0\n", _END + r"\g<0>"),
    ),
    "reinforcement_learning/train_torch.py": (
        _HOOKS,
        (r"^    optimizer = .*\n", r"\g<0>    timer = GPUPhaseHooks(agent, optimizer).attach()\n"),
        (r"^    args: argparse.Namespace,\n", r"\g<0>    timer: GPUPhaseHooks,\n"),
        (r"in sampler:", "in timer.steps(sampler):"),
        (r"global_step, args\)\n", "global_step, args, timer)\n"),
        (r"^    envs.close\(\)\n", _END + r"\g<0>"),
    ),
    "reinforcement_learning/train_fabric.py": (
        _FABRIC,
        (r"Fabric\(loggers=logger\)", f"Fabric(loggers=logger, {_CALLBACK})"),
        (r"^    args: argparse.Namespace,\n", r"\g<0>    timer: FabricPhaseTimer,\n"),
        (r"in sampler:", "in timer.steps(sampler):"),
        (r"global_step, args\)\n", "global_step, args, timer)\n"),
        (r"^    envs.close\(\)\n", _END + r"\g<0>"),
    ),
}
"""By script, how the timer gets in."""

SMALLER: Mapping[str, Edits] = {
    "dcgan": (
        (r"^workers = .*", "workers = 0"),
        (r"^batch_size = .*", "batch_size = 16"),
        (r"^n(g|d)f = .*", r"n\1f = 16"),
        (r"^num_epochs = .*", "num_epochs = 3"),
        (r"^            transforms.ToTensor\(\),\n", ""),
    ),
    "meta_learning": (
        (r"meta_batch_size=32", "meta_batch_size=4"),
        (r"num_iterations=60000", "num_iterations=60"),
    ),
    "image_classifier": ((r"T.ToTensor\(\), ", ""),),
    # In plain PyTorch it runs under DDP, where Fabric asks for this.
    "reinforcement_learning/train_fabric.py": (
        (
            r"^    agent, optimizer = .*\n",
            r"\g<0>    agent.mark_forward_method('get_action_and_value')\n"
            "    agent.mark_forward_method('estimate_returns_and_advantages')\n",
        ),
    ),
}
"""By example or script, what makes it run on a CPU. No line of these counts as changed."""

DDP = {"LT_CLI_USED": "1", "LT_STRATEGY": "ddp", "LT_DEVICES": "1", "LT_NUM_NODES": "1"}
"""How Fabric is told of the strategy that a script in plain PyTorch has."""

WORDS: Mapping[str, Sequence[str]] = {
    "image_classifier": ("--epochs", "4", "--batch-size", "16"),
    "reinforcement_learning": ("--total-timesteps", "1024"),
}


def edited(text: str, edits: Edits) -> str:
    """Return a script with its edits.

    Raises:
        ValueError: If the place of one is not there.
    """
    for pattern, replacement in edits:
        text, n = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not n:
            raise ValueError(f"There is no {pattern!r}")
    return text


def lines_changed(before: str, after: str) -> int:
    """Return how many lines of a script are new or other than before."""
    differences = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in differences)


def run(scratch: Path, script: str, learn2learn: Path) -> Run:
    """Return what the timer in a script has saved."""
    folder = scratch / Path(script).parent
    benchmarks = Path(__file__).resolve().parents[1]
    ranks = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    environment = {
        **os.environ,
        **(ranks if "torch" in script or "meta" in script else {}),
        **(DDP if script == "reinforcement_learning/train_fabric.py" else {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "12355",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (benchmarks, benchmarks.parent))),
        "FOREIGN_LEARN2LEARN": str(learn2learn),
    }
    words = WORDS.get(folder.name, ())
    program = [sys.executable, "-m", "foreign.fabric_data", str(scratch / script), *words]
    done = subprocess.run(
        program,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = [line for line in done.stdout.splitlines() if "lightning_gputime" in line]
    print(script, done.returncode, *said, sep="\n  ")
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    return load(folder / "run.json")


def measure(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the medians of the phases that each script has, over several runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learn2learn", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for example in dict.fromkeys(script.split("/")[0] for script in TIMER):
            if options.only in example:
                shutil.copytree(checkout / "examples" / "fabric" / example, scratch / example)
        scripts = [script for script in TIMER if options.only in script]
        for script in scripts:
            smaller = SMALLER.get(script, SMALLER.get(script.split("/")[0], ()))
            small = edited((scratch / script).read_text(), smaller)
            timed = edited(small, TIMER[script])
            (scratch / script).write_text(timed)
            found[script] = {"lines_changed": lines_changed(small, timed)}
        runs: dict[str, list[Run]] = {script: [] for script in scripts}
        for _ in range(options.runs):
            for script in scripts:
                runs[script].append(run(scratch, script, options.learn2learn.resolve()))
    for script, several in runs.items():
        found[script] |= {
            "steps": [int(one.history["step"][-1]) + 1 for one in several],
            "timed": [len(one.history) for one in several],
            "median_ms": {
                phase: [round(one.summary().rows[phase].p50_ms, 3) for one in several]
                for phase in several[0].summary().rows
            },
            "n": {phase: stats.n for phase, stats in several[0].summary().rows.items()},
        }
    return {"examples": found}
