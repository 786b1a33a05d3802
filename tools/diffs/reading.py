"""A unified diff, as what it does to the modules of one package.

The unidiff library takes it apart; what is left to us is what may be in one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ReadHunk
from unidiff.patch import PatchedFile, PatchSet
from vllm_livepatch.sitecustomize.changes import Change, Hunk
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import PACKAGES

LARGEST = 8 * 1024 * 1024  # bytes; the largest pull requests of vLLM are a tenth of it
LONGEST_HEADER = 4096  # characters
_NOWHERE = "/dev/null"
_COMPILED = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hip", ".hpp", ".pyx", ".rs", ".so"})
_PREFIX = re.compile(r"[abciow12]/")  # what git puts before a path
_BEFORE_TIME = ("1970-01-01 ", "1969-12-31 ")  # how diff -N dates a file that is not there


@dataclass(frozen=True)
class Diff:
    """What a diff does to the modules of one package, and which of its files were set aside, with the reason."""

    package: str
    changes: tuple[Change, ...]
    aside: tuple[tuple[str, str], ...]
    text: str  # the diff without what was set aside


def parse(
    data: bytes, include: Sequence[str] = (), exclude: Sequence[str] = (), packages: Sequence[str] = PACKAGES
) -> Diff:
    """The changes of a diff to Python modules of one of the packages. Raises UserError."""
    aside: list[tuple[str, str]] = []
    changes: dict[str, Change] = {}
    kept: list[str] = []
    changed_packages: set[str] = set()
    wanted = " or ".join(packages)
    for file, paths in _files(_text(data), packages):
        path = paths[-1]
        if include and not _match(paths, include):
            aside.append((str(path), "not included"))
        elif exclude and _match(paths, exclude):
            aside.append((str(path), "excluded"))
        elif file.is_binary_file:
            raise UserError(f"{path} is changed in binary form (--exclude sets it aside)")
        elif path.suffix in _COMPILED:
            raise UserError(f"{path} is compiled source, which cannot be changed at import (--exclude sets it aside)")
        elif not any(part.parts[0] in packages and part.suffix == ".py" for part in paths):
            aside.append((str(path), f"no Python module of {wanted}"))
        elif len(paths) > 1:
            raise UserError(f"{paths[0]} is renamed by the diff, and a module cannot be (--exclude sets it aside)")
        else:
            change = _change(file, path)
            if change.module in changes:
                raise UserError(f"the diff has both a module and a package {change.module}")
            changes[change.module] = change
            kept.append(_written(file, path, change))
            changed_packages.add(path.parts[0])
    if not changes:
        raise UserError(f"the diff changes no Python module of {wanted}")
    if len(changed_packages) > 1:
        both = " and ".join(sorted(changed_packages))
        raise UserError(f"the diff changes {both}: make a patch for each, with --include 'vllm/*' and so on")
    if all(change.added for change in changes.values()):
        raise UserError("the diff only adds modules: nothing that is loaded would change")
    return Diff(changed_packages.pop(), tuple(changes[name] for name in sorted(changes)), tuple(aside), "".join(kept))


def _text(data: bytes) -> str:
    if not data.strip():
        raise UserError("the diff is empty")
    if len(data) > LARGEST:
        raise UserError(f"the diff has more than {LARGEST // 1024 // 1024} MiB, which is no patch")
    if b"\0" in data:
        raise UserError("the diff has binary parts")
    if b"\r" in data:
        raise UserError("the diff has CR characters: its line ends were converted (CRLF)")
    if not data.endswith(b"\n"):
        raise UserError("the diff does not end with a newline: it may have been cut off")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the diff is not UTF-8: byte {error.start}") from error


def _files(text: str, packages: Sequence[str]) -> list[tuple[PatchedFile, list[PurePosixPath]]]:
    """The files of a diff, each with its path in the repository: two where it is renamed."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        # The library's pattern for such a line takes for ever on some.
        if line.startswith("diff --git ") and (len(line) > LONGEST_HEADER or "://" in line):
            raise UserError(f"line {number} of the diff names no file")
    try:
        files = list(PatchSet.from_string(text))
    except (UnidiffParseError, ValueError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the diff cannot be read: {str(error)[:200].strip()}") from error
    if not files:
        raise UserError("no file is named in it: this is not a unified diff")
    _nothing_passed_over(lines, files)
    found = [(file, _paths(file, packages)) for file in files]
    named: set[PurePosixPath] = set()
    for _, paths in found:
        if not named.isdisjoint(paths):
            raise UserError(f"the diff names {paths[-1]} twice: of a series of commits, take the whole as one diff")
        named.update(paths)
    return found


def _nothing_passed_over(lines: Sequence[str], files: Sequence[PatchedFile]) -> None:
    """The library passes over what it cannot read outside of hunks: changes would be lost without a word."""
    hunks = [hunk for file in files for hunk in file]
    heads = sum(1 for line in lines if line.startswith("@@"))
    if heads != len(hunks):
        raise UserError(f"the diff has {heads} hunk headers, of which {len(hunks)} can be read")
    for hunk in hunks:
        last = max((line.diff_line_no or 0 for line in hunk), default=0)
        rest = [*lines[last : last + 2], "", ""]
        header = rest[0].startswith("--- ") and rest[1].startswith("+++ ")
        if last and rest[0][:1] in ("+", "-", " ") and rest[0] != "-- " and not header:
            raise UserError(f"line {last + 1} of the diff is beyond the count of lines that its hunk's header gives")


def _paths(file: PatchedFile, packages: Sequence[str]) -> list[PurePosixPath]:
    """The paths of a file before and after the diff; one where they are the same. Raises UserError."""
    names = [name for name in (file.source_file, file.target_file) if name != _NOWHERE]
    if not names:
        raise UserError("the diff has a file without a name")
    return list(dict.fromkeys(_in_repository(name, packages) for name in names))


def _in_repository(name: str, packages: Sequence[str]) -> PurePosixPath:
    """A path as git or diff wrote it, without what comes before the repository's own."""
    bare = name[1:-1] if len(name) > 1 and name[0] == name[-1] == '"' else name
    prefixed = _PREFIX.match(bare) is not None
    path = PurePosixPath(bare[2:] if prefixed else bare)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise UserError(f"the diff names {name!r}, which is outside the package")
    parts = path.parts
    if len(parts) > 1 and parts[1] in packages and (parts[0] == parts[1] or not (prefixed or parts[0] in packages)):
        parts = parts[1:]  # the directory of a plain `diff -r`
    return PurePosixPath(*parts)


def _change(file: PatchedFile, path: PurePosixPath) -> Change:
    if file.target_file == _NOWHERE or str(file.target_timestamp).startswith(_BEFORE_TIME):
        raise UserError(f"{path} is deleted by the diff, and a loaded module cannot be (--exclude sets it aside)")
    parts = list(path.with_suffix("").parts)
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{path} is no module's name")
    package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if package else parts)
    if file.source_file == _NOWHERE or str(file.source_timestamp).startswith(_BEFORE_TIME):
        hunks = [_hunk(hunk, path) for hunk in file]
        if len(hunks) > 1 or any(hunk.old for hunk in hunks):
            raise UserError(f"{path} is added by the diff, and yet has old lines")
        lines = hunks[0].new if hunks else ()
        return Change(module, (Hunk(1, (), (*lines, "")),), added=True, package=package)
    if not file:
        raise UserError(f"{path} is named in the diff but not changed (its mode, perhaps): --exclude sets it aside")
    return Change(module, tuple(_hunk(hunk, path) for hunk in file), package=package)


def _hunk(hunk: ReadHunk, path: PurePosixPath) -> Hunk:
    old: list[str] = []
    new: list[str] = []
    for line in hunk:
        value = line.value.removesuffix("\n")
        if line.line_type == "\\":
            raise UserError(f"{path}: a file that does not end with a newline is not supported")
        if line.line_type in (" ", "-"):
            old.append(value)
        if line.line_type in (" ", "+"):
            new.append(value)
    return Hunk(hunk.source_start, tuple(old), tuple(new))


def _written(file: PatchedFile, path: PurePosixPath, change: Change) -> str:
    """One file of a diff as it is kept: no mode, no times, no trailing lines."""
    lines = [f"--- {_NOWHERE if change.added else f'a/{path}'}\n", f"+++ b/{path}\n"]
    for hunk in file:
        lines.append(
            f"@@ -{hunk.source_start},{hunk.source_length} +{hunk.target_start},{hunk.target_length} @@"
            + (f" {hunk.section_header}\n" if hunk.section_header else "\n")
        )
        lines += [str(line) for line in hunk if line.line_type]
    return "".join(lines)


def _match(paths: Iterable[PurePosixPath], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(str(path), pattern) for path in paths for pattern in patterns)
