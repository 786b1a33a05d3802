"""vLLM's real Mooncake connectors and Mooncake's real transfer engine: asks that are refused, lost and late.

Prefill and decode ask and answer over the loopback; contents of blocks are compared. Each case says what decode is told
of a load (its own contents, that it failed, or nothing), and what prefill lets go. A run takes seconds of a core: one release of
each form of the code is run patched, and on stock those where stock begins to differ; the others by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "mooncake_asks"
PATCHES = ("mooncake-failed-loads", "mooncake-lost-asks")
EVERY = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.16")]
RELEASES = executed.ends(EVERY)
GROUPS = [release for release in EVERY if Version("0.20") <= Version(release) < Version("0.30")]
"""Those whose connector serves models of several KV groups, and whose scheduler does not take their failed loads."""
STOCK = executed.first(EVERY)
NOTHING, FAILED, OWN = "nothing is told", "failed", "its own"

RIGHT = {
    "in_turn": [OWN, True],
    "at_once": [OWN, True],
    "fewer": [FAILED, OWN],
    "stopped": FAILED,
    "aborted": FAILED,
    "aborted_in_queue": FAILED,
    "begun_again": [OWN, True],
    "begun_again_at_once": [OWN, OWN],
    "no_leg": [FAILED, False],
    "unreachable": FAILED,
    "unknown": FAILED,
    "some_unknown": [FAILED, False, FAILED, True],
    "never_sent": [FAILED, False, OWN],
    "known_later": [FAILED, OWN],
    "uneven": [FAILED, OWN],
    "registering": [FAILED, OWN],
    "killed": [FAILED, FAILED, OWN],
    "waiting": [OWN, [OWN, OWN]],
    "tried_again": [OWN, True],
    "tried_again_first": [OWN, True],
    "tried_again_unheard": [OWN, True],
    "tried_again_apart": [OWN, True],
    "tried_again_at_once": [OWN, True],
    "tried_again_twice": [OWN, True, False, OWN, True],
    "let_go_named": [True, False, True],
    "let_go_first": [FAILED, True],
    "let_go_before": [FAILED, True, True],
    "let_go_last": [FAILED, True, True],
    "let_go_amid": [False, OWN, True],
    "let_go_beside": [OWN, FAILED, True],
    "slots": [OWN, True, True, OWN],
    "stray": [True, OWN],
    "odd_id": OWN,
    "two_legs": [OWN, True, True],
    "two_legs_at_once": [OWN, True, True],
    "two_legs_in_turn": [OWN, True, OWN],
    "two_legs_one_aborted": [OWN, True],
    "two_legs_later": [OWN, FAILED],
}


WAITS = {**RIGHT, "broken": [NOTHING] * 2, "killed": [NOTHING, FAILED, OWN]}
"""To 0.29.0, as on stock, what was asked for and may still be written waits for good."""


def reports_failures(release: str) -> bool:
    """vLLM PR#50984: what prefill answers as failed is told to decode's scheduler."""
    return Version(release) >= Version("0.30")


def numbers_may_differ(release: str) -> bool:
    """A prefill engine may have more workers than a decode engine, or fewer."""
    return Version(release) >= Version("0.19")


def empty_is_no_load(release: str) -> bool:
    """Decode that is told of the end of what it let go of does not take that for the end of a load."""
    return Version(release) >= Version("0.32")


def asks_before(release: str) -> bool:
    """Some of a prefill engine's workers are asked before it is seen that another one is not known."""
    return Version("0.19") <= Version(release) < Version("0.24")


def stock(release: str) -> dict[str, Any]:
    outcome = FAILED if reports_failures(release) else NOTHING
    # From 0.30.0 a prefill engine may have stages. To 0.32.0 blocks are given away into which one of them writes.
    one_of_two = {"one_of_two": [Version(release) < Version("0.33"), FAILED, Version(release) >= Version("0.33")]}
    if not reports_failures(release):
        one_of_two = {}
    # 0.33.0 notices what an answer leaves out; but prefill's answer to an ask for what was aborted does not come.
    left_out = FAILED if Version(release) >= Version("0.33") else NOTHING
    return {
        **RIGHT,
        "fewer": [outcome, OWN if Version(release) >= Version("0.19") else NOTHING],
        "stopped": NOTHING,
        "aborted": NOTHING,
        "aborted_in_queue": NOTHING,
        "no_leg": [outcome, True],
        "unreachable": outcome,
        "unknown": outcome,
        "some_unknown": [NOTHING, asks_before(release), NOTHING, True],
        "never_sent": [outcome, False, OWN],
        "broken": [outcome, outcome],
        "begun_again_at_once": [NOTHING] * 2,
        "known_later": [NOTHING] * 2,
        "uneven": [NOTHING] * 2,
        # It takes one of prefill's two workers for all, and keeps it; before 0.19 that one says so, and writes nothing.
        "registering": [NOTHING, f"wrong: {'[nan, nan]' if numbers_may_differ(release) else '[-79.0, -78.0]'}"],
        "killed": [NOTHING] * 3,
        "waiting": [NOTHING, [OWN, OWN]],
        "tried_again_unheard": [left_out, True],  # of who waits, the first to be woken has the blocks
        "tried_again_twice": [left_out, True, False, OWN, True],
        "let_go_named": [True, not empty_is_no_load(release), True],
        "let_go_first": [NOTHING, True],
        "let_go_before": [NOTHING, True, True],
        "let_go_last": NOTHING,
        "let_go_amid": [True, "wrong: [301.0, 302.0]", True],
        "let_go_beside": [OWN, OWN, True],  # it has another one to wait for
        "slots": [NOTHING, False, True, OWN],
        "stray": [False, NOTHING],
        "odd_id": NOTHING,
        "two_legs": ["wrong: [104.0, 105.0]", False, True],
        "two_legs_at_once": ["wrong: [104.0, 105.0]", False, True],
        # Behind `slots` and `stray` nobody is served; alone, the first is: [OWN, True, NOTHING].
        "two_legs_in_turn": [NOTHING, False, NOTHING],
        "two_legs_one_aborted": [NOTHING, False],
        "two_legs_later": [NOTHING, NOTHING],
        **one_of_two,
    }


def patched(release: str) -> dict[str, Any]:
    """What decode is told, and what prefill lets go of."""
    named = empty_is_no_load(release)
    return {**served(release), "let_go_named": [named, not named, True]}


def served(release: str) -> dict[str, Any]:
    if not numbers_may_differ(release):
        return {**WAITS, "uneven": [FAILED] * 2, "registering": [FAILED] * 2}
    # What a write that failed, or a process that was killed, wrote may come yet: to 0.29.0 nobody gets the blocks.
    if reports_failures(release):
        return {**RIGHT, "broken": [FAILED] * 2, "one_of_two": [False, FAILED, True]}
    if asks_before(release):  # the load has failed, and is told so when nobody writes for it any more
        return {**WAITS, "some_unknown": [NOTHING, True, FAILED, True]}
    return WAITS


@pytest.mark.parametrize("release", STOCK)
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    """Loads that were refused wait for ever, and so does everybody behind asks that wait."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.3"])
    assert run["cases"] == stock(release)


@pytest.mark.parametrize("release", RELEASES)
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """Each load that came to nothing is told as failed, and each ask is served that can be."""
    environ = {"LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, path=mooncake, arguments=["30"], environ=environ)
    assert run["cases"] == patched(release)
    (report,) = (file for file in (tmp_path / "state").glob("*.json") if pid_of(file) == run["pid"])
    # Who had too few blocks beside a write that failed is held too, where the answer does not say which is which.
    # An ask that was never sent holds nothing; from 0.30.0 on the release itself reports it.
    refused, held = (4 if reports_failures(release) else 18), {"held": 4}
    if not numbers_may_differ(release):
        refused, held = 21, {"held": 3}
    elif Version("0.30") <= Version(release) < Version("0.33"):
        held = {"held": 5}  # one by the first of two workers
    for name, counters in (
        ("mooncake-failed-loads", {"failed": refused, "closed": 1, **held}),
        ("mooncake-lost-asks", {"given_up": 14, "refused": 4, "let_go": 14, "second": 3, "no_ask": 1, "not_whole": 1}),
    ):
        patch = interpreter.read(report, name)
        assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
        assert patch["counters"] == counters


@pytest.mark.parametrize(("patches", "came_to"), [("on", "RUNNING"), ("off", "the engine ends")])
@pytest.mark.parametrize("release", executed.chosen(["0.29.0"], [one for one in EVERY if one in GROUPS]))
def test_a_model_of_several_groups_needs_failed_loads_to_0_29(
    release: str,
    patches: str,
    came_to: str,
    warm: interpreter.Interpreter,
    mooncake: list[Path],
    bundle: Path,
    tmp_path: Path,
) -> None:
    """The scheduler cannot take a load that failed by its blocks; stock never reports one, and the request waits."""
    environ = {"LIVEPATCH_FAILED_LOADS": patches}
    given = {"bundle": bundle, "path": mooncake, "arguments": ["30"], "environ": environ}
    assert warm.run("mooncake_hybrid", {"vllm": release}, tmp_path, **given)["came_to"] == came_to


@pytest.mark.parametrize("release", executed.chosen(["0.29.0"], [one for one in EVERY if one in GROUPS]))
def test_stock_waits_with_a_model_of_several_groups(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path
) -> None:
    run = warm.run("mooncake_hybrid", {"vllm": release}, tmp_path, path=mooncake, arguments=["1"])
    assert run["came_to"] == "WAITING_FOR_REMOTE_KVS"


def pid_of(report: Path) -> int:
    """Of two processes that are killed there are reports, too."""
    return int(json.loads(report.read_text(encoding="utf-8"))["pid"])
