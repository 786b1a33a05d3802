"""A benchmark's table: on the screen, kept as JSON in docs/figures, and as Markdown in the pages.

    python -m vllm_livepatch.tools.bench --write      # all of them again, on a quiet machine

A page has the table between `<!-- figures: NAME -->` and `<!-- /figures -->`; `NAME 1 3` takes the first and the third
row only, and `; NAME` appends another table of the same columns. Times in pairs are compared in one direction: with the
bundle over without, so that more than 1 is slower.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.measured import measured_on

PLACE = Path("tests/results/figures")
PAGES = ("README.md", "docs/*.md")
_BLOCK = re.compile(r"(<!-- figures: ([^>]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figures:
    """What a benchmark came to: cells as they are shown, and the command that makes them again."""

    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """The table on the screen, in full where it is piped."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        Console(width=None if os.isatty(1) else 200).print(table)


def duration(seconds: float) -> str:
    """Three digits and the unit: `2.03 us`, `32.1 ms`, `7.56 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor or unit == "us":
            break
    value = seconds / factor
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def ratio(mine: Sequence[float], other: Sequence[float]) -> str:
    """The median of the ratios round by round: more than 1 is slower than the other."""
    return f"{statistics.median(one / two for one, two in zip(mine, other, strict=True)):.3f}"


def difference(mine: Sequence[float], other: Sequence[float]) -> str:
    """The median of the differences round by round, in seconds, and its interval."""
    more = [one - two for one, two in zip(mine, other, strict=True)]
    low, high = interval(more)
    return f"{duration(statistics.median(more))} ({duration(low)} to {duration(high)})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median lies with 95 %; of less than six values, the least and the greatest.

    By order statistics: how many values lie below the median is binomial, whatever their distribution.
    """
    ordered, count = sorted(values), len(values)
    probability, rank = 0.5**count, 0
    below = probability
    while below + (following := probability * (count - rank) / (rank + 1)) <= 0.025:
        probability, rank = following, rank + 1
        below += following
    if below > 0.025:
        return ordered[0], ordered[-1]
    return ordered[rank], ordered[-1 - rank]


def kept(figures: Figures, checkout: Path) -> dict[str, Any]:
    """The figures with what they were measured on."""
    return {
        "command": figures.command,
        **measured_on(checkout),
        "columns": list(figures.columns),
        "rows": [list(row) for row in figures.rows],
    }


def keep(figures: Figures, name: str, checkout: Path) -> None:
    """Write what a benchmark came to beside the others, and fill the pages that show it."""
    write(kept(figures, checkout), name, checkout)
    fill(checkout)


def write(result: dict[str, Any], name: str, checkout: Path) -> None:
    file = checkout / PLACE / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{json.dumps(result, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


def fill(checkout: Path) -> None:
    """Each page's blocks, made of what is kept."""
    for file in sorted(file for pattern in PAGES for file in checkout.glob(pattern)):
        page = file.read_text(encoding="utf-8")
        text = filled(page, checkout / PLACE, with_sources=file.name != "README.md")
        if text != page:
            file.write_text(text, encoding="utf-8")


def changes(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """A line for each cell that differs, by its row and column."""
    if old is None or (old["columns"], [row[0] for row in old["rows"]]) != (
        new["columns"],
        [row[0] for row in new["rows"]],
    ):
        return ["new rows or columns"]
    return [
        f"{row[0]}, {column}: {before} -> {after}"
        for was, row in zip(old["rows"], new["rows"], strict=True)
        for column, before, after in zip(new["columns"], was, row, strict=True)
        if before != after
    ]


def filled(page: str, place: Path = PLACE, with_sources: bool = True) -> str:
    """The page, each of its blocks made of what is kept, with what made it."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{_markdown(found[2], place, with_sources)}{found[3]}"

    return _BLOCK.sub(block, page)


def _markdown(wanted: str, place: Path, with_sources: bool) -> str:
    lines: list[str] = []
    sources: list[str] = []
    for part in wanted.split(";"):
        name, *numbers = part.split()
        result = json.loads((place / f"{name}.json").read_text(encoding="utf-8"))
        if not lines:
            lines += [f"| {' | '.join(result['columns'])} |", "|---|" + "---:|" * (len(result["columns"]) - 1)]
        rows = [result["rows"][int(number) - 1] for number in numbers] if numbers else result["rows"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        sources.append(f"`{result['command']}`, {result['date']}, revision {result['revision']}, {result['machine']}")
    if with_sources:
        lines += ["", "; ".join(dict.fromkeys(sources)) + "."]
    return "\n".join(lines) + "\n"
