"""Tables for a terminal, for a notebook, and for rich."""

import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from unicodedata import combining, east_asian_width

_BETWEEN = 2
"""Spaces between the columns of plain text."""

_MOST_OF_WIDTH = 0.4
"""A column of words that takes a larger part is folded where the table is too wide."""

_LEAST_WIDTH = 16
"""None is folded below that."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column has names, and the others mostly numbers.

    Attributes:
        title: What stands above it.
        lines: Its cells, line by line: the header, the body, and one line for the whole. Without
            any, the table is its title.
        sentences: What stands below it.
        left: The columns that are words, by their index.
        lead: What stands above the title: the most important sentences.
        drops: The columns that may be left out where it is too wide, by their header, the first of
            them first. No cell is ever cut.
    """

    title: str
    lines: Sequence[tuple[str, ...]]
    sentences: Sequence[str]
    left: Sequence[int] = (0,)
    lead: Sequence[str] = ()
    drops: Sequence[str] = ()

    def text(self, width: int | None = None) -> str:
        """Returns it as plain text.

        Args:
            width: How many characters a line may have; by default as many as it needs.
        """
        if not self.lines:
            return self.title
        narrower = [self] if width is None else [*self._narrower(width)]
        fits = (one for one in narrower if width is None or one._width() <= width)
        shown = next(fits, narrower[-1])
        widths = shown._widths()
        text = [
            (" " * _BETWEEN)
            .join(
                _padded(cell, width, i in shown.left)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            .rstrip()
            for line in shown.lines
        ]
        rule = "-" * max(map(_width_of, text))
        table = [text[0], rule, *text[1:-1], rule, text[-1]]
        lead = "\n".join(_wrapped(sentence, width) for sentence in self.lead)
        above, below = [self.title], self.sentences
        parts = [*([lead] if lead else []), *(_wrapped(sentence, width) for sentence in above)]
        parts += ["\n".join(table), *(_wrapped(sentence, width) for sentence in below)]
        return "\n\n".join(parts)

    def markdown(self) -> str:
        """Returns it as Markdown, for a pull request."""
        if not self.lines:
            return _escaped(self.title)
        header, *body, whole = [tuple(map(_escaped, line)) for line in self.lines]
        rule = ("---", *("---:" for _ in header[1:]))
        rows = [header, rule, *body, tuple(f"**{cell}**" if cell else "" for cell in whole)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lead = [f"{_escaped(sentence)}\n" for sentence in self.lead]
        sentences = [f"\n{_escaped(sentence)}" for sentence in self.sentences]
        return "\n".join([*lead, f"{_escaped(self.title)}\n", *lines, *sentences])

    def html(self) -> str:
        """Returns it as HTML."""
        if not self.lines:
            return f"<p>{html.escape(self.title)}</p>"
        header, *body, whole = self.lines
        rows = [
            self._row(header, "th"),
            *(self._row(line, "td") for line in body),
            self._row(whole, "th"),
        ]
        lead = "".join(
            f"<br>{marked(sentence)}" if i else f"<strong>{marked(sentence)}</strong>"
            for i, sentence in enumerate(self.lead)
        )
        sentences = "".join(f"<p>{marked(sentence)}</p>" for sentence in self.sentences)
        return (
            f"{f'<p>{lead}</p>' if lead else ''}"
            f'<table><caption style="text-align:left">{html.escape(self.title)}</caption>'
            f"<thead>{rows[0]}</thead><tbody>{''.join(rows[1:])}</tbody></table>{sentences}"
        )

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yields what rich shows, no wider than its console."""
        from rich.measure import Measurement
        from rich.text import Text

        if not self.lines:
            yield Text(self.title)
            return
        for i, sentence in enumerate(self.lead):
            yield Text(sentence, style="" if i else "bold")
        if self.lead:
            yield Text()
        yield Text(self.title)
        yield Text()
        wide = options.update(max_width=10_000)
        narrower = [*self._narrower(options.max_width)]
        tables = (one._rich() for one in narrower)
        fits = (
            table
            for table in tables
            if Measurement.get(console, wide, table).maximum <= options.max_width
        )
        yield next(fits, None) or narrower[-1]._rich()
        for sentence in self.sentences:
            yield Text(f"\n{sentence}")

    def _rich(self) -> Any:
        from rich.box import HORIZONTALS
        from rich.table import Table as RichTable
        from rich.text import Text

        header, *body = self.lines
        table = RichTable(box=HORIZONTALS, pad_edge=False, show_edge=False)
        for i, (name, width) in enumerate(zip(header, self._widths(), strict=True)):
            # Only words may be folded: a number that is cut is a wrong one.
            if i in self.left:
                table.add_column(name, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for i, line in enumerate(body):
            # As texts: a name of the user's may look like markup.
            table.add_row(*map(Text, line), end_section=i == len(body) - 2)
        return table

    def _narrower(self, width: int) -> Iterator["Table"]:
        """Yields it, then with long names on several lines, then both with ever fewer columns."""
        table = self
        yield from (table, table._folded(width))
        for name in self.drops:
            if name in table.lines[0]:
                table = table._without(table.lines[0].index(name))
                yield from (table, table._folded(width))

    def _folded(self, width: int) -> "Table":
        """Returns it with its words on several lines where they take most of the width."""
        most = max(int(_MOST_OF_WIDTH * width), _LEAST_WIDTH)
        lines: list[tuple[str, ...]] = []
        for line in self.lines:
            cells = [
                _folded(cell, most) if i in self.left else [cell] for i, cell in enumerate(line)
            ]
            lines += zip_longest(*cells, fillvalue="")
        return replace(self, lines=lines)

    def _without(self, column: int) -> "Table":
        return replace(
            self,
            lines=[(*line[:column], *line[column + 1 :]) for line in self.lines],
            left=[i - (i > column) for i in self.left if i != column],
        )

    def _widths(self) -> list[int]:
        return [max(map(_width_of, column)) for column in zip(*self.lines, strict=True)]

    def _width(self) -> int:
        widths = self._widths()
        return sum(widths) + _BETWEEN * (len(widths) - 1)

    def _row(self, line: tuple[str, ...], tag: str) -> str:
        # Inside the tags: a notebook's own style puts all cells to the right.
        return f"<tr>{''.join(self._cell(i, cell, tag) for i, cell in enumerate(line))}</tr>"

    def _cell(self, column: int, cell: str, tag: str) -> str:
        side = "left" if column in self.left else "right"
        text = html.escape(cell).replace("  ", "&emsp;")
        return f'<{tag} style="text-align:{side}">{text}</{tag}>'


class Tabular:
    """What `print`, rich and notebooks show as a table."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        return self._table().html()

    def __rich__(self) -> Any:
        """Returns the table for rich."""
        return self._table()


def _width_of(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    marks = sum(combining(one) > 0 for one in text)
    return len(text) - marks + sum(east_asian_width(one) in "WF" for one in text)


def _padded(cell: str, width: int, left: bool) -> str:
    space = " " * (width - _width_of(cell))
    return f"{cell}{space}" if left else f"{space}{cell}"


def _folded(cell: str, most: int) -> list[str]:
    """Returns the lines of a cell, each as far in as the first."""
    indent = " " * (len(cell) - len(cell.lstrip()))
    lines = [""]
    for one in cell:
        if _width_of(lines[-1] + one) > most:
            lines.append(indent)
        lines[-1] += one
    return lines


def _escaped(text: str) -> str:
    """Returns a text as Markdown shows it: no name of a user's may end the cell, or be HTML."""
    escaped = re.sub(r"([\\|*_\[\]])", r"\\\1", html.escape(text, quote=False))
    return escaped.replace("  ", "&emsp;").replace("\n", " ")


def marked(sentence: str) -> str:
    """Returns a sentence as HTML, with its names in the type of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))


def _wrapped(sentence: str, width: int | None) -> str:
    if width is None:
        return sentence
    # Between words alone: a name with a hyphen stays whole.
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)
