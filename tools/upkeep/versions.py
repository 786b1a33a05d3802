"""Patches' own versions: raised with each change of their code or facts, so that a version says which of them it was.

    python -m vllm_livepatch.tools.upkeep.versions

in a checkout raises the `version` in the patch.toml of each patch that has changed since its version was locked, and
locks it in patch_versions.toml. A test fails where that was forgotten.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
import typer
from vllm_livepatch import patches as own_patches
from vllm_livepatch.tools.bundles import patch_files
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.toml import tomllib

LOCK = Path(__file__).parent / "patch_versions.toml"
_VERSION = re.compile(r"^version = (\d+)\n", re.MULTILINE)

Locked = dict[str, dict[str, Any]]
"""By the patch's name: `version` and `digest`."""


def folders() -> list[Path]:
    return [file.parent for place in own_patches.__path__ for file in sorted(Path(place).glob("*/patch.toml"))]


def locked(lock: Path = LOCK) -> Locked:
    return tomllib.loads(lock.read_text("utf-8")) if lock.exists() else {}


def current(folders: Iterable[Path]) -> Locked:
    """What is to be locked; version 0 is that of a patch that says none."""
    return {name_of(folder): {"version": version(folder), "digest": digest(folder)} for folder in folders}


def name_of(folder: Path) -> str:
    return folder.name.replace("_", "-")


def version(folder: Path) -> int:
    """As written in patch.toml."""
    found = _VERSION.search(_head((folder / "patch.toml").read_text("utf-8")))
    return int(found[1]) if found else 0


def digest(folder: Path) -> str:
    """Of all that decides what the patch does, but the version itself, and what patch.toml says to people (`about`)."""
    files = patch_files.files(folder)
    parts = (f"{file.relative_to(folder).as_posix()} {hashlib.sha256(_content(file)).hexdigest()}" for file in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _content(file: Path) -> bytes:
    if file.name != "patch.toml":
        return file.read_bytes()
    facts = tomllib.loads(file.read_text("utf-8"))
    return json.dumps({key: facts[key] for key in facts if key not in ("about", "version")}, sort_keys=True).encode()


def raised(folders: Iterable[Path], lock: Path = LOCK) -> list[str]:
    """Raise the versions of what has changed, and lock all: a sentence for each that was raised."""
    known, raised, found = locked(lock), [], list(folders)
    for folder in found:
        before = known.get(name_of(folder), {"version": 0, "digest": ""})
        if (digest(folder), version(folder)) != (before["digest"], before["version"]):
            if version(folder) <= before["version"]:
                _write(folder / "patch.toml", before["version"] + 1)
            raised.append(f"{name_of(folder)} {version(folder)}")
    lock.write_text(tomli_w.dumps(current(found)), "utf-8")
    return raised


def _write(file: Path, number: int) -> None:
    text = file.read_text("utf-8")
    head = _head(text)
    line = f"version = {number}\n"
    new = _VERSION.sub(line, head) if _VERSION.search(head) else f"{line}{head}"
    file.write_text(new + text[len(head) :], "utf-8")


def _head(text: str) -> str:
    """What stands before the first table."""
    found = re.search(r"^\[", text, re.MULTILINE)
    return text[: found.start()] if found else text


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main() -> None:
    """Raise the version of each patch that has changed since its version was locked, and lock it."""
    for sentence in raised(folders()) or ["no patch has changed"]:
        print(sentence, file=sys.stderr)


if __name__ == "__main__":
    ending.end_with(app, name="versions", bare=())
