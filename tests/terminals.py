"""Pseudo-terminals of processes, and the text that they show at the end."""

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
"""More rows than any output has, so that nothing scrolls off the screen."""


def fork(columns: int, rows: int = ROWS) -> tuple[int, int]:
    """Fork this process onto a terminal with a number of columns, like `pty.fork`."""
    gc.freeze()  # Spares the fork a garbage collection of all imported objects at its end.
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm-256color"
        streams: Any = (sys.stdout, sys.stderr)
        for stream in streams:
            stream.reconfigure(line_buffering=True)  # Like streams of a terminal.
    return process, terminal


def read(process: int, terminal: int, columns: int, rows: int = ROWS) -> list[str]:
    """Wait for a process, and return the lines on its terminal without trailing empty lines."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # On Linux, the other end is closed.
            data = b""
        if not data:
            break
        stream.feed(data)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert status == 0, "\n".join(screen.display)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines
