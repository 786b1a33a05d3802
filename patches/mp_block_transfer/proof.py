"""LMCache's real MP server stores chunks of an engine's cache and loads them, without compiled operations: contents.

There is no device: its streams and events do at once what they are asked to, and the cache, the server's buffer and
the storage are in CPU memory. Where the server is driven by LMCache itself, LMCache's own operation is played alone.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from result import NotBuilt, trouble

FORMS = {
    "mla": "of latent vectors (MLA)",
    "nhd": "whose heads are within a token",
    "hnd": "whose tokens are within a head",
    "infer": "with K and V in each block, whose heads are within a token",
    "infer hnd": "with K and V in each block, whose tokens are within a head",
}
"""What the layers' memory is like."""
CHUNKS = 6
CASE = {
    "nl": 2,
    "nb": 5,
    "bs": 2,
    "hs": 8,
    "element": 2,
    "padding": 0,
    "ids": [3, 1, 4, 0],
    "per": 2,
    "skip": 1,
    "gap": 16,
    "shuffled": False,
    "offset": 0,
    "seed": 1,
}
"""Which blocks LMCache's own operation moves, and how they and the chunks lie in memory (driver/block_transfer.py)."""


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


def by_server() -> dict[str, str | None]:
    """Each form of the cache, and blocks that are none of the cache's."""
    import block_transfer_server as driver

    played = driver.played()
    found = {
        f"Chunks are stored and loaded into other blocks, of a cache {said}": moved(played["forms"][form])
        for form, said in FORMS.items()
    }
    return {**found, "A store and a load name a block that the cache does not have": refused(played["wrong_block"])}


def by_operation() -> dict[str, Callable[[], str | None]]:
    """Each layout of memory, by LMCache's own operation: every byte of it."""
    import block_transfer as driver
    import block_transfer_addresses as addresses

    module = addresses.operation()
    formats = getattr(module, "EngineKVFormat", None) or module.GPUKVFormat

    def transfer(*given: Any) -> None:
        pointers, chunks, ids, device, direction, desc, slots, layout, skip = given
        towards = getattr(module.TransferDirection, direction.name)
        layout = getattr(formats, layout.name)
        try:
            module.multi_layer_block_kv_transfer(pointers, chunks, ids, device, towards, desc, slots, layout, skip)
        except AttributeError as error:
            raise (NotBuilt(trouble(error)) if isinstance(error.obj, SimpleNamespace) else error) from error

    def case(layout: str) -> str | None:
        heads = 1 if layout.endswith(("NB_BS_HS", "ONE_HS")) else 2
        wrong = driver.differences({**CASE, "format": layout, "nh": heads}, transfer)
        return f"other bytes than those of the blocks were moved: {', '.join(wrong)}" if wrong else None

    sentence = "Blocks are moved to chunks and back, in the layout"
    return {f"{sentence} {layout}": partial(case, layout) for layout in driver.BLOCK}


def driven_by_lmcache() -> bool:
    """Tell whether LMCache itself drives the server. LMCache is not imported for that: then it looks for devices."""
    spec = importlib.util.find_spec("lmcache")
    places = (spec.submodule_search_locations if spec else None) or []
    return any(Path(place, "v1/multiprocess/modules/lmcache_driven_transfer.py").is_file() for place in places)


def cases() -> Mapping[str, Callable[[], str | None] | str | None]:
    """Each case, by its sentence."""
    return by_operation() if driven_by_lmcache() else by_server()
