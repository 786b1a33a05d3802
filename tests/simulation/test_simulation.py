"""A fixed set of worlds on pinned vLLM releases; the world itself, the reference, and mutants of our patches.

Where one fails, `python -m tests.simulation --release R --seed S --mode M [--bundle DIR]` shrinks it and tells it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools.releases import registry

from tests.releases import executed
from tests.simulation import answers, setups, shrink
from tests.simulation.cases import CASES, LATE_OLDEST, LOST, Case
from tests.simulation.mutants import MUTANTS, Mutant

RELEASES = [pin.version for pin in registry.pins("vllm")]
SOME = executed.ends(RELEASES)
"""Where stock and the world itself are looked at in CI."""
PATCHED_ON = executed.chosen(["0.14.1", "0.16.0", "0.22.1", "0.27.1", "0.30.0", "0.33.0"], RELEASES)
"""The ends, and each release from which the scheduler tells ends, fences or keeps loads otherwise."""
OLDEST, NEWEST = "0.16.0", "0.33.0"
EARLIER = ("0.16.0", "0.32.0")
"""Releases that version 0.1.0 was made for."""
STOCK, PATCHED, TAME, HUNT = range(20), range(30), range(12), range(150)
"""Seeds: what stock must break, what patched must not, what stock must not, and where faults must be found."""
LOST_STOCK, LOST_PATCHED, LOST_TAME = range(10), range(30), range(8)
"""The same of losses.py, whose worlds lose loads, peers and servers."""
REFERENCE = range(10)
"""Seeds of either that the reference must pass."""
WRONG = ("first-completion", "sends-only", "loads-only", "drops-receives", "promotes-at-send", "believes-duplicates",
         "believes-sends", "adds-at-once", "forgets-parked")  # fmt: skip


def broken(worlds: list[Any]) -> list[str]:
    """The worlds that broke an invariant, as one reads them."""
    return [
        f"{'--losses ' if world['losses'] else ''}--seed {world['seed']} --mode {world['mode']}: {fault['kind']}: {fault['text']} (step {fault['step']})"
        for world in worlds
        for fault in world["faults"][:1]
    ]


def counted(worlds: list[Any]) -> Counter[str]:
    """In how many worlds each invariant was broken."""
    return Counter(kind for world in worlds for kind in shrink.kinds(world))


@pytest.mark.parametrize("release", SOME)
def test_stock(release: str, warm: setups.Interpreter) -> None:
    """Stock dies of these worlds, and passes where nobody aborts, lies, or gives up."""
    worlds = setups.run(warm, setups.Setup(release), STOCK, losses=LOST_STOCK)
    assert counted([world for world in worlds if not world["losses"]])["engine died"] > 0
    lost = counted([world for world in worlds if world["losses"]])
    assert set(lost) >= {"engine died", "computed on wrong KV", "freed while being loaded"}
    tame = setups.run(warm, setups.Setup(release, tame=True), TAME, losses=LOST_TAME)
    assert broken([world for world in tame if not world["notes"]]) == []
    assert sum(not world["notes"] for world in tame) > len(tame) // 2


@pytest.mark.parametrize("release", PATCHED_ON)
def test_patched(release: str, warm: setups.Interpreter, bundle: Path) -> None:
    """With the bundle no invariant is broken."""
    assert broken(setups.run(warm, setups.Setup(release, bundle), PATCHED, losses=LOST_PATCHED)) == []


@pytest.mark.parametrize("release", EARLIER)
def test_patched_where_lost_loads_fail(release: str, warm: setups.Interpreter, bundle: Path) -> None:
    """Nor where a request whose load was lost ends with an error, as the engine's policy says."""
    setup = setups.Setup(release, bundle, environ={"LIVEPATCH_FAILED_LOADS_ON_LOSS": "engine"})
    assert broken(setups.run(warm, setup, losses=LOST_PATCHED)) == []


@pytest.mark.parametrize("release", SOME)
def test_reference(release: str, warm: setups.Interpreter) -> None:
    """The world is right: a scheduler that knows which transfers are outstanding, and holds for them, passes."""
    assert broken(setups.run(warm, setups.Setup(release, policy="reference"), REFERENCE, losses=REFERENCE)) == []


@pytest.mark.parametrize("policy", WRONG)
def test_wrong_policies_are_caught(policy: str, warm: setups.Interpreter) -> None:
    """Each way to be wrong shows."""
    assert broken(setups.run(warm, setups.Setup(NEWEST, policy=policy, until_one_fails=True), HUNT))


@pytest.mark.parametrize("wrong", answers.WRONG)
def test_workers_that_answer_wrongly_are_caught(wrong: str, warm: setups.Interpreter, bundle: Path) -> None:
    """Each answer shows that does not rest on evidence: the scheduler's patches cannot make up for it."""
    setup = setups.Setup(NEWEST, bundle, answers=wrong, until_one_fails=True)
    assert broken(setups.run(warm, setup, losses=HUNT))


@pytest.mark.parametrize("release", EARLIER)
def test_the_first_version_is_found_wrong(release: str, warm: setups.Interpreter, first_version: Path) -> None:
    """What version 0.1.0 did wrong is found by drawn worlds alone, and by what it did."""
    found = counted(setups.run(warm, setups.Setup(release, first_version), HUNT))
    assert set(found) >= {
        "freed while being sent",
        "freed while being loaded",
        "load into another's block",
        "computed on wrong KV",
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant, warm: setups.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each fault built into our patch shows."""
    setup = setups.Setup(mutant.release, mutant.make(bundle, tmp_path), until_one_fails=True)
    assert broken(setups.run(warm, setup, losses=HUNT) if mutant.losses else setups.run(warm, setup, HUNT))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_found_faults_stay_away(case: Case, warm: setups.Interpreter, bundle: Path) -> None:
    """What was found once is not there now."""
    setup = setups.Setup(case.release, bundle, modes=[case.mode])
    assert broken(setups.run(warm, setup, plans=[case.plan])) == []


def test_losses_that_stock_does_not_survive(warm: setups.Interpreter, bundle: Path) -> None:
    """What was drawn once and broke a stock release, is right with the bundle."""
    release = LOST[0].release
    plans = [case.plan for case in LOST]
    found = [
        (world["mode"], shrink.kinds(world))
        for world in setups.run(warm, setups.Setup(release, answers="patched"), plans=plans)
    ]
    for number, case in enumerate(LOST):
        played = dict(found[number * len(setups.MODES) : (number + 1) * len(setups.MODES)])
        assert case.breaks in played[case.mode], case.name
    assert broken(setups.run(warm, setups.Setup(release, bundle), plans=plans)) == []


def test_a_load_deadlock_beyond_0_30_0_is_a_fault(warm: setups.Interpreter) -> None:
    """Where a release keeps loaded requests apart, none may stop it; to 0.30.0 some do, which is noted."""
    plan = LATE_OLDEST.plan
    for release, notes in (("0.30.0", ["load deadlock: the first holds no blocks"]), ("0.31.0", [])):
        worlds = setups.run(warm, setups.Setup(release), plans=[plan])
        assert [(world["faults"], world["notes"]) for world in worlds] == [([], notes)] * len(setups.MODES)
    (setup, found) = setups.Setup(NEWEST, policy="loads-deadlock", until_one_fails=True), set()
    for world in setups.run(warm, setup, HUNT):
        found |= {fault["text"] for fault in world["faults"] if fault["kind"] == "never ends"}
    assert "load deadlock: the first holds blocks, and lacks some" in found


def test_a_seed_tells_the_same_story_in_two_interpreters(
    warm: setups.Interpreter, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed goes the same way in a process that shares nothing with the first."""
    monkeypatch.delenv(setups.SERVED, raising=False)
    setup = setups.Setup(NEWEST, bundle, tell=True)
    with setups.interpreters(1, setups.engine_python()) as (another,):
        reported = setups.run(another, setup, TAME, losses=TAME)
    assert setups.run(warm, setup, TAME, losses=TAME) == reported
    assert all(world["story"] for world in reported)


def test_a_failing_seed_is_shrunk(warm: setups.Interpreter) -> None:
    """What is shrunk breaks the same invariant with fewer requests, and its story says where."""
    setup = setups.Setup(NEWEST, policy="sends-only", modes=["Scheduler"])
    found = setups.run(warm, setup, TAME)
    world = next(world for world in found if "freed while being loaded" in shrink.kinds(world))
    plan = shrink.draw(world["seed"])

    def fails(plans: Any) -> list[bool]:
        found = setups.run(warm, setup, plans=[each.to_json() for each in plans])
        return ["freed while being loaded" in shrink.kinds(each) for each in found]

    small = shrink.shrink(plan, fails)
    assert fails([small]) == [True]
    assert len(small.requests) < len(plan.requests)
    setup.tell = True
    (reported,) = setups.run(warm, setup, plans=[small.to_json()])
    assert any("WRONG: freed while being loaded" in line for line in reported["story"])
