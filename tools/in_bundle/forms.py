"""Which form of a wrapper can stand for a target, by the source: what a process would refuse as `unwrappable`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ...sitecustomize import fingerprint
from ...sitecustomize.decision import Patch, Variant, module_of
from ...sitecustomize.guard import After, Before, Shortcut
from ...sitecustomize.installed import Tree
from ...sitecustomize.no_function import ONLY_A_DIFF, AfterImport, Proxy

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)
_KEPT = frozenset({"lru_cache", "cache", "custom_op"})
"""Decorators that make a callable of another kind of a function: of C, or an operation of torch."""
_VALUES = (ast.Constant, ast.Dict, ast.List, ast.Set, ast.Tuple, ast.JoinedStr)
_NO_WRAPPER = "which no wrapper can stand for: livepatch.after_import(change, holds) can change it"
_FIELDS = re.compile(r"dataclass|\bconfig\b|\b(?:Struct|BaseModel|NamedTuple|define|frozen)\b")
"""In the decorators or bases of a class that is made of its fields: vLLM's own `@config` makes a dataclass."""


@lru_cache(maxsize=4)
def parsed(source: str) -> ast.Module:
    """As `fingerprint.parsed`, remembered: targets share a module, and a large one takes a tenth of a second."""
    return fingerprint.parsed(source)


def refused(source: str, qualname: str, wrapper: Any = None) -> str:
    """Why a process would refuse such a wrapper there, empty where it would not. Without a wrapper: any of them.

    Empty, too, of what the source does not have.
    """
    tree = parsed(source)
    node, owner = fingerprint.find(tree, qualname), fingerprint.find(tree, qualname.rpartition(".")[0])
    beyond = _within(tree, qualname) if node is not None else ""
    beyond = beyond or _beyond(node, owner)
    if beyond or wrapper is None or isinstance(wrapper, AfterImport):
        return beyond
    value = getattr(node, "value", None)
    if isinstance(node, ast.ClassDef):
        return f"it is a class, {_NO_WRAPPER}"
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, _VALUES):
        return f"it is a value, {_NO_WRAPPER}"
    if isinstance(node, _DEFINED):
        decorators = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
        names = {name.rpartition(".")[2] for name in decorators}
        if "cached_property" in names:
            return f"it is a cached_property, {_NO_WRAPPER}"
        if any(name.endswith(".jit") for name in decorators):
            return "it is compiled for a device, and started past any wrapper: wrap the function that starts it"
        if names & _KEPT and not isinstance(wrapper, Proxy):
            return "its decorator makes another callable of it, for which livepatch.wrapt(wrapper) can stand"
    return ""


def unlike(patch: Patch, wrappers: Mapping[str, Any]) -> str:
    """Why a process would refuse what a patch's code gives, whatever its targets are; empty where it would not."""
    targets = [target for target in patch.targets if target not in wrappers]
    targets += sorted(str(target) for target in wrappers.keys() - set(patch.targets))
    if targets:
        return f"wrappers.py wraps other targets than patch.toml names: {', '.join(targets)}"
    for target, wrapper in wrappers.items():
        if not callable(wrapper) and not isinstance(wrapper, (AfterImport, Proxy, Before, After, Shortcut)):
            return f"wrappers.py gives no function for {target}, but {type(wrapper).__name__}"
    return ""


def unfit(
    patch: Patch, variant: Variant | None, tree: Tree, made: Callable[[], Mapping[str, Any]], run: bool
) -> tuple[str, str]:
    """The reason why a process would refuse the patch's wrappers, and the sentence; both empty where it would not.

    `made` runs the patch's code: unless `run`, only where a target is no plain function, since then the form matters.
    """
    sources = {target: tree.source(module_of(target)) for target in patch.targets_of(variant)}
    there = {target: source for target, source in sources.items() if source is not None}
    wrappers: Mapping[str, Any] = {}
    if run or any(refused(source, target.partition(":")[2], _usual) for target, source in there.items()):
        with suppress(Exception, SystemExit):  # code that needs the target itself, say: a process has that
            wrappers = made()
            why = unlike(patch, wrappers)
            if why:
                return "mismatch", why
    found = (
        (target, refused(source, target.partition(":")[2], wrappers.get(target))) for target, source in there.items()
    )
    return next((("unwrappable", f"{target}: {why}") for target, why in found if why), ("", ""))


def _usual() -> None:
    """Stands for a wrapper of the usual form."""


def _within(tree: ast.Module, qualname: str) -> str:
    """Why no form reaches what a function makes when it is called, empty of all else."""
    parts = qualname.split(".")
    for front in (".".join(parts[:count]) for count in range(1, len(parts))):
        if isinstance(fingerprint.find(tree, front), _DEFINED):
            return f"each call of {front} makes it anew, where no form reaches it: wrap {front}"
    return ""


def _beyond(node: ast.AST | None, owner: ast.AST | None) -> str:
    """Why no form reaches it, empty where one does."""
    if isinstance(node, ast.Module) and isinstance(owner, ast.ClassDef):
        return "it is what __init__ assigns to each object: wrap that"
    if not isinstance(owner, ast.ClassDef) or not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ""
    if any(re.search(r"(?:Enum|Flag)$", ast.unparse(base)) for base in owner.bases):
        return f"it is a member of an enumeration, {ONLY_A_DIFF}"
    made = " ".join(map(ast.unparse, (*owner.decorator_list, *owner.bases)))
    if (
        isinstance(node, ast.AnnAssign)
        and not re.search("ClassVar|InitVar", ast.unparse(node.annotation))
        and _FIELDS.search(made)
    ):
        return f"it is a field of a class that is made of its fields, {ONLY_A_DIFF}"
    return ""
