"""`from-diff`: a unified diff becomes a patch folder, judged against every pinned release.

A diff is taken apart by the unidiff library; what is left to us is what may be in one. Nothing is written unless all of
it can be used.
"""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tomli_w
from unidiff import PatchedFile, PatchSet, UnidiffParseError
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.changes import Change, Hunk, HunkError, changed, contained
from vllm_livepatch.tools import imports
from vllm_livepatch.tools.errors import UserError

LARGEST = 8 * 1024 * 1024  # bytes; the largest pull requests of vLLM are a tenth of it
PACKAGES = ("vllm", "lmcache")
_COMPILED = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hip", ".hpp", ".pyx", ".rs", ".so"})


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


def parse(data: bytes, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Diff:
    """The changes of a diff to Python modules of vLLM or LMCache. Raises UserError."""
    aside: list[tuple[str, str]] = []
    changes: list[Change] = []
    kept: list[str] = []
    packages: set[str] = set()
    for file in _files(_text(data)):
        path = PurePosixPath(file.path)
        if include and not _matches(path, include):
            aside.append((str(path), "not included"))
        elif exclude and _matches(path, exclude):
            aside.append((str(path), "excluded"))
        elif path.suffix in _COMPILED:
            raise UserError(f"{path} is compiled source, which cannot be changed at import (--exclude sets it aside)")
        elif path.parts[0] not in PACKAGES or path.suffix != ".py":
            aside.append((str(path), "no Python module of vllm or lmcache"))
        else:
            changes.append(_change(file, path))
            kept.append(f"--- {file.source_file}\n+++ {file.target_file}\n" + "".join(map(str, file)))
            packages.add(path.parts[0])
    if not changes:
        raise UserError("the diff changes no Python module of vllm or lmcache")
    if len(packages) > 1:
        raise UserError("the diff changes both vllm and lmcache: make two patches, with --include 'vllm/*' and so on")
    if all(change.added for change in changes):
        raise UserError("the diff only adds modules: nothing that is loaded would change")
    changes.sort(key=lambda change: change.module)
    return Diff(packages.pop(), tuple(changes), tuple(aside), "".join(kept))


def judge(diff: Diff, release: str, source: Callable[[str], str | None]) -> Judged:
    """One release, given the text of any of its modules (None where it has none of that name)."""
    applies, has = True, True
    detail = ""
    sources = {change.module: source(change.module) for change in diff.changes}
    made: dict[str, str] = {}
    for change in diff.changes:
        text = sources[change.module]
        if change.added:
            applies = applies and text is None
            has = has and text is not None and text.split("\n") == list(change.hunks[0].new)
            made[change.module] = change.text
            if text is not None:
                detail = detail or f"{change.module} exists already"
            continue
        if text is None:
            applies = has = False
            detail = detail or f"there is no {change.module}"
            continue
        try:
            made[change.module] = changed(text, change.hunks)
        except HunkError as error:
            applies = False
            detail = detail or f"{change.module}: {error}"
        has = has and contained(text, change.hunks)
    code = {
        change.module: fingerprint.of_names(text, {change.module: ""})[change.module] or ""
        for change in diff.changes
        if (text := sources[change.module]) is not None and not (change.added and applies)
    }
    if applies:
        lacking = imports.lacking(sources, made, source)
        applies, detail = not lacking, f"it imports what is not there: {', '.join(lacking)}" if lacking else detail
    if applies:
        return Judged(release, "needed", code)
    return Judged(release, "fixed-upstream", code) if has else Judged(release, "drifted", {}, detail)


def write(diff: Diff, name: str, origin: str, judged: Sequence[Judged], out: Path) -> Path:
    """Write OUT/name_with_underscores/ whole or not at all. Raises UserError."""
    folder = out / name.replace("-", "_")
    if not name.replace("-", "_").isidentifier() or name != name.lower() or "_" in name:
        raise UserError(f"{name!r} is no patch name: use small letters, digits and hyphens")
    if folder.exists():
        raise UserError(f"{folder} exists already")
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
        raise UserError(f"the diff has {len(data) / 1e6:.0f} MB: more than {LARGEST // 1024 // 1024} MiB is no patch")
    if b"GIT binary patch" in data or b"\nBinary files " in data or b"\0" in data:
        raise UserError("the diff has binary parts")
    if b"\r" in data:
        raise UserError("the diff has CR characters: its line ends were converted (CRLF)")
    if not data.endswith(b"\n"):
        raise UserError("the diff does not end with a newline: it may have been cut off")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the diff is not UTF-8: byte {error.start}") from error


def _files(text: str) -> list[PatchedFile]:
    try:
        files = list(PatchSet.from_string(text))
    except (UnidiffParseError, ValueError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the diff cannot be read: {error}") from error
    if not files:
        raise UserError("no file is named in it: this is not a unified diff")
    names: set[str] = set()
    for file in files:
        for name in (file.source_file, file.target_file):
            path = PurePosixPath(name)
            if name != "/dev/null" and (path.is_absolute() or ".." in path.parts or not path.parts):
                raise UserError(f"the diff names {name!r}, which is outside the package")
        if file.path in names:
            raise UserError(f"the diff names {file.path} twice")
        names.add(file.path)
    _no_loose_hunks(text, files)
    return files


def _no_loose_hunks(text: str, files: Sequence[PatchedFile]) -> None:
    """The library passes over hunk headers that it cannot read: then it would lose changes without a word."""
    heads = sum(1 for line in text.split("\n") if line.startswith("@@"))
    if heads != sum(len(file) for file in files):
        raise UserError(f"the diff has {heads} hunk headers, of which {sum(len(file) for file in files)} can be read")


def _change(file: PatchedFile, path: PurePosixPath) -> Change:
    source = PurePosixPath(file.source_file)
    if file.is_removed_file:
        raise UserError(f"{path} is deleted by the diff, and a loaded module cannot be (--exclude sets it aside)")
    if file.is_rename or (not file.is_added_file and source.name != path.name):
        raise UserError(f"{path} is renamed by the diff, and a module cannot be (--exclude sets it aside)")
    parts = list(path.with_suffix("").parts)
    package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if package else parts)
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{path} is no module's name")
    if not len(file):
        raise UserError(f"{path} is named in the diff but not changed (its mode, perhaps): --exclude sets it aside")
    hunks = tuple(_hunk(hunk) for hunk in file)
    if file.is_added_file:
        return Change(module, (Hunk(1, (), (*hunks[0].new, "")),), added=True, package=package)
    return Change(module, hunks, package=package)


def _hunk(hunk: object) -> Hunk:
    old: list[str] = []
    new: list[str] = []
    for line in hunk:  # type: ignore[attr-defined]
        value = line.value[:-1] if line.value.endswith("\n") else line.value
        if line.line_type == "\\":
            raise UserError("the diff changes whether a file ends with a newline, which is not supported")
        if line.line_type in (" ", "-"):
            old.append(value)
        if line.line_type in (" ", "+"):
            new.append(value)
    return Hunk(hunk.source_start, tuple(old), tuple(new))  # type: ignore[attr-defined]


def _matches(path: PurePosixPath, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(str(path), pattern) for pattern in patterns)
