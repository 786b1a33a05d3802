"""How the tests of `chunked-lmcache-load` play its driver, and what must hold of what it played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreter
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "chunked_lmcache_load"
TOGGLE = "LIVEPATCH_CHUNKED_LMCACHE_LOAD"
PART_TOKENS = 256
USABLE_BLOCKS = 99
"""Of the pool's 100 one is never given out."""
MIXES = "4"
LMCACHE = registry.pins("lmcache")[-1].version
BY_HASH_TO = "0.16.0"
"""To here the built-in connector names blocks by hash, which LMCache from 0.5.1 cannot be told any more."""


def lmcache_of(release: str) -> str:
    """The newest LMCache that a vLLM release's built-in connector can be imported and driven with."""
    return "0.4.6" if Version(release) <= Version(BY_HASH_TO) else LMCACHE


def drive(
    warm: interpreter.Interpreter,
    work: Path,
    vllm: str,
    which: str,
    *,
    bundle: Path | None = None,
    lmcache: str | None = None,
    mixes: str = MIXES,
    environ: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Play everything; by scheduler class, what each world came to."""
    releases = {"vllm": vllm, "lmcache": lmcache or lmcache_of(vllm)}
    environ = environ or {TOGGLE: "on", f"{TOGGLE}_MAX_TOKENS": str(PART_TOKENS)}
    result = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=[mixes, *which.split()])
    worlds: dict[str, Any] = result["worlds"]
    return worlds


def check(worlds: dict[str, Any], largest: int = PART_TOKENS) -> None:
    """All requests finish, on KV of their own, loaded and not recomputed, in parts, within the pool; locks are even."""
    for which, played in worlds.items():
        outcomes = {name: world["outcome"] for name, world in played.items()}
        assert outcomes == dict.fromkeys(outcomes, "finishes"), which
        for name, world in played.items():
            # What was aborted or failed to load is rightly computed, or not wanted any more.
            if not name.startswith("faults"):
                assert world["loaded"] >= 0.95 * (world["loaded"] + world["recomputed"]), (which, name)
            assert world["largest_load"] <= largest, (which, name)
            assert world["most_committed"] <= USABLE_BLOCKS, (which, name)
        assert sum(world["loaded"] for world in played.values()) > 10_000, which
