"""Takes pictures of what stands on a terminal, or in a notebook, when training ends.

    python -m pip install -e ".[examples]" pyte nbconvert ipykernel
    python examples/screenshots.py [DIRECTORY] [--run RUN]

It needs Chromium and a terminal of Linux or macOS. Without `--run` it trains `quickstart.py`; with
it, it shows the file of a run, such as one from a GPU.
"""

import argparse
import fcntl
import html
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
BEFORE = f"import runpy, sys; sys.argv.pop(0); sys.path.insert(0, {str(EXAMPLES)!r})"
# As where it is not installed, for Lightning as well.
WITHOUT_RICH = (
    f"{BEFORE}; sys.modules['rich'] = None;"
    " from lightning_utilities.core.imports import RequirementCache as R;"
    " is_met = R.__bool__; R.__bool__ = lambda one: 'rich' not in str(one) and is_met(one)"
)
QUICKSTART = "from quickstart import main; main(max_epochs=3)"
SHOW = "runpy.run_module('lightning_gputime', run_name='__main__')"
COLOURS = {"default": "#e6e6e6", "magenta": "#d2a8ff", "cyan": "#76e3ea", "green": "#7ee787"}
VERDICT = re.compile(r"(longest phase|mixed|[\w-]+-bound): ")
NOTEBOOK = ("from quickstart import main", "main(max_epochs=3)")
STYLE = (
    "body{margin:0;background:#0d1117;color:#e6e6e6;display:inline-block}"
    "pre{font:14px/18px 'DejaVu Sans Mono',monospace;margin:12px}"
)


def terminal(code: str, arguments: list[str], columns: int, folder: str, rows: int = 200) -> Any:
    """Runs Python in a terminal, and returns its screen.

    Args:
        code: What is run.
        arguments: Its arguments.
        columns: The width of the terminal.
        folder: Where it is run.
        rows: Its height.
    """
    import pyte

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-W", "ignore", "-c", code, "-", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    ) as process:
        os.close(theirs)
        screen = pyte.Screen(columns, rows)
        stream = pyte.ByteStream(screen)
        while data := _read(ours):
            stream.feed(data)
    if process.returncode:
        raise RuntimeError("\n".join(line.rstrip() for line in screen.display if line.strip()))
    return screen


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # Linux says so where the other end is closed.
        return b""


def page(screen: Any) -> str:
    """Returns the last lines of a screen as HTML, from the verdict's line on."""
    written = [i for i, line in enumerate(screen.display) if line.strip()]
    title = max(i for i in written if screen.display[i].startswith("Time per step in"))
    first = max(i for i in range(title) if VERDICT.match(screen.display[i]))
    lines = [_line(screen, i) for i in range(first, written[-1] + 1)]
    return f"<!doctype html><style>{STYLE}</style><pre>{chr(10).join(lines)}</pre>"


def _line(screen: Any, row: int) -> str:
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    return "".join(
        f'<span style="color:{COLOURS.get(cell.fg, f"#{cell.fg}")};'
        f'font-weight:{"bold" if cell.bold else "normal"}">{html.escape(cell.data)}</span>'
        for cell in cells
    )


def notebook(folder: str) -> str:
    """Runs a notebook in a folder; returns it as HTML."""
    nbformat, nbclient, nbconvert = map(import_module, ("nbformat", "nbclient", "nbconvert"))

    os.environ["PYTHONPATH"] = os.pathsep.join((str(EXAMPLES), os.environ.get("PYTHONPATH", "")))
    cells = [nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=folder)
    for cell in book.cells:
        # The lines of others are not the subject here.
        cell.outputs = [one for one in cell.outputs if _is_shown(one)]
    text, _ = nbconvert.HTMLExporter().from_notebook_node(book)
    return str(text)


def _is_shown(output: Any) -> bool:
    data = output.get("data", {})
    return "image/png" in data or "<table>" in data.get("text/html", "")


def photograph(text: str, path: Path, width: int, height: int) -> None:
    """Takes a picture of a page, and cuts off what is empty."""
    from PIL import Image, ImageChops

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("pictures need Chromium: install it, and put it on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "page.html"
        source.write_text(text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size = f"--window-size={width},{height}"
        command = [browser, *options, size, f"--screenshot={path}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(path) as image:
        whole = image.convert("RGB")
    corner = Image.new("RGB", whole.size, whole.getpixel((whole.width - 1, whole.height - 1)))
    *_, bottom = ImageChops.difference(whole, corner).getbbox() or (0, 0, 0, whole.height)
    cut = whole.crop((0, 0, whole.width, min(bottom + 12, whole.height)))
    cut.quantize(64).save(path, optimize=True)


def main(directory: str = "pictures", run: str = "") -> list[Path]:
    """Takes all pictures; returns their files."""
    folder = Path(directory).resolve()
    folder.mkdir(exist_ok=True)
    code, arguments = (SHOW, ["show", str(Path(run).resolve())]) if run else (QUICKSTART, [])
    taken = []
    with tempfile.TemporaryDirectory() as logs:
        for style, before in (("rich", BEFORE), ("plain", WITHOUT_RICH)):
            for columns in (80, 120):
                screen = terminal(f"{before}; {code}", arguments, columns, logs)
                taken.append(folder / f"terminal_{style}_{columns}.png")
                photograph(page(screen), taken[-1], width=round(8.43 * columns) + 28, height=1200)
        taken.append(folder / "notebook.png")
        photograph(notebook(logs), taken[-1], width=900, height=1400)
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes pictures of terminals and a notebook.")
    parser.add_argument("directory", nargs="?", default="pictures", help="where the files go")
    parser.add_argument("--run", default="", help="the file of a run to show")
    given = parser.parse_args()
    print(*main(given.directory, given.run), sep="\n")
