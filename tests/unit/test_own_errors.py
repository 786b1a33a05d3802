"""An error of a wrapper's own: the release's own code answers, once, and the patch stands aside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import wrapt
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import PATCHED, STEP, STOCK, USE_STEP, WORK, Sandbox


class Broken(Exception):
    """A wrapper's own error."""


class Refused(Exception):
    """The release's own error."""


class Release:
    """What is patched: it notes each call, and answers with what it was given, or with an error."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def step(self, number: Any, *, also: Any = 0) -> Any:
        self.calls.append((number, also))
        if isinstance(number, Exception):
            raise number
        return [number]

    def depth(self, left: int) -> int:
        self.calls.append(left)
        return 0 if not left else 1 + self.depth(left - 1)


class Patched:
    """A class of releases of its own, with one wrapper around `step`, and what the patch said when it stood aside."""

    def __init__(self, wrapper: Callable[..., Any], attribute: str = "step", **members: Any) -> None:
        self.logged: list[str] = []
        self.context = PatchContext("around", {}, {}, lambda: None, failed=self.logged.append)
        self.wrapper = wrapper
        self.release: Any = type("Release", (Release,), {attribute: vars(Release).get(attribute), **members})
        self.put(attribute, wrapper)

    def put(self, attribute: str, wrapper: Any) -> None:
        original = vars(self.release)[attribute]
        setattr(
            self.release, attribute, guard.in_place_of(original, wrapper, self.context, f"engine:Release.{attribute}")
        )


def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise Broken("before")


def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    result = ["changed", result]
    raise Broken("after")


@pytest.mark.parametrize("wrapper", [before, after])
def test_the_release_answers_once_and_from_then_on(wrapper: Any) -> None:
    patched = Patched(wrapper)
    release = patched.release()
    assert release.step(7, also=1) == [7]
    assert release.calls == [(7, 1)], "neither skipped nor called twice"
    assert patched.context.aside
    (logged,) = patched.logged
    assert logged.startswith(f"engine:Release.step: Broken: {wrapper.__name__} (test_own_errors.py, line ")
    assert [release.step(number) for number in (8, 9)] == [[8], [9]]
    assert release.calls[1:] == [(8, 0), (9, 0)]
    assert len(patched.logged) == 1


def test_the_release_gets_the_arguments_of_the_caller() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        kwargs["also"] = "changed"
        raise Broken

    release = Patched(wrapper).release()
    assert release.step(7) == [7]
    assert release.calls == [(7, 0)]


def test_an_error_of_the_release_passes_as_it_is() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Refused as error:
            raise error from KeyError("a cause of the wrapper's")

    patched, error = Patched(wrapper), Refused()
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            patched.release().step(error)
        assert caught.value is error
    assert not patched.context.aside


def with_its_instance(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
    return original(release, number, *rest, **named)  # it is bound already


def with_too_little(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
    try:
        return original()
    except TypeError as error:
        raise Broken from error


@pytest.mark.parametrize("wrapper", [with_its_instance, with_too_little])
@pytest.mark.parametrize("inner", [True, False], ids=["around another patch", "alone"])
def test_a_wrapper_that_calls_it_with_what_it_does_not_take_is_the_one_to_blame(wrapper: Any, inner: bool) -> None:
    def right(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
        return original(number + 0, *rest, **named)

    patched = Patched(right if inner else wrapper)
    outer = PatchContext("outer", {}, {}, lambda: None, failed=patched.logged.append)
    if inner:
        original = vars(patched.release)["step"]
        patched.release.step = guard.in_place_of(original, wrapper, outer, "engine:Release.step")
    release = patched.release()
    assert [release.step(number, also=1) for number in (7, 8)] == [[7], [8]]
    assert release.calls == [(7, 1), (8, 1)]
    assert (patched.context.aside, outer.aside) == ((False, True) if inner else (True, False))
    assert len(patched.logged) == 1


@pytest.mark.parametrize("given", [(), (1, 2)])
def test_a_caller_that_calls_it_with_what_it_does_not_take_is_told_so_by_the_release(given: tuple[int, ...]) -> None:
    def wrapper(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
        return original(number + 0, *rest, **named)

    patched = Patched(wrapper)
    with pytest.raises(TypeError, match=r"Release\.step\(\)|step\(\)"):
        patched.release().step(*given)
    assert not patched.context.aside, "no patch made that mistake"


@pytest.mark.parametrize("around", [False, True], ids=["alone", "around another patch"])
def test_a_release_that_ran_and_called_another_target_wrongly_runs_once(around: bool) -> None:
    def passes_on(original: Any, release: Any, *rest: Any, **named: Any) -> Any:
        return original(*rest, **named)

    class Release:
        ran = 0

        def outer(self) -> Any:
            self.ran += 1
            return self.inner(*[1] * 2)  # the release's own mistake

        def inner(self, one: int) -> int:
            return one

    contexts = [PatchContext(name, {}, {}, lambda: None) for name in ("outer", "inner", "outermost")]
    for context, name in zip(contexts, ("outer", "inner", *["outer"] * around), strict=False):
        setattr(Release, name, guard.in_place_of(vars(Release)[name], passes_on, context, f"engine:Release.{name}"))
    release = Release()
    with pytest.raises(TypeError):
        release.outer()
    assert release.ran == 1
    assert [context.aside for context in contexts] == [False] * 3, "no patch made that mistake"


def test_a_type_error_of_the_release_is_its_own() -> None:
    patched = Patched(lambda original, release, *rest, **named: original(*rest, **named))
    error = TypeError("in it")
    with pytest.raises(TypeError) as caught:
        patched.release().step(error)
    assert caught.value is error
    assert not patched.context.aside


def in_finally(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        raise Broken


def translated(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except Refused as error:
        raise Broken from error


def swallowed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except Refused:
        pass
    raise Broken


@pytest.mark.parametrize("wrapper", [in_finally, translated, swallowed])
def test_where_the_release_raised_its_error_is_the_answer(wrapper: Any) -> None:
    patched, error = Patched(wrapper), Refused()
    release = patched.release()
    with pytest.raises(Refused) as caught:
        release.step(error)
    assert caught.value is error
    assert error.__context__ is None, "the caller hears nothing of the wrapper's error"
    assert len(release.calls) == 1
    assert patched.context.aside


def test_an_error_of_the_release_after_one_of_the_wrapper() -> None:
    error = Refused()
    with pytest.raises(Refused) as caught:
        Patched(before).release().step(error)
    assert caught.value is error
    assert error.__context__ is None


def test_a_deliberate_error_is_the_callers_also_through_other_wrappers() -> None:
    def outer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return instance.step(*args)  # not by `wrapped`

    patched: Patched

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Refused as error:
            raise patched.context.deliberate(Broken("meant")) from error

    patched = Patched(wrapper)
    patched.release.depth = guard.in_place_of(Release.depth, outer, patched.context, "engine:Release.depth")
    for call in (patched.release().step, patched.release().depth):
        with pytest.raises(Broken) as caught:
            call(Refused())
        assert isinstance(caught.value.__cause__, Refused)
    assert not patched.context.aside
    assert not patched.logged


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_or_a_generator_is_not_swallowed(error: type[BaseException]) -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        raise error

    patched = Patched(wrapper)
    release = patched.release()
    with pytest.raises(error):
        release.step(7)
    assert (release.calls, patched.context.aside) == ([], False)


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [([1, 2, 3], [3]), ([Refused(), 2], [2]), ([1, Refused("last")], "last")],
    ids=["returned", "raised, then returned", "returned, then raised"],
)
def test_of_several_calls_the_last_is_the_answer(numbers: list[Any], answer: Any) -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        for number in numbers:
            with contextlib.suppress(Refused):
                wrapped(number)
        raise Broken

    release = Patched(wrapper).release()
    if answer == "last":
        with pytest.raises(Refused, match="last"):
            release.step(0)
    else:
        assert release.step(0) == answer
    assert len(release.calls) == len(numbers)


def test_the_releases_code_in_another_form_counts_as_the_release() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        assert wrapped.__name__ == "step"
        wrapped.answered_by(wrapped.__func__, instance, *args, **kwargs)
        raise Broken

    patched = Patched(wrapper)
    release = patched.release()
    assert (release.step(7), release.calls) == ([7], [(7, 0)])
    patched = Patched(wrapper)
    with pytest.raises(Refused):
        patched.release().step(Refused())
    assert not patched.context.aside


def test_a_recursive_function_whose_wrapper_breaks_at_the_bottom() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if args[0] == 1:
            raise Broken
        return result

    patched = Patched(wrapper, "depth")
    release = patched.release()
    assert (release.depth(3), release.calls) == (3, [3, 2, 1, 0])
    assert patched.context.aside


def test_calls_in_several_threads_each_get_their_own_answer() -> None:
    barrier = threading.Barrier(8)

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        wrapped(*args, **kwargs)
        barrier.wait(20)  # all are in the midst of their call
        raise Broken

    patched = Patched(wrapper)
    release, answers = patched.release(), {}

    def call(number: int) -> None:
        answers[number] = release.step(number)

    threads = [threading.Thread(target=call, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {number: [number] for number in range(8)}
    assert sorted(release.calls) == [(number, 0) for number in range(8)]
    assert len(patched.logged) == 1


def kinds() -> dict[str, Any]:
    """Of every kind one, and how it is called."""

    async def later(self: Any, number: int) -> list[int]:
        return [number]

    def each(self: Any, number: int) -> Any:
        yield number

    return {
        "property": (property(lambda self: [7]), lambda release: release.it),
        "classmethod": (classmethod(lambda cls, number: [number, cls.__name__][:1]), lambda release: release.it(7)),
        "staticmethod": (staticmethod(lambda number: [number]), lambda release: release.it(7)),
        "coroutine": (later, lambda release: asyncio.run(release.it(7))),
        "generator": (each, lambda release: list(release.it(7))),
        "unbound": (lambda self, number: [number], lambda release: type(release).it(release, 7)),
        "of None": (lambda self, number: [number, self][:1], lambda release: type(release).it(None, 7)),
    }


@pytest.mark.parametrize("wrapper", [before, after])
@pytest.mark.parametrize("kind", list(kinds()))
def test_every_kind_of_function(kind: str, wrapper: Any) -> None:
    member, call = kinds()[kind]
    patched = Patched(wrapper, "it", it=member)
    assert call(patched.release()) == [7]
    assert patched.context.aside is (kind != "of None")
    assert call(patched.release()) == [7]


@pytest.mark.parametrize(("kind", "bound"), [("classmethod", True), ("staticmethod", False)])
def test_the_instance_of_a_classmethod_is_its_class_and_of_a_staticmethod_none(kind: str, bound: bool) -> None:
    given: list[Any] = []

    def noting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        given.append((instance, args))
        return wrapped(*args, **kwargs)

    member, call = kinds()[kind]
    patched = Patched(noting, "it", it=member)
    assert call(patched.release()) == [7]
    assert given == [(patched.release if bound else None, (7,))]


@pytest.mark.parametrize("wrapper", [before, after])
def test_a_function_of_a_module(wrapper: Any) -> None:
    calls: list[int] = []

    def absolute(number: int) -> int:
        calls.append(number)
        return abs(number)

    context = PatchContext("around", {}, {}, lambda: None)
    function = guard.in_place_of(absolute, wrapper, context, "engine:absolute")
    assert (function(-7), calls, context.aside) == (7, [-7], True)
    assert (function(-8), calls) == (8, [-7, -8])


def test_the_wrapper_of_a_module_s_function_is_given_all_of_its_arguments() -> None:
    given: list[Any] = []

    def noting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        given.append((instance, args, kwargs))
        return wrapped(*args, **kwargs)

    def power(number: int, *, of: int) -> int:
        return int(number**of)

    context = PatchContext("around", {}, {}, lambda: None)
    assert guard.in_place_of(power, noting, context, "engine:power")(7, of=2) == 49
    assert given == [(None, (7,), {"of": 2})]


def test_a_method_of_one_object() -> None:
    context, release = PatchContext("around", {}, {}, lambda: None), Release()
    seen: list[Any] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((instance, args))
        raise Broken

    release.step = context.around(release.step, wrapper)  # type: ignore[method-assign]
    assert release.step(7) == [7]
    assert (seen, release.calls) == ([(release, (7,))], [(7, 0)])
    assert release.step.__name__ == "step"
    assert context.aside


def test_what_the_patch_held_is_given_back_before_the_release_answers() -> None:
    order: list[Any] = []

    def step(self: Any, number: int) -> int:
        order.append(number)
        return number

    patched = Patched(before, "it", it=step)
    patched.context.on_stand_aside(lambda: order.append(("first", patched.context.aside)))
    patched.context.on_stand_aside(lambda: order.append(("second", patched.context.aside)))
    release = patched.release()
    assert [release.it(7), release.it(8)] == [7, 8]
    assert order == [("second", True), ("first", True), 7, 8]


def test_an_error_while_giving_back_keeps_nothing_else_from_it() -> None:
    given: list[str] = []

    class Unsayable(Exception):
        def __str__(self) -> str:
            raise ValueError

    def put_back() -> None:
        raise Unsayable

    patched = Patched(before)
    patched.context.on_stand_aside(lambda: given.append("first"))
    patched.context.on_stand_aside(put_back)
    assert patched.release().step(7) == [7]
    assert given == ["first"]
    (logged,) = patched.logged
    assert "not all that the patch held could be given back: Unsayable: its text cannot be made" in logged


def test_of_two_errors_at_once_the_second_waits_for_nothing() -> None:
    """Threads whose wrappers raise together, and a patch that is taken back meanwhile: the first one says it."""
    context, logged = PatchContext("around", {}, {}, lambda: None), list[str]()
    given_back: list[int] = []
    context.on_stand_aside(lambda: given_back.append(1))
    context._failed = logged.append

    def errors() -> None:
        context.stand_aside("engine:f", Broken("first"))
        context.stand_aside("engine:g", Broken("second"))
        context.withdraw()

    thread = threading.Thread(target=errors, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert logged == ["engine:f: Broken: first; the release's own code answers from now on"]
    assert given_back == [1]


def test_a_report_that_cannot_be_made_is_no_error_either() -> None:
    patched = Patched(before)
    patched.context._failed = lambda detail: 1 / 0  # type: ignore[assignment]
    assert patched.release().step(7) == [7]
    assert patched.context.aside


@pytest.mark.parametrize("form", ["before", "after"])
def test_a_look_at_the_calls_of_a_method(form: str) -> None:
    seen: list[Any] = []

    def look(instance: Any, args: Any, kwargs: Any, *answer: Any) -> None:
        seen.append((args, kwargs, *answer, len(instance.calls)))

    patched = Patched(before)
    patched.release = type("Release", (Release,), {"step": Release.step})
    patched.put("step", getattr(patched.context, form)(look))
    release = patched.release()
    assert release.step(7, also=1) == [7]
    assert seen == [((7,), {"also": 1}, 0) if form == "before" else ((7,), {"also": 1}, [7], 1)]
    assert patched.release.step.__wrapped__ is Release.step
    with pytest.raises(Refused):
        release.step(Refused())
    assert len(seen) == (2 if form == "before" else 1)
    assert patched.release.step(release, 8) == [8]
    assert (release.calls[-1], len(seen), patched.context.aside) == ((8, 0), 3 if form == "before" else 2, False)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("form", ["before", "after"])
def test_an_error_of_a_look_is_no_error_of_the_call(form: str, lasting: bool) -> None:
    seen: list[Any] = []

    def look(instance: Any, args: Any, kwargs: Any, *answer: Any) -> None:
        seen.append(args)
        raise Broken(form)

    patched = Patched(before)
    patched.release = type("Release", (Release,), {"step": Release.step})
    made = getattr(patched.context, form)(look)
    patched.put("step", patched.context.lasting(made) if lasting else made)
    release = patched.release()
    assert [release.step(7, also=1), release.step(8)] == [[7], [8]]
    assert (release.calls, patched.context.aside) == ([(7, 1), (8, 0)], True)
    assert seen == ([(7,), (8,)] if lasting else [(7,)])
    (logged,) = patched.logged
    assert logged.startswith(f"engine:Release.step: Broken: {form} (")


def shortcut(release: Any, guarded: Any) -> Any:
    """Whatever is odd is the patch's business."""

    def step(self: Any, number: Any, *, also: Any = 0) -> Any:
        return (guarded if number % 2 else release)(self, number, also=also)

    return step


def test_a_shortcut_decides_whether_the_wrapper_is_asked() -> None:
    asked: list[int] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        asked.append(*args)
        return ["wrapped", wrapped(*args, **kwargs)]

    patched = Patched(before)
    patched.release = type("Release", (Release,), {"step": Release.step})
    patched.put("step", patched.context.shortcut(shortcut, wrapper))
    release = patched.release()
    assert [release.step(2, also=1), release.step(3)] == [[2], ["wrapped", [3]]]
    assert (release.calls, asked) == ([(2, 1), (3, 0)], [3])
    assert release.step.__name__ == "step"
    assert release.step.__wrapped__ is Release.step


@pytest.mark.parametrize("lasting", [False, True])
def test_the_wrapper_behind_a_shortcut_is_guarded_and_lasts_if_it_is_to(lasting: bool) -> None:
    asked: list[int] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        asked.append(*args)
        raise Broken

    patched = Patched(before)
    patched.release = type("Release", (Release,), {"step": Release.step})
    kept = patched.context.lasting(wrapper) if lasting else wrapper
    patched.put("step", patched.context.shortcut(shortcut, kept))
    release = patched.release()
    assert [release.step(1), release.step(2), release.step(3)] == [[1], [2], [3]]
    assert (release.calls, patched.context.aside) == ([(1, 0), (2, 0), (3, 0)], True)
    assert asked == ([1, 3] if lasting else [1])


class Kinds:
    """A callable of each kind: what it answers is its last argument."""

    @staticmethod
    def alone(number: int) -> int:
        return number

    @classmethod
    def of_class(cls, number: int) -> int:
        return number

    @property
    def seven(self) -> int:
        return 7

    def method(self, number: int) -> int:
        return number


def function(number: int) -> int:
    return number


KINDS = {
    "alone": ("engine:Kinds.alone", vars(Kinds)["alone"], lambda kinds: kinds.alone(7), ()),
    "of_class": ("engine:Kinds.of_class", vars(Kinds)["of_class"], lambda kinds: kinds.of_class(7), (Kinds,)),
    "seven": ("engine:Kinds.seven", vars(Kinds)["seven"], lambda kinds: kinds().seven, (Kinds,)),
    "method": ("engine:Kinds.method", vars(Kinds)["method"], lambda kinds: kinds().method(7), (Kinds,)),
    "function": ("engine:function", function, lambda kinds: kinds.function(7), ()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["before", "after", "shortcut", "shortcut before"])
def test_a_look_and_a_shortcut_of_each_kind(kind: str, form: str) -> None:
    target, original, ask, bound = KINDS[kind]
    context, seen = PatchContext("around", {}, {}, lambda: None), []

    def look(*given: Any) -> None:
        seen.append(given)

    def wrapper(original: Any, *given: Any) -> Any:
        seen.append(given)
        return original(*given[len(bound) :])

    forms: dict[str, Any] = {
        "before": context.before(look),
        "after": context.after(look),
        "shortcut": context.shortcut(lambda release, guarded: lambda *given: guarded(*given), wrapper),
        "shortcut before": context.shortcut(
            lambda release, guarded: lambda *given: guarded(*given), context.before(look)
        ),
    }
    made = guard.in_place_of(original, forms[form], context, target)
    kinds = type("Kinds", (Kinds,), {kind: staticmethod(made) if kind == "function" else made})
    assert ask(kinds) == 7
    (given,) = seen
    answer, given = ((given[0],), given[1:]) if form == "after" else ((), given)
    assert answer in ((), (7,))
    owners = tuple(one if isinstance(one, type) else type(one) for one in given[: len(bound)])
    assert (owners, given[len(bound) :]) == ((kinds,) * len(bound), () if kind == "seven" else (7,))
    assert not context.aside


def test_a_look_and_a_shortcut_around_a_method_of_one_object() -> None:
    seen: list[Any] = []
    context = Patched(before).context
    one, other = Release(), Release()
    release: Any = one

    def look(*call: Any, **named: Any) -> None:
        seen.append((call, named))

    release.step = context.around(one.step, context.after(look))
    assert (one.step(1, also=2), other.step(3)) == ([1], [3])
    assert seen == [(([1], one, 1), {"also": 2})]
    release.step = context.around(one.step, context.shortcut(shortcut, context.before(look)))
    assert [one.step(4), one.step(5)] == [[4], [5]]
    assert seen[1:] == [
        (([4], one, 4), {"also": 0}),
        ((one, 5), {"also": 0}),
        (([5], one, 5), {"also": 0}),
    ]


def test_a_look_at_what_somebody_else_wrapped() -> None:
    """An object that binds in its own way, as wrapt's do."""
    bound: list[Any] = []

    def theirs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        bound.append(instance)
        return wrapped(*args, **kwargs)

    patched = Patched(before)
    patched.release = type("Release", (Release,), {"step": wrapt.FunctionWrapper(Release.step, theirs)})
    patched.put("step", patched.context.after(lambda instance, args, kwargs, answer: None))
    release = patched.release()
    assert (release.step(7), bound) == ([7], [release])


def test_a_lasting_wrapper_goes_on_and_is_guarded_still() -> None:
    seen: list[bool] = []

    def lasting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(patched.context.aside)
        result = wrapped(*args, **kwargs)
        if args == (2,):
            raise Broken
        return ["lasting", result]

    patched = Patched(before)
    patched.context.lasting(lasting)
    patched.put("step", lasting)
    release = patched.release()
    assert [release.step(1), release.step(2), release.step(3)] == [["lasting", [1]], [2], ["lasting", [3]]]
    assert seen == [False, True, True]
    assert release.calls == [(1, 0), (2, 0), (3, 0)]
    assert len(patched.logged) == 1


@pytest.mark.parametrize("slots", [("calls",), ("calls", "__weakref__")])
def test_an_object_that_wraps_may_last_whatever_its_class_has(slots: tuple[str, ...]) -> None:
    def call(wrapper: Any, original: Any, release: Any, *rest: Any, **named: Any) -> Any:
        wrapper.calls += 1
        return original(*rest, **named)

    patched = Patched(before)
    wrapper: Any = type("Wrapper", (), {"__slots__": slots, "__call__": call})()
    wrapper.calls = 0
    release = patched.release()
    patched.context.around_its(release, "depth", patched.context.lasting(wrapper))
    release.step(7)
    assert patched.context.aside
    release.depth(0)
    assert wrapper.calls == 1, "it goes on"


@pytest.mark.parametrize(("lasting", "then"), [(True, ["lasting", 8]), (False, 8)])
def test_a_functions_wrapper_goes_on_only_if_it_is_lasting(lasting: bool, then: Any) -> None:
    """Of a module's function, and of a static method."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ["lasting", wrapped(*args, **kwargs)]

    context = PatchContext("around", {}, {}, lambda: None)
    if lasting:
        context.lasting(wrapper)
    function = guard.in_place_of(lambda number: number, wrapper, context, "engine:function")
    static = guard.in_place_of(staticmethod(lambda number: number), wrapper, context, "engine:Release.it")
    assert (function(7), static.__func__(7)) == (["lasting", 7], ["lasting", 7])
    context.withdraw()
    assert (function(8), static.__func__(8)) == (then, then)


def test_a_call_leaves_nothing_behind_for_the_garbage_collector() -> None:
    """A wrapper that swallows the release's error: the error, its frames and the call do not keep each other."""
    raised: list[weakref.ref[Refused]] = []

    def step(self: Any) -> None:
        error = Refused()
        raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        with contextlib.suppress(Refused):
            wrapped()

    release = Patched(wrapper, "it", it=step).release()
    gc.disable()
    try:
        release.it()
        assert raised[0]() is None
    finally:
        gc.enable()


# In a process

RAISES = """\
    def wrappers(livepatch):
        def around(wrapped, instance, args, kwargs):
            livepatch.count("calls")
            result = ["patched", *wrapped(*args, **kwargs)]
            if args == (13,):
                raise RuntimeError("it\\nbroke")
            return result

        return dict.fromkeys(TARGETS, around)
    """
STEPS = """
    import sys
    from fakeengine.scheduler import Scheduler
    scheduler = Scheduler()
    print(scheduler.step(7), scheduler.step(13), scheduler.step(7), scheduler.step(13))
    """


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_it_is_reported_and_logged_once(sandbox: Sandbox, mode: str) -> None:
    sandbox.patch(code=RAISES)
    sandbox.patch("other")
    sandbox.generate()
    done = sandbox.python(STEPS, LIVEPATCH=mode)
    assert (done.code, done.out) == (
        0,
        "['patched', 'patched', 7] ['patched', 13] ['patched', 7] ['patched', 13]\n",
    ), "what serves already is not ended, and the other patch goes on"
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"], reported["counters"]) == ("failed", "raised", {"calls": 2})
    assert reported["detail"] == (
        f"{STEP}: RuntimeError: it broke (wrappers.py, line 9); the release's own code answers from now on"
    )
    assert done.lines[1:] == [f"vllm-livepatch: around is no longer applied (raised): {reported['detail']}"]
    assert sandbox.reported("other")["state"] == "applied"


def test_a_forked_child_stands_aside_as_well_and_says_nothing(sandbox: Sandbox) -> None:
    sandbox.patch(code=RAISES)
    sandbox.generate()
    forks = """
    import os
    sys.stdout.flush()
    pid = os.fork()
    print(scheduler.step(13), flush=True)
    pid and os.waitpid(pid, 0)
    """
    done = sandbox.python(STEPS.rstrip() + forks)
    assert done.out.splitlines()[1:] == ["[13]", "[13]"]
    # The child has nothing to report: nothing has happened in it, and its parent's says what had before.
    assert [patch["reason"] for report in sandbox.reports() for patch in report["patches"]] == ["raised"]
    assert len(done.lines) == 2


def test_a_patch_that_is_taken_back_gives_back_what_it_held(sandbox: Sandbox) -> None:
    """Its second target cannot be wrapped; who took the first one before still has our wrapper."""
    sandbox.write({"fakeengine/worker.py": "def work(item):\n    return [item]\nstock = work\ndel work\n"})
    code = """\
        def wrappers(livepatch):
            def around(wrapped, instance, args, kwargs):
                return ["patched", *wrapped(*args, **kwargs)]
            livepatch.on_stand_aside(lambda: print("given back"))
            return dict.fromkeys(TARGETS, around)
        """
    sandbox.patch(targets=[STEP, WORK], code=code, per_module=True)
    sandbox.generate()
    done = sandbox.python("""
        import fakeengine.scheduler as scheduler
        taken = scheduler.Scheduler.step
        print(taken(None, 7) == [7], taken(scheduler.Scheduler(), 7))
        import fakeengine.worker
        print(taken(scheduler.Scheduler(), 7), scheduler.Scheduler().step(7))
        """)
    assert done.out == "True ['patched', 7]\ngiven back\n[7] [7]\n", done.err
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("failed", "missing")


def test_without_an_error_nothing_changes(patched: Sandbox) -> None:
    assert patched.python(USE_STEP).out == PATCHED != STOCK
    assert patched.reported()["state"] == "applied"


def test_a_property_keeps_what_is_not_patched_of_it() -> None:
    """Its setter, its deleter and its text: only reading it is wrapped."""

    class Engine:
        def __init__(self) -> None:
            self.kept: dict[str, int] = {"size": 1}

        @property
        def size(self) -> int:
            """How large it is."""
            return self.kept["size"]

        @size.setter
        def size(self, value: int) -> None:
            self.kept["size"] = value

        @size.deleter
        def size(self) -> None:
            del self.kept["size"]

    context = PatchContext("around", {}, {}, lambda: None)
    original = vars(Engine)["size"]
    made = guard.in_place_of(original, lambda wrapped, *_: wrapped() + 10, context, "m:Engine.size")
    Engine.size = made  # type: ignore[method-assign]
    engine = Engine()
    engine.size = 5
    assert (engine.size, engine.kept) == (15, {"size": 5})
    del engine.size
    assert engine.kept == {}
    assert made.__doc__ == "How large it is."


def test_what_a_wrapper_calls_says_what_it_is() -> None:
    """`inspect.unwrap` in a patch finds the release's own function."""

    def release() -> None: ...

    assert inspect.unwrap(guard.Wrapped(release)) is release


@pytest.mark.parametrize(
    ("target", "seen"),
    [("module:function", (None, (1, 2))), ("module:Class.method", (1, (2,)))],
    ids=["module", "class"],
)
def test_a_function_of_a_module_has_no_instance(target: str, seen: tuple[Any, Any]) -> None:
    calls: list[Any] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append((instance, args))
        return wrapped(*args, **kwargs)

    made = guard.in_place_of(lambda *args: args, wrapper, PatchContext("a-patch", {}, {}, lambda: None), target)
    assert made(1, 2) == (1, 2)
    assert calls == [seen]


async def later(self: Any, number: Any, *, also: Any = 0) -> Any:
    self.calls.append((number, also))
    return [number]


@pytest.mark.parametrize("asks", [False, True])
def test_what_cannot_be_awaited_is_an_error_of_the_wrapper(asks: bool) -> None:
    """The caller gets the answer of the release's own code, which runs once."""

    def wrapper(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
        return ("no coroutine", original(number, *rest, **named) if asks else None)

    patched = Patched(wrapper, "later", later=later)
    release = patched.release()
    assert [asyncio.run(release.later(1)), asyncio.run(release.later(2, also=3))] == [[1], [2]]
    assert (release.calls, patched.context.aside) == ([(1, 0), (2, 3)], True)
    assert patched.logged


def test_a_plain_wrapper_may_return_what_is_awaited() -> None:
    def wrapper(original: Any, release: Any, number: Any, *rest: Any, **named: Any) -> Any:
        return original(number + 1, *rest, **named)

    patched = Patched(wrapper, "later", later=later)
    assert (asyncio.run(patched.release().later(1)), patched.context.aside) == ([2], False)


def each_of(numbers: Any) -> Iterator[Any]:
    yield from numbers


@types.coroutine
def iterable(numbers: Any) -> Iterator[Any]:
    yield from numbers


@functools.wraps(later)
def decorated(*args: Any, **named: Any) -> Any:
    return later(*args, **named)


async def awaits(original: Any, *rest: Any, **named: Any) -> Any:
    return await original(*rest, **named)


def yields(original: Any, *rest: Any, **named: Any) -> Iterator[Any]:
    yield from original(*rest, **named)


async def yields_later(original: Any, *rest: Any, **named: Any) -> AsyncIterator[Any]:
    yield original


@pytest.mark.parametrize(
    ("wrapper", "original", "kind"),
    [
        (awaits, Release.step, "a coroutine function"),
        (awaits, later, ""),
        (awaits, decorated, ""),
        (awaits, each_of, "a coroutine function"),
        (yields, Release.step, "a generator"),
        (yields, each_of, ""),
        (yields_later, later, "an asynchronous generator"),
        (awaits, iterable, ""),
        (guard.Before(awaits), later, "a coroutine function"),  # type: ignore[arg-type]  # nobody would await it
        (guard.Shortcut(lambda release, guarded: guarded, awaits), Release.step, "a coroutine function"),
        (before, later, ""),
    ],
)
def test_a_wrapper_of_another_kind(wrapper: Any, original: Any, kind: str) -> None:
    assert guard.of_another_kind(wrapper, original) == kind
