"""Deciding on patches in a process: each once, in order, and what goes wrong meanwhile is a refusal."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import installed, process_decisions
from vllm_livepatch.sitecustomize.changes import HunkError
from vllm_livepatch.sitecustomize.decision import Decision, Environment, Patch, Variant
from vllm_livepatch.sitecustomize.patch_state import PatchState
from vllm_livepatch.sitecustomize.source_changes import TooLate

APPLY = Decision("needed", True, True, "needed", "")
REFUSED = Decision("drifted", False, True, "drifted", "somebody's edit")
FOUND = SimpleNamespace(release="1.0", companions={})


def patch(name: str, package: str = "engine", **more: Any) -> Patch:
    variants = (Variant({f"{package}.a:f": "f"}, ("1.0",)),)
    return Patch(name, package, "", (f"{package}.a:f",), (), variants, **more)


class World:
    """A decider of these patches; `look` is what it asks of the files, `decisions` are by patch."""

    def __init__(self, mocker: MockerFixture, *patches: Patch) -> None:
        self.states = [PatchState(one) for one in patches]
        self.decisions: dict[str, Decision] = {}
        self.notified: list[str] = []
        options: Any = {one.name: {} for one in patches}
        environment = Environment("auto", {}, options)
        everything = SimpleNamespace(all=self.states, packages={}, environment=environment, lock=threading.RLock())
        sources: Any = SimpleNamespace(texts={}, diffs=dict, put=mocker.Mock(), made=mocker.Mock())
        self.sources = sources
        self.look = mocker.patch.object(installed, "look", return_value=FOUND)
        mocker.patch.object(installed, "Process")
        mocker.patch.object(installed, "Overlay")
        mocker.patch.object(process_decisions, "decide", lambda one, *_: self.decisions.get(one.name, APPLY))
        catalogue: Any = {"digests": {one.name: f"digest of {one.name}" for one in patches}, "changes": {}}
        catalogue["changes"] = {one.name: [] for one in patches}
        patches_of_process: Any = everything
        self.decider = process_decisions.Decider(
            patches_of_process, sources, catalogue, None, lambda state: self.notified.append(state.patch.name)
        )


@pytest.mark.parametrize(
    ("error", "verdict", "reason"),
    [
        (TooLate("engine.a is imported"), "needed", "imported"),
        (HunkError("hunk 1 finds its lines nowhere"), "drifted", "drifted"),
        (RuntimeError("a file that cannot be read"), "drifted", "raised"),
    ],
)
def test_an_error_while_deciding_refuses_the_patch(
    mocker: MockerFixture, error: Exception, verdict: str, reason: str
) -> None:
    world = World(mocker, patch("one"))
    world.look.side_effect = error
    world.decider.decide(world.states)
    (state,) = world.states
    assert state.decision is not None
    assert (state.decision.verdict, state.decision.apply, state.decision.wanted) == (verdict, False, True)
    assert (state.state, state.reason, state.missing) == ("skipped", reason, True)
    assert state.detail is not None
    assert str(error) in state.detail


def test_what_was_imported_before_a_guard_armed_is_refused(mocker: MockerFixture) -> None:
    world = World(mocker, patch("one"), patch("other", "elsewhere"), patch("refused"))
    world.decisions["refused"] = REFUSED
    world.decider.too_late_for(["engine.a"])
    world.decider.decide(world.states)
    one, other, refused = world.states
    assert (one.state, one.reason) == ("skipped", "late")
    assert one.detail == "imported before the bundle was armed: engine.a"
    assert (other.state, other.reason, other.decision) == ("armed", None, APPLY)
    assert (refused.reason, refused.detail) == ("drifted", "somebody's edit")


def test_why_a_patch_applies_that_is_not_plainly_needed_is_known_before_it_does(mocker: MockerFixture) -> None:
    world = World(mocker, patch("plain"), patch("forced"))
    world.decisions["forced"] = Decision("drifted", True, True, "forced", "somebody's edit")
    world.decider.decide(world.states)
    assert [(one.state, one.reason) for one in world.states] == [("armed", None), ("armed", "forced")]


def test_source_changes_of_the_package_are_first_and_no_others(mocker: MockerFixture) -> None:
    patches = [patch("wraps"), patch("changes", diff="a.diff"), patch("elsewhere", "elsewhere", diff="b.diff")]
    world = World(mocker, *patches, patch("wraps-too"))
    world.decider.decide(world.states[:1])
    assert world.notified == ["changes", "wraps"]
    assert [one.decision for one in world.states[2:]] == [None, None]
    assert world.decider.decided_on == {"changes", "wraps"}


def test_each_is_decided_on_and_passed_on_once(mocker: MockerFixture) -> None:
    world = World(mocker, patch("one"), patch("two"))
    world.decider.decide(world.states)
    world.decider.decide(world.states)
    assert (world.notified, world.look.call_count) == (["one", "two"], 2)


def test_those_that_are_decided_on_meanwhile_are_passed_on_in_their_order(mocker: MockerFixture) -> None:
    world = World(mocker, patch("one"), patch("two"), patch("three"))
    for state in world.states:
        world.decider.decide_anew(state)
    assert world.notified == []
    world.decider.decide([])
    world.decider.decide(world.states[:1])
    assert world.notified == ["one", "two", "three"]


def test_a_decision_on_sources_that_changed_meanwhile_is_worked_out_again(mocker: MockerFixture) -> None:
    world = World(mocker, patch("one"))

    def changed_meanwhile(*_: Any) -> Any:
        if world.look.call_count == 1:
            world.decisions["one"] = REFUSED
            world.sources.texts = {"engine.a": "changed"}
        else:
            world.decisions["one"] = APPLY
        return FOUND

    world.look.side_effect = changed_meanwhile
    world.decider.decide(world.states)
    assert (world.look.call_count, world.states[0].decision) == (2, APPLY)


def test_a_decision_that_another_thread_found_first_counts(mocker: MockerFixture) -> None:
    world = World(mocker, patch("one"))

    def other_thread(*_: Any) -> Any:
        world.states[0].decision = REFUSED
        return FOUND

    world.look.side_effect = other_thread
    world.decider.decide_anew(world.states[0])
    assert (world.states[0].decision, world.decider.decided_on) == (REFUSED, set())


def test_the_digest_is_of_the_traced_patches_that_apply(mocker: MockerFixture) -> None:
    def digest(*, failed: bool = False, refused: bool = False) -> str:
        world = World(mocker, patch("plain"), patch("one", traced=True), patch("two", traced=True))
        if failed:
            world.states[2].state = "failed"
        if refused:
            world.decisions["two"] = REFUSED
        return world.decider.patch_set()

    alone = World(mocker, patch("one", traced=True)).decider.patch_set()
    assert digest() not in ("", alone)
    assert digest(refused=True) == digest(failed=True) == alone
    assert World(mocker, patch("plain")).decider.patch_set() == ""
