"""Whether a bundle is what `generate` wrote. The manifest is looked for first, and only its bundle is read."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import UserError
from . import bytecode

MANIFEST = "manifest.json"
GENERATION = re.compile(r"livepatch-[^/]+-[0-9a-f]{16}|_vllm_livepatch")
"""Folders at a bundle's top that an upgrade leaves for running processes; the second is as version 0.1 wrote them."""
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_OUTSIDE = re.compile(r"^/|(^|/)\.\.(/|$)|\0")
"""In a manifest: a name of no file below the bundle."""
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)
"""What the standard library raises for a zip file that was cut off, or in which bytes were changed."""
_BEING_WRITTEN = re.compile(r"\.pyc\.[0-9]+$")
"""How an interpreter calls bytecode until it is whole; of one that was killed it stays, and none imports it."""


@dataclass(frozen=True)
class Verified:
    """`differences` is a sentence each, `compared` counts the files, `earlier` are folders of replaced bundles.

    `foreign` is bytecode of other Pythons than this one, which cannot be compared here; `generation` is the folder that
    the manifest names.
    """

    digest: str
    differences: list[str]
    compared: int
    earlier: list[str]
    foreign: list[str]
    generation: str = ""

    @property
    def caution(self) -> str:
        """A line on what was not compared, '' where all was."""
        more = f" and {len(self.foreign) - 1} more" if len(self.foreign) > 1 else ""
        if not self.foreign:
            return ""
        return f"not compared: {self.foreign[0]}{more}, bytecode of another Python; verify with that one, or remove it"


def verified(place: Path, digest: str | None = None) -> Verified:
    """Compare a bundle (directory or zip) with its manifest, and that with `digest`.

    Bytecode that an interpreter has cached beside a source since is not the bundle's, and must be that source's. What
    an upgrade left for the processes that it found running is compared with the manifest that came with it. A bundle
    that is damaged so that the rest cannot be compared differs by that. Raises UserError where there is no bundle, or
    `digest` is none.
    """
    check_digest(digest)
    if not place.exists():
        raise UserError(f"{place} does not exist")
    try:
        files: _Files = _Zip(place) if place.is_file() else _Directory(place)
    except _Damaged as error:
        return Verified("", [f"{place} is damaged: {error}"], 0, [], [])
    manifest = files.read(MANIFEST)
    if manifest is None:
        raise UserError(f"{place} is not a bundle: it has no {MANIFEST}")
    expected = _listed(manifest)
    own = "sha256:" + hashlib.sha256(manifest).hexdigest()
    found = [f"the bundle's digest is {own}, not {digest}"] if digest not in (None, own) else []
    if isinstance(expected, str):
        if not any(map(GENERATION.fullmatch, files.tops())):
            raise UserError(f"{place} is not a bundle: its {MANIFEST} is none of one's: {expected}")
        return Verified(own, [*found, f"{MANIFEST} is damaged: {expected}"], 0, [], [])
    compared = len(expected)
    current = {name.partition("/")[0] for name in expected}
    all_of_it = {**expected, **_own_manifests(current, manifest)}
    names = set(files.names())
    earlier = sorted({name.partition("/")[0] for name in names if "/" in name} - current)
    earlier = [folder for folder in earlier if GENERATION.fullmatch(folder) and f"{folder}/{MANIFEST}" in names]
    for folder in earlier:
        listed = files.read(f"{folder}/{MANIFEST}") or b""
        before = _listed(listed)
        if isinstance(before, str):
            found.append(f"{folder}/{MANIFEST} is damaged: {before}")
            continue
        all_of_it.update({name: sha256 for name, sha256 in before.items() if name.startswith(f"{folder}/")})
        all_of_it[f"{folder}/{MANIFEST}"] = hashlib.sha256(listed).hexdigest()
    for name, sha256 in sorted(all_of_it.items()):
        content = files.read(name)
        if files.is_link(name):  # to what is not here: it may change, and a copy of the bundle may lack it
            found.append(f"{name} is a link")
        elif content is None:
            found.append(f"{name} is missing")
        elif hashlib.sha256(content).hexdigest() != sha256:
            found.append(f"{name} was changed")
    if files.is_link(MANIFEST):
        found.append(f"{MANIFEST} is a link")
    sources = all_of_it.keys() & names if files.keeps_bytecode else set()
    foreign: list[str] = []
    for name in sorted(names - all_of_it.keys() - {MANIFEST}):
        source = _source_of(name)
        if source not in sources or files.is_link(name):
            found.append(f"{name} was added")
        elif name.endswith(".pyc"):
            data = files.read(name) or b""
            why = bytecode.wrong(name, data, files.read(source) or b"", files.modified(source))
            found += [f"{name} {why}"] if why else []
            foreign += [name] if bytecode.is_foreign(data) and not why else []
    generation = next((folder for folder in current if folder.startswith("livepatch-")), "")
    return Verified(own, found, compared, earlier, foreign, generation)


def check_digest(digest: str | None) -> None:
    """Raises UserError for what is no digest of a bundle."""
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise UserError(f"--digest {digest} is not sha256: and 64 hexadecimal digits, as `generate` prints it")


def _own_manifests(folders: set[str], manifest: bytes) -> dict[str, str]:
    """A generation has a copy of the manifest, for the processes that run it."""
    sha256 = hashlib.sha256(manifest).hexdigest()
    return {f"{folder}/{MANIFEST}": sha256 for folder in folders if folder.startswith("livepatch-")}


def _listed(manifest: bytes) -> dict[str, str] | str:
    """The SHA-256 of each file, or what is wrong with the manifest."""
    try:
        found = {str(name): str(sha256) for name, sha256 in dict(json.loads(manifest)["files"]).items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return str(error)
    outside = [name for name in found if _OUTSIDE.search(name)]
    return f"{outside[0]!r} is no file of a bundle" if outside else found


def _source_of(name: str) -> str | None:
    """The source whose bytecode this file is, kept beside it. Without that source, it would be run for itself."""
    path = PurePosixPath(_BEING_WRITTEN.sub(".pyc", name))
    if path.suffix != ".pyc":
        return None
    folder = path.parent.parent if path.parent.name == "__pycache__" else path.parent
    return str(folder / f"{path.name.partition('.')[0]}.py")


class _Damaged(Exception):
    """A zip file that was one."""


class _Directory:
    keeps_bytecode = True

    def __init__(self, place: Path) -> None:
        self._place = place

    def tops(self) -> list[str]:
        return [entry.name for entry in self._place.iterdir()]

    def names(self) -> list[str]:
        """Links to directories as well: Python imports what is behind one."""
        found = (file for file in self._place.rglob("*") if file.is_symlink() or not file.is_dir())
        return [file.relative_to(self._place).as_posix() for file in found]

    def read(self, name: str) -> bytes | None:
        """None where there is no such file: a pipe, which would be waited for, or a device is none."""
        try:
            return (self._place / name).read_bytes() if (self._place / name).is_file() else None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{self._place / name} cannot be read: {error.strerror or error}") from error

    def is_link(self, name: str) -> bool:
        return (self._place / name).is_symlink()

    def modified(self, name: str) -> int:
        return int((self._place / name).stat().st_mtime)


class _Zip:
    keeps_bytecode = False  # nobody writes it there

    def __init__(self, place: Path) -> None:
        try:
            with place.open("rb") as opened:
                begun = opened.read(4) == b"PK\3\4"
            with zipfile.ZipFile(place) as archive:
                self._files: Mapping[str, bytes] = {name: archive.read(name) for name in archive.namelist()}
        except _UNREADABLE as error:
            if begun:
                raise _Damaged(str(error) or type(error).__name__) from error
            raise UserError(f"{place} is neither a directory nor a zip file: {error}") from error
        except OSError as error:
            raise UserError(f"{place} cannot be read: {error.strerror or error}") from error

    def tops(self) -> list[str]:
        return [name.partition("/")[0] for name in self._files]

    def names(self) -> list[str]:
        return list(self._files)

    def read(self, name: str) -> bytes | None:
        return self._files.get(name)

    def is_link(self, name: str) -> bool:
        return False

    def modified(self, name: str) -> int:
        return 0


_Files = _Directory | _Zip
