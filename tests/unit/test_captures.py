"""What was taken of a target before the patch came: other names get the wrapper too, everything else refuses the patch."""

from __future__ import annotations

import pytest

from tests.unit import interpreters
from tests.unit.support import WORK, Sandbox
from tests.unit.test_wrapping import not_applied

SCHEDULER = "fakeengine.scheduler"
TARGETS = [f"{SCHEDULER}:{name}" for name in ("work", "Scheduler.step", "Scheduler.of_static", "Scheduler.of_class")]
TARGETS.append(f"{SCHEDULER}:Scheduler.value")
# The patch waits for the worker, which the program imports last: what `{taken}` takes is stock.
SOURCE = """\
import functools, threading

def work(number): return ["work", number]

class Scheduler:
    def step(self, number): return ["step", number]
    @staticmethod
    def of_static(number): return ["static", number]
    @classmethod
    def of_class(cls, number): return ["class", number]
    @property
    def value(self): return ["value"]
{body}
{taken}
"""
ALIASES = {
    "a method under two names": ("    run = step", "", "Scheduler().run(7)", "step"),
    "a subclass": ("", "class Other(Scheduler):\n    run = Scheduler.step", "Other().run(7)", "step"),
    "a class that is no subclass": ("", "class Other:\n    run = Scheduler.step", "Other().run(7)", "step"),
    "a static method": ("    run = of_static", "", "Scheduler.run(7)", "static"),
    "the function in a static method": (
        "",
        "class Other: pass\nOther.run = Scheduler.of_static",
        "Other.run(7)",
        "static",
    ),
    "a class method": ("    run = of_class", "", "Scheduler.run(7)", "class"),
    "a property": ("    run = value", "", "Scheduler().run", "value"),
    "a function under two names": ("", "run = work", "scheduler.run(7)", "work"),
    "a method as a function of the module": ("", "run = Scheduler.step", "scheduler.run(Scheduler(), 7)", "step"),
}
CAPTURES = {
    "dict": ("TABLE = {'y': work}", "scheduler.TABLE['y'](7)", "the dict fakeengine.scheduler.TABLE['y']"),
    "dict in a class": ("class T: TABLE = {'y': work}", "scheduler.T.TABLE['y'](7)", "the dict fakeengine.scheduler.T.TABLE['y']"),
    "dict in a list": ("TABLE = [{'y': [work]}]", "scheduler.TABLE[0]['y'][0](7)", "the list fakeengine.scheduler.TABLE"),
    "list": ("TABLE = [Scheduler.step]", "scheduler.TABLE[0](None, 7)", "the list fakeengine.scheduler.TABLE"),
    "set": ("TABLE = {work}", "[*scheduler.TABLE][0](7)", "the set fakeengine.scheduler.TABLE"),
    "partial": ("run = functools.partial(work, 7)", "scheduler.run()", "the functools.partial fakeengine.scheduler.run"),
    "default": ("def run(f=work): return f(7)", "scheduler.run()", "a default argument of fakeengine.scheduler.run"),
    "keyword": ("def run(*, f=work): return f(7)", "scheduler.run()", "a default argument of fakeengine.scheduler.run"),
    "closure": (
        "def outer(f):\n    def run(): return f(7)\n    return run\nrun = outer(work)",
        "scheduler.run()", "a variable of fakeengine.scheduler.outer.<locals>.run",
    ),
    "wraps": (
        "@functools.wraps(work)\ndef run(number): return run.__wrapped__(number)",
        "scheduler.run(7)", "fakeengine.scheduler.work, which wraps it",
    ),
    "bound method": ("TABLE = [Scheduler().step]", "scheduler.TABLE[0](7)", "the method fakeengine.scheduler.TABLE"),
    "class method": ("TABLE = [Scheduler.of_class]", "scheduler.TABLE[0](7)", "the method fakeengine.scheduler.TABLE"),
    "static method": ("TABLE = [Scheduler.of_static]", "scheduler.TABLE[0](7)", "the list fakeengine.scheduler.TABLE"),
    "getter": ("TABLE = [Scheduler.value.fget]", "scheduler.TABLE[0](None)", "the list fakeengine.scheduler.TABLE"),
    "instance": ("class Box: pass\nbox = Box()\nbox.f = work", "scheduler.box.f(7)", "the fakeengine.scheduler.Box fakeengine.scheduler.box"),
}  # fmt: skip
NO_CALLS = {
    "a class without a hash": "class Meta(type):\n    def __eq__(self, other): raise TypeError\n    __hash__ = None\nclass Odd(metaclass=Meta): pass\nscheduler = Scheduler.step",
    "a cache's key": "@functools.lru_cache\ndef known(f): return 1\nknown(work)",
    "a weak reference": "import weakref\nTABLE = weakref.WeakValueDictionary(work=work)",
    "a call": "work(7); Scheduler().step(7); Scheduler.of_static(7)",
    "a signature": "import inspect\ninspect.signature(work); inspect.signature(Scheduler.step)",
    "a name": "TABLE = {'work': 'work'}",
    "overloads": "import typing\n@typing.overload\ndef other(x: int) -> int: ...\n@typing.overload\ndef other(x: str) -> str: ...\ndef other(x): return x",
    "an abstract class": "import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n    def step(self, number): ...\nBase.register(Scheduler)\nissubclass(Scheduler, Base)",
    "a subclass that calls it": "class Other(Scheduler):\n    def step(self, number): return super().step(number)",
    "dropped": "TABLE = [work]; TABLE.clear()",
}  # fmt: skip


def ready(sandbox: Sandbox, body: str, taken: str) -> None:
    sandbox.write({"fakeengine/scheduler.py": SOURCE.replace("{body}", body).replace("{taken}", taken)})
    sandbox.patch(targets=[*TARGETS, WORK])
    sandbox.generate()


def program(call: str) -> str:
    imports = "import fakeengine.scheduler as scheduler, fakeengine.worker\nfrom fakeengine.scheduler import *\n"
    return f"{imports}print({call})"


@pytest.mark.parametrize(("body", "taken", "call", "word"), ALIASES.values(), ids=ALIASES)
def test_another_name_gets_the_wrapper_too(sandbox: Sandbox, body: str, taken: str, call: str, word: str) -> None:
    ready(sandbox, body, taken)
    done = sandbox.python(program(call))
    assert done.out.startswith(f"['patched', '{word}'"), done.err
    assert (sandbox.reported()["state"], done.others) == ("applied", [])


@pytest.mark.parametrize("frozen", ["", "import gc; gc.freeze()\n"], ids=["", "frozen"])
@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_another_name_on_each_python_and_where_the_garbage_collector_is_kept_from_looking(
    sandbox: Sandbox, version: str, frozen: str
) -> None:
    """vLLM freezes what it has when it has started; a target may come later."""
    ready(sandbox, "    run = step", "run = work")
    code = f"import fakeengine.scheduler as scheduler\n{frozen}{program('Scheduler().run(7), scheduler.run(7)')}"
    counted = "\nimport gc; print(gc.get_freeze_count() > 1_000, gc.isenabled())"  # of 3.12's own there are some
    done = sandbox.python(code + counted, python=interpreters.find(version) or "", LIVEPATCH="strict")
    assert done.out == f"['patched', 'step', 7] ['patched', 'work', 7]\n{bool(frozen)} True\n", done.err


@pytest.mark.parametrize(("body", "taken", "call", "word"), ALIASES.values(), ids=ALIASES)
def test_what_is_frozen_stays_frozen_and_nothing_else(
    sandbox: Sandbox, body: str, taken: str, call: str, word: str
) -> None:
    """Garbage of later is still collected: what was alive at the look, and not frozen, is not frozen by it."""
    ready(sandbox, body, taken)
    code = f"""
import gc, sys, weakref
import fakeengine.scheduler as scheduler
from fakeengine.scheduler import *
gc.freeze()
frozen = gc.get_freeze_count()
class Ring: pass
ring = Ring(); ring.ring = ring
alive = weakref.ref(ring)
import fakeengine.worker
print({call})
print(frozen >= gc.get_freeze_count() > frozen - 100)
del ring
gc.collect()
print(alive())
"""
    done = sandbox.python(code, LIVEPATCH="strict")
    first, *rest = done.out.splitlines()
    assert first.startswith(f"['patched', '{word}'"), done.err
    assert rest == ["True", "None"], done.err


@pytest.mark.parametrize("kind", ["dict", "partial", "closure", "instance"])
def test_what_is_frozen_and_holds_it_refuses_the_patch(sandbox: Sandbox, kind: str) -> None:
    taken, call, _ = CAPTURES[kind]
    ready(sandbox, "", taken)
    code = f"import fakeengine.scheduler, gc; gc.freeze()\n{program(f'[{call}, work(1), Scheduler().step(2)]')}"
    done = sandbox.python(code)
    assert "patched" not in done.out, done.err
    assert "is held by" in not_applied(sandbox, "captured", done.err)
    assert sandbox.python(code, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
@pytest.mark.parametrize("kept", ["gc.get_objects()", "[one for one in gc.get_objects() if type(one) is not int]"])
def test_a_list_of_all_objects_is_no_capture(sandbox: Sandbox, kept: str, version: str) -> None:
    """A program that looks for what its memory goes to keeps one."""
    ready(sandbox, "    run = step", "")
    code = f"import gc, fakeengine.scheduler\nkept = {kept}\n{program('work(7), Scheduler().run(7)')}"
    done = sandbox.python(code, python=interpreters.find(version) or "", LIVEPATCH="strict")
    assert done.out == "['patched', 'work', 7] ['patched', 'step', 7]\n", done.err


@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_a_call_that_waits_is_no_capture(sandbox: Sandbox, kind: str) -> None:
    """Since Python 3.11 a suspended call holds its function."""
    waits = "def waits(number): yield number" if kind == "generator" else "async def waits(number): return number"
    target = f"{SCHEDULER}:waits"
    sandbox.write({"fakeengine/scheduler.py": waits})
    sandbox.patch(targets=[target, WORK])
    sandbox.generate()
    code = "import fakeengine.scheduler as s; one = s.waits(7); import fakeengine.worker; print(s.waits.__wrapped__); one.close()"
    done = sandbox.python(code, LIVEPATCH="strict")
    assert (done.code, sandbox.reported()["state"]) == (0, "applied"), done.err


@pytest.mark.parametrize(("taken", "call", "holder"), CAPTURES.values(), ids=CAPTURES)
def test_what_is_held_in_another_way_refuses_the_patch(sandbox: Sandbox, taken: str, call: str, holder: str) -> None:
    """All of it: no target is patched, and the holder is named."""
    ready(sandbox, "", taken)
    done = sandbox.python(program(f"[{call}, work(1), Scheduler().step(2)]"))
    assert "patched" not in done.out, done.err
    detail = not_applied(sandbox, "captured", done.err)
    assert f"is held by {holder}" in detail
    strict = sandbox.python(program(call), LIVEPATCH="strict")
    assert (strict.code, strict.out) == (78, "")


@pytest.mark.parametrize("taken", NO_CALLS.values(), ids=NO_CALLS)
def test_what_calls_nothing_is_fine(sandbox: Sandbox, taken: str) -> None:
    ready(sandbox, "", taken)
    done = sandbox.python(program("work(7)"))
    assert done.out.startswith("['patched', 'work'"), done.err
    assert (sandbox.reported()["state"], done.others) == ("applied", [])


def test_what_another_patch_holds_is_no_capture(sandbox: Sandbox) -> None:
    """Two patches around one function, the second applied much later; a patch's code has the original by name."""
    ready(sandbox, "", "")
    code = """\
        from functools import partial
        TABLE = []
        def wrappers(livepatch):
            from fakeengine.scheduler import work
            TABLE.append(partial(work, 1))
            def around(wrapped, instance, args, kwargs):
                return ["again", *wrapped(*args, **kwargs), *work(0), *TABLE[0]()]
            return dict.fromkeys(TARGETS, around)
        """
    sandbox.patch("last", [f"{SCHEDULER}:work", WORK], code)
    sandbox.patch("first", [f"{SCHEDULER}:work"])
    sandbox.generate()
    done = sandbox.python(program("work(7)"))
    assert {sandbox.reported(name)["state"] for name in ("around", "first", "last")} == {"applied"}, done.err
    assert "'again'" in done.out
    assert done.out.count("'patched'") == 6, "of three calls, by two patches each"


def test_a_call_that_is_under_way_is_no_capture(sandbox: Sandbox) -> None:
    sandbox.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self, number):\n        import fakeengine.worker\n        return [number]\n"})  # fmt: skip
    sandbox.patch(targets=["fakeengine.scheduler:Scheduler.step", WORK])
    sandbox.generate()
    done = sandbox.python("from fakeengine.scheduler import Scheduler; Scheduler().step(1); print(Scheduler().step(7))")
    assert (done.out, sandbox.reported()["state"]) == ("['patched', 7]\n", "applied"), done.err
