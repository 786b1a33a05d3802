"""A fixed set of worlds on every pinned vLLM release; the world itself, the reference, and mutants of our patches.

Where one fails, `python -m tests.simulation --release R --seed S --mode M [--bundle DIR]` shrinks it and tells it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools import registry

from tests.simulation import arms, shrink
from tests.simulation.cases import CASES, Case
from tests.simulation.conftest import python_of_engine
from tests.simulation.mutants import MUTANTS, Mutant

RELEASES = [pin.version for pin in registry.pins("vllm")]
OLDEST, NEWEST = "0.16.0", "0.33.0"
EARLIER = ("0.16.0", "0.21.0", "0.26.0", "0.32.0")
"""Releases that version 0.1.0 was made for."""
STOCK, PATCHED, TAME, HUNT = range(30), range(100), range(20), range(150)
"""Seeds: what stock must break, what patched must not, what stock must not, and where faults must be found."""
WRONG = ("first-completion", "sends-only", "loads-only", "drops-receives", "promotes-at-send", "believes-duplicates",
         "believes-sends", "adds-at-once", "forgets-parked")  # fmt: skip


def broken(worlds: list[Any]) -> list[str]:
    """The worlds that broke an invariant, as one reads them."""
    return [
        f"--seed {world['seed']} --mode {world['mode']}: {fault['kind']}: {fault['text']} (step {fault['step']})"
        for world in worlds
        for fault in world["faults"][:1]
    ]


def counted(worlds: list[Any]) -> Counter[str]:
    """In how many worlds each invariant was broken."""
    return Counter(kind for world in worlds for kind in shrink.kinds(world))


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: arms.Interpreter) -> None:
    """Stock dies of these worlds, and passes where nobody aborts, lies, or gives up."""
    assert counted(arms.run(warm, arms.Arm(release), STOCK))["engine died"] > 0
    tame = arms.run(warm, arms.Arm(release, tame=True), TAME)
    assert broken([world for world in tame if not world["notes"]]) == []
    assert sum(not world["notes"] for world in tame) > len(tame) // 2


@pytest.mark.parametrize("release", RELEASES)
def test_patched(release: str, warm: arms.Interpreter, bundle: Path) -> None:
    """With the bundle no invariant is broken."""
    assert broken(arms.run(warm, arms.Arm(release, bundle), PATCHED)) == []


@pytest.mark.parametrize("release", RELEASES)
def test_reference(release: str, warm: arms.Interpreter) -> None:
    """The world is right: a scheduler that knows which transfers are outstanding, and holds for them, passes."""
    assert broken(arms.run(warm, arms.Arm(release, policy="reference"), PATCHED)) == []


@pytest.mark.parametrize("policy", WRONG)
def test_wrong_policies_are_caught(policy: str, warm: arms.Interpreter) -> None:
    """Each way to be wrong shows."""
    assert broken(arms.run(warm, arms.Arm(NEWEST, policy=policy), HUNT))


@pytest.mark.parametrize("release", EARLIER)
def test_the_first_version_is_found_wrong(release: str, warm: arms.Interpreter, first_version: Path) -> None:
    """What version 0.1.0 did wrong is found by drawn worlds alone, and by what it did."""
    found = counted(arms.run(warm, arms.Arm(release, first_version), HUNT))
    assert set(found) >= {
        "freed while being sent",
        "freed while being loaded",
        "load into another's block",
        "computed on wrong KV",
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant, warm: arms.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each fault built into our patch shows."""
    assert broken(arms.run(warm, arms.Arm(mutant.release, mutant.make(bundle, tmp_path)), HUNT))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_found_faults_stay_away(case: Case, warm: arms.Interpreter, bundle: Path) -> None:
    """What was found once is not there now."""
    arm = arms.Arm(case.release, bundle, modes=[case.mode])
    assert broken(arms.run(warm, arm, plans=[case.plan])) == []


def test_a_seed_tells_the_same_story_in_two_interpreters(warm: arms.Interpreter, bundle: Path) -> None:
    """Each seed goes the same way in a process that shares nothing with the first."""
    arm = arms.Arm(NEWEST, bundle, tell=True)
    with arms.interpreters(1, python_of_engine()) as (another,):
        told = arms.run(another, arm, TAME)
    assert arms.run(warm, arm, TAME) == told
    assert all(world["story"] for world in told)


def test_a_failing_seed_is_shrunk(warm: arms.Interpreter) -> None:
    """What is shrunk breaks the same invariant with fewer requests, and its story says where."""
    arm = arms.Arm(NEWEST, policy="sends-only", modes=["Scheduler"])
    found = arms.run(warm, arm, HUNT)
    world = next(world for world in found if "freed while being loaded" in shrink.kinds(world))
    plan = shrink.draw(world["seed"])

    def fails(plans: Any) -> list[bool]:
        found = arms.run(warm, arm, plans=[each.to_json() for each in plans])
        return ["freed while being loaded" in shrink.kinds(each) for each in found]

    small = shrink.shrink(plan, fails)
    assert fails([small]) == [True]
    assert len(small.requests) < len(plan.requests)
    arm.tell = True
    (told,) = arms.run(warm, arm, plans=[small.to_json()])
    assert any("WRONG: freed while being loaded" in line for line in told["story"])
