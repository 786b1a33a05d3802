"""The course of a target's import: in which order what is done, what fails, and what is left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import runtime, wrapping
from vllm_livepatch.sitecustomize.changed_module import ChangedModule
from vllm_livepatch.sitecustomize.changes import Change
from vllm_livepatch.sitecustomize.decision import Decision
from vllm_livepatch.sitecustomize.patch_state import PatchState
from vllm_livepatch.sitecustomize.source_changes import Made, SourceChanges

from tests.unit.support import Sandbox
from tests.unit.test_changed_module import RAISES, SCHEDULER, STEP, STOCK, USE, diff_patch, engine, state

__all__ = ["engine"]

LOADERS = {
    "not to be copied": """
class Loader:
    def __copy__(self):
        raise TypeError("not to be copied")
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(CODE, vars(module))
    def get_source(self, name=None):
        return open(FILE).read()
loader = Loader()
""",
    "its own copy": """
class Loader:
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        exec(CODE, vars(module))
    @staticmethod
    def get_source(name=None):
        return open(FILE).read()
loader = Loader
""",
    "one that makes the module": """
class Loader:
    def load_module(self, name):
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = FILE
        exec(CODE, vars(module))
        return module
    def get_source(self, name=None):
        return open(FILE).read()
loader = Loader()
""",
}
FOUND_BY_IT = """
import sys, warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
warnings.simplefilter("ignore")
CODE = compile(open(FILE).read(), FILE, "exec")
{loader}
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "fakeengine.scheduler":
            spec = ModuleSpec(name, loader, origin=FILE)
            spec.has_location = True
            return spec

sys.meta_path.insert(1, Finder)
"""


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_cannot_load_a_changed_source_fails_only_the_patches_that_apply(
    engine: Sandbox, kind: str
) -> None:
    diff_patch(engine, STEP)
    diff_patch(engine, {"fakeengine/scheduler.py": ('"freed"', '"changed"')}, name="turned-off")
    diff_patch(engine, {"fakeengine/scheduler.py": ('"stock"', '"changed"')}, name="drifted", variant=[])
    engine.generate()
    file = engine.site / "fakeengine/scheduler.py"
    code = f"FILE = {str(file)!r}\n{FOUND_BY_IT.replace('{loader}', LOADERS[kind])}{USE}"
    done = engine.python(code, LIVEPATCH_TURNED_OFF="off")
    assert (done.code, done.out) == (0, STOCK), done.err
    assert state(engine) == ("failed", "loader")
    assert state(engine, "turned-off") == ("skipped", "off")
    assert state(engine, "drifted") == ("skipped", "drifted")
    message = (
        "diffed is not applied (loader): fakeengine.scheduler cannot be patched, its loader cannot be made to load"
    )
    assert sum(message in line for line in done.others) == 1
    assert not any("turned-off" in line for line in done.others)


def test_a_diff_that_did_not_take_is_not_in_the_patch_set_that_a_wrapper_gets(engine: Sandbox) -> None:
    """What the patch set names is what torch.compile will trace; a wrapper of the same module may ask at once."""
    asks = """\
        def wrappers(livepatch):
            asked = livepatch.patch_set()
            return dict.fromkeys(TARGETS, lambda wrapped, instance, args, kwargs: asked)
        """
    engine.patch("asks", [f"{SCHEDULER}:Scheduler.free"], asks)
    diff_patch(engine, {"fakeengine/scheduler.py": ("class Scheduler:", "__loader__ = None\nclass Scheduler:")})
    engine.generate()
    done = engine.python(f"from {SCHEDULER} import Scheduler; print(repr(Scheduler().free()))")
    assert state(engine) == ("failed", "readback"), done.err
    assert done.out == "''\n"


@pytest.mark.parametrize(("toggle", "shown"), [("auto", "changed"), ("off", "stock")])
def test_a_loader_shows_what_it_would_run_before_it_runs(engine: Sandbox, toggle: str, shown: str) -> None:
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'changed'")})
    engine.generate()
    done = engine.python(
        """
        import importlib.util, sys
        loader, found = importlib.util.find_spec("fakeengine.third").loader, {}
        exec(loader.get_code("fakeengine.third"), found)
        print(loader.get_source("fakeengine.third").strip(), found["VALUE"], "fakeengine.third" in sys.modules)
        print(type(loader).__name__)
        """,
        LIVEPATCH_DIFFED=toggle,
    )
    assert (done.code, done.out) == (0, f"VALUE = '{shown}' {shown} False\nSourceFileLoader\n"), done.err


def test_a_module_that_only_a_diff_has_runs_as_a_program_and_shows_its_source(engine: Sandbox) -> None:
    """`python -m` and readers of sources ask its loader, and import nothing."""
    diff_patch(engine, STEP, added={"fakeengine/tool.py": "print('runs as', __name__)\n"})
    engine.generate()
    done = engine.python(
        """
        import importlib.util, runpy, sys
        loader = importlib.util.find_spec("fakeengine.tool").loader
        print(repr(loader.get_source("fakeengine.tool")), loader.get_code("fakeengine.tool").co_name)
        print("fakeengine.tool" in sys.modules)
        runpy.run_module("fakeengine.tool", run_name="__main__")
        """
    )
    shown = "\"print('runs as', __name__)\\n\" <module>"
    assert (done.code, done.out) == (0, f"{shown}\nFalse\nruns as __main__\n"), done.err


def test_the_traceback_of_a_module_that_only_a_diff_has_shows_no_frame_of_ours(engine: Sandbox) -> None:
    diff_patch(engine, STEP, added={"fakeengine/tool.py": "1 / 0\n"})
    engine.generate()
    done = engine.python("import fakeengine.tool")
    assert (done.code, done.others[-1]) == (1, "ZeroDivisionError: division by zero")
    files = [line.split('"')[1] for line in done.lines if line.startswith("  File ")]
    assert files[0] == "<string>"
    assert [file.endswith("fakeengine/tool.changed.py") for file in files[1:]] == [True], done.err


def test_a_module_that_was_dropped_with_its_diff_is_not_found_in_its_package(engine: Sandbox) -> None:
    """`from package import module` takes the package's attribute before it looks in sys.modules."""
    diff_patch(
        engine,
        {
            "fakeengine/worker.py": ("def work(item):", f"from fakeengine import third\n{RAISES}\ndef work(item):"),
            "fakeengine/third.py": ("'stock'", "'changed'"),
        },
    )
    engine.generate()
    done = engine.python(
        "import fakeengine.worker\nprint(hasattr(fakeengine, 'third'))\n"
        "from fakeengine import third\nprint(third.VALUE)"
    )
    assert (done.code, done.out) == (0, "False\nstock\n"), done.err
    assert state(engine) == ("failed", "raised")


def test_a_dropped_diff_whose_other_modules_were_never_imported(engine: Sandbox) -> None:
    """Neither they nor their packages are there to be forgotten."""
    engine.write({"fakeengine/deep/__init__.py": "", "fakeengine/deep/part.py": "VALUE = 'stock'\n"})
    diff_patch(
        engine,
        {
            "fakeengine/third.py": ("VALUE", f"{RAISES}\nVALUE"),
            "fakeengine/deep/part.py": ("'stock'", "'changed'"),
        },
    )
    engine.generate()
    done = engine.python(
        "from fakeengine.third import VALUE\nfrom fakeengine.deep import part\nprint(VALUE, part.VALUE)"
    )
    assert (done.code, done.out) == (0, "stock stock\n"), done.err
    assert done.others == [
        f"vllm-livepatch: diffed is not applied (raised): {engine.reported('diffed')['detail']}",
    ]


@pytest.fixture
def run() -> Iterator[ModuleType]:
    """A target module that has run, and that nobody finds in sys.modules."""
    module = ModuleType("fakeengine_run")
    module.__spec__ = ModuleSpec(module.__name__, None)
    wrapping.executed(module)
    yield module
    del wrapping._run[module.__name__]


@pytest.mark.parametrize(("importing", "loaded"), [(True, True), (False, False)])
def test_a_module_that_has_run_is_there_while_its_import_ends_and_gone_when_it_is_dropped(
    run: ModuleType, importing: bool, loaded: bool
) -> None:
    """At the end of its import the interpreter takes a module out of sys.modules, and puts it back."""
    assert run.__name__ not in sys.modules
    run.__spec__._initializing = importing  # type: ignore[union-attr]
    assert wrapping.is_loaded(run.__name__) is loaded


APPLY = Decision("needed", True, True, "needed", "")
REFUSED = Decision("drifted", False, True, "drifted", "somebody's edit")


class World:
    """A runtime of patches on two modules, each of whose parts is a double that answers as it is told."""

    def __init__(self, mocker: MockerFixture) -> None:
        def facts(*targets: str, **more: Any) -> dict[str, Any]:
            return {"title": "one", "package": "engine", "targets": list(targets), "variant": [], **more}

        patches = {
            "both": facts("engine.a:f", "engine.b:g"),
            "diff": facts("engine.a", diff="change.diff", added=["engine.new"]),
            "each": facts("engine.a:f", "engine.b:g", per_module=True),
            "only-b": facts("engine.b:g"),
        }
        for part in ("Reporter", "SourceChanges", "Decider", "Applier"):
            mocker.patch.object(runtime, part)
        mocker.patch.object(wrapping, "executed")
        self.loaded = {"engine.a"}
        mocker.patch.object(wrapping, "is_loaded", side_effect=self.loaded.__contains__)
        catalogue = {"patches": patches, "version": "1.2", "digests": {}, "changes": {}}
        made: Any = runtime.Runtime(catalogue, "root", {"digest": None})
        self.runtime, self.reporter, self.applier = made, made.reporter, made._applier
        self.decider, self.sources = made._decider, made._sources
        self.sources.count_loaded.return_value = (1, 1, None)
        self.states: dict[str, PatchState] = {one.patch.name: one for one in made.patches.all}
        for one in self.states.values():
            one.decision = APPLY
        self.module = ModuleType("engine.a")
        mocker.patch.dict(sys.modules, {"engine.a": self.module})

    def applied(self) -> dict[str, list[str]]:
        """To which of its targets each patch was applied."""
        return {call.args[0].patch.name: call.args[1] for call in self.applier.apply.call_args_list}

    def not_applied(self) -> list[str]:
        return [state.patch.name for call in self.reporter.not_applied.call_args_list for state in call.args]


@pytest.fixture
def world(mocker: MockerFixture) -> World:
    return World(mocker)


def test_a_patch_is_applied_when_all_its_modules_are_there_or_module_by_module(world: World) -> None:
    world.runtime.after_execution(world.module)
    assert world.applied() == {"each": ["engine.a:f"]}
    assert world.states["diff"].state == "applied"
    assert (world.states["both"].state, world.states["only-b"].state) == ("armed", "armed")
    world.reporter.imported.assert_called_once_with()
    world.reporter.soon.assert_called_once_with(15.0)
    world.loaded.add("engine.b")
    world.applier.apply.reset_mock()
    world.runtime.after_execution(world.module)
    whole = ["engine.a:f", "engine.b:g"]
    assert world.applied() == {"both": whole, "each": whole}
    assert world.not_applied() == []


def test_a_private_copy_of_a_module_is_nobodys_target(world: World) -> None:
    world.runtime.after_execution(ModuleType("engine.a"))
    assert world.applied() == {}
    world.reporter.imported.assert_not_called()


@pytest.mark.parametrize("decision", [None, REFUSED])
def test_what_is_not_to_be_applied_is_not(world: World, decision: Decision | None) -> None:
    world.states["each"].decision = world.states["diff"].decision = decision
    world.runtime.after_execution(world.module)
    assert world.applied() == {}
    world.sources.count_loaded.assert_not_called()


def test_what_has_failed_is_not_tried_again(world: World) -> None:
    world.states["each"].settle("failed", "raised", "an error of its own")
    world.runtime.after_execution(world.module)
    assert (world.applied(), world.not_applied()) == ({}, [])


def test_what_fails_is_reported(world: World) -> None:
    world.sources.count_loaded.return_value = (1, 2, "engine.a")
    world.applier.apply.side_effect = lambda state, targets: state.settle("failed", "missing", "it is not there")
    world.runtime.after_execution(world.module)
    assert world.not_applied() == ["diff", "each"]
    diff = world.states["diff"]
    assert (diff.reason, diff.detail) == ("readback", "engine.a, looked up again, was not made of the changed source")


def test_a_diff_is_partly_applied_until_all_its_modules_are_there(world: World) -> None:
    world.sources.count_loaded.return_value = (1, 2, None)
    world.runtime.after_execution(world.module)
    diff = world.states["diff"]
    assert (diff.state, diff.reason, diff.detail) == ("applied", "partly", "1 of 2 modules imported so far")


def test_out_of_reach_is_what_would_have_been_applied(world: World) -> None:
    world.states["both"].settle("failed", "raised", "an error of its own")
    world.states["each"].decision = REFUSED
    world.applier.reset_mock()
    world.runtime.out_of_reach("engine.a", "its loader is somebody's own")
    world.applier.unapply.assert_called_once_with(
        world.states["diff"], "loader", "engine.a cannot be patched, its loader is somebody's own"
    )
    assert world.not_applied() == ["diff"]
    world.reporter.imported.assert_called_once_with()
    world.states["diff"].decision = None
    world.runtime.out_of_reach("engine.a", "why")
    world.applier.unapply.assert_called_once()


def test_modules_that_were_imported_before_the_guard_armed_are_decided_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine.a", "engine.b"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    world.runtime.armed_late(["engine.a", "engine.b"])
    world.decider.too_late_for.assert_called_once_with(["engine.a", "engine.b"])
    decided = [[state.patch.name for state in call.args[0]] for call in world.decider.decide.call_args_list]
    assert decided == [["both", "diff", "each"], ["both", "each", "only-b"]]
    assert world.reporter.imported.call_count == 2


def test_a_module_that_only_a_diff_has_is_decided_on_as_it_is_looked_for(world: World) -> None:
    assert world.runtime.added("engine.other") is world.sources.added.return_value
    world.decider.decide.assert_not_called()
    assert world.runtime.added("engine.new") is world.sources.added.return_value
    world.decider.decide.assert_called_once_with([world.states["diff"]])


@pytest.mark.parametrize(
    ("decided_on", "changed", "gone"), [({"diff"}, None, True), (set(), None, False), ({"diff"}, "a module", False)]
)
def test_a_module_is_gone_once_it_was_decided_that_nobody_adds_it(
    world: World, decided_on: set[str], changed: Any, gone: bool
) -> None:
    world.decider.decided_on = decided_on
    world.sources.module.return_value = changed
    assert world.runtime.is_gone("engine.new") is gone


@pytest.mark.parametrize(
    ("stay", "detail"),
    [
        (set(), "it raised"),
        ({"engine.y", "engine.x"}, "it raised; loaded earlier, and so still as changed: engine.x, engine.y"),
    ],
)
def test_where_a_diff_is_given_up_wrappers_of_its_modules_are_decided_on_anew(
    world: World, stay: set[str], detail: str
) -> None:
    world.states["each"].decision = None
    end = world.runtime._give_up(["diff"], "it raised", stay)
    assert world.not_applied() == [], "it is not known yet whether the module works without it"
    end(True)
    diff = world.states["diff"]
    assert (diff.state, diff.reason, diff.detail) == ("failed", "raised", detail)
    assert world.not_applied() == ["diff"]
    world.decider.decide_anew.assert_called_once_with(world.states["both"])


def test_a_forked_child_counts_anew_under_a_lock_of_its_own(world: World, mocker: MockerFixture) -> None:
    world.states["both"].context = counts = mocker.Mock()
    before = world.runtime.patches.lock
    world.runtime._forked()
    assert world.runtime.patches.lock is not before
    counts.forget.assert_called_once_with()
    world.reporter.forked_child.assert_called_once_with()


def test_an_error_of_our_own_breaks_no_import(mocker: MockerFixture) -> None:
    says = mocker.patch.object(runtime, "to_stderr")
    runtime.guarded(mocker.Mock(side_effect=KeyError("x")), 1)
    says.assert_called_once_with("an error of its own, please report it: KeyError: 'x'")


def test_a_changed_module_is_loaded_also_at_the_moment_that_its_import_takes_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread asks for the diff's modules as the interpreter ends the import of one."""
    name = "engine_part"
    sources = SourceChanges(None)
    changed = ChangedModule(name, "x = 1\n", None, None)
    sources.put("one", Made((Change(name, (), added=True),), {name: changed}))
    module = ModuleType(name)
    spec = ModuleSpec(name, SimpleNamespace(get_source=lambda name: changed.text))  # type: ignore[arg-type]
    spec._initializing = True  # type: ignore[attr-defined]
    module.__spec__, module.__loader__ = spec, spec.loader
    monkeypatch.setitem(wrapping._run, name, module)
    assert name not in sys.modules
    assert sources.count_loaded("one") == (1, 1, None)
