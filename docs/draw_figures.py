"""Draw the figures of docs/explanation/how-it-works.md as SVG, with colors for light and dark.

python docs/draw_figures.py
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "explanation"
WIDTH = 860
GOLDEN = 0.6180339887498949
PHASES = {
    "data": "#E69F00",
    "callbacks": "#D55E00",
    "forward": "#0072B2",
    "loss": "#CC79A7",
    "backward": "#56B4E9",
    "optimizer": "#009E73",
    "other": "#BBBBBB",
}
DARK_TEXT = {"data", "loss", "backward", "other"}  # Phases whose color needs black text.
STYLE = """
svg {
  --panel: #ffffff; --ink: #1f2933; --mute: #5b6775; --line: #8895a7; --box: #eef2f7; --no: #c62828
}
@media (prefers-color-scheme: dark) {
  svg {
    --panel: #1e2129; --ink: #e3e6ec; --mute: #a7b0bd; --line: #6b7685; --box: #2b303b;
    --no: #ff8a80
  }
}
text { fill: var(--ink); font: 15px sans-serif }
.title { font-weight: bold }
.small { font-size: 13px }
.mute { fill: var(--mute) }
.mid { text-anchor: middle }
.end { text-anchor: end }
.black { fill: #111111 }
.white { fill: #ffffff }
.box { fill: var(--box); stroke: var(--line) }
.line { stroke: var(--ink); fill: none; stroke-width: 1.5 }
.idle { fill: var(--line); opacity: 0.45 }
.no { stroke: var(--no); fill: none; stroke-width: 2; stroke-dasharray: 5 4 }
.nofill { fill: var(--no) }
"""


class Figure:
    """Shapes of one SVG."""

    def __init__(self, height: int) -> None:
        self.height, self.shapes = height, list[str]()

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Add a line of text."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escaped}</text>')

    def rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Add a rectangle with a class of the style sheet, or the color of a phase."""
        look = f'fill="{PHASES[style]}"' if style in PHASES else f'class="{style}"'
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {look}/>'
        )

    def phase(
        self, name: str, x: float, y: float, width: float, height: float = 26, color: str = ""
    ) -> None:
        """Add a box with a text if that fits, in the color of a phase: by default of `name`."""
        color = color or name
        self.rect(x, y, width, height, color)
        if width >= 8 * len(name):
            ink = "black" if color in DARK_TEXT else "white"
            self.text(x + width / 2, y + height / 2 + 4, name, f"small mid {ink}")

    def box(self, x: float, y: float, width: float, lines: list[str], style: str = "small") -> None:
        """Add a box with centered lines of text."""
        height = 18 * len(lines) + 12
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="4" class="box"/>'
        )
        for n, line in enumerate(lines):
            self.text(x + width / 2, y + 20 + 18 * n, line, f"{style} mid")

    def path(self, d: str, style: str = "line", *, arrow: bool = False) -> None:
        """Add a path, with an arrow at its end if asked."""
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.shapes.append(f'<path d="{d}" class="{style}"{end}/>')

    def save(self, name: str, title: str) -> None:
        """Write the file."""
        arrow = (
            '<defs><marker id="arrow" markerWidth="9" markerHeight="9" refX="7" refY="4"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" style="fill:var(--ink)"/></marker></defs>'
        )
        body = "\n".join(self.shapes)
        (FOLDER / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n{arrow}\n"
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" style="fill:var(--panel)"/>\n'
            f"{body}\n</svg>\n"
        )


def draw_marks() -> None:
    """Draw one step on the host and on the GPU, with its marks and the host wait."""
    figure = Figure(250)
    figure.text(24, 40, "marks: one GPU event, one host time and one label each", "small mute")
    host = {"data": 60, "forward": 90, "loss": 40, "backward": 110, "optimizer": 76}
    gpu = {"data": 60, "forward": 170, "loss": 40, "backward": 232, "optimizer": 84}
    starts = {}
    for title, y, x, phases in (("CPU", 60, 110, host), ("GPU", 170, 180, gpu)):
        figure.text(24, y + 18, title, "title")
        for name, width in phases.items():
            starts[title, name] = x
            figure.phase(name, x, y, width)
            figure.path(f"M{x} {y - 6}v38")
            x += width
        figure.path(f"M{x} {y - 6}v38")
        starts[title, "end"] = x
    for name in ("forward", "backward", "end"):
        cpu, device = starts["CPU", name], starts["GPU", name]
        figure.path(f"M{cpu} 94L{device} 162", arrow=True)
    figure.rect(486, 60, 190, 26, "idle")
    figure.text(581, 77, "launches the next step", "small mid")
    figure.rect(676, 60, 90, 26, "box")
    figure.text(721, 77, "host wait", "small mid")
    figure.path("M766 168V90", arrow=True)
    figure.text(774, 132, "last event", "small mute")
    figure.text(
        24,
        228,
        "A phase lasts from its mark to the next one, on the GPU's own clock.",
        "small mute",
    )
    figure.save("marks", "One step on the CPU and on the GPU")


def draw_pace() -> None:
    """Draw how the lag at marks tells the pace, and how backward gets the lines of forward."""
    figure = Figure(560)
    figure.text(24, 30, "1  The lag at the end of an interval tells its pace", "title")
    lines = (
        ("augment(x)", 110, 110),
        ("net(x)", 220, 84),
        ("f(y)", 304, 50),
        ("loss.item()", 354, 226),
        ("log(loss)", 580, 130),
    )
    figure.text(24, 68, "host", "title")
    figure.text(24, 148, "GPU", "title")
    for name, x, width in lines:
        figure.rect(x, 50, width, 26, "idle" if name == "loss.item()" else "box")
        figure.text(x + width / 2, 67, name, "small mid")
    for name, x, width in (("net(x)", 220, 292), ("f(y)", 512, 68)):
        figure.phase(name, x, 130, width, color="forward")
    for host, device in ((110, 110), (220, 220), (304, 512), (354, 580), (580, 580), (710, 710)):
        figure.path(f"M{host} 44v38")
        figure.path(f"M{device} 124v38")
        figure.path(f"M{host} 84L{device} 120", arrow=True)
    figure.text(318, 112, "lag", "small mute end")
    figure.text(722, 112, "no lag", "small mute")
    figure.text(24, 206, "pace", "title")
    paces = (
        ("host", 110, 110, "data"),
        ("GPU", 220, 292, "backward"),
        ("GPU", 512, 68, "backward"),
        ("host", 580, 130, "data"),
    )
    for name, x, width, color in paces:
        figure.phase(name, x, 188, width - 2, color=color)
    labels = (
        (165, "augment(x)"),
        (366, "net(x)"),
        (546, "f(y)"),
        (645, "loss.item(): it has"),
    )
    for x, label in labels:
        figure.text(x, 232, label, "small mid")
    figure.text(645, 250, "emptied the queue", "small mid")
    figure.text(
        24,
        284,
        "loss.item() itself takes no time: the GPU works meanwhile. What it costs is that the GPU"
        " then has no work.",
        "small mute",
    )

    figure.text(24, 326, "2  Backward gets the lines of forward", "title")
    parts = (("h = body(x)", 4, "data"), ("y = head(h)", 2, "optimizer"), ("f(y)", 1, "loss"))
    figure.text(24, 376, "forward", "title")
    figure.text(24, 470, "backward", "title")
    x, number = 110, 1
    for name, count, color in parts:
        figure.text(x + 6, 350, name, "small")
        figure.path(f"M{x} 340v46")
        for _ in range(count):
            figure.phase(str(number), x + 2, 358, 96, color=color)
            x, number = x + 100, number + 1
    x = 110
    for _, count, color in reversed(parts):
        figure.path(f"M{x} 446v38")
        for _ in range(count):
            number -= 1
            figure.phase(str(number), x + 2, 452, 96, color=color)
            x += 100
    figure.path(f"M{x} 446v38")
    figure.text(110, 412, "Autograd numbers the operations in order.", "small mute")
    figure.text(110, 432, "Hooks mark those nodes at which the line changes.", "small mute")
    figure.text(24, 516, "3  Scale the lines to all steps", "title")
    figure.text(
        24,
        540,
        "Marks slow the host down, so each phase and pace of the examined steps is scaled to that"
        " of ordinary steps.",
        "small mute",
    )
    figure.save("pace", "How lines get their time and pace")


def draw_sampling() -> None:
    """Draw how timed steps represent all steps."""
    figure = Figure(430)
    long_steps, width, left = {6, 17, 28, 39, 50}, 13, 30
    starts = [round(part * 20 + (part + 1) ** 2 * GOLDEN % 1 * 20) for part in range(3)]
    starts[1] = 26  # The second window moves onto the next long step.
    timed = {start + n for start in starts for n in range(5)}
    figure.text(24, 30, "1  The host clock is read at every step", "title")
    for step in range(60):
        height = 74 if step in long_steps else 26
        x = left + step * width
        figure.rect(x, 126 - height, width - 3, height, "forward" if step in timed else "idle")
    for start, label in zip(
        starts, ("timing window", "moved onto a long step", "timing window"), strict=True
    ):
        middle = left + (start + 2.5) * width
        figure.path(f"M{left + start * width} 134h{5 * width - 3}")
        figure.text(middle, 152, label, "small mid mute")
    figure.text(
        24, 196, "2  Durations define strata, and the clock gives the time of each", "title"
    )
    bars = (("ordinary steps", 214, 530), ("long steps", 250, 190))
    for name, y, length in bars:
        figure.text(130, y + 18, name, "small end")
        figure.rect(140, y, length, 26, "idle")
    figure.text(684, 232, "55 steps", "small mute")
    figure.text(344, 268, "5 steps", "small mute")
    figure.text(24, 316, "3  The timed steps of a stratum divide its time into phases", "title")
    shares = (
        {"data": 0.08, "forward": 0.3, "loss": 0.07, "backward": 0.4, "optimizer": 0.15},
        {"data": 0.62, "forward": 0.13, "loss": 0.03, "backward": 0.16, "optimizer": 0.06},
    )
    for (name, y, length), parts in zip(bars, shares, strict=True):
        figure.text(130, y + 138, name, "small end")
        x = 140.0
        for phase, share in parts.items():
            figure.phase(phase, x, y + 120, share * length)
            x += share * length
    figure.text(
        24, 416, "How much windows differ gives the 95 % interval of each share.", "small mute"
    )
    figure.save("sampling", "How timed steps represent all steps")


def draw_diagnosis() -> None:
    """Draw how the bottleneck is chosen."""
    figure = Figure(470)
    figure.text(24, 30, "1  Break down the wall clock of the whole training by line", "title")
    entries = (
        ("data/fetch", 0.502, "data"),
        ("first step", 0.190, "idle"),
        ("log:52", 0.088, "callbacks"),
        ("set-up", 0.055, "idle"),
        ("Block.forward:20", 0.165, "backward"),
    )
    x = 24.0
    for name, share, style in entries:
        figure.rect(x, 44, share * 812 - 2, 30, style)
        color = {"data": " black", "backward": " black", "callbacks": " white"}.get(style, "")
        figure.text(x + share * 406, 63, name, f"small mid{color}")
        x += share * 812
    figure.text(24, 94, "50 %: 2.01x without it", "small mute")
    figure.text(181 + 406 - 24, 94, "9 %: 1.10x", "small mute")
    figure.text(702, 94, "the model's own work", "small mute")
    figure.text(24, 136, "2  Choose the bottleneck", "title")
    choice = (
        (
            ["20 % of the time cannot be separated,", "and the GPU may wait in it?"],
            "no verdict",
        ),
        (
            ["the GPU waits for launches of the model", "for 30 %, and no other row saves more?"],
            "launch-bound",
        ),
        (
            ["removing a row saves 20 %,", "and it is not the model's own work?"],
            "the row's code, such as input-bound",
        ),
    )
    y, left, width = 152, 24, 330
    for lines, answer in choice:
        height = 18 * len(lines) + 12
        figure.box(left, y, width, lines)
        figure.path(f"M{left + width} {y + height / 2}h46", arrow=True)
        figure.text(left + width + 8, y + height / 2 - 5, "yes", "small mute")
        figure.text(left + width + 54, y + height / 2 + 4, answer, "small title")
        figure.path(f"M{left + width / 2} {y + height}v26", arrow=True)
        figure.text(left + width / 2 + 8, y + height + 17, "no", "small mute")
        y += height + 28
    otherwise = "GPU-bound, or compute-bound on a CPU, with the longest line of the model"
    figure.text(left, y + 14, otherwise, "small title")
    figure.text(
        left,
        y + 40,
        "Worth a look: the largest other row, if it saves 5 %.",
        "small mute",
    )
    figure.text(
        24,
        y + 74,
        "A row counts by the time that its removal saves: 1 - 1 / speed-up.",
        "small mute",
    )
    figure.save("diagnosis", "How the bottleneck is chosen")


def draw_self_check() -> None:
    """Draw what is checked when, and what a mismatch means."""
    figure = Figure(440)
    figure.text(24, 30, "1  Check the steps against what the loop must have done", "title")
    checks = (
        ("attach", ["every internal name of", "torch and the trainer exists"]),
        (
            "5 steps",
            [
                "each expected boundary fired",
                "forward precedes backward",
                "the trainer counts as many",
            ],
        ),
        ("20 timed steps", ["model, backward and update", "fired in most steps"]),
        ("end", ["the same for short runs;", "steps without a model call"]),
    )
    figure.path("M40 62H830", arrow=True)
    for n, (when, lines) in enumerate(checks):
        x = 24 + n * 206
        figure.path(f"M{x + 97} 56v12")
        figure.text(x + 97, 50, when, "small title mid")
        figure.box(x, 76, 194, lines)
    figure.text(24, 186, "2  If a boundary is missing, its phases cannot be separated", "title")
    step = {"callbacks": 90, "forward": 150, "loss": 50, "backward": 210, "optimizer": 90}
    for title, y, has_fetch in (("expected", 202, True), ("recorded", 244, False)):
        figure.text(106, y + 18, title, "small end")
        x = 116
        if has_fetch:
            figure.rect(x, y, 110, 26, "data")
            figure.text(x + 55, y + 17, "data/fetch", "small mid black")
        for name, width in step.items():
            extra = 110 if name == "callbacks" and not has_fetch else 0
            shift = 110 if name != "callbacks" or has_fetch else 0
            figure.phase(name, x + shift, y, width + extra)
            x += width
    figure.rect(116, 242, 200, 30, "no")
    figure.text(
        116, 292, "Without the check, this training would be called host-bound.", "small mute"
    )
    figure.text(24, 334, "3  Say so, and let no verdict depend on it", "title")
    boxes = (
        ["one warning:", "what is missing, and why"],
        ["summary().not_measured", "names the feature"],
        ["entries with these phases have", "no verdict and no advice"],
        ["no verdict at all, if they take", "20 % and the GPU may be idle"],
    )
    for n, lines in enumerate(boxes):
        figure.box(24 + n * 206, 350, 194, lines)
    figure.text(
        24, 424, "The check reads records that exist anyway: no step takes longer.", "small mute"
    )
    figure.save("self-check", "What the self-check compares, and what a mismatch means")


if __name__ == "__main__":
    draw_marks()
    draw_pace()
    draw_sampling()
    draw_diagnosis()
    draw_self_check()
