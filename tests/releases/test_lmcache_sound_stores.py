"""Hybrid models at a real LMCache server: their states' groups have mostly null blocks; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest

DRIVER = "lmcache_stores_mamba"
PATCH = "lmcache-sound-stores"
RELEASES = ["0.5.4", "0.5.5", "0.5.6"]
"""To 0.5.3 LMCache takes no hybrid model whose steps may pass over a block."""
INSTALLED = "0.5.6"

STOCK = {
    "together": [[0, True], [64, False], [160, True]],
    "apart": [[0, True], [0, True], [160, True]],
    "in_part": [[0, True], [96, False], [160, True]],
}
"""Of each request how many tokens came from LMCache, and whether they were the prompt's."""
PATCHED = {
    "together": [[0, True], [0, True], [0, True]],
    "apart": [[0, True], [0, True], [160, True]],
    "in_part": [[0, True], [0, True], [160, True]],
}


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    releases = {"vllm": "0.33.0"} | ({} if release == INSTALLED else {"lmcache": release})
    environ = {"LIVEPATCH_LMCACHE_SOUND_STORES": "on"}
    cases: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=list(STOCK))[
        "cases"
    ]
    return cases


@pytest.mark.parametrize("release", executed.chosen(RELEASES[-1:], RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path) == STOCK


@pytest.mark.parametrize("release", executed.chosen(RELEASES[-1:], RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path, bundle) == PATCHED
