"""The examples of pytorch/examples, with a `GPUPhaseHooks` put in by the shortest edit.

Each is copied to a temporary folder and run there: unchanged, with the timer, and with every step
timed under torch.profiler. The phases of the same steps must agree with the trace within 0.1 ms or
1 %; the losses that are printed must be those of the unchanged run.
"""

import argparse
import difflib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("lightning", "numpy")

Edit = tuple[str, str]
"""A piece of a script, and what takes its place."""

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FOREIGN_DETERMINISTIC": "1"}
"""The environment in which `drive.py` makes torch deterministic."""

_PRINT = "print(timer.summary())"
_MNIST = {"10000": 1000}


def after(piece: str, line: str) -> Edit:
    """Return the edit that puts a line behind a piece."""
    return piece, f"{piece}\n{line}"


def before(piece: str, line: str) -> Edit:
    """Return the edit that puts a line before a piece."""
    return piece, f"{line}\n{piece}"


_IMPORT = after("import argparse", "from lightning_gputime import GPUPhaseHooks")


@dataclass(frozen=True)
class Program:
    """A script of others, and how it is run.

    Attributes:
        script: Its path in the checkout; its folder is copied.
        timer: The edits that put the timer in.
        arguments: Its command line; `{accel}` is left out without a GPU.
        smaller: Edits that make it end, or its data fit: no part of what puts the timer in.
        sizes: How many made items take the place of so many.
        steps: The first and the last step that is traced.
        ranks: How many processes it runs in.
        files: What is written into the copy before it runs.
    """

    script: str
    timer: tuple[Edit, ...]
    arguments: tuple[str, ...] = ()
    smaller: tuple[Edit, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[int, int] = (20, 60)
    ranks: int = 1
    files: Mapping[str, str] = field(default_factory=dict)


def _words(lines: int) -> str:
    return "".join(
        f"the word {i % 997} of a line {i % 89} that says nothing\n" for i in range(lines)
    )


_CORPUS = {
    "data/wikitext-2/train.txt": _words(6000),
    "data/wikitext-2/valid.txt": _words(100),
    "data/wikitext-2/test.txt": _words(100),
}
_LANGUAGE_MODEL = (
    _IMPORT,
    (
        "enumerate(range(0, train_data.size(0) - 1, args.bptt))",
        "enumerate(timer.steps(range(0, train_data.size(0) - 1, args.bptt)))",
    ),
    before("# Run on test data.", _PRINT),
)
_EPISODES = (
    _IMPORT,
    ("in count(1):", "in timer.steps(count(1)):"),
    after("    main()", f"    {_PRINT}"),
)
_FEW_EPISODES = after(
    "from itertools import count",
    "from itertools import islice\ncount = lambda first: islice(range(first, 99999), 80)",
)

PROGRAMS = {
    "mnist": Program(
        "mnist/main.py",
        (
            _IMPORT,
            before(
                "    scheduler = StepLR(",
                "    timer = GPUPhaseHooks(model, optimizer).attach()",
            ),
            ("device, train_loader, optimizer, epoch)\n        test",
             "device, timer.steps(train_loader), optimizer, epoch)\n        test"),
            before("    if args.save_model:", f"    {_PRINT}"),
        ),
        ("--epochs", "2"),
        sizes=_MNIST | {"60000": 64 * 80},
    ),
    "vae": Program(
        "vae/main.py",
        (
            _IMPORT,
            after("lr=1e-3)", "timer = GPUPhaseHooks(model, optimizer).attach()"),
            ("in enumerate(train_loader)", "in enumerate(timer.steps(train_loader))"),
            after("str(epoch) + '.png')\n", f"    {_PRINT}"),
        ),
        ("--epochs", "2"),
        sizes=_MNIST | {"60000": 128 * 80},
        files={"results/.keep": ""},
    ),
    "dcgan": Program(
        "dcgan/main.py",
        (
            _IMPORT,
            before(
                "if opt.dry_run:\n    opt.niter",
                "timer = GPUPhaseHooks(nn.ModuleList([netD, netG]),"
                " [optimizerD, optimizerG]).attach()",
            ),
            ("enumerate(dataloader, 0)", "enumerate(timer.steps(dataloader), 0)"),
            after("netD_epoch_%d.pth' % (opt.outf, epoch))", _PRINT),
        ),
        ("--dataset", "fake", "--niter", "1", "--manualSeed", "1", "{accel}"),
        sizes={"1000": 64 * 80},
    ),
    "imagenet": Program(
        "imagenet/main.py",
        (
            _IMPORT,
            before(
                "    for epoch in range(args.start_epoch",
                "    timer = GPUPhaseHooks(model, optimizer).attach()",
            ),
            ("        train(train_loader,", "        train(timer.steps(train_loader),"),
            after("            }, is_best)", f"    {_PRINT}"),
        ),
        ("--dummy", "-b", "128", "-j", "8", "--epochs", "1", "--seed", "1"),
        sizes={"1281167": 128 * 60, "50000": 512},
        steps=(15, 40),
    ),
    "word_language_model": Program(
        "word_language_model/main.py",
        (
            *_LANGUAGE_MODEL,
            after("criterion = nn.NLLLoss()", "timer = GPUPhaseHooks(model).attach()"),
        ),
        ("--epochs", "1", "{accel}"),
        files=_CORPUS,
    ),
    "word_language_model --use-optimizer": Program(
        "word_language_model/main.py",
        (
            *_LANGUAGE_MODEL,
            after("lr=args.lr)", "    timer = GPUPhaseHooks(model, optimizer).attach()"),
        ),
        ("--epochs", "1", "--use-optimizer", "--lr", "0.001", "--model", "Transformer", "{accel}"),
        files=_CORPUS,
    ),
    "actor_critic": Program(
        "reinforcement_learning/actor_critic.py",
        (*_EPISODES, after("lr=3e-2)", "timer = GPUPhaseHooks(model, optimizer).attach()")),
        smaller=(_FEW_EPISODES,),
    ),
    "reinforce": Program(
        "reinforcement_learning/reinforce.py",
        (*_EPISODES, after("lr=1e-2)", "timer = GPUPhaseHooks(policy, optimizer).attach()")),
        smaller=(_FEW_EPISODES,),
    ),
    "FSDP2": Program(
        "distributed/FSDP2/example.py",
        (
            _IMPORT,
            ("    for _ in range(10):",
             "    timer = GPUPhaseHooks(model, optim).attach()\n"
             "    for _ in timer.steps(range(10)):"),
            before("    checkpointer.save(", f"    {_PRINT}"),
        ),
        smaller=(("range(10)", "range(80)"),),
        ranks=2,
    ),
}  # fmt: skip


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Return a script with its edits.

    Raises:
        ValueError: If a piece is not there once.
    """
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    return text


def added(old: str, new: str) -> list[str]:
    """Return the lines that an edit wrote or changed."""
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    return [line[2:].strip() for line in lines if line.startswith("+ ")]


class Copy:
    """A program in a folder of its own."""

    def __init__(self, checkout: Path, program: Program, folder: Path) -> None:
        self._program, self._folder = program, folder
        path = Path(program.script)
        shutil.copytree(checkout / path.parent, folder, dirs_exist_ok=True)
        for name, text in program.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        self._script = folder / path.name
        self._original = self._script.read_text()
        self.lines = added(self._original, edited(self._original, program.timer))

    def run(
        self,
        edits: tuple[Edit, ...],
        steps: tuple[int, int] = (-1, -1),
        launcher: tuple[str, ...] = (sys.executable,),
        *,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        """Run it with some edits; return what it printed and, of each rank, what was found.

        Args:
            edits: What is written into the script.
            steps: The first and the last step that is traced.
            launcher: What runs a script of Python.
            deterministic: Whether torch is to take kernels that always return the same.
        """
        program = self._program
        self._script.write_text(edited(edited(self._original, edits), program.smaller))
        out = self._folder / "found.json"
        accel = ["--accel"] if torch.cuda.is_available() else []
        words = [word for word in program.arguments if word != "{accel}"]
        if program.ranks > 1:
            launcher += ("-m", "torch.distributed.run", "--standalone")
            launcher += ("--nproc-per-node", str(program.ranks))
        sizes = json.dumps(dict(program.sizes))
        own = [str(Path(__file__).with_name("drive.py"))]
        own += ["--args"] if "traceml_ai.launcher.cli" in launcher else []
        own += [str(out), *map(str, steps), sizes, self._script.name, *words]
        own += accel if "{accel}" in program.arguments else []
        environment = {**os.environ, **(DETERMINISTIC if deterministic else {})}
        done = subprocess.run(
            [*launcher, *own], cwd=self._folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{program.script}: {done.stdout[-2000:]}{done.stderr[-5000:]}")
        ranks = [out.with_suffix(f".{rank}.json") for rank in range(program.ranks)]
        return {
            "output": done.stdout,
            "messages": [line for line in done.stderr.splitlines() if line.strip()],
            "ranks": [json.loads(path.read_text()) for path in ranks],
        }


def losses(output: str) -> list[str]:
    """Return the losses and rewards that a script printed."""
    lines = "\n".join(line for line in output.splitlines() if not line.startswith("loss "))
    return re.findall(r"(?:loss\w*|reward)\W+([-\d.e+]+)", lines, re.IGNORECASE)


def compared(steps: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the phases of the same steps by the timer and by the trace (in milliseconds)."""
    found = {}
    names = {name for one in steps.values() for phases in one.values() for name in phases}
    for phase in sorted(name for name in names if "/" not in name):
        ways = {
            way: [one[way].get(phase, 0.0) for one in steps.values()]
            for way in ("timer", "trace", "marked", "own_stream")
        }
        timer, trace, marked, own_stream = (statistics.mean(column) for column in ways.values())
        pairs = zip(ways["timer"], ways["trace"], strict=True)
        found[phase] = {
            "timer_ms": round(timer, 4),
            "trace_ms": round(trace, 4),
            "agrees": abs(timer - trace) <= max(0.1, 0.01 * trace),
            "worst_step_ms": round(max(abs(ours - theirs) for ours, theirs in pairs), 4),
            # By the trace, from where the host recorded an event to where it recorded the next.
            "trace_from_events_ms": round(marked, 4),
            # By the trace, without the waits of the timed stream at the end of backward.
            "own_stream_ms": round(own_stream, 4),
        }
    return found


def same_losses(copy: "Copy", timer: tuple[Edit, ...], plain: str, usual: str) -> dict[str, bool]:
    """Return whether the timer leaves the losses as they are, and whether a second run does."""
    found = {"same_losses": losses(plain) == losses(usual)}
    if not found["same_losses"]:
        outputs = [copy.run(edits, deterministic=True)["output"] for edits in ((), timer)]
        again = copy.run(())["output"]
        found["same_losses_of_two_plain_runs"] = losses(plain) == losses(again)
        found["same_losses_deterministic"] = losses(outputs[0]) == losses(outputs[1])
    return found


def run(checkout: Path, name: str, *, untraced: bool) -> dict[str, Any]:
    """Run one program; return what was found."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(checkout, program, Path(folder))
        found: dict[str, Any] = {"lines": copy.lines}
        if untraced:
            plain, usual = copy.run(()), copy.run(program.timer)
            found |= {
                "messages": [line for line in usual["messages"] if line not in plain["messages"]],
                "losses": len(losses(plain["output"])),
                **same_losses(copy, program.timer, plain["output"], usual["output"]),
                "table": usual["ranks"][0]["table"].splitlines(),
            }
        traced = copy.run(program.timer, program.steps)
        found["steps"] = len(traced["ranks"][0]["steps"])
        found["ranks"] = [compared(rank["steps"]) for rank in traced["ranks"]]
    return found


def measure(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the programs; return what was found of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--traced-only", action="store_true", help="leave out untraced runs")
    parser.add_argument("--commit", default="", help="of the checkout, where that is not in git")
    known = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in known.programs:
        if PROGRAMS[name].ranks > max(1, torch.cuda.device_count()):
            continue
        try:
            found[name] = run(checkout, name, untraced=not known.traced_only)
        except RuntimeError as error:
            found[name] = {"error": str(error)}
            print(f"{name}: {error}", flush=True)
        else:
            show(name, found[name])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    commit = {"commit": known.commit} if known.commit else {}
    return {"gpu": gpu, "gpus": torch.cuda.device_count(), **commit, "results": found}


def show(name: str, found: dict[str, Any]) -> None:
    """Print what was found of one program."""
    print(f"{name}: {len(found['lines'])} lines, {found['steps']} steps")
    if "losses" in found:
        same = {key: value for key, value in found.items() if key.startswith("same_losses")}
        print(f"    {found['losses']} losses: {same}")
    for line in [*found["lines"], *found.get("messages", ()), *found.get("table", ())]:
        print("   ", line)
    for rank, phases in enumerate(found["ranks"]):
        for phase, one in phases.items():
            print(f"    rank {rank} {phase:9} {one}", flush=True)
