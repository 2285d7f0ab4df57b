"""The command `run`: it starts a script whose training gets a timer."""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from lightning_gputime._auto_instrumentation import BEGAN, VARIABLE, options_of_all

ABOUT = """\
Run a script with a timer that it has not: in the Trainer of Lightning or transformers, in a Fabric,
or in a plain loop, where a step is one update of the first optimizer. All else is as without: its
arguments, output, exit code and errors. Processes that it starts get a timer, too.

  run train.py --its own --args
  run --modules 2 --save-path run.json.gz train.py
  run -m package.module
  run torchrun --nproc-per-node 2 train.py
"""

SWITCHES = ("annotate", "memory")
VALUES = (
    "every_n_steps",
    "flops",
    "history_size",
    "items",
    "log",
    "modules",
    "prefix",
    "probe_every_n_steps",
    "save_path",
    "sync_ranks",
    "warmup_steps",
)
"""Options of all timers that a command line can give; each is described at `TimerOptions`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run)
    parser.allow_abbrev = False  # What it does not know may be the script's.
    for name in (*SWITCHES, *VALUES):
        flag = f"--{name.replace('_', '-')}"
        if name in SWITCHES:
            parser.add_argument(flag, action="store_true", default=None, help="see TimerOptions")
        else:
            kind = str if name in ("prefix", "save_path") else _value
            parser.add_argument(flag, type=kind, metavar="VALUE", help="see TimerOptions")
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module, as python")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="the script or command, and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Become the process of the script. Raise what is wrong with the options before."""
    given = vars(args)
    if not args.script:
        raise ValueError("no script is given: write run train.py, or run -m package.module")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("Python's flags -E, -I and -S keep the timer out: leave them out")
    wanted = {name: given[name] for name in (*SWITCHES, *VALUES) if given[name] is not None}
    if alone := options_of_all(wanted):
        from lightning_gputime._options import Options  # Imports torch.

        try:
            Options(**alone)
        except TypeError as error:
            raise ValueError(error) from None
    if "save_path" in wanted:
        wanted["save_path"] = os.path.abspath(os.path.expanduser(wanted["save_path"]))
    os.environ |= {VARIABLE: json.dumps(wanted), BEGAN: str(time.time())}
    paths = [os.path.join(os.path.dirname(__file__), "site"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # In place of this process: its signals, exit code and tracebacks are those of the script.
    first = args.script[0]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As without Python, which ignores it.
    if not args.is_module and not os.path.isfile(first) and shutil.which(first):
        os.execvp(first, args.script)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *flags, *["-m"][: args.is_module], *args.script])


def _value(text: str) -> Any:
    """Return the value of an option: a number, True or False, a list, or the text itself."""
    if "," in text:
        return [_value(part) for part in text.split(",")]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
