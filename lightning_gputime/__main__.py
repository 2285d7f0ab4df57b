"""What runs as `lightning-gputime`, and as `python -m lightning_gputime`."""

import sys

from lightning_gputime._cli import main

if __name__ == "__main__":
    sys.exit(main())
