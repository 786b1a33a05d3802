"""All or nothing, read back: what `applied` means, and what happens where a patch cannot be applied."""

from __future__ import annotations

import importlib
import linecache
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import guard, wrapping

from tests.unit.support import AROUND, PATCHED, STEP, STOCK, USE_STEP, WORK, Sandbox

BOTH = (
    "import fakeengine.scheduler as scheduler, fakeengine.worker as worker\n"
    "print(scheduler.Scheduler().step(7), worker.work(8))\n"
)
BOTH_STOCK, BOTH_PATCHED = "[7] [8]\n", "['patched', 7] ['patched', 8]\n"


def not_applied(sandbox: Sandbox, reason: str, err: str) -> str:
    """The detail of a patch that is wanted and `failed`: in the report, and in one line on stderr."""
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"]) == ("failed", reason)
    greeting, line = err.splitlines()
    assert "LIVEPATCH=off turns it off" in greeting
    assert line == f"vllm-livepatch: around is not applied ({reason}): {reported['detail']}"
    return str(reported["detail"])


def test_applied_once_and_counted(patched: Sandbox) -> None:
    done = patched.python(USE_STEP)
    assert (done.code, done.out) == (0, PATCHED)
    reported = patched.reported()
    assert (reported["state"], reported["verdict"]) == ("applied", "needed")
    assert (reported["reason"], reported["detail"]) == (None, None)
    assert (reported["targets"], reported["counters"]) == ([STEP], {"calls": 1})
    assert len(done.lines) == 1


def test_targets_in_several_modules_apply_together(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[STEP, WORK])
    sandbox.generate()
    done = sandbox.python("""
        from fakeengine.scheduler import Scheduler
        print(Scheduler().step(7))
        import fakeengine.worker
        print(Scheduler().step(7), fakeengine.worker.work(8))
        """)
    assert done.out == STOCK + BOTH_PATCHED
    assert sandbox.reported()["state"] == "applied"


def test_until_the_last_target_is_imported_a_patch_is_armed(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[STEP, WORK])
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert (done.out, len(done.lines)) == (STOCK, 1)
    assert (sandbox.reported()["state"], sandbox.reported()["verdict"]) == ("armed", "needed")


def test_a_second_target_that_is_gone_when_its_module_has_run(sandbox: Sandbox) -> None:
    """Its source has it, and so the decision is to apply; the module then deletes it."""
    sandbox.write({"fakeengine/worker.py": "def work(item):\n    return [item]\nstock = work\ndel work\n"})
    sandbox.patch(targets=[STEP, WORK])
    sandbox.generate()
    done = sandbox.python("""
        import fakeengine.scheduler as scheduler, fakeengine.worker as worker
        print(scheduler.Scheduler().step(7), worker.stock(8), hasattr(worker, "work"))
        """)
    assert done.out == "[7] [8] False\n"
    assert WORK in not_applied(sandbox, "missing", done.err)


def test_a_second_target_that_no_source_has(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[STEP, "fakeengine.worker:other"])
    sandbox.generate()
    done = sandbox.python(BOTH)
    assert done.out == BOTH_STOCK
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"], reported["verdict"]) == ("skipped", "drifted", "drifted")
    assert "fakeengine.worker:other" in reported["detail"]
    assert done.lines[1:] == [f"vllm-livepatch: around is not applied (drifted): {reported['detail']}"]


@pytest.mark.parametrize(
    "code",
    [
        "def wrappers(livepatch):\n    raise RuntimeError('it broke')",
        "raise RuntimeError('it broke')",
        "def wrappers(livepatch):\n    import sys\n    sys.exit('it broke')",
        "def wrappers(livepatch)\n    it broke",
        "def wrappers(livepatch):\n    return None",
        "import no_such_module_that_broke",
    ],
    ids=["raises", "raises on import", "exits", "does not parse", "returns nothing", "imports what is missing"],
)
def test_a_patch_that_raises_while_applying(sandbox: Sandbox, code: str) -> None:
    sandbox.patch(code=code)
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert (done.code, done.out) == (0, STOCK)
    assert "while applying" in not_applied(sandbox, "raised", done.err)


@pytest.mark.parametrize("extra", ["'fakeengine.worker:work'", "'fakeengine.scheduler:Scheduler.free'", None])
def test_a_patch_that_wraps_other_targets_than_it_names(sandbox: Sandbox, extra: str | None) -> None:
    targets = f"[*TARGETS, {extra}]" if extra else "[]"
    sandbox.patch(code=AROUND.replace("fromkeys(TARGETS", f"fromkeys({targets}"))
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert done.out == STOCK
    not_applied(sandbox, "mismatch", done.err)


def test_a_read_back_that_finds_the_wrong_object(sandbox: Sandbox) -> None:
    """A metaclass that swallows assignments: setattr says nothing, and nothing was set."""
    source = """\
        class Deaf(type):
            def __setattr__(cls, name, value):
                pass

        class Scheduler(metaclass=Deaf):
            def step(self, number):
                return [number]
        """
    sandbox.write({"fakeengine/scheduler.py": source})
    sandbox.patch(targets=[WORK, STEP])
    sandbox.generate()
    done = sandbox.python(BOTH)
    assert done.out == BOTH_STOCK
    detail = not_applied(sandbox, "readback", done.err)
    assert STEP in detail
    assert "Scheduler.step" in detail


@pytest.mark.parametrize("targets", [[WORK, STEP], [STEP, WORK]])
def test_a_target_that_cannot_be_set_leaves_all_as_they_were(sandbox: Sandbox, targets: list[str]) -> None:
    """It refuses to be set back as well, which must not keep the other one from it."""
    source = """\
        class Fixed(type):
            def __setattr__(cls, name, value):
                raise AttributeError("fixed")

        class Scheduler(metaclass=Fixed):
            def step(self, number):
                return [number]
        """
    sandbox.write({"fakeengine/scheduler.py": source})
    sandbox.patch(targets=targets)
    sandbox.generate()
    done = sandbox.python(BOTH)
    assert (done.code, done.out) == (0, BOTH_STOCK)
    assert "fixed" in not_applied(sandbox, "raised", done.err)


PATCHED_BEFORE = """
    import fakeengine.scheduler as scheduler
    def theirs(self, number):
        return ["theirs", number]
    scheduler.Scheduler.step = theirs
    import fakeengine.worker as worker
    print(scheduler.Scheduler().step(7), worker.work(8))
    """


def test_a_target_that_somebody_else_patched_before_us(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[WORK, STEP])
    sandbox.generate()
    done = sandbox.python(PATCHED_BEFORE)
    assert done.out == "['theirs', 7] [8]\n"
    assert f"{STEP} was already replaced by __main__.theirs" in not_applied(sandbox, "foreign", done.err)


def test_force_takes_a_target_that_somebody_else_patched_before_us(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[WORK, STEP])
    sandbox.generate()
    # Only forced where the code is not one that was verified: somebody edited it on disk as well.
    sandbox.write({"fakeengine/worker.py": "def work(item):\n    return [item + 0]\n"})
    done = sandbox.python(PATCHED_BEFORE, LIVEPATCH_AROUND="force")
    assert done.out == "['patched', 'theirs', 7] ['patched', 8]\n"
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("applied", "forced")


def test_a_target_that_its_own_module_decorates_is_no_stranger(sandbox: Sandbox) -> None:
    sandbox.write(
        {
            "fakeengine/tools.py": """\
                def timed(function):
                    def timed_one(*args):
                        return ["timed", *function(*args)]
                    return timed_one
                """,
            "fakeengine/scheduler.py": """\
                from fakeengine.tools import timed
                class Scheduler:
                    @timed
                    def step(self, number):
                        return [number]
                """,
        }
    )
    sandbox.patch()
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == "['patched', 'timed', 7]\n"
    assert sandbox.reported()["state"] == "applied"


def test_a_target_that_its_own_module_replaces_from_elsewhere_is_a_stranger(sandbox: Sandbox) -> None:
    sandbox.write({"fakeengine/fast.py": "def step(self, number):\n    return ['fast', number]\n"})
    scheduler = sandbox.site / "fakeengine/scheduler.py"
    scheduler.write_text(
        scheduler.read_text("utf-8") + "from fakeengine import fast\nScheduler.step = fast.step\n", "utf-8"
    )
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert done.out == "['fast', 7]\n"
    assert "fakeengine.fast.step" in not_applied(sandbox, "foreign", done.err)


def test_a_target_that_somebody_else_replaces_after_us(sandbox: Sandbox) -> None:
    """Told at the next look, which the next target's import brings."""
    sandbox.patch()
    sandbox.patch("other", [WORK])
    sandbox.generate()
    done = sandbox.python("""
        import fakeengine.scheduler as scheduler
        print(scheduler.Scheduler().step(7))
        def theirs(self, number):
            return ["theirs", number]
        scheduler.Scheduler.step = theirs
        import fakeengine.worker, sys
        print(scheduler.Scheduler().step(7), flush=True)
        print("after the look", file=sys.stderr)
        """)
    assert done.out == PATCHED + "['theirs', 7]\n"
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"]) == ("failed", "overwritten")
    message = f"vllm-livepatch: around is no longer applied (overwritten): {reported['detail']}"
    assert done.lines[1:] == [message, "after the look"]
    assert "__main__.theirs" in reported["detail"]
    assert sandbox.reported("other")["state"] == "applied"


def test_what_is_replaced_after_the_last_import_is_reported_at_the_end(patched: Sandbox) -> None:
    done = patched.python(f"{USE_STEP}; Scheduler.step = None")
    assert (patched.reported()["state"], patched.reported()["reason"]) == ("failed", "overwritten")
    assert len(done.lines) == 2


def test_somebody_elses_wrapper_around_ours_is_fine(patched: Sandbox) -> None:
    done = patched.python("""
        import functools
        from fakeengine.scheduler import Scheduler
        ours = Scheduler.step
        @functools.wraps(ours)
        def theirs(self, number):
            return ["theirs", *ours(self, number)]
        Scheduler.step = theirs
        print(Scheduler().step(7))
        """)
    assert done.out == "['theirs', 'patched', 7]\n"
    assert patched.reported()["state"] == "applied"
    assert len(done.lines) == 1


def test_a_function_that_a_module_has_taken_by_name_already(sandbox: Sandbox) -> None:
    """The patch waits for its second target, and meanwhile `from fakeengine.worker import work` has the stock one."""
    sandbox.write({"fakeengine/user.py": "from fakeengine.worker import work\ndef use(): return work(8)\n"})
    sandbox.patch(targets=[WORK, STEP])
    sandbox.generate()
    for code in (
        f"import fakeengine.user\n{BOTH}print(fakeengine.user.use())",
        f"{BOTH}import fakeengine.user; print(fakeengine.user.use())",
    ):
        assert sandbox.python(code).out == BOTH_PATCHED + "['patched', 8]\n"


def test_two_patches_around_one_function(sandbox: Sandbox) -> None:
    for name in ("first", "second"):
        sandbox.patch(name, code=AROUND.replace('"patched"', f'"{name}"'))
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert done.out == "['second', 'first', 7]\n"
    for name in ("first", "second"):
        assert (sandbox.reported(name)["state"], sandbox.reported(name)["counters"]) == ("applied", {"calls": 1})
    assert len(done.lines) == 1


def test_a_patch_that_fails_leaves_the_other_on_the_same_function(sandbox: Sandbox) -> None:
    sandbox.patch("first", code="def wrappers(livepatch):\n    raise RuntimeError('it broke')")
    sandbox.patch("second")
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == PATCHED
    assert [sandbox.reported(name)["state"] for name in ("first", "second")] == ["failed", "applied"]


def test_every_kind_of_function(sandbox: Sandbox) -> None:
    source = """\
        import functools
        def plain(number): return [number]
        class Scheduler:
            class Inner:
                def method(self, number): return [number]
            @staticmethod
            def static(number): return [number]
            @classmethod
            def of_class(cls, number): return [number, cls.__name__]
            def __init__(self, number=0): self.made = [number]
            def __call__(self, number): return [number]
            async def later(self, number): return [number]
        class Derived(Scheduler): pass
        """
    sandbox.write({"fakeengine/scheduler.py": source})
    names = ["plain", *(f"Scheduler.{name}" for name in ("Inner.method", "static", "of_class", "__call__"))]
    sandbox.patch(targets=[f"fakeengine.scheduler:{name}" for name in names])
    code = """\
        def wrappers(livepatch):
            def around(wrapped, instance, args, kwargs):
                wrapped(*args, **kwargs)
                instance.made.append("patched")
            async def awaited(wrapped, instance, args, kwargs):
                return ["patched", *await wrapped(*args, **kwargs)]
            return dict(zip(TARGETS, (around, awaited)))
        """
    sandbox.patch("more", ["fakeengine.scheduler:Scheduler.__init__", "fakeengine.scheduler:Scheduler.later"], code)
    sandbox.generate()
    done = sandbox.python("""
        import asyncio, inspect, pickle
        from fakeengine.scheduler import Scheduler, Derived, plain
        print(plain(1), Scheduler.Inner().method(2), Scheduler.static(3), Scheduler().static(4))
        print(Scheduler.of_class(5), Derived.of_class(6), Scheduler()(7), Derived(number=8).made)
        print(asyncio.run(Derived().later(9)), inspect.iscoroutinefunction(Scheduler.later))
        print(inspect.signature(plain), inspect.signature(Scheduler.__init__), inspect.getsource(plain), end="")
        """)
    assert done.out.splitlines() == [
        "['patched', 1] ['patched', 2] ['patched', 3] ['patched', 4]",
        "['patched', 5, 'Scheduler'] ['patched', 6, 'Derived'] ['patched', 7] [8, 'patched']",
        "['patched', 9] True",
        "(number) (self, number=0) def plain(number): return [number]",
    ], done.err


# By itself, without a bundle: modules of this process.


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A module of a file, with a function, a class, and something that its module did not write."""
    file = tmp_path / "fake_engine.py"
    file.write_text(
        "def work(item):\n    return [item]\n\n\nclass Scheduler:\n    def step(self, number):\n        return [number]\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wrapping, "_run", {})
    yield importlib.import_module("fake_engine")
    sys.modules.pop("fake_engine", None)


def wrapped(original: Any, wrapper: Any, target: str) -> Any:
    return wrapper


def step_for(engine: Any, target: str = "fake_engine:work", **more: Any) -> wrapping.Applied:
    (step,) = wrapping.planned({target: lambda item: ["patched", item]}, wrapped, (), {}, force=False, beneath={})
    return step


def test_what_no_wrapper_can_stand_for_is_not_wrapped(engine: Any) -> None:
    def refuses(original: Any, wrapper: Any, target: str) -> Any:
        raise guard.Unwrappable("an abstract method")

    with pytest.raises(wrapping.ApplyError) as caught:
        wrapping.planned({"fake_engine:work": print}, refuses, (), {}, force=False, beneath={})
    assert caught.value.reason == "unwrappable"
    assert "fake_engine:work" in caught.value.detail


def test_an_error_of_somebody_elses_while_it_is_set(engine: Any) -> None:
    """A class that refuses the second of two: the first is as it was, and the error has a reason."""

    class Refuses(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise ValueError(name)

    engine.Closed = Refuses("Closed", (), {"step": engine.Scheduler.step})
    steps = [step_for(engine), wrapping.Applied("fake_engine:Closed.step", engine.Closed, "step", None, print)]
    original = engine.work
    with pytest.raises(wrapping.ApplyError, match=r"ValueError while applying: step") as caught:
        wrapping.put_in_place(steps)
    assert caught.value.reason == "raised"
    assert engine.work is original


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_nobodys_reason(engine: Any, error: type[BaseException]) -> None:
    class Ends(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise error

    engine.Closed = Ends("Closed", (), {"step": engine.Scheduler.step})
    with pytest.raises(error):
        wrapping.put_in_place([wrapping.Applied("fake_engine:Closed.step", engine.Closed, "step", None, print)])


def spec_of(module: Any, **more: Any) -> None:
    module.__spec__ = SimpleNamespace(**more)


def test_whether_a_module_is_loaded(engine: Any) -> None:
    """Its spec says that it is being imported, a moment longer than it is: `executed` says when that is over."""
    assert wrapping.is_loaded("fake_engine")
    assert not wrapping.is_loaded("no.such.module")
    spec_of(engine)  # one that says nothing of it: made by hand
    assert wrapping.is_loaded("fake_engine")
    spec_of(engine, _initializing=True)
    assert not wrapping.is_loaded("fake_engine")
    spec_of(engine, _initializing=False, loader_state={"__class__": type(engine)})  # a LazyLoader's
    assert not wrapping.is_loaded("fake_engine")
    wrapping.executed(engine)
    spec_of(engine, _initializing=True)
    assert wrapping.is_loaded("fake_engine")


def test_a_module_that_its_import_takes_away_for_a_moment(engine: Any) -> None:
    wrapping.executed(engine)
    del sys.modules["fake_engine"]
    spec_of(engine, _initializing=True)
    assert wrapping.imported("fake_engine") is engine
    for flags in ({"_initializing": False}, {}):  # its import is over: somebody dropped it
        spec_of(engine, **flags)
        assert wrapping.imported("fake_engine") is None


def test_a_target_that_is_gone_is_not_in_place(engine: Any) -> None:
    step = step_for(engine)
    wrapping.put_in_place([step])
    assert wrapping.in_place(step)
    del engine.work
    assert not wrapping.in_place(step)
    assert wrapping.overtaken_by(step) == "nothing"


def test_a_wrapper_is_reached_as_what_its_class_gives_of_it(engine: Any) -> None:
    """Somebody's wrapper holds the function of our class method, not the class method."""
    ours = classmethod(lambda cls: None)
    step = wrapping.Applied("fake_engine:Scheduler.step", engine.Scheduler, "step", None, ours)

    def theirs() -> None: ...

    theirs.__wrapped__ = ours.__func__  # type: ignore[attr-defined]
    assert wrapping.reaches(ours, step.wrapper)
    assert wrapping.reaches(theirs, step.wrapper)
    assert not wrapping.reaches(lambda: None, step.wrapper)


@pytest.mark.parametrize("source", [None, "def work(:\n", ""], ids=["gone", "does not parse", "names nothing"])
def test_where_the_source_says_nothing_a_strange_function_is_somebody_elses(
    engine: Any, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    file = Path(engine.__file__)
    file.unlink()
    if source is not None:
        file.write_text(source, "utf-8")
    linecache.clearcache()
    engine.work = textwrap.dedent
    with pytest.raises(wrapping.ApplyError) as caught:
        step_for(engine)
    assert caught.value.reason == "foreign"
    assert f"textwrap.dedent in {textwrap.__file__}" in caught.value.detail


def test_a_module_without_a_file_may_have_a_strange_function(engine: Any) -> None:
    engine.__file__ = None
    engine.work = len  # has no code, and so no file
    with pytest.raises(wrapping.ApplyError) as caught:
        step_for(engine)
    assert caught.value.detail == "fake_engine:work was already replaced by builtins.len"


def test_who_took_a_function_by_name_is_patched_but_for_modules_of_ours(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.work
    own, other = ModuleType("vllm_livepatch.a_module"), ModuleType("elsewhere.a_module")
    own.work, other.renamed = original, original  # type: ignore[attr-defined]
    for module in (own, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    step = step_for(engine)
    wrapping.put_in_place([step])
    assert (own.work, other.renamed) == (original, engine.work)
    assert engine.work is step.wrapper
    wrapping.undo([step])
    assert [own.work, other.renamed, engine.work] == [original] * 3


def test_an_alias_that_does_not_take_the_wrapper_is_no_success(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None: ...

    other = Keeps("elsewhere.a_module")
    vars(other)["renamed"] = original = engine.work
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.raises(
        wrapping.ApplyError, match=r"^renamed of .*elsewhere.a_module.*, looked up again, is "
    ) as caught:
        wrapping.put_in_place([step_for(engine)])
    assert caught.value.reason == "readback"
    assert engine.work is original
