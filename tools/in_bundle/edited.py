"""Files in site-packages that a recipe edited: they are not as the distribution that brought them was installed.

Only files that hold a patch's target are read, and the folders that hold those.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...sitecustomize import installed
from ...sitecustomize.decision import Patch

_LEFT = (".orig", ".rej")
"""What `patch` and `git apply --reject` leave beside a file: the text before, and the parts that found no place."""
_MOST = 3
_STEP = (
    "a step of a recipe (a heredoc, sed, git apply, patch) edits installed files. Delete that step and install the "
    "package again; docs/recipes.md has the patches that replace it"
)


class Looked(NamedTuple):
    """`text` is a sentence for a person, '' where no distribution's RECORD lists the files."""

    edited: bool
    text: str


class _Record(NamedTuple):
    distribution: str
    hashes: dict[str, str]  # of each file that it lists, relative to site-packages; '' where it has none


def look(patches: Sequence[Patch]) -> Looked:
    """Compares each file that holds a target with the RECORD of the distribution that brought it."""
    tree = installed.Process()
    modules = {module: module.partition(".")[0] for patch in patches for module in patch.modules}
    compared = 0
    differ: dict[str, tuple[str, str]] = {}  # by file: its module, and the distribution
    left: list[str] = []
    for package in dict.fromkeys(modules.values()):
        for place in tree.places(package):
            root = os.path.dirname(place)
            records = _records(root, package)
            files = {
                os.path.relpath(origin, root).replace(os.sep, "/"): module
                for module, top in modules.items()
                if top == package
                and (origin := tree.origin(module)) is not None
                and origin.startswith(place + os.sep)
                and os.path.isfile(origin)
            }
            for name, module in files.items() if records else ():
                compared += 1
                if not any(_is_as_recorded(os.path.join(root, name), name, record) for record in records):
                    differ[name] = (module, records[0].distribution)
            left += _left_behind(root, {os.path.dirname(name) for name in files})
    if not differ and not left:
        text = f"each file that a patch is for is as it was installed ({compared} compared with RECORD)"
        return Looked(False, text if compared else "")
    found = [f"{_some(differ)} is not as {_some({by: 0 for _, by in differ.values()})} was installed"] if differ else []
    found += [f"{_some(left)} was left by a diff"] if left else []
    changed = {module for module, _ in differ.values()}
    about = [patch.name for patch in patches if changed.intersection(patch.modules)]
    concerned = f" Patches for code in it: {', '.join(about)}." if about else ""
    return Looked(True, f"{'; '.join(found)}: {_STEP}.{concerned}")


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return f"{', '.join(every[:_MOST])}{more}"


def _records(root: str, package: str) -> list[_Record]:
    """Of the distributions that list the package: those whose name begins with its name, else any."""
    try:
        folders = sorted(name for name in os.listdir(root) if name.endswith(".dist-info"))
    except OSError:
        return []
    named = [name for name in folders if name.lower().startswith(package)]
    for some in (named, [name for name in folders if name not in named]):
        found = [record for name in some for record in _read(os.path.join(root, name), package)]
        if found:
            return found
    return []


def _read(folder: str, package: str) -> Iterator[_Record]:
    try:
        with open(os.path.join(folder, "RECORD"), encoding="utf-8", newline="") as file:
            text = file.read()
        if f"{package}/__init__.py" not in text:  # most of them: not worth reading by rows
            return
        rows = {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) > 1}
    except (OSError, ValueError, csv.Error):
        return
    if f"{package}/__init__.py" in rows:
        name, _, version = os.path.basename(folder).removesuffix(".dist-info").partition("-")
        yield _Record(f"{name} {version}", rows)


def _is_as_recorded(path: str, name: str, record: _Record) -> bool:
    """False for a file that RECORD does not list. True where nothing is known: no SHA-256, or an unreadable file."""
    written = record.hashes.get(name)
    if written is None:
        return False
    algorithm, _, expected = written.partition("=")
    if algorithm != "sha256":
        return True
    try:
        with open(path, "rb") as file:
            found = hashlib.sha256(file.read()).digest()
    except OSError:
        return True
    return base64.urlsafe_b64encode(found).decode().rstrip("=") == expected.rstrip("=")


def _left_behind(root: str, folders: Iterable[str]) -> list[str]:
    found = []
    for folder in sorted(folders):
        try:
            names = sorted(os.listdir(os.path.join(root, folder)))
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if name.endswith(_LEFT)]
    return found
