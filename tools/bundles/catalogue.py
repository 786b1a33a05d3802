"""The catalogue: every folder with a `patch.toml`, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_livepatch import patches as own_patches
from vllm_livepatch.sitecustomize.changes import Change
from vllm_livepatch.sitecustomize.decision import Patch, PatchError, Variant
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.order import contradiction
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import leading, patch_files
from vllm_livepatch.tools.diffs import reading
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.naming import known
from vllm_livepatch.tools.in_bundle.verdicts import barred
from vllm_livepatch.tools.toml import tomllib

KEEPS_APART = "compile-cache-key"


@dataclass(frozen=True)
class Entry:
    """One patch folder: where it is, what its two files say, and the same checked."""

    folder: Path
    facts: dict[str, Any]
    patch: Patch

    def wrappers(self, variant: Variant | None) -> dict[str, Any]:
        """What the patch's code makes for a form of the code, without its packages. Raises UserError."""
        with barred(self.patch):
            return leading.made(self.folder, self.patch, variant)

    def changes(self) -> tuple[Change, ...]:
        """What a diff changes, nothing where the patch is none. Raises UserError."""
        if not self.patch.diff:
            return ()
        diff = reading.parse((self.folder / self.patch.diff).read_bytes(), packages=[self.patch.package])
        targets = {change.module for change in diff.changes if not change.added}
        added = {change.module for change in diff.changes if change.added}
        if (targets, added) != (set(self.patch.targets), set(self.patch.added)):
            raise UserError(f"{self.folder}: {self.patch.diff} changes other modules than patch.toml says")
        return diff.changes


def own() -> set[str]:
    """The names of the patches that come with this project; none of their folders is read."""
    files = (file for place in map(Path, own_patches.__path__) for file in place.glob("*/patch.toml"))
    return {file.parent.name.replace("_", "-") for file in files}


def load(extra: Iterable[Path] = (), own: bool = True) -> dict[str, Entry]:
    """The patches that come with this project, unless not wanted, and those of `extra` directories, by name.

    Raises UserError.
    """
    entries: dict[str, Entry] = {}
    extra = list(extra)
    for place in (*(map(Path, own_patches.__path__) if own else ()), *extra):
        if not place.is_dir():
            raise UserError(f"{place} is not a directory of patches")
        found = sorted(place.glob("*/patch.toml"))
        if not found:
            one = (place / "patch.toml").is_file()
            why = (
                f"is a patch, not a directory of patches: --patch-dir {place.parent}"
                if one
                else ("has no patch: a patch is a folder with a patch.toml")
            )
            raise UserError(f"{place} {why}")
        for file in found:
            entry = read(file.parent)
            if place in extra:
                _parse(entry.folder)
            if entry.patch.name in entries:
                first = entries[entry.patch.name].folder
                raise UserError(f"two patches are called {entry.patch.name}: {first} and {entry.folder}")
            entries[entry.patch.name] = entry
    return entries


def _parse(folder: Path) -> None:
    """Raises UserError where a file of a patch's code is no Python: a process would find that out. Runs none."""
    for file in patch_files.code(folder):
        try:
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"{folder}: {error}") from error


def read(folder: Path) -> Entry:
    """One patch folder. Raises UserError."""
    if not folder.name.isidentifier():
        raise UserError(f"{folder}: a patch's folder is its name with underscores")
    name = folder.name.replace("_", "-")
    file = folder / "patch.toml"
    patch_files.look(folder)
    try:
        facts = patch_lock.read(folder)
        patch = to_patch(name, facts)
    except UserError as error:  # of the lock, or of both files
        raise UserError(f"{folder}: {str(error).splitlines()[0]}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, PatchError) as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from error
    code = patch.diff or "wrappers.py"
    if not (folder / code).is_file():
        raise UserError(f"{folder} has no {code}, which is the patch's code")
    return Entry(folder, facts, patch)


def choose(entries: dict[str, Entry], names: Sequence[str]) -> dict[str, Entry]:
    """The entries called `names`, all where none is named; with what keeps apart the compiled artifacts of those that
    change traced code. Raises UserError.
    """
    wanted = {known(entries, name) for name in names}
    chosen = {name: entry for name, entry in entries.items() if not names or name in wanted}
    if any(entry.patch.traced for entry in chosen.values()) and KEEPS_APART in entries:
        chosen[KEEPS_APART] = entries[KEEPS_APART]
    go_together(chosen.values())
    return chosen


def go_together(entries: Iterable[Entry]) -> None:
    """Raises UserError where what patches say of each other (inside, outside, instead_of) cannot be."""
    why = contradiction(entry.patch for entry in entries)
    if why:
        raise UserError(why)
