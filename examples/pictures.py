"""Create the pictures of the manual from a single run of `tutorial.py`.

    python -m pip install -e ".[examples]" pyte nbconvert ipykernel
    python examples/pictures.py [DIRECTORY]

It needs Chromium, and Linux or macOS. Without Chromium, as on many machines with a GPU, it only
saves the run. Then copy the directory to a machine with Chromium and start it again: it reuses the
run. The terminals show the output of `lightning-gputime show`, and the page shows that of
`lightning-gputime report`.
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

from matplotlib.figure import Figure
from plot_phases import plot_step, plot_steps
from tutorial import train

from lightning_gputime import GPUPhaseTimer, StepTimes, load

EXAMPLES = Path(__file__).resolve().parent
RUN = "run.json.gz"
TERMINALS = {"hero": 100, "terminal_80": 80, "terminal_120": 120}
ROWS = 1000
ENVIRONMENT = " · torch "
SHOW = (
    "import runpy, sys; sys.argv.pop(0); runpy.run_module('lightning_gputime', run_name='__main__')"
)
VERDICT = re.compile(r"(cpu-contention|[\w-]+-bound)")
NOTEBOOK = (
    "import matplotlib.pyplot as plt\nfrom lightning_gputime import load\n"
    "from plot_phases import plot_steps",
    f"run = load({RUN!r})\nrun.summary()",
    "plot_steps(run.history[run.warmup_steps :], plt.subplots(figsize=(9, 4))[1]);",
)
STYLE = (
    "body{margin:0;background:#0d1117;color:#e6e6e6;display:inline-block}"
    "pre{font:14px/18px 'DejaVu Sans Mono',monospace;margin:12px}"
)


def measure(directory: str, steps: int = 150, width: int = 0) -> GPUPhaseTimer:
    """Train the unchanged tutorial, save the run, and draw the plots. Return the timer."""
    times: list[StepTimes] = []
    folder = Path(directory)
    folder.mkdir(exist_ok=True)
    timer = GPUPhaseTimer(save_path=folder / RUN, every_n_steps=1, observers=[times.append])
    train(steps=steps, width=width, timer=timer)
    run = load(folder / RUN)
    measured = run.history[run.warmup_steps :]
    plot_steps(measured, new_axes(4.0)).savefig(folder / "steps.png", dpi=120)
    usual = sorted(times, key=lambda step: step.step_ms)[len(times) // 2]
    plot_step(usual, new_axes(2.4)).savefig(folder / "step.png", dpi=120)
    return timer


def new_axes(height: float) -> Any:
    """Return axes in a new figure."""
    return Figure(figsize=(9.0, height), layout="constrained").add_subplot()


def record(code: str, arguments: list[str], columns: int) -> bytes:
    """Run Python code in a pseudo-terminal, and return its output.

    Args:
        code: Python code.
        arguments: Arguments of the code.
        columns: Width of the terminal.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    command = [sys.executable, "-W", "ignore", "-c", code, "-", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b"".join(iter(lambda: _read(ours), b""))
    if process.returncode:
        raise RuntimeError(written.decode(errors="replace"))
    return written


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # On Linux, reading fails after the other end is closed.
        return b""


def page(written: bytes, columns: int, *, only_breakdown: bool = False) -> str:
    """Return as HTML the summary that a terminal shows, or only its part above the phases."""
    import pyte

    screen = pyte.Screen(columns, ROWS)
    pyte.ByteStream(screen).feed(written)
    used = [i for i, line in enumerate(screen.display) if line.strip()]
    # Omit the description of the environment after the summary.
    ends = (n for n, i in enumerate(used) if ENVIRONMENT in screen.display[i])
    used = used[: next(ends, None)]
    title = max(i for i in used if screen.display[i].startswith("Time per step in"))
    first = max(i for i in range(title) if VERDICT.match(screen.display[i]))
    last = used[-1]
    if only_breakdown:
        others = ("Not measured", "Time per step in")
        last = max(i for i in used if i <= title and not screen.display[i].startswith(others))
    text = "\n".join(_line(screen, i) for i in range(first, last + 1))
    return f"<!doctype html><style>{STYLE}</style><pre>{text}</pre>"


def _line(screen: Any, row: int) -> str:
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    return "".join(
        f'<span style="background:#{cell.bg}">{html.escape(cell.data)}</span>'
        if cell.bg != "default"
        else html.escape(cell.data)
        for cell in cells
    )


def notebook(folder: Path) -> str:
    """Run a notebook in a folder, and return it as HTML."""
    nbformat, nbclient, nbconvert = map(import_module, ("nbformat", "nbclient", "nbconvert"))

    os.environ["PYTHONPATH"] = os.pathsep.join((str(EXAMPLES), os.environ.get("PYTHONPATH", "")))
    cells = [nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=folder)
    text, _ = nbconvert.HTMLExporter().from_notebook_node(book)
    return str(text)


def report(folder: Path) -> str:
    """Return the HTML page of the run."""
    written = folder / "report.html"
    command = [sys.executable, "-m", "lightning_gputime", "report", str(folder / RUN)]
    subprocess.run([*command, "-o", str(written)], check=True, capture_output=True)
    return written.read_text(encoding="utf-8")


def photograph(browser: str, text: str, path: Path, width: int, height: int = 1400) -> None:
    """Take a screenshot of a page, and crop its empty lower margin."""
    from PIL import Image, ImageChops

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "page.html"
        source.write_text(text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--window-size={width},{height}", "--force-device-scale-factor=2"]
        options += ["--virtual-time-budget=5000"]  # Let scripts draw their parts of the page.
        command = [browser, *options, f"--screenshot={path}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(path) as image:
        full = image.convert("RGB")
    corner = Image.new("RGB", full.size, full.getpixel((full.width - 1, full.height - 1)))
    *_, bottom = ImageChops.difference(full, corner).getbbox() or (0, 0, 0, full.height)
    cut = full.crop((0, 0, full.width, min(bottom + 12, full.height)))
    cut.quantize(64).save(path, optimize=True)


def main(directory: str = "pictures") -> None:
    """Create all pictures that this machine can create."""
    folder = Path(directory).resolve()
    folder.mkdir(exist_ok=True)
    if not (folder / RUN).exists():
        measure(str(folder))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(
            f"{folder} has the run. Its pictures need Chromium:"
            " run this again on a machine that has it."
        )
        return

    for name, columns in TERMINALS.items():
        shown = record(SHOW, ["show", str(folder / RUN)], columns)
        width = round(8.43 * columns) + 28
        text = page(shown, columns, only_breakdown=name == "hero")
        photograph(browser, text, folder / f"{name}.png", width)
    photograph(browser, notebook(folder), folder / "notebook.png", 900, height=2000)
    photograph(browser, report(folder), folder / "report.png", 1200, height=2400)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes the pictures of the manual.")
    parser.add_argument("directory", nargs="?", default="pictures", help="folder for the files")
    main(parser.parse_args().directory)
