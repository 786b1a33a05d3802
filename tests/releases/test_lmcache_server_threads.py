"""LMCache's server after errors behind its memory, on each release's own storage manager, threads and disk; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_server_threads"
PATCH = "lmcache-server-threads"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.4")]
ENVIRON = {"LIVEPATCH_LMCACHE_SERVER_THREADS": "on"}

NOBODY = "nobody answers"
PATCHED: dict[str, Any] = {
    "calm": [3, 1, 2, 3, 0, 0],
    "lookup_raises": [0, [1, 3], [2, 1, 2], 0, 0],
    "load_raises": [0, [1, 3], [2, 1, 2], 0, 0],
    "store_raises": [True, 1],
    "load_never_ends": [0, 1, True, 0],
    "failed_load_is_shown": [[1, 1], [], 0],
    "evicting_raises": [True, True],
    "one_store_raises": [True, True],
    "tenants": [True, True],
}


def of_release(release: str, cases: dict[str, Any]) -> dict[str, Any]:
    """0.4.4 has no policy for tenants."""
    left_out = () if Version(release) > Version("0.4.4") else ("tenants",)
    return {case: came for case, came in cases.items() if case not in left_out}


def stock(release: str) -> dict[str, Any]:
    """From 0.5.5 on a store that an adapter refuses, and from 0.5.6 on a lookup, is ended; from 0.4.5 on a load is, when
    another load ends. To 0.5.4 a load that failed is shown as filled."""
    found = PATCHED | {
        # The second lookup finds no memory: when the first has ended, others have it.
        "load_never_ends": [NOBODY, NOBODY, True, 0],
        **{case: [False, False] for case in ("evicting_raises", "one_store_raises", "tenants")},
    }
    if Version(release) < Version("0.5.6"):
        found["lookup_raises"] = [NOBODY, [1, 3], None, 0, 0]
    if Version(release) < Version("0.5.5"):
        found["store_raises"] = [False, 1]
        found["failed_load_is_shown"] = [[1, 1], [2], 0]
    if Version(release) < Version("0.4.5"):
        found["load_raises"] = [NOBODY, [1, 3], None, 1, 2]
    return of_release(release, found)


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = warm.run(DRIVER, {"lmcache": release}, work, bundle=bundle, environ=ENVIRON)["cases"]
    return found


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Threads end, lookups are never answered, and what was taken stays taken."""
    assert driven(release, warm, tmp_path) == stock(release)


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each lookup is answered, each thread lives, and nothing is lost or given to two."""
    assert driven(release, warm, tmp_path, bundle) == of_release(release, PATCHED)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    expected = {"adapter_errors": 3, "given_up": 1}
    if Version(release) < Version("0.5.6"):
        expected["unfilled"] = 4  # of the load that raised, the one that was given up, and the short file
    counters = dict(patch["counters"])
    assert counters.pop("thread_errors") >= 2, patch  # one that raised once, and one that raises each time
    assert counters == expected, patch
