"""vLLM's real OffloadingConnector, scheduler and runner's part: transfers that fail, are refused, or raise.

Blocks on both sides have contents (driver/offloading_failures.py). On stock each failure ends the engine. CI runs the first
release of each form that differs in what the patch does, the others are run by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "offloading_failures"
PATCH = "offloading-failed-transfers"
EVERY = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.21")]
RELEASES = executed.chosen(["0.21.0", "0.33.0"], EVERY)
STOCK = executed.chosen(["0.21.0", "0.33.0"], EVERY)
MODES = ("Scheduler", "AsyncScheduler")

RIGHT = "right"
ENDED = "AssertionError in get_finished"
STORE_REFUSED = "AssertionError in handle_preemptions"
LOAD_REFUSED = "AssertionError in start_kv_transfers"
FAILURES = {
    "store_failed": ENDED,
    "store_refused": STORE_REFUSED,
    "store_flushed": ENDED,
    "store_flushed_refused": STORE_REFUSED,
    "store_first_worker": ENDED,
    "store_second_worker": STORE_REFUSED,
    "load_failed": ENDED,
    "load_refused": LOAD_REFUSED,
    "load_first_worker": LOAD_REFUSED,
    "load_second_worker": ENDED,
    "load_fail": ENDED,
    "load_longer": ENDED,
    "load_longer_fail": ENDED,
    "load_aborted": ENDED,
}
"""What stock comes to."""


def not_ours(release: str) -> dict[str, str]:
    """An error that a backend raises; to 0.24.0 the release takes it for a refusal. And a cache that is reset."""
    if Version(release) < Version("0.25"):
        return {"well": RIGHT, "store_raises": STORE_REFUSED, "load_raises": LOAD_REFUSED}
    return {"well": RIGHT, **dict.fromkeys(("store_raises", "load_raises"), "RuntimeError in begin")}


def cleared(release: str, otherwise: str) -> dict[str, str]:
    """To 0.21.0 the connector's cache cannot be reset; to 0.25.1 that ends stock's engine, whatever fails."""
    if Version(release) < Version("0.22"):
        return {}
    return {"store_cleared": "KeyError in _build_store_jobs" if Version(release) < Version("0.26") else otherwise}


def tiered(release: str) -> dict[str, str]:
    """From 0.22.1 on there is a manager of several tiers, with an example of a second one."""
    return (
        {}
        if Version(release) < Version("0.22")
        else dict.fromkeys(("tiered_store_failed", "tiered_load_failed"), ENDED)
    )


def within_step(release: str) -> dict[str, str]:
    """A load within the step, which 0.33.0 is the first to have, still ends the engine if it fails."""
    if Version(release) < Version("0.33"):
        return {}
    ended = {"sync_failed": ENDED, "sync_fail": ENDED, "sync_refused": LOAD_REFUSED, "sync_second_worker": ENDED}
    return {"sync_well": RIGHT, **ended}


def outcomes(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {mode: {case: found["outcome"] for case, found in result[mode].items()} for mode in MODES}


@pytest.mark.parametrize("release", STOCK)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The engine ends at the first transfer that fails or is refused."""
    found = outcomes(warm.run(DRIVER, {"vllm": release}, tmp_path))
    failures = FAILURES | tiered(release)
    assert found == dict.fromkeys(MODES, failures | not_ours(release) | cleared(release, ENDED) | within_step(release))


@pytest.mark.parametrize("release", RELEASES)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Failed loads are computed here, failed stores are no hit, and both are done again by whoever comes next."""
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle)
    failures = FAILURES | tiered(release)
    expected = dict.fromkeys(failures, RIGHT) | not_ours(release) | cleared(release, RIGHT) | within_step(release)
    assert outcomes(result) == dict.fromkeys(MODES, expected)
    assert not any(found["ends"] for mode in MODES for found in result[mode].values())
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    more = 2 if tiered(release) else 0
    assert patch["counters"] == {"failed_loads": 16 + more, "failed_stores": 12 + more}


def test_engine_policy(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The engine's policy decides where `failed-loads` leaves it to the engine: with `fail`, that request ends, alone."""
    environ = {"LIVEPATCH_FAILED_LOADS_ON_LOSS": "engine"}
    cases = ["load_failed", "load_fail"]
    result = warm.run(DRIVER, {"vllm": "0.29.0"}, tmp_path, bundle=bundle, environ=environ, arguments=cases)
    assert outcomes(result) == dict.fromkeys(MODES, dict.fromkeys(cases, RIGHT))
    assert [result[mode][case]["ends"] for mode in MODES for case in cases] == [[], ["second"]] * 2


def test_alone(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Without `failed-loads`, the release's own way with loads that come later is right."""
    environ = {"LIVEPATCH_FAILED_LOADS": "off"}
    cases = ["load_failed", "load_second_worker"]
    result = warm.run(DRIVER, {"vllm": "0.29.0"}, tmp_path, bundle=bundle, environ=environ, arguments=cases)
    assert outcomes(result) == dict.fromkeys(MODES, dict.fromkeys(cases, RIGHT))
