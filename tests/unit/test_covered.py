"""An outer patch's wrapper that answers without calling its original: the report says so of the patch beneath it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import covered, guard, no_function
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import bundle

from tests.unit.support import STEP, WORK, Sandbox
from tests.unit.test_order import LATE, NAMED

ANSWERS = """\
def wrappers(livepatch):
    def of_method(original, instance, number=0, *rest, **named):
        return ["outer"] if number > 7 else original(number, *rest, **named)

    def around(original, number, *rest, **named):
        return ["outer"] if number > 7 else original(number, *rest, **named)

    return {target: of_method if "Scheduler" in target else around for target in TARGETS}
"""
"""Answers by itself where the number is above 7."""
USE = "from fakeengine.scheduler import Scheduler; print(*(Scheduler().step(number) for number in (7, 8, 9)))"
PASSED = f"passed by 2 times on {STEP} by outer, which answered without calling its original"


def said(sandbox: Sandbox, name: str) -> tuple[str, str | None, str | None, dict[str, int]]:
    found = sandbox.reported(name)
    return found["state"], found["reason"], found["detail"], found["counters"]


def test_the_patch_beneath_is_covered(sandbox: Sandbox) -> None:
    sandbox.patch("inner", code=NAMED)
    sandbox.patch("outer", code=ANSWERS)
    sandbox.generate()
    assert sandbox.python(USE).out == "['inner', 7] ['outer'] ['outer']\n"
    assert said(sandbox, "inner") == ("applied", "covered", PASSED, {"calls": 1, "covered": 2})
    assert said(sandbox, "outer") == ("applied", None, None, {})


def test_all_that_stand_beneath_are(sandbox: Sandbox) -> None:
    """Of two outer ones each is named, and what a patch says of itself stays."""
    sandbox.patch("a-forced", code=NAMED, variant=[{"releases": ["0.9"], "code": sandbox.fingerprints(STEP)}])
    sandbox.patch("b-outer", code=ANSWERS.replace("7", "8"))
    sandbox.patch("outer", code=ANSWERS.replace("> 7", "== 8"))
    sandbox.generate()
    assert sandbox.python(USE).out == "['a-forced', 7] ['outer'] ['outer']\n"
    once = PASSED.replace("2 times", "1 times")
    state, reason, detail, counters = said(sandbox, "a-forced")
    assert (state, reason, counters) == ("applied", "unverified", {"calls": 1, "covered": 2})
    assert detail is not None
    assert detail.startswith("fakeengine 1.0 is not listed, but its code is that of 0.9; passed by 1 times on")
    assert detail.endswith(once)
    assert said(sandbox, "b-outer") == ("applied", "covered", once, {"covered": 1})


def test_one_that_was_put_beneath_late_is(sandbox: Sandbox) -> None:
    sandbox.patch("late", [STEP, WORK], code=NAMED, inside=["outer"])
    sandbox.patch("outer", code=ANSWERS)
    sandbox.generate()
    sandbox.python(f"{LATE.replace('step = Scheduler.step', '')}Scheduler().step(8), Scheduler().step(9)")
    assert said(sandbox, "late") == ("applied", "covered", PASSED, {"calls": 3, "covered": 2})


def test_a_child_counts_its_own(sandbox: Sandbox) -> None:
    sandbox.patch("inner", code=NAMED)
    sandbox.patch("outer", code=ANSWERS)
    sandbox.generate()
    sandbox.python(f"{USE}\nimport os; child = os.fork()\nif child: os.waitpid(child, 0)\nelse: Scheduler().step(9)")
    counts = [patch["counters"].get("covered") for one in sandbox.reports() for patch in one["patches"]]
    assert sorted(filter(None, counts)) == [1, 2]


OWN = """\
def wrappers(livepatch):
    def around(original, instance, *rest, **named):
        raise ValueError("no")

    return dict.fromkeys(TARGETS, around)
"""


@pytest.mark.parametrize("meant", [False, True])
def test_an_error_is_no_answer(sandbox: Sandbox, meant: bool) -> None:
    """Neither of the wrapper's own, which the original answers, nor one that is meant for the caller."""
    raised = "raise livepatch.deliberate(ValueError('no'))" if meant else 'raise ValueError("no")'
    sandbox.patch("inner", code=NAMED)
    sandbox.patch("outer", code=OWN.replace('raise ValueError("no")', raised))
    sandbox.generate()
    done = sandbox.python("from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))")
    assert (done.out, "ValueError: no" in done.err) == ("" if meant else "['inner', 7]\n", True)
    assert said(sandbox, "inner") == ("applied", None, None, {} if meant else {"calls": 1})


# The forms


def look(form: Any, *, lasting: bool = False) -> tuple[Any, list[int], PatchContext]:
    """What is looked at in the wrapper's place, and the calls that were passed by."""
    context = PatchContext("outer", {}, {}, lambda: None)
    passed: list[int] = []
    if lasting:
        form = context.lasting(form)
    return covered.watched(form, context, lambda: passed.append(1)), passed, context


class Engine:
    def step(self, number: int) -> list[int]:
        return [number]

    async def later(self, number: int) -> list[int]:
        return [number]

    def each(self, number: int) -> Any:
        got = yield number
        return [number, got]


def standing(name: str, form: Any, **more: Any) -> tuple[Callable[..., Any], list[int]]:
    """A method of the engine with the wrapper around it, guarded, and the calls that were passed by."""
    made, passed, context = look(form, **more)
    original = vars(Engine)[name]
    stands = (no_function if isinstance(made, no_function.Proxy) else guard).in_place_of(
        original, made, context, f"engine:Engine.{name}"
    )
    return stands.__get__(Engine()), passed


def test_a_coroutine_is_looked_at_when_it_has_answered() -> None:
    async def around(original: Any, instance: Any, number: int) -> Any:
        await asyncio.sleep(0)
        if number == 9:
            await asyncio.Event().wait()
        return ["outer"] if number == 8 else await original(number)

    stands, passed = standing("later", around)
    assert inspect.iscoroutinefunction(inspect.unwrap(stands))

    async def calls() -> None:
        assert await stands(7) == [7]
        assert passed == []
        assert await stands(8) == ["outer"]
        assert passed == [1]
        task = asyncio.create_task(stands(9))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert passed == [1], "a call that was given up has no answer"

    asyncio.run(calls())


def test_a_function_that_makes_a_coroutine_may_still_call_its_original() -> None:
    async def helper(original: Any, number: int) -> Any:
        return await original(number)

    stands, passed = standing("later", lambda original, instance, number: helper(original, number))
    assert asyncio.run(stands(7)) == [7]
    assert passed == []


def test_a_generator_is_looked_at_when_it_has_ended() -> None:
    def around(original: Any, instance: Any, number: int) -> Any:
        if number == 8:
            got = yield "outer"
            return [got]
        return (yield from original(number))

    stands, passed = standing("each", around)

    def ended(number: int) -> Any:
        generator = stands(number)
        first = next(generator)
        with pytest.raises(StopIteration) as stop:
            generator.send("got")
        return first, stop.value.value

    assert ended(7) == (7, [7, "got"])
    assert passed == []
    assert ended(8) == ("outer", ["got"])
    assert passed == [1]
    given_up = stands(8)
    next(given_up)
    given_up.close()
    assert passed == [1]


def answers(original: Any, instance: Any, number: int) -> Any:
    return None if number == 8 else original(number)


@pytest.mark.parametrize(
    "form",
    [
        answers,
        lambda original, instance, *rest, **named: answers(original, instance, *rest, **named),
        no_function.Proxy(answers),
        guard.Shortcut(lambda release, guarded: lambda self, number: guarded(self, number), answers),
    ],
)
@pytest.mark.parametrize("lasting", [False, True])
def test_each_form_is_itself(form: Any, lasting: bool) -> None:
    made, _, context = look(form, lasting=lasting)
    assert type(made) is type(form)
    assert context.lasts(made) is lasting
    stands, passed = standing("step", form, lasting=lasting)
    assert (stands(7), passed) == ([7], [])
    assert (stands(8), passed) == (None, [1])
    assert (stands(number=7), passed) == ([7], [1])


def test_the_form_of_before_is_known() -> None:
    def old(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ["outer"] if args == (8,) else wrapped(*args, **kwargs)

    stands, passed = standing("step", old)
    assert (stands(7), stands(8), passed) == ([7], ["outer"], [1])


def test_a_call_of_the_original_that_answers_nothing_is_one() -> None:
    class Quiet:
        def step(self) -> None: ...

    made, passed, context = look(lambda original, instance: original())
    assert guard.in_place_of(vars(Quiet)["step"], made, context, "engine:Quiet.step")(Quiet()) is None
    assert passed == []


def test_observers_and_asynchronous_generators_are_left_as_they_are() -> None:
    async def each(original: Any) -> Any:
        yield 1

    for form in (guard.Before(print), guard.After(print), each):
        assert look(form)[0] is form


# Where it is looked at


@pytest.mark.parametrize("shipped", [[], ["inner"], ["outer"], ["inner", "outer"]])
def test_not_where_both_are_of_this_project_and_fit(
    sandbox: Sandbox, mocker: MockerFixture, shipped: list[str]
) -> None:
    ours = sandbox.patches if shipped else sandbox.root
    mocker.patch.object(bundle, "is_shipped", lambda folder: folder.parent == ours and folder.name in shipped)
    sandbox.patch("inner", code=NAMED)
    sandbox.patch("outer", code=ANSWERS)
    sandbox.generate()
    sandbox.python(USE)
    assert said(sandbox, "inner")[3] == ({"calls": 1} if len(shipped) == 2 else {"calls": 1, "covered": 2})
    catalogue = json.loads((sandbox.package / "catalogue.json").read_text("utf-8"))
    assert catalogue["shipped"] == shipped


def test_alone_on_its_target_a_wrapper_stands_as_it_came(sandbox: Sandbox) -> None:
    sandbox.patch("outer", code=ANSWERS)
    sandbox.generate()
    depth = """
        from fakeengine.scheduler import Scheduler
        cells = [cell.cell_contents for cell in Scheduler.step.__closure__]
        print([one.__module__.rpartition(".")[2] for one in cells if hasattr(one, "__code__")])
    """
    done = sandbox.python(depth)
    assert "covered" not in done.out
    assert "wrappers" in done.out
