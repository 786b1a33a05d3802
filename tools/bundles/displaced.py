"""Which of the patches that come with this project somebody's diff turns off, by changing the code they are bound to.

In a process diffs come first, and other patches are decided on what those make of the modules: code that is none of a
patch's verified variants is refused as drifted. Here the same decision is made on the published sources.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_livepatch import patches as own_patches
from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.sitecustomize.changes import HunkError
from vllm_livepatch.sitecustomize.decision import Patch, judge, module_of
from vllm_livepatch.sitecustomize.source_changes import placed
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.releases import published, registry, span
from vllm_livepatch.tools.releases.sources import SourcesError

TreeOf = Callable[[str, str], installed.Tree]
"""The tree of a distribution's release. Raises SourcesError."""


def warnings(entries: Iterable[Entry], tree_of: TreeOf = published.tree) -> Iterator[str]:
    """The diffs among these patches: a line for each other patch that one turns off, and where.

    What has to be read of a release comes from the caches, else from the registry; a line says where it cannot.
    """
    every = list(entries)
    shipped = [entry.patch for entry in every if is_shipped(entry.folder)]
    abouts = {patch.name: patch.about for patch in shipped}
    for entry in every:
        if entry.patch.diff:
            found, unread = displaced(entry, shipped, tree_of)
            for name, releases in found.items():
                where = f"{entry.patch.package} {releases}"
                yield f"{entry.patch.name} disables {name} on {where}: it changes the same code{_lost(abouts[name])}"
            if found:
                ask = f"vllm-livepatch prove {' '.join(found)} --patch-dir {entry.folder.parent} --out FILE"
                yield f"`{ask}` finds out which of them are right on that code, for `generate --proofs FILE`"
            if unread:
                yield f"whether {entry.patch.name} disables other patches is not known: {unread}"


def _lost(about: Mapping[str, Any]) -> str:
    """What a user has without the patch, in the words of its own patch.toml."""
    lost = " ".join(str(about.get("without") or about.get("fault") or "").split())
    return f"; without it, {lost}" if lost else ""


def is_shipped(folder: Path) -> bool:
    """Whether a patch's folder is one that comes with this project."""
    return any(folder.parent.samefile(place) for place in own_patches.__path__)


def displaced(entry: Entry, shipped: Iterable[Patch], tree_of: TreeOf) -> tuple[dict[str, str], str]:
    """The patches that the diff turns off, with the releases; and why some releases could not be looked at."""
    changes = entry.changes()
    modules = {change.module for change in changes}
    left_out = entry.patch.order.instead_of
    shipped = [patch for patch in shipped if patch.name not in left_out]
    concerned = [patch for patch in shipped if modules.intersection(map(module_of, patch.names))]
    fingerprints = cache.Fingerprints(cache.directory(os.environ)).of_names
    found: dict[str, list[str]] = {}
    unread = ""
    for release in _needed(entry.patch):
        there = [patch for patch in concerned if release in _needed(patch)]
        if not there:
            continue
        try:
            tree = tree_of(entry.patch.package, release)
            after = installed.Overlay(tree, placed(changes, tree))
            for patch in there:
                seen = installed.look(patch, after, fingerprints)
                if judge(patch, seen)[0] == "drifted" and not _proved(patch, seen.code):
                    found.setdefault(patch.name, []).append(release)
        except SourcesError as error:
            unread = str(error)
        except HunkError:  # it applies there no more
            continue
    return {name: spans(entry.patch.package, releases) for name, releases in found.items()}, unread


def _proved(patch: Patch, code: Mapping[str, str | None]) -> bool:
    """Whether its proof was run on this code of the package that it patches, and did not fail."""
    names = patch.names_of(patch.package)
    return any(
        proof.outcome != "failed" and all(proof.code.get(name) == code[name] for name in names)
        for proof in patch.proofs
    )


def _needed(patch: Patch) -> list[str]:
    return [release for variant in patch.variants if variant.verdict == "needed" for release in variant.releases]


def spans(package: str, releases: Iterable[str]) -> str:
    """Releases as people say them: 0.28.0 to 0.30.0, where no pinned one in between is missing."""
    wanted = set(releases)
    order = [pin.version for pin in registry.all_pins(package)]
    runs: list[list[str]] = []
    before = False
    for release in (*order, *sorted(wanted.difference(order))):
        if release in wanted and before:
            runs[-1].append(release)
        elif release in wanted:
            runs.append([release])
        before = release in wanted
    return ", ".join(map(span, runs))
