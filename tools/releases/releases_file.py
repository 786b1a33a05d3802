"""`releases.toml`, changed as a person would: one table more, in its place, and everything else as it was."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases.registry import Pin

_TABLE = re.compile(r"^\[\[(?P<package>[\w-]+)\]\]\n(?:(?!\[\[).*\n?)*", re.MULTILINE)
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)


def table(pin: Pin) -> str:
    """The table that pins a release."""
    values = {"version": pin.version, "wheel": pin.wheel, "sha256": pin.sha256, "sources_sha256": pin.sources_sha256}
    lines = [f'{key} = "{value}"' for key, value in values.items() if value]
    return "\n".join([f"[[{pin.package}]]", *lines, *(["read = true"] if pin.read else []), ""])


def without(text: str, package: str, version: str) -> str:
    """The file's text without a release's table."""
    for table in _TABLE.finditer(text):
        if table["package"] == package and _version(table.group()) == version:
            return (text[: table.start()].rstrip() + "\n\n" + text[table.end() :]).rstrip() + "\n"
    return text


def with_table(text: str, table: str) -> str:
    """The file's text with a release's table, among its package's, oldest first. One of the same is replaced."""
    new = _TABLE.match(table)
    if new is None:
        raise ValueError(f"no table of a release: {table!r}")
    package, version = new["package"], _version(table)
    text = without(text, package, version)
    end: int | None = None
    for other in _TABLE.finditer(text):
        if other["package"] != package:
            continue
        if Version(_version(other.group())) > Version(version):
            end = other.start() if end is None else end
            break
        end = other.end()
    before, after = (text, "") if end is None else (text[:end], text[end:])
    return "\n\n".join(part.strip("\n") for part in (before, table, after) if part.strip("\n")) + "\n"


def write(file: Path, text: str) -> None:
    """Raises UserError."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _version(table: str) -> str:
    found = _VERSION.search(table)
    if found is None:
        raise ValueError(f"a table without a version: {table!r}")
    return found[1]
