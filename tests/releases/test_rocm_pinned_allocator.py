"""Every pinned LMCache release's lazy pool, stock and patched; only the pin call is stood in for. Sizes are MiB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "rocm-pinned-allocator"
DRIVER = "pinned_allocator"
RELEASES = [pin.version for pin in registry.pins("lmcache")]
ON = {"LIVEPATCH_ROCM_PINNED_ALLOCATOR": "on", "LIVEPATCH_ROCM_PINNED_ALLOCATOR_STEP_GB": "0.1875"}
"""Steps of 192 MiB: from 64 to 256 and then, cut, to the final 320."""


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The whole pool is pinned before anybody allocates, and a failed pin goes unnoticed."""
    result = warm.run(DRIVER, {"lmcache": release}, tmp_path)
    assert result["grows"]["states"][0] == {"pinned": 320, "heap": 320, "usage": [0, 320]}
    assert result["often"]["pinned"] == 320
    assert result["refused"]["start"] == {"pinned": 128, "heap": 320, "usage": [0, 320]}, "grown over unpinned memory"
    assert result["refused"]["answers"] == ["served"] * 4
    # To 0.5.0 the error is thrown away, and what was never registered is unregistered at the end.
    assert (result["refused"]["stray"] > 0) == (Version(release) <= Version("0.5.0"))
    assert result["refused_at_start"] == "a pool with 0 MiB pinned and a heap of 320 MiB"
    assert result["too_large"] == {"answers": ["OUT_OF_MEMORY"] * 2, "pinned": 320, "heap": 320, "usage": [0, 320]}


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The pool grows by steps, once for all who wait, to the size that it reported from the beginning."""
    result = warm.run(DRIVER, {"lmcache": release}, tmp_path, bundle=bundle, environ=ON)
    _grown(result["grows"])
    assert result["often"] == {"served": 8, "pinned": 256, "heap": 256, "usage": [128, 320]}
    assert result["single"] == {"made": 3, "pinned": 256, "heap": 256, "usage": [144, 320]}

    refused = result["refused"]
    assert refused["start"] == {"pinned": 64, "heap": 64, "usage": [0, 320]}
    first, second, fits, later = refused["answers"]
    assert (first, fits, later) == ("served", "served", "served")
    assert "asked for 64 MiB more, 128 MiB of 320 MiB are pinned" in second
    assert refused["state"] == {"pinned": 128, "heap": 128, "usage": [64, 128]}, "else nothing is evicted"
    assert refused["usage"] == [192, 320], "the device pins again"
    assert (refused["left"], refused["stray"]) == (0, 0)
    assert "asked for 64 MiB more, 0 MiB of 320 MiB are pinned" in result["refused_at_start"]

    assert result["too_large"] == {"answers": ["OUT_OF_MEMORY"] * 2, "pinned": 64, "heap": 64, "usage": [0, 320]}
    assert result["closed_meanwhile"] == {"waited": True, "closed_early": False, "left": 0, "stray": 0}
    assert result["mixed"] == {"usage": [0, 64], "served": True, "pinned": result["mixed"]["pinned"]}
    assert result["others"] == []
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"]["pin_failures"] == 2


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_where_it_stands_aside_the_release_pins_the_rest(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Nothing else would: its own thread has ended long before. The pool has its whole size, and is closed whole."""
    found = warm.run(DRIVER, {"lmcache": release}, tmp_path, bundle=bundle, environ=ON, arguments=["stands_aside"])
    found = found["stands_aside"]
    assert found["start"] == {"pinned": 64, "heap": 64, "usage": [0, 320]}
    assert found["state"] == {"pinned": 320, "heap": 320, "usage": [32, 320]}
    assert (found["objects"], found["left"], found["stray"]) == ([1, 9], 0, 0)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["reason"]) == ("failed", "raised"), patch
    assert "AttributeError: it has another name now" in patch["detail"]


def _grown(grown: dict[str, Any]) -> None:
    pinned = [state["pinned"] for state in grown["states"]]
    assert pinned == [64, 64, 64, *[256] * 6, *[320] * 2, 320]
    assert [state["heap"] for state in grown["states"]] == pinned
    assert [state["usage"] for state in grown["states"]] == [[used, 320] for used in [*range(0, 321, 32), 0]]
    assert (grown["objects"], grown["distinct"], grown["parents"], grown["full"]) == (10, 10, True, "OUT_OF_MEMORY")
    assert (grown["again"], grown["left"], grown["stray"], grown["alive"]) == (10, 0, 0, False)


@pytest.mark.parametrize("release", RELEASES[-1:])
def test_not_on_other_platforms(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Nothing is changed where torch is no ROCm build, unless asked for."""
    result = warm.run(DRIVER, {"lmcache": release}, tmp_path, bundle=bundle)
    assert result["grows"]["states"][0]["pinned"] == 320
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["reason"]) == ("skipped", "optional"), patch
