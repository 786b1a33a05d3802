"""LMCache's real connector, engine and lookups in the engine's process: clients that go, lookups that time out, no LMCache.

KV and LMCache's memory have contents (driver/lmcache_in_process.py). On stock one client ends the engine, or one lookup, or the
first request, or with asynchronous loading the second load of a prompt; what a lookup found stays pinned where its client goes
first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_in_process"
PATCH = "lmcache-in-process"
IN_CI = {"0.5.0": "0.29.0"}
OLDEST = {"0.3.15": "0.17.1"}
"""Which vLLM is beside an LMCache."""
EVERY = [pin.version for pin in registry.pins("lmcache")]
MODES = ("Scheduler", "AsyncScheduler")
ABORTED = ("waiting", "queued", "loading", "running", "async_queued", "async_loading", "async_running", "async_pending")
TIMED_OUT = ("timed_out", "timed_out_and_gone", "timed_out_and_answered")
DEGRADED = ("degraded", "degraded_by_layer", "degraded_async")
UNDISTURBED = ("undisturbed", "again", "partly")
LOADED = ("async_undisturbed", "async_again", "async_partly")
AGAIN = ("queued_again", "async_queued_again", "queued_again_and_preempted", "async_queued_again_and_preempted")
GIVEN = ("unreadable", "async_unreadable", "no_token")
"""What clients write into `kv_transfer_params`."""
FREED = "RuntimeError in memory"
"""What LMCache's index names has no memory any more. LMCache's own copies raise as well, in the engine's step."""


def beside(lmcache: str) -> str:
    """A vLLM that the release can be imported with."""
    version = Version(lmcache)
    otherwise = "0.20.2" if version < Version("0.4.7") else "0.23.0" if version < Version("0.5.0") else "0.29.0"
    return (IN_CI | OLDEST).get(lmcache, otherwise)


PAIRS = [(beside(release), release) for release in executed.chosen(list(IN_CI), EVERY)]


def driven(
    pair: tuple[str, str], warm: interpreter.Interpreter, work: Path, bundle: Path | None = None
) -> dict[str, dict[str, str]]:
    releases, environ = dict(zip(("vllm", "lmcache"), pair, strict=True)), {"LIVEPATCH_LMCACHE_IN_PROCESS": "on"}
    result: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ)
    return {mode: result[mode] for mode in MODES}


def loaded(version: Version) -> list[str]:
    """What stock makes of LOADED: 0.3.15 gives chunks back once; later ones do so twice where a chunk is not copied, and
    from 0.5.2 on also where it is."""
    if version >= Version("0.5.2"):
        return ["what was looked up is never given back", FREED, FREED]
    return ["right", "right", FREED if version >= Version("0.4.1") else "right"]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_stock(pair: tuple[str, str], warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each fault, on the releases that have it."""
    version = Version(pair[1])
    asserts = Version("0.4.5") <= version <= Version("0.5.0")
    for found in driven(pair, warm, tmp_path).values():
        assert {found[case] for case in UNDISTURBED} == {"right"}
        assert [found[case] for case in LOADED] == loaded(version)
        assert {found[case] for case in TIMED_OUT} == {"KeyError in lookup_cache"}
        assert {found[case] for case in GIVEN[:2]} == {"KeyError in update_state_after_alloc"}
        asserted = "AssertionError" if asserts else "IndexError"  # the latter for want of a first token
        assert found["no_token"] == f"{asserted} in request_finished"
        no_lmcache = "AssertionError in get_num_new_matched_tokens" if version <= Version("0.5.0") else "right"
        assert {found[case] for case in DEGRADED} == {no_lmcache}
        if asserts:
            assert {found[case] for case in (*ABORTED, "async_limited")} == {"AssertionError in request_finished"}
        else:
            lost = "what was looked up is never given back"  # from 0.5.2 to 0.5.5 the next load takes these pins
            assert (lost in found["queued"]) == (not Version("0.5.2") <= version <= Version("0.5.5")), found["queued"]
            assert "kept of requests that ended" in found["queued"]
            assert found["async_limited"] == "AttributeError in request_finished"


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_patched(pair: tuple[str, str], warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """All are served, with their own KV; what is stored is loaded; nothing stays pinned."""
    cases = (*UNDISTURBED, *LOADED, *ABORTED, *AGAIN, *GIVEN, "async_limited", *TIMED_OUT, *DEGRADED)
    assert driven(pair, warm, tmp_path, bundle) == dict.fromkeys(MODES, dict.fromkeys(cases, "right"))
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    counters = patch["counters"]
    assert counters["lookup_given_back"] >= len(MODES) * 4, counters  # queued, and pending, with each client
    # Five objects, in two cases. What is no object nixl-request-params takes away before.
    assert counters["unreadable_parameters"] >= len(MODES) * 2 * 5, counters
    assert counters["lookup_not_answered"] >= len(MODES) * len(TIMED_OUT), counters
    if Version(pair[1]) <= Version("0.5.0"):
        # From 0.5.1 on LMCache itself leaves them alone.
        assert counters["computed_without_lmcache"] == len(MODES) * len(DEGRADED) * 3, counters
