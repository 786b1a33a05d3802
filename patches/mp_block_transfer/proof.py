"""LMCache's real MP server stores chunks of an engine's cache and loads them, without compiled operations: contents.

There is no device: its streams and events do at once what they are asked to, and the cache, the server's buffer and
the storage are in CPU memory.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import block_transfer_server as driver

FORMS = {
    "mla": "of latent vectors (MLA)",
    "nhd": "whose heads are within a token",
    "hnd": "whose tokens are within a head",
    "infer": "with K and V in each block, whose heads are within a token",
    "infer hnd": "with K and V in each block, whose tokens are within a head",
}
"""What the layers' memory is like."""
CHUNKS = 6


def moved(came: Any) -> str | None:
    """What went wrong with chunks that were stored and loaded."""
    if not isinstance(came, dict):
        return f"raises {came}"
    looked_at = (
        (came["stored"] and came["objects"] == CHUNKS, f"{came['objects']} of {CHUNKS} chunks are stored"),
        (came["loaded"], "the chunks are said to be stored, and no load succeeds"),
        (came["same"], "what is loaded is not what was stored"),
        (came["untouched"], "blocks were written that are none of the load's"),
        (came["finished"] == [f"{CHUNKS} written", f"{CHUNKS} read"], f"the storage hears: {came['finished']}"),
    )
    return next((wrong for right, wrong in looked_at if not right), None)


def refused(came: Any) -> str | None:
    """What went wrong with a store and a load of a block that the cache does not have."""
    if not isinstance(came, dict):
        return f"raises {came}"
    if not came["cache_untouched"]:
        return "the cache was written"
    return next((f"it is {one}" for one in came["errors"] if one == "answered True"), None)


def cases() -> dict[str, str | None]:
    """Each form of the cache, and blocks that are none of the cache's."""
    played = driver.played()
    found = {
        f"Chunks are stored and loaded into other blocks, of a cache {said}": moved(played["forms"][form])
        for form, said in FORMS.items()
    }
    return {**found, "A store and a load name a block that the cache does not have": refused(played["wrong_block"])}
