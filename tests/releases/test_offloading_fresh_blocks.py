"""vLLM's real OffloadingConnector, alone and in a MultiConnector: blocks that are given anew, requests that end early, a reset.

Blocks on both sides have contents (driver/offloading_fresh.py), and what a later hit loads must be its own. CI runs the first
and the last release of each fault, the others are run by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "offloading_fresh"
PATCH = "offloading-fresh-blocks"
EVERY = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.21")]
RELEASES = executed.chosen(["0.21.0", "0.32.0"], [one for one in EVERY if Version(one) < Version("0.33")])
STOCK = executed.chosen(["0.21.0", "0.33.0"], EVERY)
MODES = ("Scheduler", "AsyncScheduler")

RIGHT = "right"
STALE = "second got a wrong token"
ASSERTS = "AssertionError in _build_store_jobs"
CASES = (
    "computed",
    "pulled",
    "pulled_workers",
    "pulled_hybrid",
    "queued",
    "queued_hybrid",
    "hung_up",
    "hung_up_longer",
    "hung_up_hybrid",
    "hung_up_while_pulled",
    "last_token",
    "reset",
)
RESETS = ("reset_while_stored", "reset_while_stored_beside")
"""Up to and including 0.24.0."""


def cases(release: str) -> tuple[str, ...]:
    return (*CASES, *RESETS) if Version(release) < Version("0.25") else CASES


def stock(release: str) -> dict[str, str]:
    """What each case comes to without the patch."""
    version, outcomes = Version(release), dict.fromkeys(cases(release), RIGHT)
    if version < Version("0.33"):
        outcomes |= dict.fromkeys(("pulled", "pulled_workers", "pulled_hybrid"), STALE)
    if version < Version("0.25"):
        outcomes |= dict.fromkeys(RESETS, f"first got a wrong token, {STALE}")
    if Version("0.25") < version < Version("0.33"):
        outcomes["reset"] = "AssertionError in build_connector_meta"
    if Version("0.26") <= version < Version("0.30"):
        outcomes["last_token"] = STALE
    if Version("0.26") <= version < Version("0.27"):
        outcomes |= dict.fromkeys(("queued", "queued_hybrid", "hung_up_longer", "hung_up_while_pulled"), ASSERTS)
        outcomes |= dict.fromkeys(("hung_up", "hung_up_hybrid"), "third got a wrong token")
    return outcomes


def counters(release: str) -> set[str]:
    """What the patch counts."""
    version, counted = Version(release), {"awaited_stores"}
    if version > Version("0.25"):
        counted.add("reloaded")
    if Version("0.26") <= version < Version("0.30"):
        counted.add("not_computed")
    return counted


def outcomes(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {mode: result[mode] for mode in MODES}


@pytest.mark.parametrize("release", STOCK)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Another's KV is stored under a prompt and given to whoever has it, or the engine ends."""
    assert outcomes(warm.run(DRIVER, {"vllm": release}, tmp_path, arguments=cases(release))) == dict.fromkeys(
        MODES, stock(release)
    )


@pytest.mark.parametrize("release", RELEASES)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """What is loaded later is its own, and no engine ends."""
    environ = {"LIVEPATCH_OFFLOADING_FRESH_BLOCKS": "on"}
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ, arguments=cases(release))
    assert outcomes(result) == dict.fromkeys(MODES, dict.fromkeys(cases(release), RIGHT))
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert set(patch["counters"]) == counters(release)
