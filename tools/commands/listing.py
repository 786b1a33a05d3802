"""A table with explanations. Its words stay whole, however narrow the screen is: they are searched for and copied."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2


class Listing:
    """The last column is text that wraps. Where the longest word in it has no room there, it goes below its row."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def add_heading(self, text: str) -> None:
        """Of the rows that follow, below an empty line. It stands in the first column."""
        rest = [Text()] * (len(self._columns) - 1)
        self._rows += [[Text(), *rest], [Text(text, style="bold"), *rest]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[Text(name) for name in self._columns], *self._rows]
        widths = [max(row[place].cell_len for row in cells) for place in range(len(self._columns))]
        left = options.max_width - sum(widths[:-1]) - _GAP * (len(widths) - 1)
        longest = max((len(word) for row in self._rows for word in row[-1].plain.split()), default=0)
        if longest <= left:
            table = Table(box=None, pad_edge=False, header_style="bold")
            for name in self._columns[:-1]:
                table.add_column(name, no_wrap=True)
            table.add_column(self._columns[-1], overflow="fold")
            for row in self._rows:
                table.add_row(*row)
            yield table
            return
        yield _line([Text(name, style="bold") for name in self._columns[:-1]], widths)
        for row in self._rows:
            yield _line(row[:-1], widths)
            if row[-1].plain:
                yield Padding(row[-1], (0, 0, 0, 4))


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    parts = []
    for cell, width in zip(cells, widths, strict=False):
        part = cell.copy()
        part.pad_right(width - part.cell_len)
        parts.append(part)
    return Text(" " * _GAP).join(parts)
