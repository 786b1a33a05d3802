"""Requests that have one id, at each LMCache's real server: whose KV is loaded, and under whose keys it is stored; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_session_hashes"
PATCH = "lmcache-session-hashes"
RELEASES = [pin.version for pin in registry.pins("lmcache")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""
TRANSFER = Path(__file__).parents[2] / "patches" / "mp_block_transfer" / "transfer.py"

RIGHT = [96, True, True]
"""Three chunks are a hit, the load ended well, and what came is the prompt's."""

PATCHED: dict[str, Any] = {
    "replicas": [RIGHT, RIGHT, RIGHT, RIGHT, True],
    "again": [RIGHT, RIGHT],
    "goes on": [RIGHT, RIGHT],
}


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> tuple[Any, Any]:
    releases = {} if release == INSTALLED else {"lmcache": release}
    environ = {"LIVEPATCH_LMCACHE_SESSION_HASHES": "on"}
    found = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=[str(TRANSFER)])
    return found["cases"], found["at once"]


@pytest.mark.parametrize("release", executed.chosen(["0.5.6"], RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    cases, at_once = driven(release, warm, tmp_path)
    # What comes is the first prompt's, or the load fails; and what is stored is kept under the first prompt's keys.
    assert [cases[name][0][1:] == RIGHT[1:] for name in ("replicas", "again")] == [False, False]
    assert [cases[name][1] for name in ("replicas", "again")] == [[0], [0]]
    assert at_once > 0


@pytest.mark.parametrize("release", executed.chosen(["0.5.6"], RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path, bundle) == (PATCHED, 0)
    reports = [interpreter.read(file, PATCH) for file in (tmp_path / "state").glob("*.json")]
    assert {(one["state"], one["verdict"]) for one in reports if one["counters"]} == {("applied", "needed")}
    assert any("hashed_anew" in one["counters"] for one in reports)
