"""LMCache's real disk backend in a real directory, and its memory: a load gives whole chunks or none, nothing stays
taken, no wait is without an end, and no thread ends by an error.

The memory that a chunk is loaded into holds another request's contents before.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lmcache_disk as driver

SECONDS = 2.0
"""How long, by the clock, a try for memory takes of a load for which there is none."""
HEARD = "loaded, and told to the scheduler"
KEPT = "references and pins of what stays in LMCache's memory"
HIMSELF = "times that a thread waits for a lock that it holds"
LOADED, LOST, HAS = "loaded", "chunks of memory that are lost", "which chunks the backend has"
FILES = "files in the directory"

Parts = list[tuple[str, Any]]
"""What is looked at one after the other, and what is right there: of a chunk its number, None where it is missing."""

CALM: Parts = [
    ("loaded with a lookup", [1, 2, 3, 4]),
    ("loaded in a batch", [1, 2, 3, 4]),
    ("loaded alone", [3]),
    ("loaded of a chunk that was never stored", [None]),
    ("bytes of the files", [driver.SIZE] * 4),
    (HAS, [False, True]),
    (FILES, 3),
]
RIGHT: dict[str, tuple[str, Parts]] = {
    "calm": ("Four chunks are stored, loaded in each way, and one is removed", CALM),
    "direct": ("Four chunks are stored, loaded in each way, and one is removed, with O_DIRECT", CALM),
    "pool_runs_out": (
        "A prompt of four chunks is looked up and loaded, and there is memory for two of them",
        [(LOADED, [1, 2]), (LOST, 0), (HAS, [True] * 4), ("loaded when there is memory again", [1, 2, 3, 4])],
    ),
    "gone_after_its_lookup": (
        "The third of four chunks leaves between the lookup and the load",
        [(LOADED, [1, 2]), (LOST, 0), (HAS, [True, True, False, True])],
    ),
    "more_than_the_pool": (
        "A prompt of four chunks is loaded in a batch, and the pool has memory for three",
        [(LOADED, [1, 2, 3, None]), (LOST, 0), (HAS, [True] * 4)],
    ),
    "memory_comes_back": (
        "The memory is full, and somebody gives a chunk back while the load waits for it",
        [(LOADED, [1, 2]), (LOST, 0)],
    ),
    "disk_is_full": (
        "A write fails; there is room again, and the chunk is stored anew",
        [
            (LOST, 0),
            ("whether the backend has the chunk that was not written", [False]),
            ("whether that chunk counts as being written", False),
            (FILES, 0),
            (HAS, [True, True]),
            (LOADED, [1]),
        ],
    ),
    "evicted_file_is_gone": (
        "The disk is full, and the file of the chunk that is to leave it is gone",
        [
            ("the store of another chunk", "stored"),
            (HAS, [False, True]),
            ("whether that chunk counts as being written", False),
            (LOADED, [2]),
        ],
    ),
    "full_of_pinned": (
        "The disk is full of chunks that others load; when these loads have ended another chunk is stored",
        [("which chunks the backend has before", [True, False]), (HAS, [False, True]), (LOADED, [2])],
    ),
    "stored_again": (
        "A disk has room for two chunks, and one is stored three times before the other",
        [(HAS, [True, True]), (LOADED, [1])],
    ),
    "evicted_after_its_load": (
        "A chunk that was looked up and loaded leaves a full disk",
        [(LOADED, [1]), (HAS, [False, True])],
    ),
    "pinned_by_another_lookup": (
        "Two requests look a chunk up; one has loaded it, and the chunk stays until the other has",
        [(LOADED, [1]), (HAS, [True, False])],
    ),
    "cleared": (
        "A full disk is cleared, and has room",
        [("whether the backend has the chunk", right) for right in (False, False, True)],
    ),
    "cleared_amid_lookups": (
        "Chunks that were looked up are removed before they are loaded, all but one",
        [("whether few names are compared", True), ("what the next request raises", None)],
    ),
    "tiers": (
        "Two chunks lie in LMCache's memory and two on the disk, and all are looked up",
        [(HEARD, [1, 2, 3, 4]), (LOST, 0), (KEPT, [(1, 0)] * 2)],
    ),
    "many_lookups": (
        "Lookups with asynchronous loads come one after the other",
        [("chunks that LMCache's memory notes of them", 0), ("chunks that the disk notes of them", 0)],
    ),
    "long_name": (
        "A chunk's file has as long a name as the file system allows",
        [(HAS, [True]), (LOADED, [1])],
    ),
    "memory_gone_after_its_lookup": (
        "Two chunks lie in LMCache's memory and two on the disk; the second leaves between the lookup and the load",
        [(HEARD, [1]), (LOST, driver.left_pinned()), (KEPT, [(1, 0)])],
    ),
    "tier_cannot_be_asked": (
        "A third tier raises when it is asked",
        [(HEARD, []), (LOST, 0), (KEPT, [(1, 0)] * 2)],
    ),
    "tier_cannot_load": (
        "A third tier raises when it loads",
        [(HEARD, [1, 2, 3, 4]), (LOST, 0), (KEPT, [(1, 0)] * 2)],
    ),
    "no_memory_for_others": (
        "The memory is full, and another than the disk waits for some",
        [("what it gets", None), (LOST, 0)],
    ),
    "collected": (
        "Memory that nobody gave back is collected in a thread that takes memory",
        [(HIMSELF, 0), (LOST, 0)],
    ),
    "collected_in_a_metric": (
        "Memory that nobody gave back is collected in a thread that updates a metric",
        [(HIMSELF, 0), (LOST, 0)],
    ),
    "collected_beside_another": (
        "Memory is dropped while another thread updates a metric, and its thread takes some of the same pool",
        [("whether it gets any", True)],
    ),
    "controller_not_told": (
        "LMCache's controller cannot be told of one chunk, and can be told of the next",
        [("of which chunk it hears", 2)],
    ),
    "layer_by_layer": (
        "A load by layers, which cannot say that a chunk is missing, finds one of three files too short",
        [(LOADED, "raises"), (LOST, 0), (HAS, [True, False, True])],
    ),
}
HOW = {"short": "is too short", "missing": "is gone", "unreadable": "cannot be read"}
LOADS: dict[str, tuple[str, Any]] = {
    "prefetch": ("all three are looked up and loaded", [1]),
    "batch": ("all three are loaded in a batch", [1, None, 3]),
    "single": ("that chunk is loaded", [None]),
}
RIGHT |= {
    f"{how}, {load}": (
        f"The file of the second of three chunks {said}, and {what}",
        [(LOADED, loaded), (LOST, 0), (HAS, [True, False, True])],
    )
    for how, said in HOW.items()
    for load, (what, loaded) in LOADS.items()
}


def finding(name: str) -> str | None:
    """What went wrong in a case."""
    case = driver.CASES[name]
    came = driver.attempted(partial(case, SECONDS) if name == "more_than_the_pool" else case)
    parts = RIGHT[name][1]
    if not isinstance(came, list):
        return str(came)
    found = [(what, right, one) for (what, right), one in zip(parts, came, strict=False)]
    wrong = [f"{what}: {one}, not {right}" for what, right, one in found if one != right]
    return "; ".join(wrong) or (None if len(came) == len(parts) else f"not all came about: {came}")


def unbuffered() -> bool:
    """Tell whether the file system takes O_DIRECT."""
    try:
        os.close(os.open("direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def cases() -> dict[str, Any]:
    """Each case, by its sentence."""
    left_out = () if unbuffered() else ("direct",)
    return {sentence: partial(finding, name) for name, (sentence, _) in RIGHT.items() if name not in left_out}
