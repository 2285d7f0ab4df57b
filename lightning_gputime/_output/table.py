"""Tables as text, Markdown and HTML, and functions that display them."""

import html
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import sub
from typing import Any
from unicodedata import combining, east_asian_width

from lightning_gputime._phases import colours_of

_BETWEEN = "  "  # Separator of the columns of plain text.
_MAX_TEXT_WIDTH = 40  # Maximum width of a last column of text in a terminal.
_TO_DO = "What to do, most important first:"


@dataclass(frozen=True, slots=True)
class Table:
    """Table with names in the first column, and texts around it."""

    title: str
    lines: Sequence[tuple[str, ...]]  # Header, body and a total. If empty, only show the title.
    sentences: Sequence[str]  # Below the table.
    left: Sequence[int] = (0,)  # Indices of columns that are aligned to the left.
    above: tuple[str, "Table"] | None = None  # Headline and another table, both above this table.
    drops: Sequence[str] = ()  # Columns to drop if it is too wide, in order. Cells are never cut.
    # Bars to draw above the table, such as "GPU": the times of their phases (in milliseconds).
    lanes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: Sequence[str] = ()  # Recommended actions, as a numbered list below the table.
    below: "Table | None" = None  # Another table below this table, before the sentences.
    # Returns a picture for a terminal, by its width and whether it has colors.
    picture: Callable[[int, bool], str] | None = None

    def text(self, width: int | None = None, *, in_colour: bool = False) -> str:
        """Return the table as text, with lines of at most `width`.

        With `in_colour`, which requires a width, also draw the lanes as colored bars.
        """
        if not self.lines:
            return self.title
        table = self if width is None else self._fitting(width)
        columns = []
        for i, column in enumerate(zip(*table.lines, strict=True)):
            widest = max(map(_width_of, column))
            spaces = [" " * (widest - _width_of(cell)) for cell in column]
            parts = (column, spaces) if i in table.left else (spaces, column)
            columns.append(map("".join, zip(*parts, strict=True)))
        header, *body, total = (_BETWEEN.join(line).rstrip() for line in zip(*columns, strict=True))
        rule = "-" * max(map(_width_of, (header, *body, total)))
        grid = "\n".join([header, rule, *body, rule, total])
        headline, above = self.above or ("", None)
        lanes = ""
        if in_colour and self.lanes and width is not None:
            lanes = _draw_lanes(self.lanes, width)
        steps = [_wrapped(f"{i:3}. {step}", width, "     ") for i, step in enumerate(self.steps, 1)]
        blocks = (
            _wrapped(headline, width),
            lanes,
            above.text(width) if above else "",
            _wrapped(self.title, width),
            grid,
            "\n".join([_TO_DO, *steps]) if steps else "",
            self.below.text(width) if self.below else "",
            self.picture(width, in_colour) if self.picture and width is not None else "",
            *(_wrapped(sentence, width) for sentence in self.sentences),
        )
        return "\n\n".join(filter(None, blocks))

    def markdown(self) -> str:
        """Return the table in the Markdown of GitHub, with its sentences as a list."""
        rule = ["---" if i in self.left else "---:" for i in range(len(self.lines[0]))]
        header, *body = ([cell.strip().replace("|", "\\|") for cell in row] for row in self.lines)
        grid = "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))
        sentences = "\n".join(f"- {sentence}" for sentence in self.sentences if sentence)
        return "\n\n".join(filter(None, [self.title, grid, sentences]))

    def html(self) -> str:
        if not self.lines:
            return f"<p>{html.escape(self.title)}</p>"
        header, *body, total = self.lines
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        head = self._row(header, "th")
        rows = "".join(self._row(line, "td") for line in body) + self._row(total, "th")
        steps = "".join(f"<li>{marked(step)}</li>" for step in self.steps)
        headline, above = self.above or ("", None)
        blocks = (
            f"<p><strong>{marked(headline)}</strong></p>" if headline else "",
            above.html() if above else "",
            f"<table>{caption}<thead>{head}</thead><tbody>{rows}</tbody></table>",
            f"<p>{_TO_DO}</p><ol>{steps}</ol>" if steps else "",
            self.below.html() if self.below else "",
            *(f"<p>{marked(sentence)}</p>" for sentence in self.sentences),
        )
        return "".join(blocks)

    def _fitting(self, width: int) -> "Table":
        """Wrap the last text column, then drop columns until the table is at most `width` wide."""
        table = self
        if len(self.left) > 1:  # With several columns aligned to the left, the last has text.
            lines: list[tuple[str, ...]] = []
            for *cells, text in self.lines:
                parts = textwrap.wrap(text, _MAX_TEXT_WIDTH, subsequent_indent="  ") or [""]
                lines.append((*cells, parts[0]))
                lines += [(*[""] * len(cells), part) for part in parts[1:]]
            table = replace(self, lines=lines)
        for name in self.drops:
            widths = [max(map(_width_of, column)) for column in zip(*table.lines, strict=True)]
            if sum(widths) + len(_BETWEEN) * (len(widths) - 1) <= width:
                break
            if name in table.lines[0]:
                dropped = table.lines[0].index(name)
                lines = [(*line[:dropped], *line[dropped + 1 :]) for line in table.lines]
                left = [i - 1 if i > dropped else i for i in table.left if i != dropped]
                table = replace(table, lines=lines, left=left)
        return table

    def _row(self, line: tuple[str, ...], tag: str) -> str:
        # Use inline styles: the style sheet of a notebook aligns all cells to the right.
        html_cells = ""
        for i, cell in enumerate(line):
            side = "left" if i in self.left else "right"
            text = marked(cell).replace("  ", "&emsp;")
            html_cells += f'<{tag} style="text-align:{side}">{text}</{tag}>'
        return f"<tr>{html_cells}</tr>"


class Tabular:
    """Base of objects that `print`, rich and notebooks show as a table."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        table = self._table()
        headline = table.above[0] if table.above is not None else ""
        gist = next(filter(None, (headline, *table.sentences, table.title)))
        return f"<{type(self).__name__}: {gist}>"

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the table for rich, no wider than its console."""
        from rich.text import Text

        # With only 16 colors, phases would share colors.
        in_colour = console.color_system in ("256", "truecolor") and not console.no_color
        yield Text.from_ansi(self._table().text(options.max_width, in_colour=in_colour))


def _width_of(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    marks = sum(combining(character) > 0 for character in text)
    wide = sum(east_asian_width(character) in "WF" for character in text)
    return len(text) - marks + wide


def _draw_lanes(lanes: Mapping[str, Mapping[str, float]], width: int) -> str:
    """Return a colored bar per lane, and a legend, as text with ANSI escape sequences."""
    colours = colours_of(dict.fromkeys(name for lane in lanes.values() for name in lane))
    longest_ms = max(sum(lane.values()) for lane in lanes.values()) or 1.0
    title_width = max(map(len, lanes)) + len(_BETWEEN)
    lines = []
    for title, lane in lanes.items():
        # Round the ends of the phases, not their sizes, so that rounding errors do not add up.
        ends = [round((width - title_width) * ms / longest_ms) for ms in accumulate(lane.values())]
        sizes = map(sub, ends, [0, *ends])
        bars = [bar(colours[name], size) for name, size in zip(lane, sizes, strict=True)]
        lines.append(title.ljust(title_width) + "".join(bars))
    # Wrap the legend with two placeholder characters before each name, because `_wrapped` would
    # count escape sequences. No-break spaces keep each name on one line.
    names = [f"\0\0 {name}".replace(" ", "\xa0") for name in colours]
    legend = _wrapped("  ".join(names), width)
    for colour in colours.values():
        legend = legend.replace("\0\0", bar(colour, 2), 1)
    return "\n".join([*lines, legend.replace("\xa0", " ")])


def bar(colour: str, size: int) -> str:
    """Return spaces on a background of the nearest of the 256 terminal colors."""
    # Colors 16 to 231 are a cube with the levels 0, 95, 135, 175, 215 and 255 of each channel.
    red, green, blue = (max(value - 35, 0) // 40 for value in bytes.fromhex(colour[1:]))
    return f"\x1b[48;5;{16 + 36 * red + 6 * green + blue}m{' ' * size}\x1b[0m"


def marked(sentence: str) -> str:
    """Return a sentence as HTML, with names in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))


def _wrapped(sentence: str, width: int | None, indent: str = "") -> str:
    if width is None:
        return sentence
    # Break only between words, so that names with hyphens stay intact.
    return textwrap.fill(
        sentence,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def show(table: Tabular, *, on_stderr: bool = False, note: str = "") -> None:
    """Show a table as HTML in a notebook, by rich in a terminal, or as text with a `note`."""
    if in_notebook():
        sys.modules["IPython"].display.display(table)
        return
    stream = sys.stderr if on_stderr else sys.stdout
    if stream is None:
        return  # The process has no standard output.
    # Clear tqdm's progress bars while text is printed, then draw them again below.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    write_mode: Any = getattr(bars, "external_write_mode", None)
    with nullcontext() if write_mode is None else write_mode(file=stream):
        width = shutil.get_terminal_size().columns if stream.isatty() else None
        try:
            if width is not None and not on_stderr:
                from rich import get_console

                # Use the global console, because progress bars and other live displays do: two
                # consoles would overwrite each other.
                get_console().print(table)
                return
        except (ImportError, UnicodeEncodeError):
            pass
        # Escape characters that the encoding of the stream cannot represent.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        terminal = os.environ.get("TERM", "") + os.environ.get("COLORTERM", "")
        has_colours = re.search("256color|truecolor", terminal) and not os.environ.get("NO_COLOR")
        text = table._table().text(width, in_colour=bool(has_colours))
        text = "\n\n".join(filter(None, (text, _wrapped(note, width))))
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def in_notebook() -> bool:
    """Return True in the process of a notebook kernel, where HTML can be displayed."""
    ipython = sys.modules.get("IPython")
    try:
        kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
        # A process forked from a kernel cannot send output to its notebook.
        return kernel is not None and getattr(kernel.session, "pid", os.getpid()) == os.getpid()
    except Exception:
        return False
