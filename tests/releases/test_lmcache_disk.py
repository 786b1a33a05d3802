"""LMCache's disk in the engine's process, on each release's own backend, in a real directory: contents, and what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_disk"
PATCH = "lmcache-disk"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.4")]
ENVIRON = {"LIVEPATCH_LMCACHE_DISK": "on", "LIVEPATCH_LMCACHE_DISK_SECONDS": "0.5"}

HELD = "the lock is held"
NOTHING = "the scheduler hears nothing"
FREE = [1, 0]
"""References and pins of a chunk in LMCache's memory that nobody uses."""
USED = [2, 1]
PINNED_TO = Version("0.5.5")
HALF = [2.0, 99.0]
"""A chunk of which half came: the rest is what another request left there."""

CALM: dict[str, Any] = {
    "calm": [[1, 2, 3, 4], [1, 2, 3, 4], [3], [None], [4096] * 4, [False, True], 3],
    "direct": [[1, 2, 3, 4], [1, 2, 3, 4], [3], [None], [4096] * 4, [False, True], 3],
    "memory_comes_back": [[1, 2], 0],
    "pinned_by_another_lookup": [[1], [True, False]],
    "tiers": [[1, 2, 3, 4], 0, [FREE, FREE]],
    "long_name": [[True], [1]],
    "collected_beside_another": [True],
}
"""What stock has right, and the patch leaves so."""

PATCHED: dict[str, Any] = CALM | {
    "pool_runs_out": [[1, 2], 0, [True] * 4, [1, 2, 3, 4]],
    "gone_after_its_lookup": [[1, 2], 0, [True, True, False, True]],
    "more_than_the_pool": [[1, 2, 3, None], 0, [True] * 4],
    "disk_is_full": [0, [False], False, 0, [True, True], [1]],
    "evicted_file_is_gone": ["stored", [False, True], False, [2]],
    "full_of_pinned": [[True, False], [False, True], [2]],
    "stored_again": [[True, True], [1]],
    "evicted_after_its_load": [[1], [False, True]],
    "cleared": [False, False, True],
    "cleared_amid_lookups": [True, None],
    "layer_by_layer": ["raises", 0, [True, False, True]],
    "many_lookups": [0, 0],
    "tier_cannot_be_asked": [[], 0, [FREE, FREE]],
    "tier_cannot_load": [[1, 2, 3, 4], 0, [FREE, FREE]],
    "no_memory_for_others": [None, 0],
    "collected": [0, 0],
    "collected_in_a_metric": [0, 0],
    "controller_not_told": [2],
    **{f"{how}, prefetch": [[1], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
    **{f"{how}, batch": [[1, None, 3], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
    **{f"{how}, single": [[None], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
}


def left_pinned(release: str) -> int:
    """To PINNED_TO an order to remove a chunk keeps its pin, until LMCache's own time ends it."""
    return int(Version(release) <= PINNED_TO)


def stock(release: str) -> dict[str, Any]:
    """What the original code makes of the same.

    From 0.5.2 on a batch of files is read by threads that catch errors. From 0.5.5 on a store that finds no room is
    not kept as under way.
    """
    in_threads, admits = Version(release) >= Version("0.5.2"), Version(release) >= Version("0.5.5")
    return CALM | {
        "pool_runs_out": [[99, 99], 0, HELD],
        "gone_after_its_lookup": [NOTHING, 2, HELD],
        "more_than_the_pool": "waits, also after twenty tries",
        "disk_is_full": [1, [False], True, 1, [False, True], [None]],
        "evicted_file_is_gone": ["FileNotFoundError", [False, False], not admits, [None]],
        "full_of_pinned": [[True, False], [False, True], [2]] if admits else [[True, False], [True, False], [None]],
        "stored_again": [[True, True], [1]] if admits else [[False, True], [None]],
        "evicted_after_its_load": [[1], [True, False]],
        "cleared": [False, False, False],
        "cleared_amid_lookups": [True, "raises"],
        "layer_by_layer": [[1, HALF, 3], 0, [True] * 3],
        "memory_gone_after_its_lookup": [NOTHING, 2 + left_pinned(release), [USED]],
        "many_lookups": [6, 6],
        "tier_cannot_be_asked": [NOTHING, 2, [USED, USED]],
        "tier_cannot_load": [NOTHING, 2, [USED, USED]],
        "no_memory_for_others": ["waits, also after twenty tries", 0],
        "collected": [1, 1],
        "collected_in_a_metric": [1, 0],
        "controller_not_told": [],
        "short, prefetch": [[1, HALF, 3], 0, [True] * 3],
        "short, batch": [[1, HALF, 3], 0, [True] * 3],
        "short, single": [[HALF], 0, [True] * 3],
        "missing, prefetch": [NOTHING, 3, [True, False, True]],
        "missing, batch": [[1, None, 3] if in_threads else "raises", 0, [True, False, True]],
        "missing, single": ["raises", 0, [True, False, True]],
        "unreadable, prefetch": [NOTHING, 3, [True] * 3],
        "unreadable, batch": [[1, None, 3] if in_threads else "raises", 0, [True] * 3],
        "unreadable, single": ["raises", 0, [True] * 3],
    }


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = warm.run(DRIVER, {"lmcache": release}, work, bundle=bundle, environ=ENVIRON)["cases"]
    return found


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Unread memory is given out, errors go nowhere, and what was taken stays taken."""
    assert driven(release, warm, tmp_path) == stock(release)


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Whole chunks or none; nothing is lost, and the scheduler hears of as many as are loaded."""
    left = {"memory_gone_after_its_lookup": [[1], left_pinned(release), [FREE]]}
    assert driven(release, warm, tmp_path, bundle) == PATCHED | left
    patch = interpreter.reported(tmp_path, PATCH)
    # Nine spoiled files, one by layers, one that left, one that left the memory and two tiers that raise. Memory that
    # runs out with asynchronous loading and without, and for another than the disk.
    counted = {"missing": 14, "without_memory": 3, "failed_writes": 1, "unremoved": 1, "collected": 3, "unsent": 1}
    if Version(release) < Version("0.5.5"):
        counted |= {"no_room": 2, "stored_already": 2}
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"] == counted, patch
