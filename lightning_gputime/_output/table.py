"""Tables as text and HTML, and where to show them."""

import html
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import sub
from typing import Any, TextIO
from unicodedata import combining, east_asian_width

from lightning_gputime._phases import colours_of

_BETWEEN = "  "  # What separates the columns of plain text.
_MAX_WORDS = 40  # The width of a column of words, where that of the whole is limited.


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column has names, and the others mostly numbers."""

    title: str
    # The header, the body, and one line for the whole. Without any, the table is its title.
    lines: Sequence[tuple[str, ...]]
    sentences: Sequence[str]  # Below it.
    left: Sequence[int] = (0,)  # The columns that are words.
    above: tuple[str, "Table"] | None = None  # The most important sentence, and a table of it.
    # The columns to leave out where the table is too wide, in this order. No cell is ever cut.
    drops: Sequence[str] = ()
    lanes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # Their times by phase.

    def text(self, width: int | None = None, *, in_colour: bool = False) -> str:
        """Return it as text, with lines of at most `width` characters; its lanes in colour only."""
        if not self.lines:
            return self.title
        table = self if width is None else self._fitting(width)
        header, *body, whole = table._padded_lines()
        rule = "-" * max(map(_width_of, (header, *body, whole)))
        lead = [_wrapped(self.above[0], width), self.above[1].text(width)] if self.above else []
        if in_colour and self.lanes and width is not None:
            lead.insert(1, _draw_lanes(self.lanes, width))
        title, *below = (_wrapped(one, width) for one in (self.title, *self.sentences))
        grid = "\n".join([header, rule, *body, rule, whole])
        return "\n\n".join(filter(None, [*lead, title, grid, *below]))

    def html(self) -> str:
        if not self.lines:
            return f"<p>{html.escape(self.title)}</p>"
        header, *body, whole = self.lines
        rows = "".join(self._row(line, "td") for line in body) + self._row(whole, "th")
        lead = ""
        if self.above:
            lead = f"<p><strong>{marked(self.above[0])}</strong></p>{self.above[1].html()}"
        sentences = "".join(f"<p>{marked(sentence)}</p>" for sentence in self.sentences)
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        table = f"{caption}<thead>{self._row(header, 'th')}</thead><tbody>{rows}</tbody>"
        return f"{lead}<table>{table}</table>{sentences}"

    def _fitting(self, width: int) -> "Table":
        """Leave out ever more columns, until it is no wider than `width`."""
        table = replace(self, lines=[*self._broken_lines()]) if len(self.left) > 1 else self
        for name in self.drops:
            widths = [max(map(_width_of, column)) for column in zip(*table.lines, strict=True)]
            if sum(widths) + len(_BETWEEN) * (len(widths) - 1) <= width:
                break
            if name in table.lines[0]:
                at = table.lines[0].index(name)
                lines = [(*line[:at], *line[at + 1 :]) for line in table.lines]
                left = [i - (i > at) for i in table.left if i != at]
                table = replace(table, lines=lines, left=left)
        return table

    def _broken_lines(self) -> Iterator[tuple[str, ...]]:
        """Yield its lines, with the words of the last column over several."""
        for *cells, words in self.lines:
            first, *more = textwrap.wrap(words, _MAX_WORDS, subsequent_indent="  ") or [""]
            yield (*cells, first)
            yield from ((*[""] * len(cells), one) for one in more)

    def _padded_lines(self) -> list[str]:
        columns = []
        for i, column in enumerate(zip(*self.lines, strict=True)):
            width = max(map(_width_of, column))
            space = [" " * (width - _width_of(cell)) for cell in column]
            pairs = (column, space) if i in self.left else (space, column)
            columns.append(map("".join, zip(*pairs, strict=True)))
        return [_BETWEEN.join(line).rstrip() for line in zip(*columns, strict=True)]

    def _row(self, line: tuple[str, ...], tag: str) -> str:
        # Inside the tags: a notebook's own style puts all cells to the right.
        cells = ""
        for i, cell in enumerate(line):
            side = "left" if i in self.left else "right"
            text = marked(cell).replace("  ", "&emsp;")
            cells += f'<{tag} style="text-align:{side}">{text}</{tag}>'
        return f"<tr>{cells}</tr>"


class Tabular:
    """What `print`, rich and notebooks show as a table."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        table = self._table()
        verdict = table.above[0] if table.above is not None else ""
        first = next(filter(None, (verdict, *table.sentences, table.title)))
        return f"<{type(self).__name__}: {first}>"

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the table for rich, no wider than its console."""
        from rich.text import Text

        # Of 16 colours some phases would get the same one.
        in_colour = console.color_system in ("256", "truecolor") and not console.no_color
        yield Text.from_ansi(self._table().text(options.max_width, in_colour=in_colour))


def _width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    marks = sum(combining(one) > 0 for one in text)
    return len(text) - marks + sum(east_asian_width(one) in "WF" for one in text)


def _draw_lanes(lanes: Mapping[str, Mapping[str, float]], width: int) -> str:
    """Return a bar per lane, in the colours of its phases, and what each colour stands for."""
    colours = colours_of(dict.fromkeys(name for lane in lanes.values() for name in lane))
    longest_ms = max(sum(lane.values()) for lane in lanes.values()) or 1.0
    left = max(map(len, lanes)) + len(_BETWEEN)
    lines = []
    for title, lane in lanes.items():
        ends = [round((width - left) * ms / longest_ms) for ms in accumulate(lane.values())]
        sizes = zip(lane, map(sub, ends, [0, *ends]), strict=False)
        lines.append(title.ljust(left) + "".join(_bar(colours[name], n) for name, n in sizes))
    # Each name in one piece, behind two characters that become a square.
    names = [f"\0\0 {name}".replace(" ", "\xa0") for name in colours]
    legend = _wrapped("  ".join(names), width)
    for colour in colours.values():
        legend = legend.replace("\0\0", _bar(colour, 2), 1)
    return "\n".join([*lines, legend.replace("\xa0", " ")])


def _bar(colour: str, size: int) -> str:
    """Return spaces on a ground of the nearest of the 256 colours that terminals have."""
    red, green, blue = (max(value - 35, 0) // 40 for value in bytes.fromhex(colour[1:]))
    return f"\x1b[48;5;{16 + 36 * red + 6 * green + blue}m{' ' * size}\x1b[0m"


def marked(sentence: str) -> str:
    """Return a sentence as HTML, with its names in the type of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))


def _wrapped(sentence: str, width: int | None) -> str:
    if width is None:
        return sentence
    # Between words alone: a name with a hyphen stays whole.
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def show(table: Tabular, *, on_stderr: bool = False) -> None:
    """Show a table: in a notebook, through rich on a terminal if it is installed, or as text."""
    if in_notebook():
        sys.modules["IPython"].display.display(table)
        return
    stream = sys.stderr if on_stderr else sys.stdout
    if stream is None:
        return  # As where a process has no standard output.
    with _below_bars(stream):
        width = shutil.get_terminal_size().columns if stream.isatty() else None
        try:
            if width is not None and not on_stderr:
                from rich import get_console

                # Live displays such as rich's progress bar are on this console: another one would
                # write over them, and they over it.
                get_console().print(table)
                return
        except (ImportError, UnicodeEncodeError):
            pass
        # With escapes in place of what the stream has no bytes for.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        kind = os.environ.get("TERM", "") + os.environ.get("COLORTERM", "")
        has_colours = re.search("256color|truecolor", kind) and not os.environ.get("NO_COLOR")
        text = table._table().text(width, in_colour=bool(has_colours))
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    try:
        kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
        # A process that was forked from a kernel cannot send to its notebook.
        return kernel is not None and getattr(kernel.session, "pid", os.getpid()) == os.getpid()
    except Exception:
        return False


def _below_bars(stream: TextIO) -> AbstractContextManager[Any]:
    """Clear tqdm's progress bars while something is printed, and draw them again below."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    above: Any = getattr(bars, "external_write_mode", None)
    return nullcontext() if above is None else above(file=stream)
