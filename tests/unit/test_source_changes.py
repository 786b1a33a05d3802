"""A changed module by itself: what is compiled of it, and how it is known to be in place."""

from __future__ import annotations

import importlib.util
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import changed_module
from vllm_livepatch.sitecustomize.changed_module import ChangedModule
from vllm_livepatch.sitecustomize.changes import Change, Hunk, HunkError
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.sitecustomize.source_changes import Made, SourceChanges, placed

STOCK, CHANGED = "def f():\n    return 1\n", "def f():\n    return 2\n"
CHANGE = Change("engine.part", (Hunk(2, ("    return 1",), ("    return 2",)),))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A package of one module."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "engine" / "part.py").write_text(STOCK, "utf-8")
    return Tree([str(tmp_path)])


def test_a_module_that_is_there_is_not_added_and_one_that_is_not_is_not_changed(tree: Tree) -> None:
    added = Change("engine.part", (Hunk(0, (), ("x = 1", "")),), added=True)
    with pytest.raises(HunkError, match=r"^engine.part exists already$"):
        placed([added], tree)
    with pytest.raises(HunkError, match=r"^engine.other is not there$"):
        placed([Change("engine.other", CHANGE.hunks)], tree)
    assert placed([CHANGE], tree) == {"engine.part": CHANGED}


def test_what_is_no_python_is_seen_before_anything_is_changed(tree: Tree) -> None:
    with pytest.raises(SyntaxError):
        SourceChanges(None).made([Change("engine.part", (Hunk(1, ("def f():",), ("def f(:",)),))], tree)


def test_only_a_module_that_the_diff_adds_has_a_spec_of_ours(tree: Tree) -> None:
    sources = SourceChanges(None)
    new = Change("engine.new", (Hunk(0, (), ("x = 1", "")),), added=True, package=True)
    sources.put("a-patch", sources.made([CHANGE, new], tree))
    assert sources.added("engine.part") is None
    assert sources.added("engine.nothing") is None
    spec = sources.added("engine.new")
    assert spec is not None
    assert (spec.has_location, spec.submodule_search_locations) == (True, [])
    module = importlib.util.module_from_spec(spec)
    assert module.__file__ == sources.files()["engine.new"]


def test_the_text_is_compiled_as_it_would_be_by_itself() -> None:
    """Our own `from __future__ import annotations` is not its."""
    made = ChangedModule("engine.part", "def f(a: 1 + 1): pass\n", None, None)
    module = ModuleType("engine.part")
    made.execute(module)
    assert module.f.__annotations__ == {"a": 2}


def test_what_raises_in_one_thread_is_undone_there_while_another_imports() -> None:
    """Two threads import modules that one patch changes: neither import is inside of the other."""
    begun, may_end = threading.Event(), threading.Event()
    waits = ChangedModule("engine.part", "begun.set()\nmay_end.wait()\n", "/engine/part.py", None)
    raises = ChangedModule("engine.other", "1 / 0\n", "/engine/other.py", None)
    sources = SourceChanges(None)
    changes = CHANGE, Change("engine.other", CHANGE.hunks)
    sources.put("a-patch", Made(changes, {"engine.part": waits, "engine.other": raises}))
    given_up: list[str] = []

    def give_up(patches: list[str], why: str, stay: set[str]) -> Callable[[bool], None]:
        given_up.extend(patches)
        return lambda works: None

    def execute(changed: ChangedModule, **names: Any) -> ModuleType:
        module = ModuleType(changed.module)
        vars(module).update(names)
        loader = SimpleNamespace(exec_module=lambda found: setattr(found, "stock", True))
        changed.substitute(loader)
        sources.execute(module, loader, changed, give_up)
        return module

    other = threading.Thread(target=execute, args=(waits,), kwargs={"begun": begun, "may_end": may_end})
    other.start()
    try:
        assert begun.wait(20)
        assert vars(execute(raises))["stock"]
    finally:
        may_end.set()
        other.join()
    assert given_up == ["a-patch"]


def function(file: str, module: str) -> FunctionType:
    code = compile("def f(): pass", file, "exec")
    names: dict[str, Any] = {"__name__": module}
    exec(code, names)
    made = names["f"]
    assert isinstance(made, FunctionType)
    return made


def test_a_module_of_the_stock_code_is_not_in_place_whatever_its_loader_says() -> None:
    made = ChangedModule("engine.part", CHANGED, "/engine/part.py", None)
    module: Any = ModuleType("engine.part")
    module.__loader__ = SimpleNamespace(get_source=lambda name: CHANGED)
    module.f = function(made.filename, "engine.part")
    module.theirs = function("/engine/part.py", "engine.other")  # another module's, which says that file
    assert made.in_place(module)
    module.f = function("/engine/part.py", "engine.part")
    assert not made.in_place(module)


def test_what_an_added_module_raises_shows_no_frame_of_ours() -> None:
    made = ChangedModule("engine.new", "raise LookupError\n", None, None)
    spec = made.spec(package=False)
    assert spec.loader is not None
    with pytest.raises(LookupError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert changed_module.__file__ not in files
    assert files[-1] == made.filename
