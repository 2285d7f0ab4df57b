"""What runs as `lightning-gputime`, and as `python -m lightning_gputime`."""

import sys


def main() -> int:
    """Run a command by the arguments of the process; return the exit code."""
    if sys.argv[1:2] == ["run"]:
        from lightning_gputime._auto_instrumentation import command

        return command.main(sys.argv[2:])
    from lightning_gputime import _cli

    return _cli.main()


if __name__ == "__main__":
    sys.exit(main())
