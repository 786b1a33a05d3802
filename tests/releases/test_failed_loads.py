"""Every pinned vLLM's real schedulers: loads fail, in the step itself or beside it, with one KV cache group or two.

Slots have contents, and each token says whether it was sampled on the request's own KV (driver/failed_loads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "failed_loads"
PATCH = "failed-loads"
RELEASES = [pin.version for pin in registry.pins("vllm")]
POLICY_WAS_RECOMPUTE = "0.17.0"
"""Before this release `fail` is no default, but an operator's choice, and is followed."""

RIGHT = "right"
STALE = "lost runs past its end, lost got a token sampled on lost KV"
NEXT_TOO = f"{STALE}, next got a token sampled on lost KV"
CACHED = "after got a token sampled on lost KV, again got a token sampled on lost KV"
ASKED_FOR_EVER = "requests never end, requests never freed, pool not full, lost got another answer"
STUCK = "requests never end, requests never freed"
STUCK_NOT = ("0.19.0", "0.23.0")
"""From the first and before the second of these, stock ends `later_small_pool_idle`. Before them a load that is to be done
again holds what another needs; later the blocks that a failed load gave back are kept free for it."""
LOADS_AGAIN_TO = "0.21.0"
"""Up to here a request that is let in again loads again at once. Later its blocks may be in the prefix cache still."""
RESUMED = {RIGHT, "it did not load again, no load failed"}
GROUPS = (
    "groups_now",
    "groups_now_window",
    "groups_now_passed",
    "groups_now_fail",
    "groups_later",
    "groups_later_window",
    "groups_later_fail",
)

STOCK = {
    "Scheduler": {
        **dict.fromkeys(
            ("now", "now_first", "now_shared", "now_reset", "now_fail", "later", "later_fail", "later_idle"), RIGHT
        ),
        "now_aborted": CACHED,
        "later_first": ASKED_FOR_EVER,
    },
    "AsyncScheduler": {
        **dict.fromkeys(("now_fail", "later", "later_fail", "later_idle"), RIGHT),
        "now": STALE,
        "now_first": STALE,
        "now_shared": NEXT_TOO,
        "now_aborted": CACHED,
        "later_first": ASKED_FOR_EVER,
    },
}
"""What stock comes to with one group. A preemption before the failure is known (`now_reset`) differs, and is apart."""


def asked(release: str, mode: str) -> dict[str, str]:
    """What stock comes to where an operator's command line has `fail`, and where it has no policy."""
    by_default = RIGHT if Version(release) >= Version(POLICY_WAS_RECOMPUTE) else STOCK[mode]["now"]
    return {"asked_fail": RIGHT, "asked_nothing": by_default}


OTHERS = ("now_reset", "later_small_pool_idle", "asked_fail", "asked_nothing", *GROUPS)
"""Further cases."""
ALONE = ("asked_fail", "later_fail", "later_idle", "groups_now_fail", "groups_later_fail")
FAILED = {
    "Scheduler": {name: ["lost"] for name in ("now_fail", *ALONE)},
    "AsyncScheduler": {name: ["lost"] for name in ALONE} | {"now_fail": ["lost", "next"]},
}
"""Who ends with an error where the engine's policy is followed: with steps under way, who shares the lost blocks, too."""


def outcomes(result: dict[str, Any], mode: str) -> dict[str, str]:
    return {case: found["outcome"] for case, found in result[mode].items()}


def failed(result: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The requests that ended with an error, by scheduler and case."""
    return {
        mode: {case: sorted(found["ends"]) for case, found in result[mode].items() if found["ends"]} for mode in STOCK
    }


def stock_of_groups(release: str, mode: str) -> dict[str, str]:
    """Up to 0.29 the one list is unpacked from two; 0.30.0 takes the first group alone; later releases refuse."""
    if Version(release) < Version("0.30"):
        return dict.fromkeys(GROUPS, "ValueError in _update_requests_with_invalid_blocks")
    if Version(release) >= Version("0.31"):
        return dict.fromkeys(GROUPS, "RuntimeError in _handle_invalid_blocks")
    stale = (
        dict.fromkeys(("groups_now", "groups_now_window", "groups_now_passed"), NEXT_TOO)
        if mode == "AsyncScheduler"
        else {}
    )
    return dict.fromkeys(GROUPS, RIGHT) | stale


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Tokens that were sampled on lost KV are delivered, or the engine ends, or asks for the same load for ever."""
    result = warm.run(DRIVER, {"vllm": release}, tmp_path)
    for mode, expected in STOCK.items():
        found = outcomes(result, mode)
        if mode == "AsyncScheduler":
            assert "lost got a token sampled on lost KV" in found.pop("now_reset")
        resumed = found.pop("now_resumed")
        if Version(release) <= Version(LOADS_AGAIN_TO):
            assert resumed == "lost got a token sampled on lost KV"
        small_pool = RIGHT if Version(STUCK_NOT[0]) <= Version(release) < Version(STUCK_NOT[1]) else STUCK
        assert found == expected | stock_of_groups(release, mode) | asked(release, mode) | {
            "later_small_pool_idle": small_pool
        }


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Whoever lost a load is computed here: every token is right, every request ends, nothing is left."""
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle)
    for mode, cases in STOCK.items():
        found = outcomes(result, mode)
        resumed = found.pop("now_resumed")
        assert resumed == RIGHT if Version(release) <= Version(LOADS_AGAIN_TO) else resumed in RESUMED
        assert found == dict.fromkeys((*cases, *OTHERS), RIGHT)
    assert failed(result) == (
        FAILED
        if Version(release) < Version(POLICY_WAS_RECOMPUTE)
        else {mode: {"asked_fail": ["lost"]} for mode in STOCK}
    )
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"]["withheld"]


@pytest.mark.parametrize(
    "release", executed.chosen(["0.16.0", "0.33.0"], ["0.14.1", "0.16.0", "0.17.0", "0.29.0", "0.33.0"])
)
def test_engine_policy(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """`ON_LOSS=engine`: where the policy is `fail`, the request ends with an error, and nobody gets a wrong token."""
    environ = {"LIVEPATCH_FAILED_LOADS_ON_LOSS": "engine"}
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ)
    for mode, cases in STOCK.items():
        found = outcomes(result, mode)
        resumed = found.pop("now_resumed")
        assert resumed == RIGHT if Version(release) <= Version(LOADS_AGAIN_TO) else resumed in RESUMED
        assert found == dict.fromkeys((*cases, *OTHERS), RIGHT)
    default = {} if Version(release) < Version(POLICY_WAS_RECOMPUTE) else {"asked_nothing": ["lost"]}
    assert failed(result) == {mode: {**ends, **default} for mode, ends in FAILED.items()}


@pytest.mark.parametrize("release", executed.chosen(["0.16.0", "0.33.0"], ["0.16.0", "0.24.0", "0.29.0", "0.33.0"]))
def test_a_policy_that_is_set(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """A configuration is made, copied and sent as on stock, and what somebody has set is known from what nobody has."""
    stock = warm.run("failure_policy", {"vllm": release}, tmp_path)["ways"]
    copies = stock["constructor"]
    assert stock == {way: dict.fromkeys(copies) for way in stock}
    patched = warm.run("failure_policy", {"vllm": release}, tmp_path, bundle=bundle)["ways"]
    is_set = {way: "given" in way or way == "assigned" for way in stock}
    assert patched == {way: dict.fromkeys(copies, expected) for way, expected in is_set.items()}
