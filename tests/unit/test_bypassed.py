"""A class that overrides a wrapped method without calling it is found, when the patch is applied and later."""

from __future__ import annotations

import sys
from textwrap import dedent
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import overrides
from vllm_livepatch.sitecustomize.wrapping import Applied

from tests.unit.support import STEP, Sandbox

DETAIL = f"__main__.Own overrides {STEP} without calling it"

CALLS = {
    "super": "def step(self, number): return super().step(number)",
    "super with arguments": "def step(self, number): return super(Own, self).step(number)",
    "the class by name": "def step(self, number): return Scheduler.step(self, number)",
    "the class between": "def step(self, number): return Between.step(self, number)",
    "the module's class": "def step(self, number): return module.Scheduler.step(self, number)",
    "from a function inside": "def step(self, number): return [*(super(Own, self).step(n)[0] for n in [number])]",
    "decorated": "@functools.lru_cache\n    def step(self, number): return super().step(number)",
    "wraps it": "step = functools.wraps(Scheduler.step)(lambda *args: [])",
    "the very same": "step = Scheduler.step",
    "nothing of its own": "pass",
    "another method": "def free(self): return 'nothing'",
    "no function of Python": "step = len",
}
BYPASSES = {
    "its own": "def step(self, number): return ['own', number]",
    "calls itself": "def step(self, number): return ['own'] if not number else self.step(number - 1)",
    "calls itself by its class": "def step(self, number): return ['own'] if not number else Own.step(self, 0)",
    "calls another of the base": "def step(self, number): return [super().free()]",
    "decorated": "@functools.lru_cache\n    def step(self, number): return ['own', number]",
    "the stock one, taken before": "step = Scheduler.step.__wrapped__",
    "a static one": "@staticmethod\n    def step(number): return ['own', number]",
}
PROGRAM = """
import functools, sys
import fakeengine.scheduler as module
from fakeengine.scheduler import Scheduler
class Between(Scheduler): pass
class Own(Between):
    {body}
print("the class is there", file=sys.stderr)
import fakeengine.worker  # the next look
print("after the look", file=sys.stderr)
"""


def run(sandbox: Sandbox, body: str, **environ: str) -> list[str]:
    """The lines after the greeting; the second patch makes the second look."""
    sandbox.patch()
    sandbox.patch("other", ["fakeengine.worker:work"])
    sandbox.generate()
    done = sandbox.python(PROGRAM.format(body=body), **environ)
    assert done.code == 0, done.err
    return done.others


@pytest.mark.parametrize("body", list(CALLS.values()), ids=list(CALLS))
def test_an_override_that_calls_it_is_fine(sandbox: Sandbox, body: str) -> None:
    assert run(sandbox, body) == ["the class is there", "after the look"]
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("applied", None)


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("body", list(BYPASSES.values()), ids=list(BYPASSES))
def test_an_override_that_does_not_is_logged_once(sandbox: Sandbox, body: str, mode: str) -> None:
    message = f"vllm-livepatch: around is bypassed: {DETAIL}"
    first, *rest = run(sandbox, body, LIVEPATCH=mode)
    assert first == "the class is there"
    assert sorted(rest) == ["after the look", message], "said once, by the thread that looks"
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"], reported["detail"]) == ("applied", "bypassed", DETAIL)
    assert sandbox.reported("other")["reason"] is None


def test_every_class_below_is_looked_at_once() -> None:
    """However they derive from each other."""

    class Owner:
        def step(self) -> Any: ...

    class One(Owner):
        def step(self) -> Any:
            return "its own"

    class Other(Owner):
        def step(self) -> Any:
            return super().step()

    class Below(One): ...

    class Both(Below, Other):
        def step(self) -> Any:
            return "its own"

    class Last(Both):
        def step(self) -> Any:
            return Both.step(self)

    step = Applied("engine:Owner.step", Owner, "step", None, vars(Owner)["step"])
    of_module = Applied("engine:step", sys, "step", None, None)
    assert sorted(overrides.bypassing([of_module, step])) == [
        f"{__name__}.{cls.__qualname__} overrides engine:Owner.step without calling it" for cls in (Both, One)
    ]


def test_a_class_that_is_there_when_the_patch_is_applied(sandbox: Sandbox) -> None:
    source = (sandbox.site / "fakeengine/scheduler.py").read_text("utf-8")
    own = "class Own(Scheduler):\n    def step(self, number):\n        return ['own']\n"
    sandbox.write({"fakeengine/scheduler.py": f"{source}\n{own}"})
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python("import fakeengine.scheduler, sys; print('imported', file=sys.stderr)")
    message = f"vllm-livepatch: around is bypassed: fakeengine.scheduler.Own overrides {STEP} without calling it"
    assert sorted(done.others) == ["imported", message]


def test_an_override_that_is_a_target_itself(sandbox: Sandbox) -> None:
    source = (sandbox.site / "fakeengine/scheduler.py").read_text("utf-8")
    own = "class Own(Scheduler):\n    def step(self, number):\n        return ['own']\n"
    sandbox.write({"fakeengine/scheduler.py": f"{source}\n{dedent(own)}"})
    sandbox.patch(targets=[STEP, "fakeengine.scheduler:Own.step"])
    sandbox.generate()
    done = sandbox.python("from fakeengine.scheduler import Own; print(Own().step(7))")
    assert (done.out, len(done.lines)) == ("['patched', 'own']\n", 1)


def test_a_property_and_what_is_below_what_bypasses(sandbox: Sandbox) -> None:
    """Of classes in a row, the one that bypasses is named; below it `super` is fine."""
    sandbox.write({"fakeengine/scheduler.py": "class Scheduler:\n    @property\n    def step(self): return [7]\n"})
    body = "@property\n    def step(self): return ['own']\n"
    body += "class Below(Own):\n    @property\n    def step(self): return super().step"
    message = f"vllm-livepatch: around is bypassed: {DETAIL}"
    assert sorted(run(sandbox, body)) == ["after the look", "the class is there", message]


LAZY = """
class Lazy:  # of a program that binds it later
    def __getattribute__(self, name):
        raise RuntimeError("not bound yet")
"""


def test_an_override_that_cannot_be_asked_hides_no_other(sandbox: Sandbox) -> None:
    """A lazy proxy raises when it is asked for an attribute. What is counted behind it is reported all the same."""
    sandbox.patch()
    sandbox.generate()
    code = f"""
import fakeengine.scheduler
from fakeengine.scheduler import Scheduler
{LAZY}
class First(Scheduler): step = Lazy()
class Own(Scheduler):
    def step(self, number): return number
Scheduler().step(7)
"""
    done = sandbox.python(code)
    assert (done.code, done.others) == (0, [f"vllm-livepatch: around is bypassed: {DETAIL}"]), done.err
    reported = sandbox.reported()
    assert (reported["state"], reported["detail"], reported["counters"]) == ("applied", DETAIL, {"calls": 1})


def test_a_target_that_was_replaced_by_what_cannot_be_asked(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python(f"from fakeengine.scheduler import Scheduler\n{LAZY}\nScheduler.step = Lazy()")
    detail = f"{STEP} was replaced later by an object that raises RuntimeError when its attributes are asked for"
    assert (done.code, done.others) == (0, [f"vllm-livepatch: around is no longer applied (overwritten): {detail}"])
    assert (sandbox.reported()["state"], sandbox.reported()["detail"]) == ("failed", detail)


REPLACED = """
import functools, sys
import fakeengine.scheduler as module
ours = module.Scheduler
{code}
import fakeengine.worker  # the next look
print(module.Scheduler().step(7))
"""
CLASSES = {
    "nothing of its own": ("class Own(ours): pass", "['patched', 7]", None),
    "another method": ("class Own(ours):\n    def free(self): return 1", "['patched', 7]", None),
    "calls it": ("class Own(ours):\n    def step(self, number): return super().step(number)", "['patched', 7]", None),
    "does not": ("class Own(ours):\n    def step(self, number): return [0]", "[0]", "Own"),
    "a class beside it does not": (
        "class Beside:\n    def step(self, number): return [0]\nclass Own(Beside, ours): pass", "[0]", "Beside",
    ),
    "a class beside it does": (
        "class Beside:\n    def step(self, number): return super().step(number)\nclass Own(Beside, ours): pass",
        "['patched', 7]", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "out", "named"), CLASSES.values(), ids=CLASSES)
def test_a_class_below_that_takes_the_name(sandbox: Sandbox, code: str, out: str, named: str | None) -> None:
    """As vllm-ascend assigns its own scheduler over vLLM's: what it inherits is patched, what it overrides is named."""
    sandbox.patch()
    sandbox.patch("other", ["fakeengine.worker:work"])
    sandbox.generate()
    done = sandbox.python(REPLACED.format(code=f"{code}\nmodule.Scheduler = Own"))
    assert done.out == f"{out}\n", done.err
    reported = sandbox.reported()
    detail = named and f"__main__.{named} overrides {STEP} without calling it"
    assert (reported["state"], reported["reason"], reported["detail"]) == ("applied", named and "bypassed", detail)


def test_another_class_that_takes_the_name_is_named(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.patch("other", ["fakeengine.worker:work"])
    sandbox.generate()
    code = "class Own:\n    def step(self, number): return [0]\nmodule.Scheduler = Own"
    sandbox.python(REPLACED.format(code=code))
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"]) == ("failed", "overwritten")
    assert "__main__.Own.step" in reported["detail"]


AROUND_OURS = {
    "closure": "def made(f):\n    return lambda self, number: f(self, number)\nours.step = made(ours.step)",
    "global": "taken = ours.step\ndef theirs(self, number): return taken(self, number)\nours.step = theirs",
    "default": "def theirs(self, number, f=ours.step): return f(self, number)\nours.step = theirs",
    "two": "def made(f):\n    return lambda self, number: f(self, number)\nours.step = made(made(made(ours.step)))",
    "partialmethod": "ours.step = functools.partialmethod(ours.step)",
    "object": (
        "class Theirs:\n    def __init__(self, f): self.f = f\n    def __get__(self, one, cls=None): return self.f.__get__(one)\n"
        "ours.step = Theirs(ours.step)"
    ),
    "object that raises": (
        "class Theirs:\n    def __init__(self, f): self.f = f\n    def __get__(self, one, cls=None): return self.f.__get__(one)\n"
        "    def __getattr__(self, name): raise RuntimeError(name)\nours.step = Theirs(ours.step)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", AROUND_OURS.values(), ids=AROUND_OURS)
def test_somebody_elses_wrapper_that_does_not_say_what_it_wraps(sandbox: Sandbox, code: str) -> None:
    sandbox.patch()
    sandbox.patch("other", ["fakeengine.worker:work"])
    sandbox.generate()
    done = sandbox.python(REPLACED.format(code=code))
    assert done.out == "['patched', 7]\n", done.err
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("applied", None)
