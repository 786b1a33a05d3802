"""Diffs for the tests, made of the sources of published releases when they are needed; none is stored."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path


def between(old: Path, new: Path, files: list[str]) -> str:
    """What makes the `files` of one release's sources those of another's, as git would write it."""
    texts = {name: (_text(old / name), _text(new / name)) for name in files}
    return "".join(of(name, before, after) for name, (before, after) in texts.items())


def replacing(source: Path, replacements: Mapping[str, list[tuple[str, str]]], context: int = 3) -> str:
    """What replaces, in each file of a release's sources, one text, which must be there once, by another."""
    texts = {name: _text(source / name) or "" for name in replacements}
    made = {name: replaced(text, replacements[name]) for name, text in texts.items()}
    return "".join(of(name, texts[name], made[name], context) for name in replacements)


def replaced(text: str, pairs: list[tuple[str, str]]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, f"it is there {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def of(name: str, before: str | None, after: str | None, context: int = 3) -> str:
    """The diff of one file; None stands for a file that is not there."""
    assert after is not None
    head = f"diff --git a/{name} b/{name}\n" + ("new file mode 100644\n" if before is None else "")
    lines = difflib.unified_diff(
        (before or "").splitlines(True),
        after.splitlines(True),
        "/dev/null" if before is None else f"a/{name}",
        f"b/{name}",
        n=context,
    )
    return head + "".join(lines)


def _text(file: Path) -> str | None:
    return file.read_text("utf-8") if file.is_file() else None
