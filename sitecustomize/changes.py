"""Source changes: the hunks of a diff, put into a module's text exactly or not at all.

Pure. A hunk is placed where its old lines stand; no fuzz. Lines that moved are fine as long as only one place fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class HunkError(ValueError):
    """A hunk has no place in this text; the message names it."""


@dataclass(frozen=True)
class Hunk:
    """`line` counts from 1, in the old text; `old` and `new` are the hunk's lines with their context, without ends."""

    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """What a diff does to one module. `added`: the module is new, and its text is `hunks[0].new`."""

    module: str
    hunks: tuple[Hunk, ...]
    added: bool = False
    package: bool = False  # the module is a package's __init__

    @property
    def text(self) -> str:
        """The text of an added module."""
        return "\n".join(self.hunks[0].new)

    def to_json(self) -> dict[str, Any]:
        hunks = [{"line": hunk.line, "old": list(hunk.old), "new": list(hunk.new)} for hunk in self.hunks]
        return {"module": self.module, "hunks": hunks, "added": self.added, "package": self.package}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Change:
        hunks = tuple(Hunk(item["line"], tuple(item["old"]), tuple(item["new"])) for item in value["hunks"])
        return cls(value["module"], hunks, value["added"], value["package"])


def changed(text: str, hunks: Sequence[Hunk]) -> str:
    """The text with every hunk in its place. Raises HunkError, with nothing changed."""
    lines = text.split("\n")
    result: list[str] = []
    done = 0  # lines of the old text that are behind us
    for hunk, place in zip(hunks, places(text, hunks), strict=True):
        result += lines[done:place]
        result += hunk.new
        done = place + len(hunk.old)
    return "\n".join([*result, *lines[done:]])


def places(text: str, hunks: Iterable[Hunk]) -> list[int]:
    """The line, counted from 0, at which each hunk stands. Raises HunkError.

    A hunk takes the place where its old lines stand, behind the hunk before it. Of several such places it takes only
    the one that its line number names, moved as far as the hunk before it was.
    """
    lines = text.split("\n")
    found: list[int] = []
    behind = 0
    moved = 0
    for number, hunk in enumerate(hunks, 1):
        found.append(_place(lines, hunk, behind, hunk.line - 1 + moved, number))
        behind = found[-1] + len(hunk.old)
        moved = found[-1] - (hunk.line - 1)
    return found


def contained(text: str, hunks: Sequence[Hunk]) -> bool:
    """Whether the text has every hunk already: each, turned round, has its place."""
    turned: list[Hunk] = []
    grown = 0
    for hunk in hunks:
        line = hunk.line + grown + (not hunk.old)  # a hunk without old lines names the line before it
        turned.append(Hunk(line, hunk.new, hunk.old))
        grown += len(hunk.new) - len(hunk.old)
    try:
        changed(text, turned)
    except HunkError:
        return False
    return True


def _place(lines: list[str], hunk: Hunk, start: int, named: int, number: int) -> int:
    old = list(hunk.old)
    if not old:
        if lines == [""]:
            return 0
        raise HunkError(f"hunk {number} (line {hunk.line}) adds lines without any context to place them by")
    places = [
        index
        for index in range(start, len(lines) - len(old) + 1)
        if lines[index] == old[0] and lines[index : index + len(old)] == old
    ]
    if len(places) == 1:
        return places[0]
    if not places:
        raise HunkError(f"hunk {number} (line {hunk.line}) finds its lines nowhere")
    if named in places:
        return named
    found_at = ", ".join(str(place + 1) for place in places[:5])
    raise HunkError(f"hunk {number} (line {hunk.line}) finds its lines in {len(places)} places: lines {found_at}")
