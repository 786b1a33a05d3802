"""LMCache's worker adapter, and the connector that the engine asks: what they say of loads that failed."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import lmcache_failed_loads as driver

NOTHING: tuple[str, list[int]] = ("", [])
STEPS = {
    "succeeds": ("a load succeeds", [("a", []), NOTHING]),
    "fails": ("a load fails", [("a", [1, 2]), NOTHING]),
    "fails_later": ("a load fails a step later", [NOTHING, ("a", [1, 2]), NOTHING]),
    "fails_beside_others": ("of three loads one fails, and one takes a step", [("ab", [2, 3]), ("c", [])]),
    "fails_and_again": ("a load fails, and the request's next one succeeds", [("a", [1, 2]), ("a", [])]),
    "server_gone": ("the server is gone while two loads are under way", [("ab", [1, 2, 3, 4]), NOTHING]),
    "refused": ("the server is gone when a load begins, and back later", [("ac/s", [1, 2, 5, 6]), NOTHING, ("b", [])]),
    "lazily": ("a load fails where stores wait in the scheduler", [("a", [1, 2]), NOTHING]),
}
"""By the driver's case: what it is, and for each step the loads that end (behind a slash, requests that are sent) and
the blocks that were not loaded."""


def cases() -> dict[str, str | None]:
    """Each case: the blocks that count as loaded and are not, and the ends that are not told."""
    asked = driver.World.failed
    # Where the connector never asks, that is another patch's: what the worker would answer is looked at.
    driver.World.failed = lambda world: asked(world) or _noted(world.adapter)
    played = driver.played()
    return {what: _finding(played[name], steps) for name, (what, steps) in STEPS.items() if played[name] != []}


def _noted(adapter: Any) -> set[int]:
    ask = getattr(adapter, "get_block_ids_with_load_errors", None)
    noted: set[int] = ask() if ask else vars(adapter).pop("error_block_ids", set())
    return noted


def _finding(came: Any, steps: list[tuple[str, list[int]]]) -> str | None:
    if isinstance(came, str):
        return came
    for number, ((ended, failed, wrong), (ends, fails)) in enumerate(zip(came, steps, strict=True)):
        if wrong:
            return f"blocks {wrong} count as loaded in step {number}, and hold another request's KV"
        if ended != ends:
            return f"in step {number} the ends of {ends or 'nobody'} are due, and those of {ended or 'nobody'} told"
        if failed != fails:
            return f"in step {number} blocks {fails} have failed, and {failed} are reported"
    return None
