"""How patches stand to each other, as their patch.toml says: whose wrapper is called first, and which is left out.

One rule puts them in order: a patch comes last of those that are there, or before the first that must be behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Patch

Behind = Mapping[str, Set[str]]
"""By a patch's name: those that must be behind it, also by way of others."""


@dataclass(frozen=True)
class Order:
    """What one patch says, by the names of others. A name that nobody here has says nothing."""

    inside: tuple[str, ...] = ()  # their wrappers are called before this patch's
    outside: tuple[str, ...] = ()  # theirs are called by this patch's
    instead_of: tuple[str, ...] = ()  # they are not applied where this patch is


def outer(patches: Iterable[Patch]) -> dict[str, frozenset[str]]:
    """By patch, whose wrappers must stand outside of its own."""
    orders = {patch.name: patch.order for patch in patches}
    found = {name: set(order.inside) for name, order in orders.items()}
    for name, order in orders.items():
        for other in orders.keys() & set(order.outside):
            found[other].add(name)
    return _reached(found)


def left_out(patches: Iterable[Patch]) -> dict[str, frozenset[str]]:
    """By patch, which others have to wait for what is decided on it."""
    return _reached({patch.name: set(patch.order.instead_of) for patch in patches})


def _reached(steps: Mapping[str, Set[str]]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for name in steps:
        reached: set[str] = set()
        waiting = [*steps[name]]
        while waiting:
            other = waiting.pop()
            if other in steps and other not in reached:
                reached.add(other)
                waiting += steps[other]
        found[name] = frozenset(reached)
    return found


def placed(names: Iterable[str], behind: Behind) -> list[str]:
    """The names in their order, but for what must be behind each."""
    found: list[str] = []
    for name in names:
        found.insert(next((at for at, other in enumerate(found) if other in behind[name]), len(found)), name)
    return found


def contradiction(patches: Iterable[Patch]) -> str:
    """Why no order can be made of these patches, in a sentence; empty where one can."""
    patches = list(patches)
    for behind, what in ((outer(patches), "stand inside"), (left_out(patches), "be applied instead")):
        names = [name for name in sorted(behind) if name in behind[name]]
        if names:
            return f"{', '.join(names[:-1])} and {names[-1]} are to {what} of each other, which cannot be"
    diffs = {patch.name for patch in patches if patch.diff}
    for patch in patches:
        for other in sorted(diffs.intersection((*patch.order.inside, *(() if patch.diff else patch.order.instead_of)))):
            return f"{patch.name} can be neither inside nor instead of {other}: that is a diff, and diffs come first"
    return ""
