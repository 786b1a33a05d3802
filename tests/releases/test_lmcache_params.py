"""LMCache's connector and server, real: no client's `kv_transfer_params` ends the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version

VLLM = "0.29.0"
COUNTED, LIMITED = Version("0.4.6"), Version("0.5.6")
"""From these LMCache releases on answers have statistics, and what is stored can be limited."""
CHUNK, PROMPT = 32, 96
"""Tokens: of a chunk, and of a prompt's whole chunks."""
RELEASES = ["0.4.5", "0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5", "0.5.6"]


def right(lmcache: str) -> dict[str, Any]:
    """Nobody is loaded at first; the same prompt in the next engine is, as much as was stored."""
    names = (
        "none",
        "limit",
        "no limit",
        "limit is text",
        "limit is a fraction",
        "limit is a list",
        "statistics",
        "both",
    )
    answered = {f"answered: {name}": [[0, True], [PROMPT, True]] for name in names}
    if Version(lmcache) >= LIMITED:
        answered["answered: limit"] = [[0, True], [CHUNK, True]]
    return answered | {f"left: {name}": [[0, True], 0] for name in names} | {"session: statistics": [0, True]}


def ends(lmcache: str) -> set[str]:
    """What ends the engine on stock."""
    odd = {"answered: limit is text", "answered: limit is a fraction", "answered: limit is a list", "answered: both"}
    asked = {"left: statistics", "left: both"}
    return (odd if Version(lmcache) >= LIMITED else set()) | (asked if Version(lmcache) >= COUNTED else set())


@pytest.mark.parametrize("lmcache", executed.chosen(["0.4.6", "0.5.6"], RELEASES))
def test_params(lmcache: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Stock ends at a limit that is no number, and where a client leaves that asked for statistics."""
    releases = {"vllm": VLLM, "lmcache": lmcache}
    stock, patched = (tmp_path / name for name in ("stock", "patched"))
    for work in (stock, patched):
        work.mkdir()
    found = warm.run("lmcache_params", releases, stock)["cases"]
    assert {name for name, came in found.items() if str(came).startswith("raises")} == ends(lmcache)
    assert {name: came for name, came in found.items() if name not in ends(lmcache)} == {
        name: came for name, came in right(lmcache).items() if name not in ends(lmcache)
    }
    assert warm.run("lmcache_params", releases, patched, bundle=bundle)["cases"] == right(lmcache)
