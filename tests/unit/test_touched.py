"""Every attribute that a patch's code asks something of upstream for is in its facts, or in `[about.besides]`.

Told by name alone, from the syntax: an attribute of ours or of the standard library that has the name of one of
upstream's hides that one, and what is asked for by a computed name is not seen.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import threading
from collections.abc import Iterator

import pytest
from vllm_livepatch.sitecustomize import kit
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.guard import Wrapped
from vllm_livepatch.tools.bundles import catalogue, patch_files

from tests.unit import keeping

ENTRIES = {name: entry for name, entry in catalogue.load().items() if not entry.patch.diff}
TYPES: tuple[type, ...] = (
    dict,
    list,
    set,
    frozenset,
    str,
    bytes,
    int,
    float,
    tuple,
    type,
    object,
    BaseException,
    collections.deque,
)
TYPES += (collections.OrderedDict, collections.Counter, threading.Event, threading.Thread, type(threading.Lock()))
STANDARD = {name for kind in TYPES for name in dir(kind)} | set(dir(PatchContext)) | {"__name__", "__mro__"}
STANDARD |= {"aside", "asked", "facts", "options", "patch_set"}  # of a patch's context
STANDARD |= set(dir(Wrapped)) | set(dir(kit.Remembered))
KIT = {"leaves": "_connectors"}
"""What a helper of the kit asks the release for, on behalf of who calls it."""


def modules(name: str) -> Iterator[ast.Module]:
    for file in patch_files.code(ENTRIES[name].folder):
        yield ast.parse(file.read_text("utf-8"))


def asked_for(tree: ast.Module) -> Iterator[str]:
    """Attributes by name: of `x.name`, and of getattr, hasattr, setattr and `around_its` with a constant."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in imported):
            yield node.attr
        elif isinstance(node, ast.Name) and node.id in KIT:
            yield KIT[node.id]
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in ("getattr", "hasattr", "setattr", "around_its"):
                yield str(node.args[1].value)


def own(tree: ast.Module) -> Iterator[str]:
    """What the patch's own classes and functions are called and have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                targets = [inner.target] if isinstance(inner, ast.AnnAssign) else getattr(inner, "targets", [])
                stored = [target for target in targets if ast.unparse(target).partition(".")[0] in ("self", "cls")]
                yield from (ast.unparse(target).partition(".")[2] for target in stored)
            yield from (name for child in node.body for name in declared(child))


def declared(child: ast.stmt) -> Iterator[str]:
    """Fields, constants and slots in a class body."""
    if isinstance(child, ast.AnnAssign):
        yield ast.unparse(child.target)
    elif isinstance(child, ast.Assign):
        yield from map(ast.unparse, child.targets)
        if ast.unparse(child.targets[0]) == "__slots__":
            yield from ast.literal_eval(child.value)


def uses(name: str) -> dict[str, list[str]]:
    """What patch.toml says that the code asks of other patches' code, by patch."""
    found: dict[str, list[str]] = ENTRIES[name].patch.about.get("uses", {})
    return found


def besides(name: str) -> set[str]:
    """What patch.toml says is not upstream's, or needs no facts, and why."""
    return {one for names in ENTRIES[name].patch.about.get("besides", {}).values() for one in names}


def uncovered(name: str) -> set[str]:
    known = {part for path in ENTRIES[name].patch.names for part in path.partition(":")[2].split(".")}
    trees = list(modules(name))
    ours = {one for tree in trees for one in own(tree)} | {one for names in uses(name).values() for one in names}
    return {one for tree in trees for one in asked_for(tree)} - known - ours - STANDARD - set(dir(builtins))


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_a_patch_touches_is_in_its_facts(name: str) -> None:
    assert uncovered(name) == besides(name)


MARKS = {
    name: {one for one in keeping.kept(entry.folder) if one.startswith("_livepatch_")}
    for name, entry in ENTRIES.items()
}
ALIKE = {"_livepatch_loads", "_livepatch_lost", "_livepatch_writes"}
"""Names that two patches give to attributes of objects of different classes."""


@pytest.mark.parametrize("name", [name for name in sorted(ENTRIES) if uses(name)])
def test_what_a_patch_uses_of_another_is_there_and_is_asked_for(name: str) -> None:
    asked = {one for tree in modules(name) for one in asked_for(tree)} | MARKS[name]
    for other, names in uses(name).items():
        assert {*names} <= {one for tree in modules(other) for one in own(tree)} | MARKS[other]
        assert {*names} <= asked


def test_an_attribute_on_the_release_s_objects_is_one_patch_s_and_used_by_who_says_so() -> None:
    for mark in {mark for marks in MARKS.values() for mark in marks} - ALIKE:
        having = {name for name, marks in MARKS.items() if mark in marks}
        using = {name for name in having if any(mark in names for names in uses(name).values())}
        assert len(having - using) == 1, (mark, having)


def test_a_name_taken_out_of_the_facts_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["kv-block-reaper"]
    (path,) = [call for call in entry.patch.calls if call.endswith(":MultiConnector._connectors")]
    less = dataclasses.replace(entry.patch, calls=tuple(call for call in entry.patch.calls if call != path))
    monkeypatch.setitem(ENTRIES, "kv-block-reaper", dataclasses.replace(entry, patch=less))
    assert uncovered("kv-block-reaper") == {"_connectors"} | besides("kv-block-reaper")
