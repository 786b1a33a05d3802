"""vLLM's engine core while a finished request's blocks are held, and its worker's queue, stock and patched.

See driver/idle_stepping.py and idle_queue.py: seconds are the driver's own, so that every figure is the same on every
machine. One release of each form of the code is run; the others by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.tools.bundles import catalogue

PATCH = "idle-stepping"
DRIVER = PATCH.replace("-", "_")
ENTRIES = catalogue.load()
VARIANTS = ENTRIES[PATCH].patch.variants
EVERY = [release for variant in VARIANTS if variant.verdict == "needed" for release in variant.releases]
NEEDED = executed.first(EVERY)
EARLIER = [release for variant in VARIANTS if variant.verdict == "not-present" for release in variant.releases]
WITHOUT = executed.chosen(EARLIER[-1:], EARLIER)
ALONE = {f"LIVEPATCH_{name.replace('-', '_').upper()}": "off" for name in ENTRIES if name != PATCH}
NEWEST = EVERY[-1]
MODES = ("Scheduler", "AsyncScheduler")

TURN = 0.003
"""Seconds between the beginnings of two steps on stock: a step, and upstream's sleep of a millisecond."""
WAIT = 0.05
"""The option's default."""
LEFT_ALONE = ("loading", "no_room", "pausing", "scaling", "ending", "data_parallel")
"""Cases in which more than holds remain, or which the patch does not judge."""
RESTING = {"spins": 0, "polls": [20, 20, 20], "late": 0.0}
"""A worker that hears of a step 50 ms later."""


def turns(seconds: float) -> Any:
    """So many seconds of stepping without a pause, give or take one step."""
    return pytest.approx(seconds / TURN, abs=1.5)


@pytest.mark.parametrize("release", NEEDED)
def test_nothing_but_holds(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Stock steps without a pause, and its worker spins; patched, 20 to 40 steps a second are made, and it rests."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=ALONE, with_stock=True)
    for mode in MODES:
        stock, patched = run["stock"][mode], run["patched"][mode]
        assert stock["held"]["steps"] == turns(1.0)
        assert 15 <= patched["held"]["steps"] <= 40
        assert patched["held"]["late"] <= WAIT + 2 * TURN
        assert stock["held_shortly"]["late"] <= 2 * TURN
        assert patched["held_shortly"]["late"] <= 0.1 / 8 + 2 * TURN
        assert max(stock["newcomer"]["late"], patched["newcomer"]["late"]) <= TURN
        assert stock["newcomer"]["steps"] == turns(0.5)
        assert 7 <= patched["newcomer"]["steps"] <= 20
        for case in LEFT_ALONE:
            assert patched[case]["steps"] == pytest.approx(stock[case]["steps"], abs=1), case
            assert patched[case].get("late", 0) <= stock[case].get("late", 0) + TURN, case
        assert patched["room_unseen"]["steps before it"] <= stock["room_unseen"]["steps before it"] + 1
        assert patched["pushing"]["steps"] == stock["pushing"]["steps"] == turns(0.5)
        assert stock["pushing"]["steps then"] == turns(0.5)
        assert patched["pushing"]["steps then"] <= 20
    stock, patched = run["stock"]["queue"], run["patched"]["queue"]
    last = stock["idle then"]["polls"][-1]  # upstream's own: 5 s from 0.27.1 on, and no end before
    assert stock["apart"] == {"spins": 501, "polls": [], "late": 0.0001}
    assert patched["apart"] == patched["another call"] == RESTING
    assert patched["a request"] == {"spins": 0, "polls": [20, 20], "late": 0.0}
    assert patched["not told of"] == {**RESTING, "late": 0.01}
    assert patched["idle then"] == {"spins": 0, "polls": [*[20] * 50, last], "late": 0.0}
    for case in ("after a request", "together", "after another call", "something else"):
        assert patched[case] == stock[case], case
        assert stock[case]["polls"] == []
    patch = interpreter.reported(tmp_path, PATCH, run["pid"])
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert set(patch["counters"]) == {"slowed"}


def test_beside_the_others(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """What the other patches do in the scheduler changes nothing of it."""
    run = warm.run(DRIVER, {"vllm": NEWEST}, tmp_path, bundle=bundle)
    for mode in MODES:
        assert run["stock"][mode]["held"]["steps"] == turns(1.0)
        assert run["patched"][mode]["held"]["steps"] <= 40
        assert run["patched"][mode]["loading"]["steps"] == pytest.approx(run["stock"][mode]["loading"]["steps"], abs=1)
    assert interpreter.reported(tmp_path, PATCH, run["pid"])["state"] == "applied"


def test_no_wait(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """WAIT_SECONDS=0: steps as on stock."""
    environ = {**ALONE, "LIVEPATCH_IDLE_STEPPING_WAIT_SECONDS": "0"}
    run = warm.run(DRIVER, {"vllm": NEWEST}, tmp_path, bundle=bundle, environ=environ)
    assert {mode: run["patched"][mode] for mode in MODES} == {mode: run["stock"][mode] for mode in MODES}


@pytest.mark.parametrize("release", WITHOUT)
def test_before_the_fault(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """To 0.21.0 an engine makes no step for what it holds; the blocks come back with the next request's steps."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, arguments=["held"])
    for mode in MODES:
        assert run["stock"][mode]["held"] == {"steps": 0, "late": None}
