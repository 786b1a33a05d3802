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

    def reversed(self) -> Hunk:
        return Hunk(self.line, self.new, self.old)


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


def changed(text: str, hunks: Iterable[Hunk]) -> str:
    """The text with every hunk in its place. Raises HunkError, with nothing changed.

    A hunk takes the place where its old lines stand, behind the hunk before it; of several such places, only the one
    that the diff's line number names.
    """
    lines = text.split("\n")
    result: list[str] = []
    done = 0  # lines of the old text that are behind us
    for number, hunk in enumerate(hunks, 1):
        place = _place(lines, hunk, done, number)
        result += lines[done:place]
        result += hunk.new
        done = place + len(hunk.old)
    return "\n".join([*result, *lines[done:]])


def contained(text: str, hunks: Sequence[Hunk]) -> bool:
    """Whether the text has every hunk already: each, turned round, has its place."""
    try:
        changed(text, [hunk.reversed() for hunk in hunks])
    except HunkError:
        return False
    return True


def _place(lines: list[str], hunk: Hunk, start: int, number: int) -> int:
    old = list(hunk.old)
    if not old:
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
    if hunk.line - 1 in places:
        return hunk.line - 1
    said = ", ".join(str(place + 1) for place in places[:5])
    raise HunkError(f"hunk {number} (line {hunk.line}) finds its lines in {len(places)} places: lines {said}")
