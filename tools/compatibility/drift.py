"""What drifted: the code of a `drifted` verdict beside the nearest code that was verified, which is fetched for it."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.decision import (
    Installed,
    Patch,
    Variant,
    differences,
    judge,
    judge_companion,
    module_of,
)
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.compatibility import moved
from vllm_livepatch.tools.releases.sources import SourcesError

Fetch = Callable[[str, str], Tree]
"""The tree of a distribution's release. Raises SourcesError."""


@dataclass(frozen=True)
class Change:
    """One name whose code is not that of the verified variant: a unified diff from there to here, its lines."""

    name: str
    diff: tuple[str, ...]


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
            titles = f"{package} {release} {name}", f"{here} {name}"
            lines = difflib.unified_diff(before, after, *titles, lineterm="")
            changes.append(Change(name, tuple(lines)))
    except SourcesError as error:
        return Drift(package, variants, nearest, release, (), str(error), moved.places(patch, found, tree))
    return Drift(package, variants, nearest, release, tuple(changes), moved=moved.places(patch, found, tree))


def definition(tree: Tree, name: str) -> list[str]:
    """The lines that define `module:qualname`, decorators included; of a module, all; empty where there is none."""
    source = tree.source(module_of(name))
    if source is None:
        return []
    lines = source.splitlines()
    qualname = name.partition(":")[2]
    if not qualname:
        return lines
    try:
        node: Any = fingerprint.find(_parsed(source), qualname)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return lines
    if node is None:
        return []
    parts = node.body if isinstance(node, ast.Module) else [node]  # what `__init__` assigns to an attribute
    return [line for part in parts for line in lines[_first(part) - 1 : part.end_lineno]]


@functools.lru_cache(maxsize=16)  # as many modules as a patch's targets stand in, here and in the release beside
def _parsed(source: str) -> ast.Module:
    return fingerprint.parsed(source)


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
