"""Applying a patch: what its code is given, what is taken back, and imports that are half done."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import applying, wrapping
from vllm_livepatch.sitecustomize.decision import Decision, Environment, Patch, Variant
from vllm_livepatch.sitecustomize.patch_state import PatchState

VARIANT = Variant({"engine.a:f": "f"}, ("1.0",), facts={"which": "old"})
PATCH = Patch("one", "engine", "", ("engine.a:f",), (), (VARIANT,))


class World:
    """An applier of one patch, whose reporter is a double."""

    def __init__(self, mocker: MockerFixture, variant: Variant | None = VARIANT) -> None:
        self.state = PatchState(PATCH)
        self.state.decision = Decision("needed", True, True, "needed", "", variant)
        environment = Environment("auto", {}, {"one": {}})
        patches: Any = SimpleNamespace(
            all=[self.state], environment=environment, lock=threading.RLock(), outer={"one": frozenset()}
        )
        self.reporter = mocker.Mock()
        sources: Any = SimpleNamespace(files=dict)
        self.applier = applying.Applier(patches, sources, "root", self.reporter, str)


@pytest.mark.parametrize("error", [AttributeError, ImportError, NameError])
def test_an_import_that_is_half_done_is_tried_three_times_more(mocker: MockerFixture, error: type[Exception]) -> None:
    pauses = mocker.patch.object(time, "sleep")
    step = mocker.Mock(side_effect=[error, error, error, "found"])
    assert applying.patiently(step) == "found"
    assert pauses.call_args_list == [mocker.call(0.1)] * 3
    failing = mocker.Mock(side_effect=error)
    with pytest.raises(error):
        applying.patiently(failing)
    assert failing.call_count == 4


@pytest.mark.parametrize(("variant", "facts"), [(VARIANT, {"which": "old"}), (None, {})])
def test_the_code_is_given_the_facts_of_the_variant_found(
    mocker: MockerFixture, variant: Variant | None, facts: dict[str, str]
) -> None:
    world = World(mocker, variant)
    made = mocker.patch.object(applying, "PatchContext")
    assert world.applier._context(world.state) is world.applier._context(world.state)
    made.assert_called_once()
    assert made.call_args.args[2] == facts


def test_a_wrappers_error_and_a_counter_are_reported_within_a_second(mocker: MockerFixture) -> None:
    world = World(mocker)
    world.applier._raised(world.state, "an error")
    assert (world.state.state, world.state.reason, world.state.detail) == ("failed", "raised", "an error")
    world.reporter.no_longer_applied.assert_called_once_with(world.state)
    world.reporter.soon.assert_called_once_with(1.0)
    world.applier._context(world.state).count("calls")
    assert world.reporter.soon.call_args_list == [mocker.call(1.0)] * 2


@pytest.mark.parametrize("steps", [[], ["a step"]])
def test_only_what_was_applied_is_withdrawn(mocker: MockerFixture, steps: list[Any]) -> None:
    world = World(mocker)
    withdrawn = mocker.Mock()
    context: Any = withdrawn
    world.state.context, world.state.applied = context, steps
    mocker.patch.object(wrapping, "in_place", return_value=True)
    undone = mocker.patch.object(wrapping, "undo", side_effect=list)
    world.applier.unapply(world.state, "raised", "an error")
    assert (world.state.state, world.state.reason, world.state.applied) == ("failed", "raised", [])
    assert (undone.call_count, withdrawn.withdraw.call_count) == (1, len(steps))


def around(*_: Any) -> None:
    """A wrapper that is never called."""


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_target_that_is_in_place_is_left_and_an_overtaken_one_is_put_in_place_again(
    mocker: MockerFixture, overtaken: bool
) -> None:
    world = World(mocker)
    step: Any = SimpleNamespace(target="engine.a:f", wrapper=around)
    world.state.applied = [step]
    context: Any = SimpleNamespace(aside=False)
    mocker.patch.object(wrapping, "overtaken_by", return_value="somebody" if overtaken else None)
    planned = mocker.patch.object(wrapping, "planned", return_value=[])
    mocker.patch.object(wrapping, "put_in_place")
    assert world.applier._put_around(world.state, context, {"engine.a:f": around})
    assert planned.call_args.args[0] == ({"engine.a:f": around} if overtaken else {})
    assert world.state.applied == ([] if overtaken else [step])


def test_another_thread_that_was_faster_is_seen(mocker: MockerFixture) -> None:
    world = World(mocker)
    context: Any = SimpleNamespace(aside=False)
    put = mocker.patch.object(wrapping, "put_in_place")

    def other_thread(*_: Any) -> list[Any]:
        world.state.applied = []
        return []

    mocker.patch.object(wrapping, "planned", side_effect=other_thread)
    assert not world.applier._put_around(world.state, context, {"engine.a:f": around})
    mocker.patch.object(wrapping, "planned", return_value=[SimpleNamespace(target="engine.a:f")])
    mocker.patch.object(wrapping, "is_as_planned", return_value=False)
    assert not world.applier._put_around(world.state, context, {"engine.a:f": around})
    put.assert_not_called()


def test_an_error_of_the_plan_counts_unless_another_thread_came_in_between(mocker: MockerFixture) -> None:
    world = World(mocker)
    context: Any = SimpleNamespace(aside=False)
    error = wrapping.ApplyError("occupied", "somebody else's")

    def other_thread(*_: Any) -> list[Any]:
        world.state.applied = []
        raise error

    mocker.patch.object(wrapping, "planned", side_effect=other_thread)
    assert not world.applier._put_around(world.state, context, {"engine.a:f": around})
    mocker.patch.object(wrapping, "planned", side_effect=error)
    with pytest.raises(wrapping.ApplyError):
        world.applier._put_around(world.state, context, {"engine.a:f": around})


def test_what_stands_aside_is_not_put_in_place(mocker: MockerFixture) -> None:
    world = World(mocker)
    context: Any = SimpleNamespace(aside=True)
    mocker.patch.object(wrapping, "planned", return_value=[])
    put = mocker.patch.object(wrapping, "put_in_place")
    assert world.applier._put_around(world.state, context, {"engine.a:f": around})
    put.assert_not_called()
