"""Blocks of a load that failed while its writer may still write: nobody has them when that comes, late.

A release's real scheduler and worker decode, Mooncake's real engine writes; contents are compared before and after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest

PATCH = "mooncake-failed-loads"
DRIVER = "mooncake_held"
RELEASES = executed.chosen(["0.30.0", "0.33.0"], ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
"""From vLLM PR#50984 on, which reports such loads as failed; before, their requests wait."""

STOCK: dict[str, Any] = {
    "failed": [True, True, False, 0],
    "failed_behind_a_hit": [5.0, True, True, False],
    "given_away": [True, True, True, False],
    "overdue": [True, True, False, 0, True],
    "gone": [True, 0, True, False, True, True],
}
"""The third of each, the last of two, and the fourth of the last: what runs on these blocks is written over."""

PATCHED = {
    "failed": [True, True, True, 8],
    "failed_behind_a_hit": [5.0, True, True, True],
    "given_away": [True, True, True, True],
    "overdue": [True, True, True, 8, True],
    "gone": [True, 29, False, True, True, True],
}


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    """What comes late is written over what another request, or the same one, has computed."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["30"])
    assert run["cases"] == STOCK


@pytest.mark.parametrize("release", RELEASES)
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """The request goes on at once, on other blocks; those come back when prefill has answered, or its time is over."""
    environ = {
        "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2",
        "LIVEPATCH_MOONCAKE_FAILED_LOADS_HELD_SHARE": "0.45",
    }
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, path=mooncake, arguments=["60"], environ=environ)
    assert run["cases"] == PATCHED
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    counters = {"held": 5, "failed": 2, "given_back": 2, "not_asked": 1, "closed": 4, "over_share": 1}
    assert patch["counters"] == counters
