"""A terminal that runs a command, and what stands on it at the end."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte

ROWS = 60


def run(*command: str, columns: int, rows: int = ROWS) -> pyte.Screen:
    """Runs Python in a terminal of so many columns; returns its screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": f"{Path(__file__).parent.parent}"}
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=Path(__file__).parent,
    ) as process:
        os.close(theirs)
        screen = pyte.Screen(columns, rows)
        stream = pyte.ByteStream(screen)
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # Linux says so where the other end is closed.
                read = b""
            if not read:
                break
            stream.feed(read)
    os.close(ours)
    assert process.returncode == 0, "\n".join(screen.display)
    return screen


def text(screen: pyte.Screen) -> list[str]:
    """Returns the lines of a screen, without the empty ones below."""
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines
