"""Each LMCache that lets a worker copy KV: a real server that is stopped, killed or raises, a real worker's contents.

What a step waited for in vain is a sum of time-outs, in seconds: stock's `mq_timeout` is 1 here, the patched one's 300.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_bounded_waits"
PATCH = "lmcache-bounded-waits"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.5.0")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""

AGAIN = [64, [["again"], []], True]
"""A hit of two chunks, a load that has ended well, and its contents."""
BOTH = [5, 6, 7, 8, 9, 10, 11, 12]
"""The blocks of both loads."""
STOPPED = {
    "hits": [64, 64],
    "step": [["c", "d"], ["a", "b"], BOTH, 1.0],
    "next step": [["f"], ["e"], [5, 6, 7, 8], 0.0],
    "again": AGAIN,
}
REGISTERED_ONCE = {"registered": 1, "known": 1, "again": AGAIN, "events": True}


def patched(release: str) -> dict[str, Any]:
    """A server that does not live is waited for once, for one second, and one that does for SECONDS."""
    in_the_step = Version(release) < Version("0.5.5")  # later releases poll for what a lookup comes to
    return {
        "stopped": STOPPED,
        "stopped_after_a_load": [[[], ["a", "b"], BOTH, 1.0], True],
        "answers_pings_before_the_end": [[["a"], [5, 6, 7, 8]], True],
        "raises": [[["a", "b", "c"], [], []], True, AGAIN],
        "raises_again": [True, True, False],
        "slow": [[["a"], []], True, True],
        "stopped_under_a_store": [[["late"], [], [], 1.0], 64, [["reads it"], []], True],
        "lookup": [0, 1.0 if in_the_step else 0.0, 300.0, 1],
        "time_outs": [1, 300.0, 300.0, 300.0],
        "used_after_a_lookup": AGAIN,
        "session": 1.0,
        "heartbeats": {
            # A ping's time-out, and whether the server counts as there after it. The fourth ping is answered, but was
            # sent before an answer failed to come: one more registers the worker.
            "pings": [[5.0, False], [2.0, False], [2.0, True], [5.0], [2.0, True], [5.0, True]],
            "registered by": [3, 5],
        },
        # The longest pause, who finds the server well again, whether pings are PING_SECONDS apart, and how many at once.
        "found_again": [[0.5], [True, True], True, 1],
        "lost_again": [False, 1.0, AGAIN],
        # What LMCache itself, and lmcache-reregister, do of the same worker at the same time.
        "lost_and_forgotten": {
            "step": STOPPED["step"],
            "forgotten": True,
            "next step": STOPPED["next step"],
            **REGISTERED_ONCE,
        },
        "forgotten_and_lost": {"forgotten": True, "step": [["c"], ["a"], [5, 6, 7, 8], 0.0], **REGISTERED_ONCE},
        "lost_under_a_ping": REGISTERED_ONCE,
        "other_transfers": [["TimeoutError", 0.7], ["TimeoutError", 0.7], 30.0],
        **({"stopped_through_messages": STOPPED} if release == INSTALLED else {}),
        "killed": {"step": STOPPED["step"], "again": AGAIN},
        "killed_under_a_store": [["a", "b"], [], [], 1.0],
        "maps_nothing_of_a_dead_server": [[["a"], [], [], 1.0], AGAIN, False],
    }


def stock(release: str) -> dict[str, Any]:
    """Each wait is `mq_timeout`; over shared memory a store that is not answered ends the engine.

    To 0.5.4 a load that came to nothing is reported as one that has ended well; to 0.5.5 the scheduler has no heartbeat.
    """
    version = Version(release)
    says, polls, beats = (version >= Version(since) for since in ("0.5.5", "0.5.5", "0.5.6"))
    asynchronous = [[[], ["a"], [5, 6, 7, 8] if says else [], 2.0], True, [["given up"], True], 64, [], False, True]
    error = "TimeoutError" if version < Version("0.5.1") else "LMCacheTimeoutError"
    return {
        "stopped_after_a_load": [[[], ["a", "b"], [9, 10, 11, 12] if says else [], 2.0], True],
        "answers_pings_before_the_end": [[["a"], [5, 6, 7, 8] if says else []], True],
        "raises": [[error], False, AGAIN],
        "lookup": [0, 0.0 if polls else 1.0, 1.0, int(beats)],
        "found_again": [[3600.0], [False, False], True, 0],
        # Not mended: a load waits twice, a preemption for as long as the store does, and a store that is given up reads
        # what was another request's, and stores it.
        **({"asynchronous": asynchronous} if version >= Version("0.5.2") else {}),
        "killed_under_a_store": [error, 1.0],
    }


def driven(
    release: str,
    warm: interpreter.Interpreter,
    work: Path,
    mq_timeout: int,
    *cases: str,
    bundle: Path | None = None,
    off: tuple[str, ...] = (),
) -> dict[str, Any]:
    releases = {"vllm": "0.29.0"} if release == INSTALLED else {"vllm": "0.29.0", "lmcache": release}
    own = {"LIVEPATCH_LMCACHE_BOUNDED_WAITS_SECONDS": "2", "LIVEPATCH_LMCACHE_BOUNDED_WAITS_PING_SECONDS": "0.5"}
    environ = {**own, **dict.fromkeys(off, "off")}
    arguments = (str(mq_timeout), *cases)
    found = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=arguments)
    cases_found: dict[str, Any] = found["cases"]
    return cases_found


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    expected = stock(release)
    assert driven(release, warm, tmp_path, 1, *expected) == expected


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    expected = patched(release)
    assert driven(release, warm, tmp_path, 300, *expected, bundle=bundle) == expected
    reports = [interpreter.read(file, PATCH) for file in (tmp_path / "state").glob("*.json")]
    (patch,) = [one for one in reports if one["state"] == "applied" and one["counters"]]
    assert patch["verdict"] == "needed", patch
    through_messages, lookups = int(release == INSTALLED), 3 if Version(release) < Version("0.5.5") else 0
    unanswered, loads_failed = 16 + lookups + through_messages, 6 + through_messages
    assert patch["counters"] == {"unanswered": unanswered, "loads_failed": loads_failed, "stored_late": 1}


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_a_cache_that_takes_long_to_clear(
    patched: bool, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """After a weight update: `reset_cache` has the release's own time, for it is no wait of a step's. From 0.5.6 on."""
    found = driven(INSTALLED, warm, tmp_path, 300, "cleared", bundle=bundle if patched else None)
    assert found == {"cleared": True}


def test_alone(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Without the other patches of this worker. To 0.5.4 nobody else reports a load that was not answered as failed."""
    release, off = "0.5.4", ("LIVEPATCH_LMCACHE_FAILED_LOADS", "LIVEPATCH_LMCACHE_REREGISTER")
    cases = (
        "stopped",
        "answers_pings_before_the_end",
        "raises",
        "stopped_under_a_store",
        "lost_and_forgotten",
        "killed",
    )
    expected = {case: patched(release)[case] for case in cases}
    assert driven(release, warm, tmp_path, 300, *expected, bundle=bundle, off=off) == expected
