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
HALF = [2.0, 99.0]
"""A chunk of which half came: the rest is what another request left there."""

CALM: dict[str, Any] = {
    "calm": [[1, 2, 3, 4], [1, 2, 3, 4], [3], [None], [4096] * 4, [False, True], 3],
    "direct": [[1, 2, 3, 4], [1, 2, 3, 4], [3], [None], [4096] * 4, [False, True], 3],
    "memory_comes_back": [[1, 2], 0],
    "pinned_by_another_lookup": [[1], [True, False]],
}
"""What stock has right, and the patch leaves so."""

PATCHED: dict[str, Any] = CALM | {
    "pool_runs_out": [[1, 2], 0, [True] * 4, [1, 2, 3, 4]],
    "gone_after_its_lookup": [[1, 2], 0, [True, True, False, True]],
    "more_than_the_pool": [[1, 2, 3, None], 0, [True] * 4],
    "disk_is_full": [0, [False], False, 0, [True, True], [1]],
    "evicted_file_is_gone": ["stored", [False, True], False, [2]],
    "full_of_pinned": [[True, False], [False, True], [2]],
    "evicted_after_its_load": [[1], [False, True]],
    "cleared": [False, False, True],
    "layer_by_layer": ["raises", 0, [True, False, True]],
    **{f"{how}, prefetch": [[1], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
    **{f"{how}, batch": [[1, None, 3], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
    **{f"{how}, single": [[None], 0, [True, False, True]] for how in ("short", "missing", "unreadable")},
}


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
        "evicted_after_its_load": [[1], [True, False]],
        "cleared": [False, False, False],
        "layer_by_layer": [[1, HALF, 3], 0, [True] * 3],
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
    assert driven(release, warm, tmp_path, bundle) == PATCHED
    patch = interpreter.reported(tmp_path, PATCH)
    # Nine spoiled files, one by layers and one that left; memory that runs out with asynchronous loading and without.
    counted = {"missing": 11, "without_memory": 2, "failed_writes": 1, "unremoved": 1}
    if Version(release) < Version("0.5.5"):
        counted["no_room"] = 2
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"] == counted, patch
