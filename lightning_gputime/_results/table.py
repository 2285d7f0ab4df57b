"""Tables for a terminal, for a notebook, and for rich."""

import html
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column has names, and the others mostly numbers.

    Attributes:
        title: What stands above it.
        lines: Its cells, line by line: the header, the body, and one line for the whole. Without
            any, the table is its title.
        sentences: What stands below it.
        left: The columns that are words, by their index.
    """

    title: str
    lines: Sequence[tuple[str, ...]]
    sentences: Sequence[str]
    left: Sequence[int] = (0,)

    def text(self) -> str:
        """Returns it as plain text."""
        if not self.lines:
            return self.title
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if i in self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in self.lines
        ]
        rule = "-" * max(map(len, text))
        table = [self.title, "", text[0], rule, *text[1:-1], rule, text[-1]]
        return "\n".join([*table, *(f"\n{sentence}" for sentence in self.sentences)])

    def markdown(self) -> str:
        """Returns it as Markdown, for a pull request."""
        if not self.lines:
            return _escaped(self.title)
        header, *body, whole = [tuple(map(_escaped, line)) for line in self.lines]
        rule = ("---", *("---:" for _ in header[1:]))
        rows = [header, rule, *body, tuple(f"**{cell}**" if cell else "" for cell in whole)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        sentences = [f"\n{_escaped(sentence)}" for sentence in self.sentences]
        return "\n".join([f"{_escaped(self.title)}\n", *lines, *sentences])

    def html(self) -> str:
        """Returns it as HTML."""
        if not self.lines:
            return f"<p>{html.escape(self.title)}</p>"
        header, *body, whole = self.lines
        rows = [_row(header, "th"), *(_row(line, "td") for line in body), _row(whole, "th")]
        sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.sentences)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead>{rows[0]}</thead>"
            f"<tbody>{''.join(rows[1:])}</tbody></table>{sentences}"
        )

    def rich(self) -> Any:
        """Returns it as a table of rich."""
        from rich.table import Table as RichTable
        from rich.text import Text

        if not self.lines:
            return self.title
        header, *body = self.lines
        # As texts: a name of the user's may look like markup.
        caption = Text("\n".join(self.sentences)) if self.sentences else None
        table = RichTable(title=self.title, caption=caption, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i in self.left else "right", no_wrap=True)
        for i, line in enumerate(body):
            table.add_row(*map(Text, line), end_section=i >= len(body) - 2)
        return table


def _escaped(text: str) -> str:
    """Returns a text as Markdown shows it: no name of a user's may end the cell, or be HTML."""
    escaped = re.sub(r"([\\|*_\[\]])", r"\\\1", html.escape(text, quote=False))
    return escaped.replace("  ", "&emsp;").replace("\n", " ")


def _row(line: tuple[str, ...], tag: str) -> str:
    cells = (html.escape(cell).replace("  ", "&emsp;") for cell in line)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def show(table: object) -> None:
    """Prints a table: through rich on a terminal, where rich is installed, else as plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(table)
            return
    print(table)
