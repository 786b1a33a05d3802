"""What drifted: the code of a `drifted` verdict beside the nearest code that was verified, which is fetched for it."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import io
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.decision import (
    Installed,
    Patch,
    Variant,
    judge,
    judge_companion,
    module_of,
)
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.sitecustomize.matching import differences
from vllm_livepatch.tools.compatibility import moved
from vllm_livepatch.tools.releases.sources import SourcesError

CONTEXT = 1
"""Lines of a diff before and after what differs."""
_LINE_END = re.compile("\r\n|\r|\n")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Fetch = Callable[[str, str], Tree]
"""The tree of a distribution's release. Raises SourcesError."""


@dataclass(frozen=True)
class Change:
    """One name whose code is not that of the verified variant: a unified diff from there to here, its lines.

    Comments, docstrings and empty lines are left out, since no fingerprint has them, unless nothing else differs.
    """

    name: str
    diff: tuple[str, ...]
    gone: bool = False  # whether there is no such name any more

    @property
    def lines(self) -> tuple[str, ...]:
        """The diff without the lines that name the two sides."""
        return self.diff[2:]


@dataclass(frozen=True)
class Drift:
    """How a patch's code lies to what was verified. `release` is the one that `nearest` was read from."""

    package: str
    variants: tuple[tuple[Variant, tuple[str, ...]], ...]  # with the names that differ here
    nearest: Variant
    release: str
    changes: tuple[Change, ...]
    unread: str = ""  # why there are no diffs
    moved: Mapping[str, str] = field(default_factory=dict)  # targets that are gone: the module that has such code

    def described(self) -> dict[str, Any]:
        return {
            "package": self.package,
            "nearest": {"release": self.release, "releases": list(self.nearest.releases)},
            "changes": [{"target": change.name, "diff": "\n".join(change.diff)} for change in self.changes],
            "variants": [
                {"releases": list(variant.releases), "verdict": variant.verdict, "differs": list(differs)}
                for variant, differs in self.variants
            ],
            **({"unread": self.unread} if self.unread else {}),
            **({"moved": dict(self.moved)} if self.moved else {}),
        }


def drift(patch: Patch, found: Installed, tree: Tree, fetch: Fetch) -> Drift | None:
    """Compare what was found in `tree` with every verified form of the package that drifted; None where it has none."""
    package, installed = patch.package, found.release
    if judge(patch, found)[0] != "drifted":
        drifted = [name for name in patch.companions if judge_companion(patch, name, found)[0] == "drifted"]
        package = drifted[0] if drifted else package
        installed = found.companions.get(package, installed)
    forms = [form for form in patch.forms(package) if form.code]
    if not forms:
        return None
    variants = tuple((variant, tuple(differences(patch, package, variant, found))) for variant in forms)
    nearest, differs = min(variants, key=lambda item: (len(item[1]), _distance(item[0], installed)[0]))
    release = _distance(nearest, installed)[1]
    here = f"{package} {installed or 'as installed'}"
    try:
        there = fetch(package, release)
        changes = []
        for name in differs:
            before, after = definition(there, name), definition(tree, name)
            gone = before is not None and after is None
            if before == after:
                before, after = definition(there, name, whole=True), definition(tree, name, whole=True)
            titles = f"{package} {release} {name}", f"{here} {name}"
            lines = difflib.unified_diff(before or [], after or [], *titles, lineterm="", n=CONTEXT)
            changes.append(Change(name, tuple(lines), gone))
    except SourcesError as error:
        return Drift(package, variants, nearest, release, (), str(error), moved.places(patch, found, tree))
    return Drift(package, variants, nearest, release, tuple(changes), moved=moved.places(patch, found, tree))


def definition(tree: Tree, name: str, whole: bool = False) -> list[str] | None:
    """The lines that define `module:qualname`, decorators included; of a module, all; None where there is none.

    `whole`: with its comments, docstrings and empty lines.
    """
    source = tree.source(module_of(name))
    if source is None:
        return None
    lines = _LINE_END.split(source)  # as the parser counts them
    qualname = name.partition(":")[2]
    try:
        coded: Sequence[str | None] = lines if whole else _coded(source)
        node: Any = fingerprint.find(_parsed(source), qualname) if qualname else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return lines
    if qualname and node is None:
        return None
    parts = [] if node is None else node.body if isinstance(node, ast.Module) else [node]  # of `__init__`: assignments
    spans = [(_first(part), part.end_lineno) for part in parts] if qualname else [(1, len(lines))]
    return [line for first, last in spans for line in coded[first - 1 : last] if line is not None]


@functools.lru_cache(maxsize=16)  # as many modules as a patch's targets stand in, here and in the release beside
def _parsed(source: str) -> ast.Module:
    return fingerprint.parsed(source)


@functools.lru_cache(maxsize=16)
def _coded(source: str) -> list[str | None]:
    """A module's lines without comments; None for those that hold a docstring, or nothing. Those of strings stay."""
    lines: list[str | None] = [*_LINE_END.split(source)]
    kept: set[int] = set()  # lines within a string
    docstrings: set[int] = set()
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            kept.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
        body = getattr(node, "body", None)
        first = body[0] if isinstance(node, _DOCUMENTED) and isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            last = first.end_lineno or first.lineno
            before, after = ((lines[number - 1] or "").encode() for number in (first.lineno, last))
            if not before[: first.col_offset].strip() and not after[first.end_col_offset :].strip():
                docstrings.update(range(first.lineno, last + 1))
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            row, column = token.start
            if token.type == tokenize.COMMENT and row <= len(lines):
                lines[row - 1] = (lines[row - 1] or "")[:column].rstrip()
    empty = {number for number, line in enumerate(lines, 1) if not (line or "").strip()} - kept
    return [None if number in empty | docstrings else line for number, line in enumerate(lines, 1)]


def _first(node: Any) -> int:
    return int(min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]))


def _distance(variant: Variant, release: str | None) -> tuple[tuple[int, ...], str]:
    """How far a variant's closest release is from `release`, and which that is; an unknown release is the newest."""
    wanted = version_key(release) if release is not None else (1 << 30,)

    def far(candidate: str) -> tuple[int, ...]:
        parts = version_key(candidate)
        length = max(len(parts), len(wanted))
        padded = [[*numbers, *[0] * (length - len(numbers))] for numbers in (parts, wanted)]
        return tuple(abs(one - other) for one, other in zip(*padded, strict=True))

    closest = min(variant.releases, key=far)
    return far(closest), closest


def version_key(release: str) -> tuple[int, ...]:
    """A key to sort releases by; what is no version comes last."""
    try:
        return Version(release).release
    except InvalidVersion:
        return (1 << 30,)
