"""Targets that two patches wrap: each call goes through both, which is right only where the two fit. And classes that
one of them changes, of which the other one wraps or calls methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, permutations

from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.bundles.displaced import is_shipped


def sentences(entries: Iterable[Entry]) -> Iterator[str]:
    """A line for each target that a patch of somebody's own and another one wrap; those of this project fit.

    None where patch.toml says of each two how they stand to each other.
    """
    entries = list(entries)
    by_target: dict[str, list[Entry]] = {}
    for entry in entries:
        for target in () if entry.patch.diff else entry.patch.targets:
            by_target.setdefault(target, []).append(entry)
    for target, those in by_target.items():
        if any(_may_not_fit(one, other) for one, other in combinations(those, 2)):
            names = [entry.patch.name for entry in those]
            yield (
                f"{' and '.join(names)} have one target, {target}: each call goes through the wrappers of all of them. "
                "inside, outside or instead_of in one's patch.toml says how they stand to each other"
            )
    for one, other in permutations(entries, 2):
        for target in () if one.patch.diff or not _may_not_fit(one, other) else one.patch.targets:
            methods = sorted(name for name in other.patch.names if name.startswith(f"{target}."))
            if methods:
                yield (
                    f"{one.patch.name} changes {target}, and {other.patch.name} wraps or calls {', '.join(methods)}: "
                    f"where another class is put there, {other.patch.name} may not be applied (relied-on). "
                    "instead_of in one's patch.toml says which one is to be"
                )


def _may_not_fit(one: Entry, other: Entry) -> bool:
    """Whether one of the two is somebody's own, and neither says how they stand to each other."""
    named = {name for entry in (one, other) for names in vars(entry.patch.order).values() for name in names}
    own = not (is_shipped(one.folder) and is_shipped(other.folder))
    return own and named.isdisjoint({one.patch.name, other.patch.name})
