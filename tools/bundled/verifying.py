"""Whether a bundle is what `generate` wrote."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path, PurePosixPath

from ..errors import UserError

MANIFEST = "manifest.json"


def differences(place: Path) -> tuple[list[str], int]:
    """How a bundle (directory or zip) differs from its manifest, a sentence each; and how many files were compared.

    Bytecode that an interpreter has cached beside the sources since is not the bundle's. Raises UserError where there
    is no bundle, or its manifest cannot be read.
    """
    if not place.exists():
        raise UserError(f"{place} does not exist")
    files = _read_zip(place) if place.is_file() else _read_directory(place)
    if MANIFEST not in files:
        raise UserError(f"{place} is not a bundle: it has no {MANIFEST}")
    try:
        manifest = json.loads(files.pop(MANIFEST))
        expected: dict[str, str] = dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place / MANIFEST} is damaged: {error}") from error
    found: list[str] = []
    for name, digest in sorted(expected.items()):
        if name not in files:
            found.append(f"{name} is missing")
        elif hashlib.sha256(files[name]).hexdigest() != digest:
            found.append(f"{name} was changed")
    added = sorted(set(files) - set(expected))
    found += [f"{name} was added" for name in added if _source_of(name) not in expected.keys() & files.keys()]
    return found, len(expected)


def _source_of(name: str) -> str | None:
    """The source whose bytecode this file is, kept beside it. Without that source, it would be run for itself."""
    path = PurePosixPath(name)
    if path.suffix != ".pyc":
        return None
    folder = path.parent.parent if path.parent.name == "__pycache__" else path.parent
    return str(folder / f"{path.name.partition('.')[0]}.py")


def _read_directory(place: Path) -> dict[str, bytes]:
    return {
        file.relative_to(place).as_posix(): file.read_bytes() for file in sorted(place.rglob("*")) if file.is_file()
    }


def _read_zip(place: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(place) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{place} is neither a directory nor a zip file: {error}") from error
