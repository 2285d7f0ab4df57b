"""Hold the timer against a program that others wrote.

    python benchmarks/foreign NAME CHECKOUT --out benchmarks/results/foreign_NAME.json

NAME is a file of this folder, and CHECKOUT the folder of a repository, into which nothing is
written. Each file has `PACKAGES`, whose versions stand in the result, and `measure(checkout,
arguments)`, which returns what it found. What follows on the command line goes to `measure`.
"""

import argparse
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, or "" where that is not in git."""
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run one program, and save what was found."""
    # For this folder as a package: its files may bear the names of packages that they run.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from record import environment, save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a file of this folder, without its ending")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, help="write what is found to this file")
    known, arguments = parser.parse_known_args()
    program = import_module(f"foreign.{known.name}")
    found = {
        **environment("host", "machine", "python", "torch"),
        "versions": {package: version(package) for package in program.PACKAGES},
        "command": " ".join(["python benchmarks/foreign", known.name, "CHECKOUT", *arguments]),
        "commit": commit_of(known.checkout),
        **program.measure(known.checkout.resolve(), arguments),
    }
    save(known.out, found)


if __name__ == "__main__":
    main()
