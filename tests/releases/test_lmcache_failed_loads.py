"""Each pinned LMCache's real worker adapter, and the connector that the engine asks: what they say of loads that failed.

A step is what has ended, the blocks that failed, and the blocks that the engine takes for loaded though they hold another
request's KV (driver/lmcache_failed_loads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_failed_loads"
PATCH = "lmcache-failed-loads"
CONNECTORS_PATCH = "failed-loads"
RELEASES = [pin.version for pin in registry.pins("lmcache")]
IN_CI = ["0.3.15", "0.4.2"]
"""Those that the proof cannot be played on beside the newest vLLM, whose connector does not import them."""
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""
FIXED = "0.5.5"
"""From this release on LMCache itself reports the blocks."""

NEVER_ASKED = [pin.version for pin in registry.pins("vllm") if Version(pin.version) < Version("0.18.0")]
"""Where vLLM's own connector says that no load has failed, and does not ask the worker's adapter."""

NOTHING = ["", [], []]
RIGHT = {
    "succeeds": [["a", [], []], NOTHING],
    "fails": [["a", [1, 2], []], NOTHING],
    "fails_later": [NOTHING, ["a", [1, 2], []], NOTHING],
    "fails_beside_others": [["ab", [2, 3], []], ["c", [], []]],
    "fails_and_again": [["a", [1, 2], []], ["a", [], []]],
    "server_gone": [["ab", [1, 2, 3, 4], []], NOTHING],
    "refused": [["ac/s", [1, 2, 5, 6], []], NOTHING, ["b", [], []]],
    "lazily": [["a", [1, 2], []], NOTHING],
}
FAILURES = 4
"""Loads of these cases that fail under a server that is well, but for `lazily`."""


def right(lmcache: str) -> dict[str, Any]:
    """Every load ends, and its blocks are reported as failed, or hold what was loaded. "[]": the release has no such case."""
    since = {"server_gone": "0.4.2", "refused": "0.4.2", "lazily": "0.5.4"}
    absent = {case: Version(lmcache) < Version(first) for case, first in since.items()}
    return {case: [] if absent.get(case) else steps for case, steps in RIGHT.items()}


def stock(lmcache: str, asked: bool = True) -> dict[str, Any]:
    """Blocks of a failed load count as loaded; where the server is gone, only if nobody asks.

    To 0.4.7 the end of a load that is not begun is never told.
    """
    expected = right(lmcache)
    complete = {case for case in ("server_gone", "refused") if asked}
    found = {
        case: [*steps] if case in complete else [[ended, [], failed] for ended, failed, _ in steps]
        for case, steps in expected.items()
    }
    if found["refused"] and Version(lmcache) < Version("0.5.0"):
        found["refused"][0] = ["c/s", [1, 2, 5, 6], []] if asked else ["c/s", [], [5, 6]]
    return found


def beside(lmcache: str) -> str:
    """A vLLM that it can be imported with and whose connector works with it."""
    until = {"0.4.2": "0.17.1", "0.4.4": "0.18.1", "0.4.7": "0.20.2", "0.5.1": "0.23.0"}
    return next((vllm for before, vllm in until.items() if Version(lmcache) < Version(before)), "0.29.0")


def driven(
    lmcache: str, vllm: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None, **environ: str
) -> dict[str, Any]:
    releases = {"vllm": vllm} if lmcache == INSTALLED else {"vllm": vllm, "lmcache": lmcache}
    cases: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ)["cases"]
    return cases


@pytest.mark.parametrize("release", executed.chosen(IN_CI, RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """To 0.5.4 a load that failed counts as one that succeeded: the request computes on what its blocks held before."""
    reports = driven(release, beside(release), warm, tmp_path)
    if Version(release) < Version(FIXED):
        assert reports == stock(release, asked=Version(release) > Version("0.4.1"))
    else:
        assert reports == right(release)


@pytest.mark.parametrize("release", executed.chosen(IN_CI, RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The blocks of a failed load, and no others, are reported in the step that reports its end, once."""
    asked = {"LIVEPATCH_LMCACHE_FAILED_LOADS": "on"}  # where it is not needed it does no harm
    reports = driven(release, beside(release), warm, tmp_path, bundle, **asked)
    assert reports == right(release)
    patch = interpreter.reported(tmp_path, PATCH)
    fixed = Version(release) >= Version(FIXED)
    assert (patch["state"], patch["verdict"]) == ("applied", "fixed-upstream" if fixed else "needed"), patch
    counted = {"failed": 0 if fixed else FAILURES + bool(reports["lazily"])}
    counted["refused"] = int(Version("0.4.2") <= Version(release) < Version("0.5.0"))
    assert patch["counters"] == {kind: number for kind, number in counted.items() if number}


@pytest.mark.parametrize("vllm", NEVER_ASKED)
def test_vllm_that_never_asks(vllm: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """To 0.17.1 vLLM's connector reports no failed load, not even where LMCache's worker does."""
    lmcache = "0.4.4"  # the newest that works with these
    for name in ("stock", "patched"):
        (tmp_path / name).mkdir()
    assert driven(lmcache, vllm, warm, tmp_path / "stock") == stock(lmcache, asked=False)
    assert driven(lmcache, vllm, warm, tmp_path / "patched", bundle) == right(lmcache)
    for patch in (PATCH, CONNECTORS_PATCH):
        report = interpreter.reported(tmp_path / "patched", patch)
        assert (report["state"], report["verdict"]) == ("applied", "needed"), report


def test_a_connector_that_asks_a_worker_that_cannot_say(
    warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Without the worker's patch, an LMCache that has no place for failed blocks is as it came."""
    off = {"LIVEPATCH_LMCACHE_FAILED_LOADS": "off"}
    assert driven("0.4.1", "0.17.1", warm, tmp_path, bundle, **off) == stock("0.4.1", asked=False)
    assert interpreter.reported(tmp_path, CONNECTORS_PATCH)["state"] == "applied"
