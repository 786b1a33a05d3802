"""The catalogue's groups, as a person reads them: what one runs, and the patches that are about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ...sitecustomize.decision import Patch
from ...sitecustomize.settings import GROUPS

T = TypeVar("T")
TITLES = {
    "scheduler": "scheduler",
    "nixl": "NIXL",
    "mooncake": "Mooncake",
    "moriio": "MoRI-IO",
    "lmcache_server": "LMCache server",
    "lmcache_in_process": "LMCache in process",
    "offloading": "offloading",
    "rocm": "ROCm",
}
REST = "in no group"


def sections(things: Iterable[T], patch_of: Callable[[T], Patch]) -> list[tuple[str, list[T]]]:
    """Groups and the things whose patch is in each; the catalogue's groups first, then others by name.

    Patches in no group come last, as the group "".
    """
    found: dict[str, list[T]] = {}
    for thing in things:
        found.setdefault(patch_of(thing).group, []).append(thing)
    names = [*GROUPS, *sorted(found.keys() - {*GROUPS, ""}), ""]
    return [(name, found[name]) for name in names if name in found]


def titled(things: Iterable[T], patch_of: Callable[[T], Patch]) -> list[tuple[str, list[T]]]:
    """As `sections`, each with its heading. All headings are "" where no patch is in a group."""
    found = sections(things, patch_of)
    grouped = any(name for name, _ in found)
    return [((TITLES.get(name, name) or REST) if grouped else "", some) for name, some in found]
