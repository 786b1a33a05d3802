"""The kit that patches' code imports, and that of a folder which lies elsewhere, too."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import context
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.kit import Remembered, attached, leaves
from vllm_livepatch.tools.bundles import catalogue, leading


def test_what_is_attached_is_made_once_for_each_object() -> None:
    one, other = SimpleNamespace(), SimpleNamespace()
    state = attached(one, "_livepatch_state", list)
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


def test_a_folder_that_lies_elsewhere_has_the_kit_too(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/patch.toml").write_text('title = "t"\npackage = "vllm"\ntargets = ["vllm.a:B.finish"]\n')
    (tmp_path / "mine/wrappers.py").write_text(CODE)
    entry = catalogue.read(tmp_path / "mine")
    assert list(leading.made(entry.folder, entry.patch)) == ["vllm.a:B.finish"]
