"""Shows a table where the user looks: in a notebook, on a terminal, or in a file."""

import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_gputime._results.table import Tabular


def show(table: Tabular) -> None:
    """Shows a table: in a notebook, through rich on a terminal if it is installed, or as text."""
    if in_notebook():
        sys.modules["IPython"].display.display(table)
        return
    if sys.stdout is None:
        return  # As where a process has no standard output.
    with _below_bars():
        if not sys.stdout.isatty():
            print(_encodable(str(table)))
            return
        try:
            from rich import get_console

            # The one that live displays are on, such as rich's progress bar: another console would
            # write over them, and they over it.
            get_console().print(table)
        except (ImportError, UnicodeEncodeError):
            print(_encodable(table._table().text(shutil.get_terminal_size().columns)))


def _encodable(text: str) -> str:
    """Returns a text with escapes in place of what standard output has no bytes for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def in_notebook() -> bool:
    """Tells whether this is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    try:
        kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
        # A process that was forked from a kernel cannot send to its notebook.
        return kernel is not None and getattr(kernel.session, "pid", os.getpid()) == os.getpid()
    except Exception:
        return False


def _below_bars() -> AbstractContextManager[Any]:
    """Takes tqdm's progress bars away while something is printed, and draws them again below."""
    tqdm = sys.modules.get("tqdm")
    try:
        if tqdm is not None and tqdm.tqdm._instances:
            bars: AbstractContextManager[Any] = tqdm.tqdm.external_write_mode(file=sys.stdout)
            return bars
    except Exception:
        # The bars are not worth the table.
        pass
    return nullcontext()
