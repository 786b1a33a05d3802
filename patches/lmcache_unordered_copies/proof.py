"""Copies between a device's buffer and a chunk in host memory, on a stream that is behind: what both hold."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import unordered_copies as driver

STORED = {
    "stored": "a chunk of memory that is pinned in pieces is stored",
    "stored, without a runtime": "such a chunk is stored where the device's runtime is not found",
    "stored, eager": "a chunk of other memory is stored",
}
LOADED = {
    "loaded": "a chunk of memory that is pinned in pieces is loaded",
    "loaded, eager": "a chunk of other memory is loaded",
}
BROKEN = {
    "broken": "the device refuses a copy",
    "broken, otherwise": "the device refuses a copy with another error",
}


def cases() -> dict[str, str | None]:
    """Each case: what was copied before it was there, or is read, or written over, later than it counts as ended."""
    played = driver.played()
    judges: dict[str, tuple[str, Callable[[Any], str | None]]] = {
        **{name: (what, _of_store) for name, what in STORED.items()},
        **{name: (what, _of_load) for name, what in LOADED.items()},
        **{name: (what, _of_refusal) for name, what in BROKEN.items()},
        "stored by LMCache": ("LMCache's server stores two chunks through its one buffer", _of_stores),
        "loaded by LMCache": ("LMCache's server loads two chunks through its one buffer", _of_loads),
        "pieces": ("how chunks are cut that begin anywhere in their pieces", _of_pieces),
        "errors": ("chunks without memory, and of another size", _of_errors),
        "on_host": ("a buffer in host memory is stored", lambda came: _holding(came, 4, "the chunk")),
        "compiled": ("with a compiled operation, that is asked once", _of_compiled),
    }
    return {
        what: played[name] if isinstance(played[name], str) else judged(played[name])
        for name, (what, judged) in judges.items()
        if name in played
    }


def _holding(found: list[int], value: int, whose: str) -> str | None:
    return None if found == [value] else f"{whose} holds {found}, and {value} was due"


def _of_store(came: dict[str, list[int]]) -> str | None:
    if came["later"] != [7]:
        return f"the chunk holds {came['later']}, which the buffer held before the blocks (7) were moved there"
    return _holding(came["at_its_end"], 7, "when the store counts as ended, the chunk")


def _of_load(came: dict[str, list[int]]) -> str | None:
    if came["before"] != [3]:
        return f"the buffer (3) is written over before it was read: {came['before']} is read there"
    return _holding(came["after"], 5, "the load counts as ended before the chunk was read: what is loaded")


def _of_stores(came: list[list[int]]) -> str | None:
    return None if came == [[7], [9]] else f"the chunks of blocks that hold 7 and 9 hold {came}"


def _of_loads(came: list[list[int]]) -> str | None:
    return None if came == [[5], [6]] else f"the blocks of chunks that hold 5 and 6 hold {came}"


def _of_refusal(came: list[Any]) -> str | None:
    said, holds = came
    if said != "the device refuses":
        return f"nothing is said of it, and the chunk holds {holds}"
    return _holding(holds, 1, "another copy was made in its place: the chunk")


def _of_pieces(came: list[list[int]]) -> str | None:
    for offset, sizes in zip((0, 32, 63, 64), came, strict=True):
        ends = accumulate(sizes, initial=offset)
        beyond = [
            size
            for end, size in zip(ends, sizes, strict=False)
            if end // driver.PIECE != (end + size - 1) // driver.PIECE
        ]
        if beyond:
            return f"of a chunk that begins at {offset}, a copy goes beyond a pinned piece: copies of {sizes} bytes"
    return None


def _of_errors(came: list[str]) -> str | None:
    return "one of them is copied without an error" if "none" in came else None


def _of_compiled(came: list[int]) -> str | None:
    asked, size = came
    return (
        None if (asked, size) == (1, driver.SIZE) else f"it is asked {asked} times, with {size} bytes of {driver.SIZE}"
    )
