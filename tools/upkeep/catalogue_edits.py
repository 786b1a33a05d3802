"""A release more in what people write: in the variants of a patch.toml, and in the release lists of the tests.

The files keep their looks: what is added is added to their text, and read back before it is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from packaging.version import Version
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

VARIANT = re.compile(r"^\[\[(?:variant|companion)\]\]\n(?:(?!\[\[).*\n?)*", re.MULTILINE)
RELEASES = re.compile(r"^(releases = \[)([^\]]*)(\])", re.MULTILINE)


def said_of_too(text: str, version: str, alike: Collection[str]) -> str:
    """A patch.toml that says of the release `version` what it says of one of those that are `alike`.

    The same text where it says nothing of them: then nothing is said of this one either. Raises UserError.
    """
    for segment in VARIANT.finditer(text):
        releases = tomllib.loads(segment.group())["variant"][0]["releases"]
        if version in releases:
            return text
        if not set(alike).isdisjoint(releases):
            new = RELEASES.sub(lambda match: match[1] + _with_release(match[2], version) + match[3], segment.group(), 1)
            after = text[: segment.start()] + new + text[segment.end() :]
            if tomllib.loads(after) == tomllib.loads(text):
                raise UserError("a patch.toml is written in a way that this command cannot add to; add it by hand")
            return after
    return text


def with_release(text: str, version: str, previous: str) -> str:
    """A file of test data in which every list that has the release `previous` has `version` behind it."""
    if f'"{version}"' in text:
        return text
    return re.sub(rf'("{re.escape(previous)}")(?=\s*[,\]])', rf'\1, "{version}"', text)


def without_release(text: str, version: str) -> str:
    """A file of test data, or a patch.toml, with the release in no list; variants that had no other are gone."""
    only = re.compile(rf'^releases = \["{re.escape(version)}",?\s*\]', re.MULTILINE)
    for segment in reversed(list(VARIANT.finditer(text))):
        if only.search(segment.group()):
            text = text[: segment.start()] + text[segment.end() :]
    text = re.sub(rf',\s*"{re.escape(version)}"(?=\s*[,\]])', "", text)
    return re.sub(rf'"{re.escape(version)}",\s*', "", text).replace(f'["{version}"]', "[]").rstrip("\n") + "\n"


def _with_release(listed: str, version: str) -> str:
    """The inside of a list of releases, oldest first, with one more."""
    for literal in re.finditer(r'"([^"]+)"', listed):
        if Version(literal[1]) > Version(version):
            return f'{listed[: literal.start()]}"{version}", {listed[literal.start() :]}'
    end = listed.rindex('"') + 1
    return f'{listed[:end]}, "{version}"{listed[end:]}'


def read(file: Path) -> str:
    """Raises UserError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
