"""What a patch's code keeps, as far as its text tells: containers, threads, sockets and files that outlive a call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_livepatch.tools.bundles import patch_files

CONTAINERS = frozenset(
    [
        "bytearray",
        "defaultdict",
        "deque",
        "dict",
        "list",
        "local",
        "set",
        "Counter",
        "OrderedDict",
        "Remembered",
        "Queue",
        "SimpleQueue",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "ContextVar",
    ]
)
HANDLES = frozenset(
    ["Thread", "Timer", "ThreadPoolExecutor", "create_server", "create_connection", "socket", "start_server"]
)
MARK = re.compile(r"_livepatch_\w+")


def kept(folder: Path) -> set[str]:
    """`Class.attribute`, names of modules and of `wrappers`, and attributes `_livepatch_...` of the release's objects."""
    found: set[str] = set()
    for file in patch_files.code(folder):
        tree = ast.parse(file.read_text("utf-8"))
        found.update(_marks(tree))
        found.update(_in_body(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.update(f"{node.name}.{name}" for name in _of_class(node))
            elif isinstance(node, ast.FunctionDef) and node.name == "wrappers":
                found.update(_in_body(node.body))
            elif isinstance(node, ast.Call) and _called(node) in HANDLES:
                found.add(_called(node))
    return found


def _marks(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MARK.fullmatch(node.value):
            yield node.value


def _in_body(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        yield from (target.id for target in _filled(statement) if isinstance(target, ast.Name))


def _of_class(cls: ast.ClassDef) -> Iterator[str]:
    """Attributes that a method fills with a container, or that the class has."""
    yield from _in_body(cls.body)
    for node in ast.walk(cls):
        for target in _filled(node) if isinstance(node, ast.stmt) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr


def _filled(statement: ast.stmt) -> list[ast.expr]:
    """What a statement makes a container of."""
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return []
    empty = isinstance(value, (ast.Dict, ast.List)) and not getattr(value, "keys", getattr(value, "elts", None))
    made = isinstance(value, ast.Call) and _called(value) in CONTAINERS
    return list(targets) if empty or made or isinstance(value, (ast.ListComp, ast.DictComp, ast.SetComp)) else []


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
