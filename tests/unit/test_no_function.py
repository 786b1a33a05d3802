"""Targets that are no functions of Python: what stands for a callable, what changes a value, and what nothing reaches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import guard, no_function
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import bundle
from vllm_livepatch.tools.in_bundle import forms

from tests.unit.support import PYTHON, STEP, Cli, Done, Sandbox, finish

MODULE = "fakeengine.scheduler"
SOURCE = """\
import enum, functools, math, operator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

class Scheduler:
    limit = 3
    def __init__(self): self.made = 1
    def step(self, number): return [number]
    @functools.lru_cache
    def kept(self, number): return number
    @functools.cached_property
    def size(self): return 3
    named = operator.attrgetter("limit")
    exact = staticmethod(math.isqrt)

class Kind(enum.Enum):
    FAST = 1
class Flags(enum.IntFlag):
    ONE = 1
@dataclass
class Config:
    size: int
    depth: int = 1
    shared: ClassVar[int] = 2
class Pair(NamedTuple):
    left: int = 0

LIMIT = 3
KINDS = {"fifo": "Fifo"}
root = math.isqrt
binary = functools.partial(int, base=2)
class Called:
    def __call__(self, number): return number
called = Called()
@functools.cache
def cached(number): return number
"""
PROXIED = """\
def wrappers(livepatch):
    def around(original, *args, **named):
        livepatch.count("calls")
        return ["patched", original(*args, **named)]

    def of_method(original, instance, *args, **named):
        return ["patched", type(instance).__name__, original(*args, **named)]

    return {target: livepatch.wrapt(of_method if target.endswith(".kept") else around) for target in TARGETS}
"""
CHANGED = """\
def wrappers(livepatch):
    def change(module):
        livepatch.count("changes")
        {change}

    return {{target: livepatch.after_import(change, lambda module: {holds}) for target in TARGETS}}
"""
REGISTRY = CHANGED.format(
    change="module.KINDS['mine'] = 'Mine'; livepatch.on_stand_aside(lambda: module.KINDS.pop('mine', None))",
    holds="module.KINDS.get('mine') == 'Mine'",
)
LARGER = CHANGED.format(change="module.LIMIT = 7", holds="module.LIMIT == 7")


@pytest.fixture
def engine(sandbox: Sandbox) -> Sandbox:
    sandbox.write({"fakeengine/scheduler.py": SOURCE})
    return sandbox


def run(engine: Sandbox, code: str, **environ: str) -> Done:
    engine.generate()
    return engine.python(f"import {MODULE} as m\n{code}", **environ)


def checked(engine: Sandbox, cli: Cli, *more: str) -> Done:
    return cli("check", "--site-packages", str(engine.site), "--patch-dir", str(engine.patches), "--only", *more)


# Callables


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        ("root", "m.root(9)", ["patched", 3]),
        ("binary", "m.binary('101')", ["patched", 5]),
        ("called", "m.called(7)", ["patched", 7]),
        ("cached", "m.cached(7)", ["patched", 7]),
        ("Scheduler.kept", "m.Scheduler().kept(7)", ["patched", "Scheduler", 7]),
        ("Scheduler.kept", "m.Scheduler.kept(m.Scheduler(), 7)", ["patched", "Scheduler", 7]),
        ("Scheduler.named", "m.Scheduler().named(m.Scheduler())", ["patched", 3]),
        ("Scheduler.exact", "m.Scheduler().exact(9)", ["patched", 3]),
        ("Scheduler.exact", "m.Scheduler.exact(9)", ["patched", 3]),
    ],
)
def test_a_callable_gets_a_proxy(engine: Sandbox, cli: Cli, name: str, call: str, answer: list[object]) -> None:
    engine.patch(targets=[f"{MODULE}:{name}"], code=PROXIED)
    done = run(engine, f"import json; print(json.dumps({call}))")
    assert (json.loads(done.out), done.others) == (answer, [])
    assert engine.reported()["state"] == "applied"
    assert checked(engine, cli).code == 0


def test_a_proxy_is_the_callable_to_all_who_ask(engine: Sandbox) -> None:
    engine.patch(targets=[f"{MODULE}:cached", f"{MODULE}:root", f"{MODULE}:called"], code=PROXIED)
    code = """
import copy, pickle
print(m.cached.cache_info().misses, m.cached.__name__, isinstance(m.called, m.Called), m.root == m.math.isqrt)
print(copy.copy(m.root)(9), copy.deepcopy(m.called)(9), pickle.loads(pickle.dumps(m.root))(9), m.math.isqrt(9))
"""
    assert run(engine, code).out == "0 cached True True\n['patched', 3] ['patched', 9] 3 3\n"


def test_an_error_of_its_own_is_answered_by_the_callable(engine: Sandbox) -> None:
    code = "def wrappers(livepatch):\n    def f(original, *args): raise RuntimeError('it broke')\n"
    engine.patch(targets=[f"{MODULE}:root", STEP], code=f"{code}    return {{TARGETS[0]: livepatch.wrapt(f), STEP: f}}")
    file = engine.patches / "around" / "wrappers.py"
    file.write_text(f"STEP = {STEP!r}\n{file.read_text('utf-8')}", "utf-8")
    done = run(engine, "print(m.root(9), m.root(16))")
    assert done.out == "3 4\n"
    assert engine.reported()["reason"] == "raised"
    assert "it broke" in engine.reported()["detail"]


@pytest.mark.parametrize("code", [PROXIED, LARGER])
def test_a_bundle_holds_wrapt_where_a_patch_asks_for_it_alone(engine: Sandbox, code: str) -> None:
    engine.patch(targets=[f"{MODULE}:root"], code=code)
    names = bundle.contents(engine.entries())
    assert any("/vendor/wrapt/" in name for name in names) is (code is PROXIED)


# Values, classes and registries


@pytest.mark.parametrize(
    ("name", "code", "shown", "answer"),
    [
        ("LIMIT", LARGER, "m.LIMIT", "7"),
        ("KINDS", REGISTRY, "m.KINDS", "{'fifo': 'Fifo', 'mine': 'Mine'}"),
        (
            "Scheduler.limit",
            CHANGED.format(change="module.Scheduler.limit = 7", holds="module.Scheduler.limit == 7"),
            "m.Scheduler().limit",
            "7",
        ),
        (
            "Scheduler",
            CHANGED.format(
                change="module.Scheduler = type('Mine', (module.Scheduler,), {})",
                holds="module.Scheduler.__name__ == 'Mine'",
            ),
            "m.Scheduler.__name__, m.Scheduler().step(7)",
            "Mine [7]",
        ),
    ],
)
def test_what_is_no_callable_is_changed_once_its_module_has_run(
    engine: Sandbox, cli: Cli, name: str, code: str, shown: str, answer: str
) -> None:
    engine.patch(targets=[f"{MODULE}:{name}"], code=code)
    done = run(engine, f"print({shown})")
    assert (done.out, done.others) == (f"{answer}\n", [])
    assert (engine.reported()["state"], engine.reported()["counters"]) == ("applied", {"changes": 1})
    assert checked(engine, cli).code == 0


@pytest.mark.parametrize("how", ["the look says no", "the look raises", "the change raises"])
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_what_is_not_read_back_leaves_all_as_it_was(engine: Sandbox, how: str, mode: str) -> None:
    """Of three targets one is wrapped, one changed already: these too."""
    change = REGISTRY if how == "the look says no" else LARGER
    code = f"""{change.replace("def wrappers", "def changes").replace("for target in TARGETS", "for target in [None]")}
def wrappers(livepatch):
    def broken(module):
        module.LIMIT = 8
        {"1 / 0" if how == "the change raises" else "pass"}
    def kinds(module):
        module.KINDS["mine"] = 1
        livepatch.on_stand_aside(lambda: module.KINDS.pop("mine"))
    def step(original, scheduler, number, *rest, **named): return ["patched"]
    holds = lambda module: {"1 / 0" if how == "the look raises" else "False"}
    after = livepatch.after_import
    return dict(zip(TARGETS, [step, after(kinds, lambda module: True), after(broken, holds)]))
"""
    engine.patch(targets=[STEP, f"{MODULE}:KINDS", f"{MODULE}:LIMIT"], code=code)
    done = run(engine, "print(m.Scheduler().step(7), m.KINDS, m.LIMIT)", LIVEPATCH=mode)
    reason = "raised" if how == "the change raises" else "readback"
    assert f"around is not applied ({reason}): " in done.others[0]
    if mode == "strict":
        assert (done.code, done.out) == (78, "")
    else:
        assert (done.code, done.out) == (0, "[7] {'fifo': 'Fifo'} 3\n")
        assert (engine.reported()["state"], engine.reported()["reason"]) == ("failed", reason)


def test_what_is_changed_back_later_is_said(engine: Sandbox) -> None:
    engine.patch(targets=[f"{MODULE}:LIMIT"], code=LARGER)
    done = run(engine, "m.LIMIT = 3")
    assert (engine.reported()["state"], engine.reported()["reason"]) == ("failed", "overwritten")
    assert f"{MODULE}:LIMIT was replaced later by builtins.int, or changed" in done.others[0]
    engine.write({"fakeengine/all.py": f"import {MODULE} as m\nm.LIMIT = 4\n"})
    assert engine.python("import fakeengine.all", LIVEPATCH="strict").code == 78


def test_a_module_that_is_loaded_again_is_changed_again(engine: Sandbox) -> None:
    engine.patch(targets=[f"{MODULE}:LIMIT"], code=LARGER)
    done = run(engine, "import importlib\nprint(m.LIMIT); importlib.reload(m); print(m.LIMIT)")
    assert (done.out, done.others) == ("7\n7\n", [])
    assert engine.reported()["counters"] == {"changes": 2}


def test_a_patch_that_stands_down_takes_its_change_back(engine: Sandbox) -> None:
    code = """\
def wrappers(livepatch):
    def change(module): module.LIMIT = 7
    def step(original, scheduler, number, *rest, **named): raise RuntimeError('it broke')
    return dict(zip(TARGETS, [step, livepatch.after_import(change, lambda module: module.LIMIT == 7)]))
"""
    engine.patch(targets=[STEP, f"{MODULE}:LIMIT"], code=code)
    done = run(engine, "print(m.LIMIT, m.Scheduler().step(7), m.LIMIT)")
    assert done.out == "7 [7] 3\n"
    assert engine.reported()["reason"] == "raised"


def test_two_patches_of_one_value_and_one_that_relies_on_it(engine: Sandbox) -> None:
    """Values that are one object, as small numbers are, mislead nobody who looks for wrappers by identity."""
    engine.patch("a", targets=[f"{MODULE}:LIMIT"], code=LARGER)
    engine.patch("b", targets=[f"{MODULE}:KINDS"], code=REGISTRY)
    engine.patch("c", targets=[STEP], calls=[f"{MODULE}:LIMIT", f"{MODULE}:KINDS", f"{MODULE}:Scheduler.limit"])
    more = "module.Scheduler.limit = module.LIMIT; module.LIMIT = 3"
    engine.patch("d", targets=[f"{MODULE}:Scheduler.limit"], code=CHANGED.format(change=more, holds="True"))
    done = run(engine, "print(m.Scheduler().step(7))")
    assert done.out == "['patched', 7]\n"
    states = {one["name"]: one["state"] for one in engine.report()["patches"]}
    assert states == {"a": "failed", "b": "applied", "c": "applied", "d": "applied"}, "d took back what a had made"


def test_threads_that_end_their_imports_together_change_it_once(engine: Sandbox) -> None:
    events = "import threading\nstarted, go = threading.Event(), threading.Event()\n"
    engine.write({"fakeengine/worker.py": "KINDS = {}\n", "fakeengine/events.py": events})
    code = """\
def wrappers(livepatch):
    def change(module):
        import fakeengine.events
        livepatch.count("changes")
        fakeengine.events.started.set()
        assert fakeengine.events.go.wait(30)
        module.LIMIT = 7
    kept = livepatch.after_import(lambda module: None, lambda module: True)
    return dict(zip(TARGETS, [livepatch.after_import(change, lambda module: module.LIMIT == 7), kept]))
"""
    engine.patch(targets=[f"{MODULE}:LIMIT", "fakeengine.worker:KINDS"], code=code, per_module=True)
    engine.generate()
    done = engine.python(f"""
        import importlib, threading
        from fakeengine import events
        first = threading.Thread(target=importlib.import_module, args=["{MODULE}"])
        first.start()
        assert events.started.wait(30)
        import fakeengine.worker
        events.go.set()
        first.join()
        import {MODULE} as m
        print(m.LIMIT)
        """)
    assert (done.out, done.others) == ("7\n", [])
    assert engine.reports()[-1]["patches"][0]["counters"] == {"changes": 1}


def test_a_wrapper_of_a_callable_lasts_if_it_is_to() -> None:
    context = PatchContext("around", {}, {}, lambda: None)
    around = context.lasting(context.wrapt(lambda original, number: ["patched", original(number)]))
    made = no_function.in_place_of(math.isqrt, around, context, "engine:root")
    context.withdraw()
    assert made(9) == ["patched", 3]
    with pytest.raises(guard.Unwrappable, match=r"a builtins\.dict"):
        no_function.in_place_of({}, context.wrapt(print), context, "engine:table")


# What nothing in a process can change


class OddKind(type):
    """As msgspec's, which has the names itself; or one that answers whatever it is asked, or raises."""

    answer: Any = ("size",)

    @property
    def __struct_fields__(cls) -> Any:
        if cls.answer is None:
            raise RuntimeError
        return cls.answer


@pytest.mark.parametrize(
    ("answer", "is_field"), [(("size",), True), (None, False), (object(), False), (["size"], False)]
)
def test_a_metaclass_may_know_the_fields_and_may_be_odd(
    monkeypatch: pytest.MonkeyPatch, answer: Any, is_field: bool
) -> None:
    monkeypatch.setattr(OddKind, "answer", answer)
    odd = OddKind("Odd", (), {"size": 1, "other": 2})
    assert (no_function.out_of_reach(odd, "size") is not None) is is_field
    assert no_function.out_of_reach(odd, "other") is None
    assert no_function.out_of_reach(None, "size") is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Kind.FAST", "a member of an enumeration"),
        ("Flags.ONE", "a member of an enumeration"),
        ("Config.size", "a field of a class that is made of its fields"),
        ("Config.depth", "a field of a class that is made of its fields"),
        ("Pair.left", "a field of a class that is made of its fields"),
    ],
)
@pytest.mark.parametrize("code", [PROXIED, LARGER])
def test_only_a_diff_can_change_these(engine: Sandbox, cli: Cli, name: str, what: str, code: str) -> None:
    engine.patch(targets=[f"{MODULE}:{name}"], code=code)
    line = f"{what}, which only a diff can change (vllm-livepatch from-diff)"
    done = checked(engine, cli)
    assert done.code == 1
    assert f"around: a process refuses it: {MODULE}:{name}: it is {line}\n" in done.out
    (found,) = json.loads(checked(engine, cli, "--json").out)["patches"]
    assert (found["verdict"], found["reason"]) == ("needed", "unwrappable")
    done = run(engine, "")
    assert done.others == [f"vllm-livepatch: around is not applied (unwrappable): {MODULE}:{name} is {line}"]


PLAIN = "def wrappers(livepatch): return dict.fromkeys(TARGETS, lambda original, *args, **named: original(*args))"


@pytest.mark.parametrize(
    ("name", "code", "form"),
    [
        ("Scheduler", PLAIN, "livepatch.after_import(change, holds) can change it"),
        ("Scheduler", PROXIED, "livepatch.after_import(change, holds) can change it"),
        ("LIMIT", PLAIN, "livepatch.after_import(change, holds) can change it"),
        ("KINDS", PROXIED, "livepatch.after_import(change, holds) can change it"),
        ("Config.shared", PLAIN, "livepatch.after_import(change, holds) can change it"),
        ("cached", PLAIN, "livepatch.wrapt(wrapper) can"),
        ("Scheduler.kept", PLAIN, "livepatch.wrapt(wrapper) can"),
        ("Scheduler.size", PLAIN, "livepatch.after_import(change, holds) can change it"),
        ("Scheduler.size", PROXIED, "livepatch.after_import(change, holds) can change it"),
    ],
)
def test_a_form_that_cannot_stand_there_is_refused_with_one_that_can(
    engine: Sandbox, cli: Cli, name: str, code: str, form: str
) -> None:
    engine.patch(targets=[f"{MODULE}:{name}"], code=code)
    done = checked(engine, cli)
    assert done.code == 1
    assert form.partition("(")[0] in done.out
    (line,) = run(engine, "").others
    assert line.startswith(f"vllm-livepatch: around is not applied (unwrappable): {MODULE}:{name} is ")
    assert line.endswith(f", which no wrapper can stand for: {form}")


KERNEL = """\
class JITFunction:
    def __init__(self, function): self.function = function
    def __getitem__(self, grid): return self.function
    def __call__(self, *args): raise RuntimeError("as kernel[grid]")
jit = JITFunction
"""


@pytest.mark.parametrize("code", [PLAIN, PROXIED])
def test_a_kernel_is_started_past_any_wrapper(engine: Sandbox, cli: Cli, code: str) -> None:
    use = "\nimport triton\n@triton.jit\ndef kernel(number): return number\n"
    engine.write({"triton/__init__.py": KERNEL, "fakeengine/scheduler.py": SOURCE + use})
    engine.patch(targets=[f"{MODULE}:kernel"], code=code)
    assert (
        f"{MODULE}:kernel: it is compiled for a device, and started past any wrapper: wrap " in checked(engine, cli).out
    )
    done = run(engine, "print(m.kernel[1](7))")
    assert (done.out, len(done.others)) == ("7\n", 1)
    assert done.others[0].endswith(
        "a triton.JITFunction, which no wrapper can stand for: wrap the function that starts it"
    )


def test_what_a_function_makes_is_no_target(engine: Sandbox, cli: Cli) -> None:
    source = "\nclass Outer:\n    def make(self):\n        class Inner:\n            def step(self): return 1\n        return Inner()\n"
    engine.write({"fakeengine/scheduler.py": SOURCE + source})
    engine.patch(targets=[f"{MODULE}:Outer.make.Inner.step"], code=PLAIN)
    done = checked(engine, cli)
    why = "each call of Outer.make makes it anew, where no form reaches it: wrap Outer.make"
    assert (done.code, f"{MODULE}:Outer.make.Inner.step: {why}\n" in done.out) == (1, True), done
    assert forms.refused(SOURCE, "Scheduler.step", print) == ""


@pytest.mark.parametrize("name", ["root", "binary", "called", "Scheduler.named"])
def test_a_callable_that_the_source_does_not_tell_from_a_function(engine: Sandbox, name: str) -> None:
    """The process names the form; `check` cannot know what an expression comes to."""
    engine.patch(targets=[f"{MODULE}:{name}"], code=PLAIN)
    assert forms.refused(SOURCE, name, print) == ""
    (line,) = run(engine, "").others
    assert line.endswith(", which no wrapper can stand for: livepatch.wrapt(wrapper) can")


def test_what_each_object_has_is_no_target(engine: Sandbox, cli: Cli) -> None:
    engine.patch(targets=[f"{MODULE}:Scheduler.made"], code=PLAIN)
    assert "it is what __init__ assigns to each object: wrap that" in checked(engine, cli).out


def test_lock_refuses_it_and_new_names_what_can(engine: Sandbox, cli: Cli, tmp_path: Path) -> None:
    place = ["--site-packages", str(engine.site)]
    engine.patch(targets=[f"{MODULE}:LIMIT"], code=PLAIN, variant=[])
    done = cli("lock", str(engine.patches / "around"), *place)
    assert (done.code, "it is a value, which no wrapper can stand for" in done.err) == (2, True)
    done = cli("new", "mine", "--target", f"{MODULE}:Kind.FAST", "--out", str(tmp_path), *place)
    assert (done.code, "a diff can change" in done.err) == (2, True), done.err


NEEDS_THE_ENGINE = f"import fakeengine.scheduler\n{PLAIN}"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("LIMIT", LARGER, ""),
        ("LIMIT", PLAIN, "it is a value, which no wrapper can stand for"),
        ("Kind.FAST", PLAIN, "it is a member of an enumeration"),
        ("Kind.FAST", "raise SystemExit", "it is a member of an enumeration"),
        ("cached", PLAIN, "its decorator makes another callable of it"),
        ("cached", PROXIED, ""),
        ("LIMIT", "raise ValueError", ""),
        ("LIMIT", NEEDS_THE_ENGINE, ""),
        ("Scheduler.step", "import os; os._exit(3)", ""),
    ],
)
def test_a_bundles_own_check_knows_the_form(engine: Sandbox, cli: Cli, name: str, code: str, said: str) -> None:
    """As `check` does, by the standard library. It imports nothing that is patched, and no code that need not be run."""
    engine.patch(targets=[f"{MODULE}:{name}"], code=code)
    engine.generate()
    done = finish([PYTHON, engine.bundle, "check", "--json"], engine.environ())
    (found,) = json.loads(done.out)["patches"]
    assert (done.code, found["reason"]) == ((1, "unwrappable") if said else (0, "needed"))
    assert not said or f"{MODULE}:{name}: {said}" in found["detail"]
    if code != NEEDS_THE_ENGINE and "os._exit" not in code:  # the command runs code of others
        (elsewhere,) = json.loads(checked(engine, cli, "--json").out)["patches"]
        assert {**elsewhere, "detail": found["detail"]} == found
    assert finish([PYTHON, engine.bundle, "doctor"], engine.environ()).code == (1 if said else 0)
    assert engine.reports() == []


def test_what_the_source_does_not_have_is_not_refused_for_its_form() -> None:
    assert forms.refused(SOURCE, "nowhere", print) == forms.refused(SOURCE, "Scheduler.nowhere", print) == ""
    assert forms.refused(SOURCE, "", print) == "", "a whole module, as of a diff"
