"""LMCache's real lazy pool and its manager: how much of the pool is pinned when, and what a pin that fails comes to.

No memory is pinned: the call that registers memory with the device is a stand-in, which keeps the books and can refuse.
The pool is smaller than the step by which the patch lets it grow, so one expansion reaches the final size.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pinned_allocator as driver

INITIAL, FINAL = 64, 320
"""MiB of the pool at the start and at most."""
ROUNDS = 5
FULL = "OUT_OF_MEMORY"


def unpinned(*states: Mapping[str, Any]) -> str | None:
    """What is wrong with the first state in which the pool is larger than what is pinned."""
    for state in states:
        if state["heap"] > state["pinned"]:
            return f"the pool has {state['heap']} MiB, and {state['pinned']} MiB are pinned"
    return None


def books(left: int, stray: int) -> str | None:
    """What is wrong with the device's books when the pool is closed."""
    if left:
        return f"{left} MiB stay pinned"
    return f"{stray} chunks are unregistered that never were registered" if stray else None


def too_early(state: Mapping[str, Any]) -> str | None:
    """What is wrong with a pool of which nobody needs more than the initial size."""
    return f"{state['pinned']} MiB are pinned, and nobody needs them" if state["pinned"] > INITIAL else None


def start() -> str | None:
    """A pool begins with its initial size, and reports its final one"""
    state = driver.grows()["states"][0]
    if state["usage"] != [0, FINAL]:
        return f"the manager reports {state['usage'][1]} MiB, and eviction goes by that"
    return too_early(state) or unpinned(state)


def grows() -> str | None:
    """A pool is filled to its final size, emptied, filled again and closed"""
    grown = driver.grows()
    objects = FINAL // 32
    used = [state["usage"] for state in grown["states"]]
    if (grown["objects"], grown["full"], grown["again"]) != (objects, FULL, objects):
        return f"{grown['objects']} and then {grown['again']} objects were made of {objects}; then: {grown['full']}"
    if grown["distinct"] != objects:
        return "two objects have the same memory"
    if used != [[mib, FINAL] for mib in [*range(0, FINAL + 1, 32), 0]]:
        return f"the manager reports {used}"
    if not grown["parents"] or grown["alive"]:
        return "an object is another allocator's, or the pool's thread has not ended"
    return unpinned(*grown["states"]) or books(grown["left"], grown["stray"])


def concurrent() -> str | None:
    """Several threads find no room at one moment, and all are served"""
    for _ in range(ROUNDS):
        state = driver.concurrent()
        if state["served"] != 8 or state["usage"] != [128, FINAL]:
            return f"{state['served']} of 8 were served, {state['usage'][0]} MiB are used"
        if wrong := unpinned(state):
            return wrong
    return None


def single() -> str | None:
    """Objects are made one by one"""
    state = driver.single()
    return unpinned(state) if state["made"] == 3 else f"{state['made']} of 3 were made"


def refused() -> str | None:
    """The device refuses to pin more, and later pins again"""
    found = driver.refused()
    first, second, fits, later = found["answers"]
    if wrong := unpinned(found["start"], found["state"]):
        return wrong
    if second == "served":
        return "an object was made that has no room in what is pinned"
    if found["state"]["usage"][1] != found["state"]["pinned"]:
        return f"the manager reports {found['state']['usage'][1]} MiB, and eviction goes by that"
    if (first, fits, later) != ("served",) * 3:
        return f"what fits came to: {first}, {fits}; when the device pins again: {later}"
    return books(found["left"], found["stray"])


def refused_at_start() -> str | None:
    """The device refuses to pin the initial size"""
    said: str = driver.refused_at_start()
    return f"there is {said}" if said.startswith("a pool") else None


def too_large() -> str | None:
    """An object is asked for that the final size has no room for"""
    found = driver.too_large()
    return f"it is answered: {found['answers']}" if found["answers"] != [FULL] * 2 else too_early(found)


def closed_meanwhile() -> str | None:
    """A pool is closed, also while the device is asked to pin more"""
    found = driver.closed_meanwhile()
    if found["closed_early"]:
        return "it was closed while the device was asked"
    return books(found["left"], found["stray"])


def mixed() -> str | None:
    """The pool that is not lazy is left alone"""
    found = driver.mixed()
    return None if found["served"] and found["usage"] == [0, 64] else f"it is {found}"


def cases() -> dict[str, Callable[[], str | None]]:
    """Each case, by its sentence."""
    every = (start, grows, concurrent, single, refused, refused_at_start, too_large, closed_meanwhile, mixed)
    return {case.__doc__ or "": case for case in every}
