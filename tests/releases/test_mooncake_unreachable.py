"""A prefill engine that is refused, silent, cut off or gone: no block is given away into which it may still write.

A release's real scheduler and worker decode, Mooncake's real engine writes; contents are compared before and after.
To 0.29.0 what failed waits, as on stock. From 0.30.0 on it goes on, and its blocks are held no shorter than stock keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version

PATCH = "mooncake-failed-loads"
DRIVER = "mooncake_unreachable"
RELEASES = executed.chosen(["0.29.0", "0.32.0", "0.33.0"], ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"])

RIGHT = {
    "refused": [True, True, True, True],  # waits, others before and after the write, its own in the end
    "silent": [[True, True], 0, True],  # both run, how many blocks are held for them, another engine's load
    "deleted": [True, 8, True, True],  # runs, how many are held, another engine's load, they come back
    "empty": [0, True],  # how many are held, the prefix cache can be reset
    "cut": [False, True, 8, True, True],  # waits, runs, how many are held, contents before and after the write
}
WAITS = {"deleted": [False, 0, True, True], "empty": [0, False], "cut": [True, False, 0, True, True]}
"""To 0.29.0, where requests keep their blocks."""


def reports_failures(release: str) -> bool:
    """vLLM PR#50984."""
    return Version(release) >= Version("0.30")


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    """Stock is right in all of these: it waits, or holds nothing."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["8"])
    if reports_failures(release):
        failed_at_once = {"deleted": [True, 0, True, True], "cut": [True, False, 0, True, True]}
        assert run["cases"] == {**RIGHT, **failed_at_once}
    else:
        assert run["cases"] == {**RIGHT, **WAITS, "silent": [[False, False], 0, True]}


@pytest.mark.parametrize("release", RELEASES)
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {
        "LIVEPATCH_MOONCAKE_FAILED_LOADS": "on",
        "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2",
        "LIVEPATCH_MOONCAKE_FAILED_LOADS_HELD_SHARE": "0.2",
    }
    patience = "60" if reports_failures(release) else "8"
    given: dict[str, Any] = {"bundle": bundle, "path": mooncake, "arguments": [patience], "environ": environ}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, **given)
    assert run["cases"] == (RIGHT if reports_failures(release) else {**RIGHT, **WAITS})
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
