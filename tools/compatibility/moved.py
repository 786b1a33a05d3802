"""Code that has another place: where a release has, under another module, what a patch knows under this one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.decision import Installed, Patch, module_of
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.releases.sources import SourcesError

NEAR = 12
"""Modules that are read for one that is gone: those with names like its own, and its neighbours."""


def places(patch: Patch, found: Installed, tree: Tree) -> dict[str, str]:
    """The targets that the tree does not have, with the module in which it has exactly such code."""
    known = {target: {form.code[target] for form in patch.variants if target in form.code} for target in patch.targets}
    gone = [target for target in patch.targets if found.code.get(target) is None and known[target]]
    answer: dict[str, str] = {}
    for module in dict.fromkeys(map(module_of, gone)):
        names = {target: target.partition(":")[2] for target in gone if module_of(target) == module}
        for candidate, source in _near(module, patch.package, tree):
            try:
                codes = fingerprint.of_names(source, names)
            except fingerprint.SourceError:
                continue
            here = {target: candidate for target, code in codes.items() if code in known[target]}
            answer |= {target: place for target, place in here.items() if target not in answer}
    return answer


def _near(module: str, package: str, tree: Tree) -> Iterator[tuple[str, str]]:
    every = [one for one in modules(tree, package) if one != module]
    parent = module.rpartition(".")[0]
    beside = [one for one in every if one.rpartition(".")[0] == parent]
    last = {one: one.rpartition(".")[2] for one in every}
    called = difflib.get_close_matches(module.rpartition(".")[2], set(last.values()), 3, 0.6)
    alike = [one for one in every if last[one] in called]
    near = dict.fromkeys(difflib.get_close_matches(module, [*alike, *beside], NEAR, 0.0))
    try:
        for one in near:
            source = tree.source(one)
            if source is not None:
                yield one, source
    except SourcesError:
        return


def modules(tree: Tree, package: str) -> Iterable[str]:
    """The modules that a tree has of a package, by their files."""
    of = getattr(tree, "of", None)  # one that is put together of others
    tree = tree if of is None else of(package) or tree
    names: Iterable[str] = getattr(tree, "files", ())
    if not names:
        origin = tree.origin(f"{package}.__init__") or tree.origin(package)
        if origin is None:
            return []
        root = Path(origin).parent
        names = [f"{package}/{file.relative_to(root).as_posix()}" for file in root.rglob("*.py")]
    parts = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names)
    return sorted(part for part in parts if part == package or part.startswith(f"{package}."))
