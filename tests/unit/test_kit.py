"""The kit that patches' code imports, and that of a folder which lies elsewhere, too."""

from __future__ import annotations

import ast
import dataclasses
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import context
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.kit import Remembered, attached, leaves
from vllm_livepatch.tools.bundles import catalogue, leading, patch_files

from tests.unit import keeping


def test_what_is_attached_is_made_once_for_each_object() -> None:
    one, other = SimpleNamespace(), SimpleNamespace()
    state: list[int] = attached(one, "_livepatch_state", list)
    assert attached(one, "_livepatch_state", lambda: pytest.fail("made twice")) is state == []
    state.append(1)
    assert attached(one, "_livepatch_state", list) is state
    assert attached(one, "_livepatch_state", lambda: pytest.fail("made twice")) == [1]
    assert attached(other, "_livepatch_state", list) == []
    assert vars(one)["_livepatch_state"] is state


def test_what_a_class_has_by_that_name_is_another() -> None:
    class Engine:
        _livepatch_state = ("the class's",)

    assert attached(Engine(), "_livepatch_state", list) == []


def test_two_threads_that_ask_at_once_are_given_the_same() -> None:
    owner, both = SimpleNamespace(), threading.Barrier(2)
    given: list[object] = []

    def make() -> object:
        both.wait(10)
        return object()

    threads = [threading.Thread(target=lambda: given.append(attached(owner, "x", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(given) == 2
    assert given[0] is given[1]


def test_the_oldest_is_forgotten_beyond_the_bound() -> None:
    ids: Remembered[str, int] = Remembered(2)
    for number, name in enumerate(["a", "b", "a", "c"]):
        ids.remember(name, number)
    assert list(ids.items()) == [("a", 2), ("c", 3)]
    ids["a"] = 4  # as in any dict: no newer for that
    ids.remember("d", 5)
    assert list(ids.items()) == [("c", 3), ("d", 5)]
    assert ids.popitem(last=False) == ("c", 3)
    ids.remember("e", 6)
    assert list(ids) == ["d", "e"]


@dataclasses.dataclass
class Multi:
    _connectors: Any


def test_the_leaves_of_a_connector_are_itself_or_its_children_at_any_depth() -> None:
    assert list(leaves("one")) == ["one"]
    assert list(leaves(Multi(["a", Multi(["b", "c"]), Multi([])]))) == ["a", "b", "c"]
    assert list(leaves(None)) == [None]
    other = Multi({"not": "children"})
    assert list(leaves(other)) == [other]


def test_what_is_told_is_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(context, "to_stderr", lines.append)
    livepatch = PatchContext("one", {}, {}, lambda: None)
    livepatch.tell("late", "it came late")
    livepatch.tell("late", "it came late", 3)
    assert (livepatch.counters, lines) == ({"late": 4}, ["one: it came late"])


def test_a_method_of_one_object_is_wrapped_and_of_no_other() -> None:
    class Engine:
        def step(self, number: int) -> Any:
            return number

    def step(original: Any, engine: Any, number: int, *rest: Any, **named: Any) -> Any:
        return (engine, original(number + 1, *rest, **named))

    one, other = Engine(), Engine()
    PatchContext("one", {}, {}, lambda: None).around_its(one, "step", step)
    assert [engine.step(1) for engine in (one, other)] == [(one, 2), 1]


CODE = """
from ...sitecustomize.kit import leaves

def wrappers(livepatch):
    def finish(original, scheduler, *rest, **named):
        return [original(*rest, **named) for leaf in leaves(scheduler)]
    return {"vllm.a:B.finish": finish}
"""


def test_a_folder_that_lies_elsewhere_has_the_kit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/patch.toml").write_text('title = "t"\npackage = "vllm"\ntargets = ["vllm.a:B.finish"]\n')
    (tmp_path / "mine/wrappers.py").write_text(CODE)
    entry = catalogue.read(tmp_path / "mine")
    assert list(leading.made(entry.folder, entry.patch)) == ["vllm.a:B.finish"]
    assert not (entry.folder / "__pycache__").exists()


def names_of(trees: list[ast.Module]) -> set[str]:
    """The constants of a patch's modules that name an attribute of the engine's objects."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    return {
        ast.unparse(node.targets[0])
        for node in assigned
        if isinstance(node.value, ast.Constant) and keeping.MARK.fullmatch(str(node.value.value))
    }


def by_hand(node: ast.AST, names: set[str]) -> Iterator[str]:
    """Where code makes such an attribute when it is first asked for, and does no more than that: as `attached` does.

    Another value in its place, a mark on a request, an attribute that is set when its object is made, and a first time
    at which more is to be done (to listen to a connector's children) are none of `attached`'s.
    """

    def is_name(key: ast.expr) -> bool:
        text = ast.unparse(key)
        return bool(keeping.MARK.fullmatch(text.strip("'"))) or text.rpartition(".")[2] in names

    def sets(statement: ast.stmt) -> bool:
        calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call) and len(one.args) > 1]
        named = [one.args[1] for one in calls if ast.unparse(one.func) == "setattr"]
        named += [one.args[0] for one in calls if ast.unparse(one.func).endswith(").setdefault")]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        named += [one.slice for one in targets if isinstance(one, ast.Subscript)]
        return any(map(is_name, named))

    if isinstance(node, ast.If) and ast.unparse(node.test).endswith(" is None") and any(map(sets, node.body)):
        plain = (isinstance(one, (ast.Assign, ast.AnnAssign)) or sets(one) for one in node.body)
        if all(plain):
            yield ast.unparse(node)
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
        if ast.unparse(node.func.value).startswith("vars(") and is_name(node.args[0]):
            yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from by_hand(child, names)


ENTRIES = {name: entry for name, entry in catalogue.load().items() if not entry.patch.diff}


AS_BEFORE = {"mooncake-failed-loads": 1, "moriio-timeouts": 3}
"""Where the words of before do the same, atomically: their proofs are played on all releases with their next change."""


@pytest.mark.parametrize("name", ENTRIES)
def test_what_a_patch_makes_when_it_is_first_asked_for_is_attached(name: str) -> None:
    trees = [ast.parse(file.read_text("utf-8")) for file in patch_files.code(ENTRIES[name].folder)]
    names = names_of(trees)
    assert len([text for tree in trees for text in by_hand(tree, names)]) == AS_BEFORE.get(name, 0)


MADE = "if found is None:\n    found = {}\n    "
HAND = {
    "vars(one).setdefault('_livepatch_state', set()).add(1)": 1,
    "vars(one).setdefault(STATE, set())": 1,
    "vars(one).setdefault(endings.STATE, set())": 1,
    MADE + "setattr(one, STATE, found)": 1,
    MADE + "vars(one)[STATE] = found": 1,
    MADE + "setattr(one, STATE, found)\n    listen(one)": 0,
    MADE + "vars(one)['blocks'] = found": 0,
    "vars(one).setdefault('blocks', set())": 0,
    "rows.setdefault(STATE, set())": 0,
    "setattr(one, STATE, set())": 0,
    "vars(one)[STATE] = now": 0,
}


@pytest.mark.parametrize("code", HAND)
def test_what_attached_would_do_is_found(code: str) -> None:
    assert len(list(by_hand(ast.parse(code), {"STATE"}))) == HAND[code]
