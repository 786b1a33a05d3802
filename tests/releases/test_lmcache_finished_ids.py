"""Each pinned LMCache's real worker adapter: what it reports of requests with several stores, and of ids used again.

What is reported as sent (S) frees the request's blocks. It must come once for each request, and not before the last of
its stores has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_finished_ids"
PATCH = "lmcache-finished-ids"
RELEASES = [pin.version for pin in registry.pins("lmcache")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""

LONG_PROMPT = 5_000
"""The driver's number of stores of a long prompt."""

PATCHED = {
    "used_again": ["S", "S", "", "S", ""],
    "used_again_with_stores": ["", "S", "", "", "S", ""],
    "remembered": 0,
    "first_then_second": ["", "", "S", ""],
    "second_then_first": ["", "", "S", ""],
    "three": ["", "", "", "S", ""],
    "one": ["", "S", ""],
    "store_after_another": ["", "", "S", ""],
    "one_fails": ["S", "", 1],
    "raises": ["S", ""],
    "long_prompt": ["", "", "S", ""],
    "asked_for_a_long_prompt": 2.0,  # the first one under way is found pending, and the one before it ended
    "server_gone": ["", "S"],
    "events": [True, True],
}


def stock(release: str) -> dict[str, Any]:
    """What the release itself does: from 0.4.3 on it keeps the ids, from 0.4.7 on it keeps a store's event."""
    keeps_ids, keeps_event = (Version(release) >= Version(since) for since in ("0.4.3", "0.4.7"))
    return {
        "used_again": ["S", "", "", "", ""] if keeps_ids else ["S", "S", "", "S", ""],
        "used_again_with_stores": ["", "S", "", "", "", ""] if keeps_ids else ["", "S", "", "", "S", ""],
        "remembered": 2000 if keeps_ids else 0,
        # The last to begin stands for all: right by luck.
        "first_then_second": ["", "", "S", ""],
        "second_then_first": ["", "S", "", ""],
        "three": ["", "", "S", "", ""],
        "one": ["", "S", ""],
        "store_after_another": ["", "S", "", ""],
        "one_fails": ["S", "", 0],
        "raises": ["S", ""],
        "long_prompt": ["", "", "S", ""],
        "asked_for_a_long_prompt": 1.0,
        "server_gone": ["", "S"],
        "events": [not keeps_event, True],
    }


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    """What each case comes to, with a vLLM that the release can be imported with."""
    version = Version(release)
    beside = "0.20.2" if version < Version("0.4.7") else "0.23.0" if version < Version("0.5.1") else "0.29.0"
    releases = {"vllm": beside} if release == INSTALLED else {"vllm": beside, "lmcache": release}
    cases: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle)["cases"]
    return cases


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """A request whose id was used before is never reported; one of several stores speaks for all."""
    assert driven(release, warm, tmp_path) == stock(release)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each request is reported once, with the last of its stores, and nothing is kept of it."""
    assert driven(release, warm, tmp_path, bundle) == PATCHED
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    beside = 8 + 2 * (LONG_PROMPT - 1)
    assert patch["counters"] == {"store_beside_another": beside, "store_after_another": 1}


@pytest.mark.parametrize("release", executed.ends(["0.14.1", "0.21.0", "0.27.1", "0.30.0", "0.33.0"]))
def test_the_engine_tells_each_end_once(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """So that an id that is told again is another request's: what the patch relies on."""
    ids = ("ends by its length", "aborted while it runs", "aborted as it is added", "reset with the cache")
    reported = warm.run("ends_reported", {"vllm": release}, tmp_path)["reported"]
    assert reported == {name: dict.fromkeys(ids, 1) for name in ("Scheduler", "AsyncScheduler")}
