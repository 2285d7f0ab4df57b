"""The command `lightning-gputime`: run, bench and tune; on saved runs show, compare, report."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lightning_gputime as package  # Imports torch only when a name is used.
from lightning_gputime._auto_instrumentation import command

if TYPE_CHECKING:
    from lightning_gputime._output.table import Tabular

SUCCEEDED, FAILED = 0, 2  # Exit codes of a command.
# Exit codes of a comparison by its outcome, worst first.
_CODE_OF_OUTCOME = {"regression": 1, "cannot tell": 3, "passed": SUCCEEDED}

_ABOUT = """\
Run a script with a timer. Show, compare and report runs that were saved by
timer.save("run.json.gz"), or under Lightning by GPUPhaseTimer(save_path="run.json.gz").

  python -m lightning_gputime run train.py
  python -m lightning_gputime show run.json.gz
  python -m lightning_gputime compare before.json.gz after.json.gz --fail-above 2%
  python -m lightning_gputime bench "train.py" "train.py --new"
  python -m lightning_gputime report run.json.gz -o report.html
"""
_SHOW = "Print the table of a saved run."
_COMPARE = """\
Show whether the step and its phases take longer after a change, and by how much, without the
warm-up. The times are those of a typical step (the mean over the middle half of the steps), or of
the mean of all steps if steps were sampled. All intervals hold together with 95 % confidence.

  compare before.json.gz after.json.gz
  compare folder_before folder_after

A folder means all runs in it. One run per side does not show how much equal runs differ (the
machine, its temperature, other users): run each side several times, alternately, as bench does.
"""
_REPORT = """\
Make one page of a run, or of two side by side, to send to others: it needs no network and no other
file. Needs bokeh: python -m pip install bokeh.
"""
_TUNE = """\
Run a script with a timer, try the changes that its advice suggests, and keep those that
measurably speed it up. The script is not edited: tune applies one change at a time from outside,
and alternates runs with and without it. Each run ends after --steps updates. The script
writes its checkpoints and logs in every run.

  tune train.py --its --args
  tune --budget 30m --steps 500 --allow-numerics train.py
"""
_CODES = """\
exit code: 0, passed: nothing exceeds its bound of --fail-above, or no bound was given;
1, regression: at least one bound is exceeded; 2, error: a file cannot be read, the runs cannot be
compared, or the arguments are wrong; 3, cannot tell: a confidence interval contains the bound.
"""

_RAW = argparse.RawDescriptionHelpFormatter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. By default, use the arguments of the process."""
    if arguments is None:
        arguments = sys.argv[1:]
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The encoding may not have "±", or a character of a phase name.
            sys.stdout.reconfigure(errors="backslashreplace")
    parser = _new_parser()
    args = parser.parse_args(arguments or ["--help"])
    if getattr(args, "script", None) and args.script[0] == "--":
        del args.script[0]
    try:
        return int(args.command(args))
    except (ImportError, OSError, ValueError) as error:
        why = str(error)
    except Exception as error:
        # Do not let Python exit with 1: exit codes 1 and 3 are outcomes of a comparison.
        message = " ".join(f"{type(error).__name__}: {error}".split())
        why = f"unexpected error: {message}"
    print(f"{parser.prog}: {why}", file=sys.stderr)
    return FAILED


def _new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning_gputime", description=_ABOUT, formatter_class=_RAW
    )
    version = f"{parser.prog} {package.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    new = partial(commands.add_parser, formatter_class=_RAW)

    run = new("run", help="run a script with a timer", description=command.ABOUT_RUN)
    command.add_run_arguments(run)
    run.set_defaults(command=_run)

    show = new("show", help="print the table of a saved run", description=_SHOW)
    show.set_defaults(command=_show)
    show.add_argument("run", help="the file of a run")
    watch = "print the table again whenever the training has rewritten the file, until Ctrl-C"
    show.add_argument("--watch", action="store_true", help=watch)
    command.add_json_arguments(show)

    about = "compare two runs, or two groups of runs"
    compare = new("compare", help=about, description=_COMPARE, epilog=_CODES)
    compare.set_defaults(command=_compare)
    compare.add_argument("before", metavar="BEFORE", help="baseline run, or a folder of runs")
    compare.add_argument("after", metavar="AFTER", help="run to compare, or a folder of runs")
    _add_comparison_arguments(compare)

    failed = f"{_CODES}If a command fails, bench exits with 2; 128 + n if signal n ended it."
    bench = new(
        "bench", help="run two commands alternately", description=command.ABOUT_BENCH, epilog=failed
    )
    bench.set_defaults(command=lambda args: _show_comparison(command.bench(args), args))
    command.add_bench_arguments(bench)
    _add_comparison_arguments(bench)

    tune = new("tune", help="try the advice, and measure its effect", description=_TUNE)
    tune.set_defaults(command=_tune)
    tune.allow_abbrev = False  # Unknown options may be the script's.
    budget = "time for all runs, as 90s, 15m or 1h; a number alone is in minutes (default: 15m)"
    tune.add_argument("--budget", type=_seconds, default=900.0, help=budget)
    tune.add_argument("--steps", type=int, default=300, help="updates per run (default: 300)")
    numerics = "also try bfloat16 and torch.compile"
    tune.add_argument("--allow-numerics", action="store_true", help=numerics)
    tune.add_argument("--json", action="store_true", help="print JSON")
    folder = "new folder for the runs (default: a temporary folder)"
    tune.add_argument("-o", "--out", help=folder)
    script = "the script and its arguments"
    tune.add_argument("script", nargs=argparse.REMAINDER, help=script)

    report = new("report", help="make a page of a run, or of two", description=_REPORT)
    report.set_defaults(command=_report)
    report.add_argument("runs", nargs="+", metavar="RUN", help="one file, or two: before and after")
    report.add_argument("-o", "--out", default="report.html", help="the page (report.html)")
    report.add_argument("--allow-mismatch", action="store_true", help="as with compare")
    return parser


def _add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    above = (
        "largest allowed slowdown: exit with 1 if the step, or any phase of at least 1 %% of it, is"
        " slower by more, and with 3 if that cannot be decided. PHASE:5%% limits one phase,"
        " step:2%% only the step, validation:20%% an entry of the wall clock. Can be repeated"
    )
    parser.add_argument(
        "--fail-above", type=_bound, action="append", default=[], metavar="2%", help=above
    )
    allow_mismatch = "also compare runs of another GPU, world size or batch size"
    parser.add_argument("--allow-mismatch", action="store_true", help=allow_mismatch)
    markdown = "print the comparison as Markdown, such as for a comment on a pull request"
    parser.add_argument("--markdown", action="store_true", help=markdown)
    command.add_json_arguments(parser)


def _bound(text: str) -> tuple[float, str]:
    """Parse a bound such as "loss:5%". Return the fraction, and the phase (empty for all)."""
    found = re.fullmatch(r"\s*(?:(.+):)?\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a percentage such as 2%, or with a phase loss:5%, got {text!r}"
        )
    return float(found[2]) / 100, found[1] or ""


def _seconds(text: str) -> float:
    """Return the seconds of a text such as "90s", "15m" or "1h". A number alone is in minutes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 15m or 1h, got {text!r}")
    return float(found[1]) * {"": 60, "s": 1, "m": 60, "h": 3600}[found[2]]


def _show(args: argparse.Namespace) -> int:
    if not args.watch:
        _show_once(args)
        return SUCCEEDED
    shown_ns = 0  # Modification time of the file that was shown last.
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if os.path.exists(args.run) and (time_ns := os.stat(args.run).st_mtime_ns) != shown_ns:
                shown_ns = time_ns
                if sys.stdout.isatty():
                    _print("\x1b[H\x1b[2J")  # Clear the screen.
                _show_once(args)
            time.sleep(1.0)
    return SUCCEEDED


def _show_once(args: argparse.Namespace) -> None:
    run = package.load(args.run)
    if args.json or args.brief:
        _print_result(run, args)
    else:
        slow = [f"\n{run.slow_table.text(width=120)}"] if run.slow_steps else []
        _print(run.summary(), f"\n{run.about}", *slow)


def _run(args: argparse.Namespace) -> int:
    """Run a script. With --json or --brief, print a result of each training instead of tables."""
    if not (args.json or args.brief):
        return command.run(args)
    from lightning_gputime._runs.saved import runs_in

    # A new folder shows which files this run has saved.
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    code = command.run_to_folder(args, folder)
    # Names of later trainings are longer: "run.json.gz", "run-2.json.gz", ... "run-10.json.gz".
    saved = runs_in(folder)
    for path in sorted(saved, key=lambda path: (len(path.name), path.name)):
        _print_result(package.load(path), args)
        if args.save_path:
            target = Path(args.save_path).expanduser().with_name(path.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if not saved:
        print("run: no run was saved, because no training step was timed", file=sys.stderr)
    if not (code and saved):  # After an error, keep the files, whose paths a message has shown.
        shutil.rmtree(folder)
    return code if saved else code or FAILED


def _print_result(
    found: "package.Run | package.RunComparison", args: argparse.Namespace, **added: str
) -> None:
    from lightning_gputime._runs.result import result_of

    content = result_of(found, brief=args.brief, **added)
    _print(json.dumps(content, indent=None if args.brief else 2, allow_nan=False))


def _compare(args: argparse.Namespace) -> int:
    found = package.compare(args.before, args.after, allow_mismatch=args.allow_mismatch)
    return _show_comparison(found, args)


def _show_comparison(found: "package.RunComparison", args: argparse.Namespace) -> int:
    """Print a comparison and its outcome for each bound. Return the exit code."""
    lines, outcomes = [], {"passed"}
    for bound in args.fail_above:
        outcomes.add(found.outcome(*bound))  # Raises if there is no such phase.
        lines += found.explain(*bound)
    worst = next(outcome for outcome in _CODE_OF_OUTCOME if outcome in outcomes)
    if args.json or args.brief:
        # Without a bound there is no outcome.
        _print_result(found, args, **({"outcome": worst} if args.fail_above else {}))
    elif args.markdown:
        _print(found.markdown(lines))
    else:
        _print(found)
    for line in lines:
        print(line, file=sys.stderr)
    return _CODE_OF_OUTCOME[worst]


def _tune(args: argparse.Namespace) -> int:
    from lightning_gputime._tuning import tune  # Imports torch.

    found = tune(args)
    _print(json.dumps(found.to_dict(), indent=2, allow_nan=False) if args.json else found)
    return SUCCEEDED


def _report(args: argparse.Namespace) -> int:
    from lightning_gputime._output.page import page
    from lightning_gputime._runs.saved import write

    if len(args.runs) > 2:
        raise ValueError(f"report takes one run, or two, got {len(args.runs)}")
    runs = [package.load(path) for path in args.runs]
    found = package.compare(*runs, allow_mismatch=args.allow_mismatch) if len(runs) == 2 else None
    text = page(runs, found)
    Path(args.out).expanduser().parent.mkdir(parents=True, exist_ok=True)
    write(args.out, text)
    _print(args.out)
    return SUCCEEDED


def _print(*parts: "Tabular | str") -> None:
    """Print tables and texts. Ignore a closed pipe, as with `| head`."""
    from lightning_gputime._output.table import show

    try:
        for part in parts:
            if isinstance(part, str):
                print(part)
            else:
                show(part)
        print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would raise for the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
