"""Targets that two patches wrap: each call goes through both, which is right only where the two fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.bundles.displaced import is_shipped


def sentences(entries: Iterable[Entry]) -> Iterator[str]:
    """A line for each target that a patch of somebody's own and another one wrap; those of this project fit."""
    by_target: dict[str, list[Entry]] = {}
    for entry in entries:
        for target in () if entry.patch.diff else entry.patch.targets:
            by_target.setdefault(target, []).append(entry)
    for target, those in by_target.items():
        if len(those) > 1 and not all(is_shipped(entry.folder) for entry in those):
            names = [entry.patch.name for entry in those]
            yield f"{' and '.join(names)} have one target, {target}: each call goes through the wrappers of all of them"
