"""MoRI-IO's real engines, schedulers included: preempted requests, requests that no router sent, and odd parameters.

Each test is one process. Stock computes on KV that nobody read, waits for ever or ends; patched, each client gets what its own
prompt says, and no block stays held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "moriio_preemption"
PATCH = "moriio-preemption"
EVERY = [pin.version for pin in registry.pins("vllm")]
RELEASES = EVERY[EVERY.index("0.23.0") :]
SOME = executed.chosen([], RELEASES)  # by hand: it takes minutes
WAYS = [f"{scheduler}, {mode}" for scheduler in ("Scheduler", "AsyncScheduler") for mode in ("read", "write")]
RIGHT = {
    "healthy": "right",
    "reset": "right",
    "full_pool": "right, right",
    "prompt_is_cached": "right",
    "preempted_and_gone": "right",
    "local": "right",
    "anothers": "right",
    "odd": {},
    "at_prefill": {},
}


def drive(warm: interpreter.Interpreter, release: str, work: Path, bundle: Path | None) -> dict[str, Any]:
    """What driver/moriio_preemption.py printed of a release, by scheduler and mode."""
    cases: dict[str, Any] = warm.run(
        DRIVER,
        {"vllm": release},
        work,
        bundle=bundle,
        environ={"LIVEPATCH_MORIIO_PREEMPTION": "on"},
        path=[interpreter.STANDINS],
    )["cases"]
    return cases


@pytest.mark.parametrize("release", SOME)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """To 0.32.0 a preempted request, and one that no router sent, is computed on unread KV, waits for ever, or ends the engine.

    0.32.0 and 0.33.0 ask in write mode, 0.33.0 in both, whether a transfer will be asked for. Odd parameters end them all.
    """
    number = Version(release)
    for way, found in drive(warm, release, tmp_path, None).items():
        fixed = number >= Version("0.33") or (way.endswith("write") and number >= Version("0.32"))
        assert found["healthy"] == "right", (way, found)
        assert (found["reset"] == "right") == (found["local"] == "right") == fixed, (way, found)
        assert (found["full_pool"] == "right, right") == fixed, (way, found)
        assert found["odd"], (way, found)


@pytest.mark.parametrize("release", SOME)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each client gets what its own prompt says; what cannot be used is computed here, and nothing is kept."""
    expected = {way: dict(RIGHT) for way in WAYS}
    if Version(release) >= Version(
        "0.31"
    ):  # all that a prefill engine which is read from needs: held for defer_timeout
        for way in (way for way in WAYS if way.endswith("read")):
            expected[way]["at_prefill"] = {"alone": "right; blocks are kept"}
    assert drive(warm, release, tmp_path, bundle) == expected
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"]["refused"] > 0, patch
