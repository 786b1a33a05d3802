"""A unified diff, as what it does to the modules of one package: read, judged against releases, written as a patch.

A diff is taken apart by the unidiff library; what is left to us is what may be in one.
"""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tomli_w
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ReadHunk
from unidiff.patch import PatchedFile, PatchSet
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.changes import Change, Hunk, HunkError, changed, contained, places
from vllm_livepatch.tools import imports
from vllm_livepatch.tools.errors import UserError

LARGEST = 8 * 1024 * 1024  # bytes; the largest pull requests of vLLM are a tenth of it
LONGEST_HEADER = 4096  # characters
PACKAGES = ("vllm", "lmcache")
_NOWHERE = "/dev/null"
_COMPILED = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hip", ".hpp", ".pyx", ".rs", ".so"})
_PREFIX = re.compile(r"[abciow12]/")  # what git puts before a path
_BEFORE_TIME = ("1970-01-01 ", "1969-12-31 ")  # how diff -N dates a file that is not there

Modules = Callable[[], Iterable[tuple[str, bool, str]]]
"""All modules of a release: name, whether it is a package's `__init__`, text."""


@dataclass(frozen=True)
class Diff:
    """What a diff does to the modules of one package, and which of its files were set aside, with the reason."""

    package: str
    changes: tuple[Change, ...]
    aside: tuple[tuple[str, str], ...]
    text: str  # the diff without what was set aside


@dataclass(frozen=True)
class Judged:
    """A diff against one release. `verdict`: needed (applies exactly), fixed-upstream (contained), or drifted."""

    release: str
    verdict: str
    code: dict[str, str]  # module: fingerprint
    detail: str = ""


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


def judge(diff: Diff, release: str, source: imports.Source, modules: Modules | None = None) -> Judged:
    """One release, given the text of any of its modules. With `modules` it is also seen to that no other module imports
    a name that the diff takes away.
    """
    sources = {change.module: source(change.module) for change in diff.changes}
    try:
        made, moved = _made(diff, sources, source)
    except HunkError as error:
        why = str(error)
        if all(_has(change, sources[change.module]) for change in diff.changes):
            return Judged(release, "fixed-upstream", _fingerprints(diff, sources))
        return Judged(release, "drifted", {}, why)
    packages = {change.module for change in diff.changes if change.package}
    lacking = imports.lacking(sources, made, packages, source)
    if lacking:
        return Judged(release, "drifted", {}, f"applied, it imports what is not there: {', '.join(lacking)}")
    missed = _missed(sources, made, modules) if modules is not None else []
    if missed:
        return Judged(release, "drifted", {}, f"it takes away what others import: {', '.join(missed)}")
    said = f"hunks moved by up to {moved} lines" if moved else ""
    return Judged(release, "needed", _fingerprints(diff, sources), said)


def _made(diff: Diff, sources: dict[str, str | None], source: imports.Source) -> tuple[dict[str, str], int]:
    """The text of each module as changed, and how far the hunks were from where the diff says. Raises HunkError."""
    made: dict[str, str] = {}
    moved = 0
    for change in diff.changes:
        text = sources[change.module]
        if change.added:
            if text is not None:
                raise HunkError(f"{change.module} exists already")
            made[change.module] = change.text
            parent = change.module.rpartition(".")[0]
            if parent not in sources and source(parent) is None:
                raise HunkError(f"{change.module} is added, but not its package")
        elif text is None:
            raise HunkError(f"there is no {change.module}")
        else:
            try:
                found = places(text, change.hunks)
                made[change.module] = changed(text, change.hunks)
            except HunkError as error:
                raise HunkError(f"{change.module}: {error}") from None
            off = (abs(place + 1 - hunk.line) for place, hunk in zip(found, change.hunks, strict=True) if hunk.old)
            moved = max(moved, *off, 0)
        try:
            fingerprint.parsed(made[change.module])
        except (SyntaxError, ValueError, RecursionError) as error:
            raise HunkError(f"{change.module}, changed, is not Python: {error}") from None
    return made, moved


def _has(change: Change, text: str | None) -> bool:
    """Whether a module is as the diff would make it."""
    if text is None:
        return False
    return text == change.text if change.added else contained(text, change.hunks)


def _fingerprints(diff: Diff, sources: dict[str, str | None]) -> dict[str, str]:
    """Of the modules that the diff changes."""
    texts = {change.module: sources[change.module] or "" for change in diff.changes if not change.added}
    found = {name: fingerprint.of_names(text, {name: ""})[name] for name, text in texts.items()}
    return {name: value for name, value in found.items() if value is not None}


def _missed(sources: dict[str, str | None], made: dict[str, str], modules: Modules) -> list[str]:
    taken = {name: imports.gone(text, made[name]) for name, text in sources.items() if text is not None}
    taken = {name: names for name, names in taken.items() if names}
    if not taken:
        return []
    words = {word for names in taken.values() for word in names}
    found: list[str] = []
    for module, package, text in modules():
        if module not in made and any(word in text for word in words):
            found += [f"{what} (by {module})" for what in imports.missed(module, text, package, taken)]
    return list(dict.fromkeys(found))


def folder_of(name: str, out: Path) -> Path:
    """The folder of a new patch. Raises UserError where it cannot be one."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no patch name: use small letters, digits and hyphens")
    folder = out / name.replace("-", "_")
    if folder.exists():
        raise UserError(f"{folder} exists already")
    return folder


def write(diff: Diff, name: str, origin: str, judged: Sequence[Judged], out: Path) -> Path:
    """Write OUT/name_with_underscores/ whole or not at all. Raises UserError."""
    folder = folder_of(name, out)
    variants: list[dict[str, object]] = []
    for item in judged:
        same = [entry for entry in variants if entry["code"] == item.code and entry["verdict"] == item.verdict]
        if item.verdict == "drifted":
            continue
        if same:
            same[0]["releases"].append(item.release)  # type: ignore[attr-defined]
        else:
            entry = {"releases": [item.release], "verdict": item.verdict, "applies": item.verdict == "needed"}
            variants.append({**entry, "code": item.code})
    facts = {
        "title": f"The diff {origin}",
        "package": diff.package,
        "diff": "change.diff",
        "traced": True,  # for all that is known, torch.compile traces it: then its artifacts are kept apart
        "targets": [change.module for change in diff.changes if not change.added],
        "added": [change.module for change in diff.changes if change.added],
        "about": {
            "origin": origin,
            "files": [change.module for change in diff.changes],
            "set_aside": [f"{path}: {why}" for path, why in diff.aside],
            "drifted": [f"{item.release}: {item.detail}" for item in judged if item.verdict == "drifted"],
        },
        "variant": variants,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=out) as temporary:
            new = Path(temporary, folder.name)
            new.mkdir()
            (new / "change.diff").write_text(diff.text, "utf-8", newline="\n")
            (new / "patch.toml").write_text(tomli_w.dumps(facts, multiline_strings=True), "utf-8")
            new.rename(folder)
    except OSError as error:
        raise UserError(f"the patch cannot be written to {folder}: {error.strerror or error}") from error
    return folder


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
