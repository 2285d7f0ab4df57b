"""The command `bench`: run two commands in turns until the answer is certain."""

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_gputime import RunComparison

ABOUT = """\
Run two commands in turns (a b b a), each with a timer as by run, and compare their steps. It ends
when the answer is certain: when the interval lies above or below the bound of --fail-above, or else
above or below zero; or after --turns runs of each. The intervals allow for having looked before.

  bench "train.py" "train.py --new"
  bench "torchrun --nproc-per-node 2 old.py" "torchrun --nproc-per-node 2 new.py" --fail-above 2%
"""
_LOOKS = (3, 5, 8, 12, 18, 27, 40)  # Turns after which it may end: the chance is split by them.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", help="a command, with options as behind run")
    parser.add_argument("after", help="the other")
    parser.add_argument("--turns", type=int, default=12, help="maximum number of runs of each (12)")
    parser.add_argument("-o", "--out", help="a new folder for the runs (a temporary one)")


def bench(args: argparse.Namespace) -> "RunComparison":
    from lightning_gputime._saved_runs.compare import compare_groups  # Imports torch.

    commands = {"before": args.before, "after": args.after}
    for side, command in commands.items():
        if not command.strip():
            raise ValueError(f"{side} must be a command such as train.py, got {command!r}")
    if args.turns < 2:
        raise ValueError(f"--turns must be 2 or more, got {args.turns}: one shows no noise")
    folder = Path(args.out or tempfile.mkdtemp(prefix="bench-")).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out must be a new folder: {folder} has files. Give it another name")
    looks = [*(n for n in _LOOKS if n < args.turns), args.turns]
    groups: list[list[Path]] = [[], []]
    for turn in range(1, args.turns + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            side = [*commands][i]
            groups[i].append(folder / side / f"{turn:03}.json.gz")
            _run(commands[side], groups[i][-1])
            if turn == 1 and i == 0:
                alone = compare_groups([groups[0], groups[0]])
                for bound in args.fail_above:
                    alone.is_above(*bound)  # Raises where there is no such phase.
        found = compare_groups(groups, allow_mismatch=args.allow_mismatch, looks=len(looks))
        _tell(f"turn {turn} of {args.turns}: {found.sentence}")
        bounds = args.fail_above or [(0.0, "step")]
        is_below = all(found.is_below(*bound) for bound in bounds)
        if turn in looks and (is_below or any(found.is_above(*bound) for bound in bounds)):
            break
    _tell(f"the runs are in {folder}")
    return found


def _run(command: str, path: Path) -> None:
    """Run a command whose training is saved. End the process with its exit code if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "lightning_gputime", "run", "--save-path", str(path)]
    # Its output goes where errors go: that of the bench is the comparison.
    process = subprocess.Popen([*run, *shlex.split(command)], stdout=2)
    interrupted = 0
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # The command has it, too, and may take its time to end.
            interrupted = 130
    if code := interrupted or (code if code >= 0 else 128 - code):
        _tell(f"`{command}` ended with exit code {code}, and the bench with it")
        raise SystemExit(code)
    if not path.is_file():
        raise ValueError(f"`{command}` saved no run: it must train, in a way that run times")


def _tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
