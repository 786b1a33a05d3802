"""Prefills that are given up while an early write, or the rest of one that failed, may read their blocks: contents.

A release's real scheduler and worker, Mooncake's real engine; a patched run is with all of Mooncake's patches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from test_mooncake_layerwise import EVERY, FAILED, NOTHING

PATCH = "mooncake-layerwise"
DRIVER = "mooncake_given_up"
STOCK: dict[str, Any] = {
    "after_another": [0, 0, False, 0],
    "before_a_third": [False, 0, 0, NOTHING, 0],
    "failed_before_a_third": [0, 0, False, 0],
    "aside": [False, 0, 0, NOTHING, 0],
}
"""Nothing is read before the end, and so no block is held."""
PATCHED: dict[str, Any] = {
    "after_another": [4, 2, True, 0],
    "before_a_third": [True, 10, 2, FAILED, 0],
    "failed_before_a_third": [6, 2, True, 0],
    "aside": [True, 4, 2, FAILED, 0],
}
"""Each step computes two blocks; those of the first leave early. All of the prefill's are held while any may be read, and
to the end of a write under the transfer those of the third: decode has what was computed for it, or nothing."""


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2"])
    assert run["cases"] == STOCK


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5"], "environ": environ}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, **given)
    assert run["cases"] == PATCHED
    patch = interpreter.reported(tmp_path, PATCH)
    assert patch["counters"]["failed"] == 2
