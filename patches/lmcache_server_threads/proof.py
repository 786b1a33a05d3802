"""LMCache's real storage manager, with its threads, and its adapter of a file system that raises or hangs."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from functools import partial
from typing import Any

import lmcache_server_threads as driver

ANSWER = "hits of the lookup in question"
NEXT = "hits of the next lookup, and what they hold"
AGAIN = "hits of the same lookup when the adapter is well, and what they hold"
PLACES, LOST = "places for lookups that stay taken", "chunks of memory that are lost"
LIVES = "whether the thread lives"

RAISES: list[tuple[str, Any]] = [(ANSWER, 0), (NEXT, [1, 3]), (AGAIN, [2, 1, 2]), (PLACES, 0), (LOST, 0)]
RIGHT: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "calm": (
        "Three chunks are stored, written to the disk, loaded and read",
        [("hits", 3), ("the first", 1), ("the second", 2), ("the third", 3), (LOST, 0), (PLACES, 0)],
    ),
    "lookup_raises": ("The adapter raises as it is asked for two chunks", RAISES),
    "load_raises": ("The adapter raises as it is given memory for two chunks", RAISES),
    "store_raises": (
        "The adapter raises as it is given a chunk to store; it takes the next",
        [("whether the chunk can leave the memory", True), ("files", 1)],
    ),
    "load_never_ends": (
        "A load hangs in the only place for lookups, and ends after all when others have the memory",
        [(ANSWER, 0), ("hits of the lookup behind it", 1), ("whether others' chunks hold theirs", True), (LOST, 0)],
    ),
    "failed_load_is_shown": (
        "A load finds one of two files too short",
        [("hits, and what they hold", [1, 1]), ("chunks that are shown as filled", []), (LOST + " or locked", 0)],
    ),
    "evicting_raises": (
        "The thread that evicts from memory meets an error",
        [(LIVES, True), ("whether memory comes free", True)],
    ),
    "one_store_raises": (
        "Of two stores behind the memory one raises when it is asked how full it is",
        [(LIVES, True), ("whether the other is asked", True)],
    ),
    "tenants": (
        "Memory is over its mark, with the policy for tenants",
        [(LIVES, True), ("whether memory comes free", True)],
    ),
}


def finding(name: str) -> str | None:
    """What went wrong in a case."""
    came = driver.played([name])[name]
    if not isinstance(came, list):
        return str(came)
    found = zip(RIGHT[name][1], came, strict=True)
    return "; ".join(f"{what}: {one}, not {right}" for (what, right), one in found if one != right) or None


def cases() -> dict[str, Any]:
    """Each case, by its sentence."""
    left_out = () if driver.isolating() else ("tenants",)
    return {sentence: partial(finding, name) for name, (sentence, _) in RIGHT.items() if name not in left_out}
