"""Real schedulers and LMCache connectors, whose requests together load more than the pool holds.

Every slot of the pool has contents, and a request that runs on anything but its own KV is seen.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import chunked_lmcache_load as driver

MIXES = 2
SENTENCES = {
    "equal_prompts": "eight clients ask the same long thing, most of which LMCache holds",
    "small_first_turn": "one prompt of which LMCache holds little, and four that it holds nearly whole",
    "head_of_line": "the oldest request's lookup is answered late, and younger ones load meanwhile",
}
FAULTS = "clients hang up and loads fail, "


def cases() -> dict[str, str | None]:
    """Each set of requests, by connector and scheduler: whether all finish, on KV that was loaded and is their own."""
    driver.quiet()
    driver.hide_later_adapter()
    return dict(_findings(driver.found(MIXES, _connectors())))


def _connectors() -> list[str]:
    """The classes that this release serves with: its own, and LMCache's where that is preferred to it."""
    own = importlib.import_module(driver.BUILT_IN)
    return ["builtin", "lmcache"] if hasattr(own, "LMCacheMPConnectorUpstream") else ["builtin"]


def _findings(worlds: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    for which, played in worlds.items():
        for name, world in played.items():
            yield f"{which}: {_sentence(name)}", _wrong(world, may_compute=name.startswith("faults"))


def _sentence(name: str) -> str:
    if name in SENTENCES:
        return SENTENCES[name]
    if name.removesuffix("_late") in SENTENCES:
        return f"{SENTENCES[name.removesuffix('_late')]}; every lookup is answered later"
    draw = name.removeprefix("faults").removeprefix("mix")
    return f"{FAULTS if name.startswith('faults') else ''}requests of many sizes, draw {draw}"


def _wrong(world: Mapping[str, Any], may_compute: bool) -> str | None:
    """What was aborted or failed to load is rightly computed."""
    if world["outcome"] != "finishes":
        return str(world["outcome"])
    loaded, recomputed = world["loaded"], world["recomputed"]
    if loaded < 0.95 * (loaded + recomputed) and not may_compute:
        return f"{recomputed} of {loaded + recomputed} tokens that LMCache holds were computed"
    return None
