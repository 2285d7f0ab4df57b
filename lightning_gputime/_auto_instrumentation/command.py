"""The commands that start scripts whose training gets a timer: `run` and `bench`."""

import argparse
import ast
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gputime._auto_instrumentation.environment import BEGAN, VARIABLE, timer_options
from lightning_gputime._compat.python_ import interpreter_flags
from lightning_gputime._runs import check_save_path

if TYPE_CHECKING:
    from lightning_gputime._runs.compare import RunComparison

ABOUT_RUN = """\
Time a script as it is: in the Trainer of Lightning or transformers, or in a plain
loop, where a step is one update of the first optimizer. Arguments, output, exit code and errors
stay those of the script. Processes that it starts are timed, too. If a script has a timer, run uses
that timer: --save-path saves its run, and the other options have no effect.
Options precede the script. The manual describes them: docs/reference/options.md.

  run train.py --its own --args
  run --every-n-steps 1 --save-path run.json.gz train.py
  run -m package.module
  run torchrun --nproc-per-node 2 train.py
  run ./launch.sh
"""
ABOUT_BENCH = """\
Run two commands alternately (a b b a), each with a timer as in run, and compare their steps. After
3, 5, 8, ... runs of each, bench stops early if the result is certain: every bound of --fail-above
has passed, or any bound is exceeded; without a bound, the step is certainly slower or faster. It
stops after --turns runs of each at the latest. The intervals are wider than those of compare,
because the runs are compared several times. If a script has a timer, its runs are compared.

  bench "train.py" "train.py --new"
  bench "torchrun --nproc-per-node 2 old.py" "torchrun --nproc-per-node 2 new.py" --fail-above 2%
"""
_LOOKS = (3, 5, 8, 12, 18, 27, 40)  # Turns after which `bench` may stop.

SWITCHES = ("annotate",)
VALUES = (
    *("every_n_steps", "flops", "history_size", "items", "lines", "log", "prefix", "save_path"),
    *("sync_ranks", "warmup_steps"),
)
"""Options with a value that `run` accepts. `TimerOptions` describes all except `save_path`."""
FLAGS = {f"--{name.replace('_', '-')}": name for name in (*SWITCHES, *VALUES)}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # Unknown options may be the script's.
    for flag, name in FLAGS.items():
        if name in SWITCHES:
            parser.add_argument(flag, action="store_true", default=None)
        else:
            kind = str if name in ("prefix", "save_path") else _value
            parser.add_argument(flag, type=kind, metavar="VALUE")
    add_json_arguments(parser)
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module, as python")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="the script or command, and its arguments"
    )


def add_json_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--brief", action="store_true", help="print a short result as JSON")


def run(args: argparse.Namespace) -> int:
    """Replace this process with the script. If an option is invalid, raise ValueError instead."""
    program, arguments = _prepare(args)
    # Replace this process, so that signals, exit code and tracebacks are those of the script.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; restore the default.
    try:
        os.execv(program, arguments)
    except OSError as error:
        raise ValueError(
            f"{program} cannot be executed ({error.strerror}): name the program that runs it,"
            f" as in `run bash {program}`, or add a first line such as #!/bin/bash"
        ) from None


def run_to_folder(args: argparse.Namespace, folder: Path) -> int:
    """Run the script in a subprocess whose output goes to stderr, and save its trainings here."""
    program, arguments = _prepare(args, folder)
    return _wait(subprocess.Popen(arguments, executable=program, stdout=2))


def _prepare(args: argparse.Namespace, folder: Path | None = None) -> tuple[str, list[str]]:
    """Write the options of `run` to the environment. Return the program to start, and its argv."""
    given = vars(args)
    if not args.script:
        raise ValueError("no script is given: write run train.py, or run -m package.module")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError(_IGNORES_SITE.format(""))
    program = None if args.is_module else find_program(args.script)
    wanted = {name: given[name] for name in (*SWITCHES, *VALUES) if given[name] is not None}
    try:
        if options := timer_options(wanted):
            from lightning_gputime._options import Options

            Options(**options)
        if "save_path" in wanted:
            wanted["save_path"] = check_save_path(wanted["save_path"])
        if folder is not None:  # Save there, with the same file names.
            name = Path(wanted.get("save_path", "run.json.gz")).name
            wanted["save_path"] = str(folder / name)
    except TypeError as error:
        raise ValueError(error) from None
    os.environ |= {VARIABLE: json.dumps(wanted), BEGAN: str(time.time())}
    paths = [os.path.join(os.path.dirname(__file__), "site"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if program is not None:
        return program, args.script
    script = ["-m", *args.script] if args.is_module else args.script
    return sys.executable, [sys.executable, *interpreter_flags(), *script]


def _value(text: str) -> Any:
    if "," in text:
        return [_value(part) for part in text.split(",")]
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", help="a command, with the options of run in front")
    parser.add_argument("after", help="the command to compare with it")
    parser.add_argument("--turns", type=int, default=12, help="maximum number of runs of each (12)")
    parser.add_argument(
        "-o", "--out", help="a new folder for the runs (default: a temporary folder)"
    )


def bench(args: argparse.Namespace) -> "RunComparison":
    """Run two commands alternately until their comparison is certain. Return the comparison."""
    from lightning_gputime._runs.compare import compare_sides

    commands = {"before": args.before, "after": args.after}
    for side, command in commands.items():
        if not command.strip():
            raise ValueError(f"{side} must be a command such as train.py, got {command!r}")
    if args.turns < 2:
        raise ValueError(f"--turns must be 2 or more, got {args.turns}: one run shows no noise")
    folder = new_folder(args.out, "bench")
    looks = [*(n for n in _LOOKS if n < args.turns), args.turns]
    runs: dict[str, list[Path]] = {side: [] for side in commands}
    for turn in range(1, args.turns + 1):
        for side in commands if turn % 2 else reversed(commands):
            runs[side].append(folder / side / f"{turn:03}.json.gz")
            _save_run(commands[side], runs[side][-1])
            if turn == 1 and side == "before":
                # Compare the run with itself, to raise now if --fail-above names an unknown phase.
                with_itself = compare_sides(runs[side], runs[side])
                for bound in args.fail_above:
                    with_itself.outcome(*bound)
        # Each look may use a part of the error rate, and late looks, which have the narrowest
        # intervals, use most of it: 1, 4, 9 % until 10, 20, 30 % of the turns. Example: of 12
        # turns, looks after 3 and 5 use 9 / 144 = 6 % and (25 - 9) / 144 = 11 %.
        looked = max((look for look in looks if look < turn), default=0)
        error_share = (turn**2 - looked**2) / args.turns**2
        found = compare_sides(
            *runs.values(), allow_mismatch=args.allow_mismatch, error_share=error_share
        )
        _report(f"turn {turn} of {args.turns}: {found.sentence}")
        bounds = args.fail_above or [(0.0, "step")]
        outcomes = {found.outcome(*bound) for bound in bounds}
        if turn in looks and ("regression" in outcomes or "cannot tell" not in outcomes):
            break
    _report(f"the runs are in {folder}")
    return found


def _save_run(command: str, path: Path) -> None:
    """Run a command and save its training. Exit this process if the command fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "lightning_gputime", "run", "--save-path", str(path)]
    # Examined steps would not be compared. Send the command's output to stderr, because stdout is
    # for results.
    run += ["--lines", "false", *shlex.split(command)]
    if code := _wait(subprocess.Popen(run, stdout=2)):
        _report(f"`{command}` failed with exit code {code}, so the bench stopped")
        # Exit codes 1 and 3 are outcomes of a comparison, so do not pass them on. Codes above 128
        # are signals.
        raise SystemExit(code if code > 128 else 2)
    if not path.is_file():
        raise ValueError(f"`{command}` saved no run: it must train for at least two steps")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process; 128 + n if signal n ended it."""
    is_interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # The process also got the signal, and may need time to exit.
            is_interrupted = True
    if is_interrupted:
        return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


def new_folder(path: str | None, command: str) -> Path:
    """Return a new folder for the runs of a command; without a path, a temporary folder."""
    folder = Path(path or tempfile.mkdtemp(prefix=f"{command}-")).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out must be a new folder: {folder} has files. Choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _report(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


_IGNORES_SITE = "Python's flags -E, -I and -S prevent the timer from starting: remove them{}"
_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
# Unlike a script, `python -c` has the current folder ("") on sys.path: remove it.
_FIND = """\
import importlib.util, sys
sys.path[:] = filter(None, sys.path)
sys.exit(sys.version_info < (3, 11) or not importlib.util.find_spec("lightning_gputime"))
"""


def find_program(command: Sequence[str]) -> str | None:
    """Return the path of the program that a command starts; None for a Python script.

    Raise ValueError if there is no such file or command, if it cannot be executed, or if the timer
    would not reach the Python that it starts.
    """
    first = command[0]
    if first == "-" or os.path.isfile(os.path.join(first, "__main__.py")):
        return None  # For "-", Python reads the script from stdin.
    if os.path.isdir(first) or not os.path.exists(first):
        path = shutil.which(first)
        if path is None:
            raise ValueError(f"no such script or command: {first!r}")
    elif not os.path.isfile(first) or first.endswith((".py", ".pyw", ".pyc", ".pyz")):
        return None  # A script, or a pipe such as a shell's `<(...)`.
    elif os.access(first, os.X_OK):
        path = os.path.abspath(first)
    elif not Path(first).suffix:
        return None
    else:
        raise ValueError(
            f"{first} is neither a Python script nor executable. Name the program that runs it, as"
            f" in `run bash {first}`, or run chmod +x {first}"
        )
    _check_python(command)
    # Check the first line of a script, too. Even `python` may be a script, as with pyenv.
    with open(path, "rb") as file:
        line = file.readline(1024)
    if line.startswith(b"#!"):
        _check_python([*os.fsdecode(line[2:]).split(), path, *command[1:]])
    return path


def _check_python(command: Sequence[str]) -> None:
    """Raise ValueError if a command starts a Python in which the timer would not run."""
    if os.path.basename(command[0]) == "env":  # Skip it, its flags and its variables.
        command = [*itertools.dropwhile(lambda w: w.startswith("-") or "=" in w, command[1:])]
    if not command or not _PYTHON.fullmatch(os.path.basename(command[0])):
        return
    flags = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    if any(re.match("-[a-zA-Z]*[EIS]", flag) for flag in flags):
        raise ValueError(_IGNORES_SITE.format(f" from {shlex.join(command)!r}"))
    python = shutil.which(command[0])
    # Do not resolve links: Python finds its virtual environment by this folder.
    folder = os.path.dirname(os.path.abspath(sys.executable))
    if python is None or os.path.dirname(os.path.abspath(python)) == folder:
        return
    found = subprocess.run([python, "-c", _FIND], check=False, stderr=subprocess.DEVNULL)
    if found.returncode:
        raise ValueError(
            f"{command[0]} has no lightning_gputime, so nothing would be timed: install it there by"
            f" {command[0]} -m pip install lightning-gputime (Python 3.11 or newer), or write run"
            " train.py, without a Python"
        )
