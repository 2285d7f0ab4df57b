"""What runs as `python -m lightning_gputime`."""

import sys

from lightning_gputime._saved_runs.cli import main

if __name__ == "__main__":
    sys.exit(main())
