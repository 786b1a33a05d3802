"""What stands at a target is taken for the function that it stands for; what it cannot stand for is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import AROUND, Sandbox

SCHEDULER = "fakeengine.scheduler"
ENGINE = """\
    def plain(number): return [number]

    class Scheduler:
        @staticmethod
        def static(number): return [number]
        @classmethod
        def of_class(cls, number): return [number]
        def method(self, number=0, *, also=None): return [number]
        async def later(self): return [1]
        def each(self): yield 1
    class Derived(Scheduler): pass
    """
AWAITED = """\
    def wrappers(livepatch):
        def each(wrapped, instance, args, kwargs):
            yield "patched"
            yield from wrapped(*args, **kwargs)
        async def later(wrapped, instance, args, kwargs):
            return ["patched", *await wrapped(*args, **kwargs)]
        return {target: each if "each" in target else later for target in TARGETS}
    """


@pytest.fixture
def engine(sandbox: Sandbox) -> Sandbox:
    sandbox.write({"fakeengine/scheduler.py": ENGINE})
    names = ["plain", *(f"Scheduler.{name}" for name in ("static", "of_class", "method"))]
    sandbox.patch(targets=[f"{SCHEDULER}:{name}" for name in names])
    sandbox.patch("awaited", [f"{SCHEDULER}:Scheduler.{name}" for name in ("later", "each")], AWAITED)
    sandbox.generate()
    return sandbox


PICKLED = """
    import copy, io, os, pickle, sys
    import fakeengine.scheduler as module
    one = module.Scheduler()
    things = {
        "function": module.plain, "static": module.Scheduler.static, "method": module.Scheduler.method,
        "derived's": module.Derived.method, "bound": one.method, "of class": module.Derived.of_class,
    }
    for name, thing in things.items():
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert b"livepatch" not in pickle.dumps(thing, protocol), name
        again = pickle.loads(pickle.dumps(thing))
        same = again.__func__ is thing.__func__ if name in ("bound", "of class") else again is thing
        print(name, same, (again(one, 7) if name in ("method", "derived's") else again(7)))
    print(copy.copy(module.plain) is module.plain, copy.deepcopy(module.Scheduler.method) is module.Scheduler.method)
    with open("pickled", "wb") as file:
        pickle.dump(things, file)
    """


def test_pickled_by_reference(engine: Sandbox) -> None:
    done = engine.python(PICKLED)
    rows = [
        f"{name} True ['patched', 7]" for name in ("function", "static", "method", "derived's", "bound", "of class")
    ]
    assert done.out.splitlines() == [*rows, "True True"], done.err
    # What a patched process has pickled is a stock process's own function there.
    load = (
        "import pickle; things = pickle.load(open('pickled', 'rb')); print(things['function'](7), things['bound'](7))"
    )
    assert engine.bare(load).out == "[7] [7]\n"


def test_pickles_are_those_of_stock(engine: Sandbox) -> None:
    code = """
        import pickle, fakeengine.scheduler as module
        print(pickle.dumps([module.plain, module.Scheduler.method, module.Scheduler().method, module.Derived.of_class]))
        """
    assert engine.python(code).out == engine.bare(code).out != ""


def test_a_spawned_process_runs_a_wrapped_function(engine: Sandbox) -> None:
    script = engine.write(
        {
            "pool.py": """\
                import multiprocessing, sys
                import fakeengine.scheduler as module
                if __name__ == "__main__":
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        print(pool.map(module.plain, [7]), pool.map(module.Scheduler().method, [8]))
                """
        },
        engine.root / "work",
    )
    done = engine.python(
        "import runpy, sys; sys.argv = ['pool.py']; runpy.run_path('work/pool.py', run_name='__main__')"
    )
    assert script
    assert done.out == "[['patched', 7]] [['patched', 8]]\n", done.err


def test_inspect_sees_the_function_that_it_stands_for(engine: Sandbox) -> None:
    code = """
        import inspect
        from fakeengine.scheduler import Scheduler, plain
        asked = [
            inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isfunction, inspect.signature,
            inspect.getsource, lambda it: (it.__name__, it.__qualname__, it.__module__),
        ]
        members = [plain, Scheduler.static, Scheduler.of_class, Scheduler.method, Scheduler.later, Scheduler.each]
        print([ask(member) for member in members for ask in asked])
        print(inspect.signature(Scheduler().method), plain is plain, Scheduler.method is Scheduler.method)
        """
    assert engine.python(code).out == engine.bare(code).out != ""


def test_what_is_awaited_and_what_yields(engine: Sandbox) -> None:
    code = (
        "import asyncio\nfrom fakeengine.scheduler import Derived as D\nprint(asyncio.run(D().later()), [*D().each()])"
    )
    assert engine.python(code).out == "['patched', 1] ['patched', 1]\n"


REFUSED = {
    "cached": ("functools.cached_property(lambda self: [7])", "functools.cached_property"),
    "a slot": ("Slotted.kept", "builtins.member_descriptor"),
    "C": ("len", "builtins.builtin_function_or_method"),
    "of C, static": ("staticmethod(len)", "builtins.staticmethod"),
    "lru_cache": ("functools.lru_cache(lambda self: [7])", "functools._lru_cache_wrapper"),
    "partial": ("functools.partialmethod(lambda self, number: [number], 7)", "functools.partialmethod"),
    "a property of its own kind": ("Property(lambda self: [7])", "fakeengine.scheduler.Property"),
    "a property of C": ("property(len)", "builtins.property"),
    "a class": ("Slotted", "builtins.type"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_no_wrapper_can_stand_for_is_refused_and_nothing_applied(sandbox: Sandbox, kind: str) -> None:
    value, name = REFUSED[kind]
    source = f"""\
        import functools

        class Property(property): pass
        class Slotted: __slots__ = ["kept"]

        def made(function): return {value}

        class Scheduler:
            def step(self, number): return [number]
            @made
            def odd(self): return [7]
        """
    sandbox.write({"fakeengine/scheduler.py": source})
    sandbox.patch(targets=[f"{SCHEDULER}:Scheduler.step", f"{SCHEDULER}:Scheduler.odd"], code=AROUND)
    sandbox.generate()
    done = sandbox.python("""
        from fakeengine.scheduler import Scheduler
        print(Scheduler().step(7), type(vars(Scheduler)["odd"]).__name__)
        """)
    assert done.out == f"[7] {name.rpartition('.')[2]}\n", done.err
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"]) == ("failed", "unwrappable")
    called = kind in ("C", "of C, static", "lru_cache")
    form = "livepatch.wrapt(wrapper) can" if called else "livepatch.after_import(change, holds) can change it"
    assert reported["detail"] == f"{SCHEDULER}:Scheduler.odd is a {name}, which no wrapper can stand for: {form}"
    assert done.lines[1:] == [f"vllm-livepatch: around is not applied (unwrappable): {reported['detail']}"]


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_generator_gets_no_coroutine(sandbox: Sandbox, kind: str) -> None:
    """Whoever goes through it would be given what is to be awaited, in each call, and no guard would see that."""
    source = f"class Scheduler:\n    {kind} steps(self):\n        yield 7\n"
    sandbox.write({"fakeengine/scheduler.py": source})
    awaits = "async def around(original, *args, **named): return await original()"
    code = f"def wrappers(livepatch):\n    {awaits}\n    return dict.fromkeys(TARGETS, around)"
    sandbox.patch(targets=[f"{SCHEDULER}:Scheduler.steps"], code=code)
    sandbox.generate()
    each = "for one in Scheduler().steps(): print(one)"
    used = each if kind == "def" else f"import asyncio\nasync def use():\n    async {each}\nasyncio.run(use())"
    done = sandbox.python(f"from fakeengine.scheduler import Scheduler\n{used}")
    assert done.out == "7\n", done.err
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("failed", "unwrappable")


def context() -> PatchContext:
    return PatchContext("around", {}, {}, lambda: None)


class Old:
    """Wrappers in the form of before."""

    seen: Any = None

    def around(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return "around", wrapped(*args, **kwargs), args, kwargs

    def look(self, instance: Any, args: Any, kwargs: Any) -> None:
        self.seen = args, kwargs

    def answered(self, instance: Any, args: Any, kwargs: Any, given: Any) -> None:
        self.seen = args, kwargs, given

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return self.around(wrapped, instance, args, kwargs)


def test_the_form_of_before_is_still_taken() -> None:
    old = Old()

    class Target:
        def step(self, number: int, again: bool = False) -> int:
            return number + 1

        @staticmethod
        def made(number: int) -> int:
            return number

    @functools.wraps(old.around)
    def decorated(*given: Any) -> Any:
        return old.around(*given)

    def with_more(more: int, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return old.around(wrapped, instance, args, kwargs)

    for wrapper in (old, old.around, Old.around.__get__(old), decorated, functools.partial(with_more, 3)):
        made = guard.in_place_of(Target.step, wrapper, context(), "module:Target.step")
        assert made(Target(), 1, again=True) == ("around", 2, (1,), {"again": True})
    static = guard.in_place_of(Target.__dict__["made"], old, context(), "module:Target.made")
    assert static.__func__(1) == ("around", 1, (1,), {})
    assert guard.in_place_of(Target.step, guard.Before(old.look), context(), "module:Target.step")(Target(), 1) == 2
    assert old.seen == ((1,), {})
    guard.in_place_of(Target.step, guard.After(old.answered), context(), "module:Target.step")(Target(), 1)
    assert old.seen == ((1,), {}, 2)
    assert guard.around(Target().step, old, context(), "step")(3) == ("around", 4, (3,), {})


def test_python_binds_what_a_wrapper_names() -> None:
    class Target:
        def step(self, number: int, again: bool = False) -> Any:
            return number, again

    def step(original: Any, target: Any, number: Any, *rest: Any, **named: Any) -> Any:
        return original(number + 1, *rest, **named)

    made = guard.in_place_of(Target.step, step, context(), "module:Target.step")
    assert made(Target(), 1) == made(Target(), number=1) == (2, False)
    assert made(Target(), 1, True) == made(Target(), again=True, number=1) == (2, True)
    bound = guard.around(Target().step, step, context(), "step")
    assert bound(number=1, again=True) == (2, True)


def test_a_wrapper_around_another_is_given_the_instance_too() -> None:
    """Two patches wrap the same method of one object."""

    class Target:
        def step(self, number: int) -> Any:
            return number, self

    def step(original: Any, target: Any, number: int, *rest: Any, **named: Any) -> Any:
        assert target is one
        return original(number + 1, *rest, **named)

    one = Target()
    twice = guard.around(guard.around(one.step, step, context(), "step"), step, context(), "step")
    assert twice(1) == (3, one)
