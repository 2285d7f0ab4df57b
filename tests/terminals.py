"""Terminals of processes, and the text that they show at the end."""

import fcntl
import gc
import os
import pty
import struct
import sys
import termios
from typing import Any

import pyte

ROWS = 200
"""More than any table has, so that nothing scrolls off the screen."""


def fork(columns: int, rows: int = ROWS) -> tuple[int, int]:
    """Fork this process onto a terminal with a number of columns, as `pty.fork`."""
    gc.freeze()  # Else the copy looks in all that is imported for garbage, when it ends.
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm-256color"
        streams: Any = (sys.stdout, sys.stderr)
        for stream in streams:
            stream.reconfigure(line_buffering=True)  # As where they were a terminal from the start.
    return process, terminal


def read(process: int, terminal: int, columns: int, rows: int = ROWS) -> list[str]:
    """Wait for a process. Return the lines on its terminal without trailing empty lines."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # Linux says so where the other end is closed.
            read = b""
        if not read:
            break
        stream.feed(read)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert status == 0, "\n".join(screen.display)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines
