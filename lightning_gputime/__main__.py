"""What runs as `python -m lightning_gputime`."""

import io
import sys

from lightning_gputime._runs.cli import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding may have no bytes for "±", or for a name of the user's.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
