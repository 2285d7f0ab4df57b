"""The command `tune`."""

import argparse
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_gputime._tuning.tuning import Tuning

ABOUT = """\
Run a script with a timer, try the changes that its advice suggests, and keep those that
measurably speed it up. The script is not edited: tune applies one change at a time from outside,
and alternates runs with and without it. Each run ends after --steps updates. The script
writes its checkpoints and logs in every run.

  tune train.py --its --args
  tune --budget 30m --steps 500 --allow-numerics train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=900.0,
        help="time for all runs, as 90s, 15m or 1h; a number alone is in minutes (default: 15m)",
    )
    parser.add_argument("--steps", type=int, default=300, help="updates per run (default: 300)")
    parser.add_argument(
        "--allow-numerics", action="store_true", help="also try bfloat16 and torch.compile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--out", help="new folder for the runs (default: a temporary folder)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def tune(args: argparse.Namespace) -> "Tuning":
    """Run the trials of a script.

    Raises:
        ValueError: If an argument is invalid, or the script fails without changes.
    """
    from lightning_gputime._tuning.trials import RunError, Script  # Imports torch.
    from lightning_gputime._tuning.tuning import Tuning, print_progress

    if not args.script:
        raise ValueError("no script is given: write tune train.py")
    if args.steps < 50:
        raise ValueError(
            f"--steps must be 50 or more, got {args.steps}: the first steps are warm-up"
        )
    folder = Path(args.out or tempfile.mkdtemp(prefix="tune-")).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out must be a new folder: {folder} has files. Choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    tuning = Tuning(Script(args.script, folder, args.steps), args.budget, args.allow_numerics)
    try:
        tuning.run()
    except RunError as error:
        raise ValueError(f"the script failed without any change: {error}") from None
    except KeyboardInterrupt:
        print_progress("interrupted")
    return tuning


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 15m or 1h, got {text!r}")
    return float(found[1]) * {"": 60, "s": 1, "m": 60, "h": 3600}[found[2]]
