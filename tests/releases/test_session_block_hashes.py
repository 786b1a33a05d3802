"""Streaming sessions of each release's schedulers, and who has a session's tokens; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER, PATCH = "session_block_hashes", "session-block-hashes"
EVERY = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.15.1")]
RELEASES = [release for release in EVERY if Version(release) < Version("0.32.0")]
RIGHT = {"resumed": [16, 0], "same": [64, 0]}
"""By who asks: tokens from the prefix cache, and how many of them are others' KV."""
AMID, END = "a round ends amid a block", "a round ends with a block"


def found(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> Any:
    return warm.run(DRIVER, {"vllm": release}, work, bundle=bundle)["found"]


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The dropped token was a block's last: its block is a hit, with another token's KV, and later blocks are none."""
    for cases in found(release, warm, tmp_path).values():
        assert cases == {AMID: RIGHT, END: {"resumed": [32, 1], "same": [16, 0]}}


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    for cases in found(release, warm, tmp_path, bundle).values():
        assert cases == {AMID: RIGHT, END: RIGHT}
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"] == {"rehashed": 2}, patch
