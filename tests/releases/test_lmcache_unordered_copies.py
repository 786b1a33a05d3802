"""Chunks between a buffer on a device and host memory, on a stream that is behind: each release's own copies.

There is no device here: the driver stands in for its stream and for its runtime's copy, and says so. On a GPU, whole servers
do the same (tests/gpu/block_server.py, docs/lab-results.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "lmcache-unordered-copies"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.4")]
EARLIER = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) < Version("0.4.4")]
WITHOUT_STAND_IN = executed.chosen(EARLIER[-1:], EARLIER)
STORED, BEFORE, OTHERS = [7], [0], [9]
"""What the blocks hold that are stored; what the buffer held before; what the chunk holds once others have it."""


def also(result: dict[str, Any]) -> None:
    """What is so on stock and patched: the release's errors, copies in CPU memory, and compiled operations are its own."""
    assert result["errors"] == ["memory_obj.raw_tensor is None", "memory_obj.raw_tensor is None", "Size mismatch"]
    assert result["on_host"] == [4]
    assert result["compiled"] == [1, 96]


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """What the buffer held before is stored, and what is still to be read there is written over.

    From 0.4.7 on a store counts as ended before its chunk is filled, and a load before its chunk was read.
    """
    result = warm.run("unordered_copies", {"lmcache": release}, tmp_path)
    for case in ("stored", "stored, without a runtime"):
        assert result[case] == {"at_its_end": BEFORE, "later": BEFORE}, case
    assert result["loaded"]["before"] == [5], "written over before it was read; it held 3"
    too_early = Version(release) >= Version("0.4.7")
    assert result["stored, eager"] == {"at_its_end": [1] if too_early else STORED, "later": STORED}
    assert result["loaded, eager"] == {"before": [3], "after": OTHERS if too_early else [5]}
    if too_early:
        assert result["stored by LMCache"] == [BEFORE, BEFORE], "two chunks, of blocks that hold 7 and 9"
        assert result["loaded by LMCache"] == [[6], [6]], "the blocks of two chunks that hold 5 and 6"
    also(result)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each copy keeps to the stream's order, goes beyond no pinned piece, and has ended when it counts as ended."""
    result = warm.run("unordered_copies", {"lmcache": release}, tmp_path, bundle=bundle)
    for case in ("stored", "stored, without a runtime", "stored, eager"):
        assert result[case] == {"at_its_end": STORED, "later": STORED}, case
    for case in ("loaded", "loaded, eager"):
        assert result[case] == {"before": [3], "after": [5]}, case
    assert result["pieces"] == [[64, 32], [32, 64], [1, 64, 31], [64, 32]], (
        "96 bytes from 0, 32, 63 and 64 on, pieces of 64"
    )
    for case in ("broken", "broken, otherwise"):
        assert result[case] == ["the device refuses", [1]], "an error, and no other copy in its place"
    driven = "stored by LMCache" in result
    assert driven == (Version(release) >= Version("0.4.7"))
    if driven:
        assert result["stored by LMCache"] == [[7], [9]]
        assert result["loaded by LMCache"] == [[5], [6]]
    also(result)
    patch = interpreter.reported(tmp_path, PATCH)
    copies = 11 if driven else 7
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("applied", "needed", {"copies": copies}), patch


@pytest.mark.parametrize("release", WITHOUT_STAND_IN)
def test_releases_that_have_no_stand_in(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Without compiled operations they have no copy at all."""
    result = warm.run("unordered_copies", {"lmcache": release}, tmp_path, bundle=bundle)
    assert result == {"lmcache": result["lmcache"], "stand_in": None}
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("skipped", "not-present", {}), patch
