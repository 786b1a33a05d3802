"""Who in an installed tree takes a target while modules are imported, by the sources: its calls would pass a patch by.

Judged as `sitecustomize/captures.py` does it in memory. Another name in a module or a class gets the wrapper too. An
entry of a table, an argument of a call (a partial, a registry, `op_func=`) and a default argument refuse the patch. A
patch is put in place when the last of its modules has been executed: of one with one module (`per_module` too) that
module alone can have taken what it has; of one with several, whoever is imported before the last of them.

Only files are parsed that name the target. Not seen: what functions do when they are called, also while modules are
imported; decorators of a target, but a web server's routes; a class that derives from the target's; star imports; names
that code makes.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import decode_source, resolve_name
from typing import Any

from vllm_livepatch.sitecustomize import fingerprint, installed
from vllm_livepatch.sitecustomize.decision import Patch, module_of

_KEEP_NOTHING = frozenset({"callable", "getattr", "hasattr", "id", "inspect.signature", "isinstance", "print", "repr"})
_PASSED_ON = (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Starred, ast.keyword)
_INSIDE = frozenset({"__func__", "fget"})
"""What gives the function inside of a method or a property."""
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_ROUTES = frozenset(
    ["api_route", "delete", "exception_handler", "get", "middleware", "on_event", "patch", "post", "put", "websocket"]
)
"""Methods of a web server's router that, as decorators, keep the function and give it back."""


@dataclass(frozen=True)
class Holder:
    """`covered`: it is given the wrapper too. `certain`: it is there before the patch, whatever is imported first."""

    target: str
    module: str
    line: int
    how: str
    covered: bool
    certain: bool

    def described(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        when = "" if self.certain else ", if it is imported before the patch's last module,"
        return f"{self.module}:{self.line} has {self.target} as {self.how}{when} and would call it unpatched"


def holders(patches: Iterable[Patch], tree: installed.Tree) -> dict[str, list[Holder]]:
    """By patch. `tree` is read as far as it is a directory's; of other trees the targets' own modules alone."""
    chosen = [patch for patch in patches if not patch.diff]
    found: dict[str, list[Holder]] = {patch.name: [] for patch in chosen}
    for module, text in _texts(chosen, tree):
        about = {patch.name: _targets(patch, module, text) for patch in chosen}
        if any(about.values()):
            held = list(_Module(module, text).holders({target for each in about.values() for target in each}))
            for name, targets in about.items():
                found[name] += [one for one in held if one.target in targets]
    return found


def _targets(patch: Patch, module: str, text: str) -> list[str]:
    """The targets of the patch that this module may hold before the patch is there."""
    waits = _waits(patch)
    return [target for target in patch.targets if (waits or module_of(target) == module) and _may_be_held(target, text)]


def _may_be_held(target: str, text: str) -> bool:
    """Whether the target's name stands there uncalled, on its own or behind a class, or as a route's. To parse takes
    longer."""
    if "." not in target.partition(":")[2] and _ROUTED.search(text):
        return True
    name = target.rpartition(".")[2] if "." in target.partition(":")[2] else target.partition(":")[2]
    for found in _name(name).finditer(text):
        before = text[found.start() - 1 : found.start()]
        owner = re.search(r"\w*$", text[max(0, found.start() - 80) : found.start() - 1]) if before == "." else None
        if owner is not None and ("." not in target.partition(":")[2] or owner[0][:1].isupper()):
            return True
        if owner is None and not (before.isalnum() or before == "_"):
            return True
    return False


_ROUTED = re.compile(rf"^@[\w.]+\.(?:{'|'.join(sorted(_ROUTES))})\(", re.MULTILINE)


@functools.cache
def _name(name: str) -> re.Pattern[str]:
    return re.compile(rf"{name}\b(?!\s*\()")


def _waits(patch: Patch) -> bool:
    """Whether others may be imported between the patch's modules."""
    return len(patch.modules) > 1 and not patch.per_module


def _texts(patches: Sequence[Patch], tree: installed.Tree) -> Iterator[tuple[str, str]]:
    own = dict.fromkeys(module for patch in patches for module in patch.modules)
    for module in own:
        text = tree.source(module)
        if text is not None:
            yield module, text
    waiting = [patch for patch in patches if _waits(patch)]
    # Of a method its class: without its name nobody else takes it.
    words = {target.partition(":")[2].split(".")[0].encode() for patch in waiting for target in patch.targets}
    for package in dict.fromkeys(patch.package for patch in waiting):
        for module, file in _files(tree, package):
            if module not in own:
                try:
                    with open(file, "rb") as opened:
                        data = opened.read()
                    if any(word in data for word in words):
                        yield module, decode_source(data)
                except (OSError, SyntaxError, UnicodeError):
                    continue


def _files(tree: installed.Tree, package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package below the folders in which the tree finds it, and their files."""
    for place in tree.places(package):
        for folder, folders, files in os.walk(place):
            folders.sort()
            inside = os.path.relpath(folder, place)
            parents = [package, *(() if inside == "." else inside.split(os.sep))]
            for file in sorted(files):
                if file.endswith(".py") and all(map(str.isidentifier, parents)):
                    stem = file.removesuffix(".py")
                    yield ".".join(parents if stem == "__init__" else [*parents, stem]), os.path.join(folder, file)


class _Module:
    """What one module does with names while it is imported."""

    def __init__(self, module: str, text: str) -> None:
        self._module = module
        self._names: dict[str, str] = {}  # what module:qualname, or which module, a name of this module stands for
        try:
            self._tree: ast.Module | None = fingerprint.parsed(text)
        except (SyntaxError, ValueError):
            self._tree = None

    def holders(self, targets: Iterable[str]) -> Iterator[Holder]:
        if self._tree is None:
            return
        self._wanted = frozenset(targets)
        self._classes: list[tuple[str, set[str]]] = []  # around what is looked at, with the names of their own
        for statement in _at_import(self._tree):
            self._bind(statement)
        yield from self._in(self._tree.body, [self._tree])

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, _DEFINED):
            self._names[statement.name] = f"{self._module}:{statement.name}"
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                self._names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(statement, ast.ImportFrom):
            source = self._source_of(statement)
            for alias in statement.names:
                self._names[alias.asname or alias.name] = f"{source}:{alias.name}"

    def _source_of(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        # Of a package's `__init__` the level counts from itself; a target's package that is a target is rare.
        package = self._module.rpartition(".")[0]
        try:
            return resolve_name("." * statement.level + (statement.module or ""), package)
        except ImportError:
            return ""

    def _in(self, nodes: Iterable[ast.AST], above: list[ast.AST]) -> Iterator[Holder]:
        for node in nodes:
            yield from self._look(node, above)

    def _look(self, node: ast.AST, above: list[ast.AST]) -> Iterator[Holder]:
        below: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):  # its body runs later
            if not isinstance(node, ast.Lambda):
                yield from self._routed(node)
            arguments = node.args
            below = [*arguments.defaults, *filter(None, arguments.kw_defaults), *getattr(node, "decorator_list", [])]
        elif isinstance(node, ast.If) and _is_for_types(node.test):
            below = node.orelse
        elif isinstance(node, ast.ClassDef):
            own = {name for statement in _at_import(node) for name in _bound(statement)}
            yield from self._in([*node.decorator_list, *node.bases, *node.keywords], [*above, node])
            self._classes.append((".".join([*(name for name, _ in self._classes), node.name]), own))
            yield from self._in(node.body, [*above, node])
            self._classes.pop()
            return
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            yield from self._held(node, above)
        elif isinstance(node, ast.ImportFrom):
            yield from self._imported(node)
        yield from self._in(below, [*above, node])

    def _routed(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Holder]:
        target = None if self._classes else self._is(f"{self._module}:{node.name}")
        if target is None:
            return
        for one in node.decorator_list:
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _ROUTES:
                yield self._holder(target, one, f"a route of {ast.unparse(one.func)}", False)

    def _imported(self, statement: ast.ImportFrom) -> Iterator[Holder]:
        source = self._source_of(statement)
        for alias in statement.names:
            target = self._is(f"{source}:{alias.name}")
            if target is not None and module_of(target) != self._module:
                yield self._holder(target, statement, f"another name, {alias.asname or alias.name}", True)

    def _held(self, node: ast.Name | ast.Attribute, above: Sequence[ast.AST]) -> Iterator[Holder]:
        target = self._is(self._stands_for(node))
        how = None if target is None else _how(node, above, self._names)
        if target is not None and how is not None:
            yield self._holder(target, node, *how)

    def _holder(self, target: str, node: ast.stmt | ast.expr, how: str, covered: bool) -> Holder:
        return Holder(target, self._module, node.lineno, how, covered, module_of(target) == self._module)

    def _stands_for(self, node: ast.expr) -> str:
        """As module:qualname, or a module; empty where that is not known."""
        if isinstance(node, ast.Name):
            for name, own in self._classes[-1:]:
                if node.id in own:
                    return f"{self._module}:{name}.{node.id}"
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            inside = self._stands_for(node.value)
            if inside:
                return f"{inside}.{node.attr}" if ":" in inside else f"{inside}:{node.attr}"
        return ""

    def _is(self, name: str) -> str | None:
        """The target that a name is. A package may give out what its modules have."""
        module, _, qualname = name.partition(":")
        for target in self._wanted if qualname else ():
            of, _, wanted = target.partition(":")
            if (of, wanted) == (module, qualname) or f"{of}.{wanted}" == f"{module}.{qualname}":
                return target
            if wanted == qualname and of.startswith(f"{module}."):
                return target
        return None


def _at_import(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """The statements that run when a module or a class is made, those under conditions among them."""
    waiting: list[ast.AST] = [*node.body]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, ast.stmt):
            yield one
        if not isinstance(one, (*_DEFINED, ast.expr)):
            waiting += ast.iter_child_nodes(one)


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, _DEFINED):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_for_types(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _how(node: ast.expr, above: Sequence[ast.AST], names: Container[str]) -> tuple[str, bool] | None:
    """What keeps an expression's value, and whether the wrapper gets there too; None where nothing does.

    `names` are what the module imports or defines: an attribute of any other may be one of an object.
    """
    inside: ast.AST = node
    for parent in reversed(above):
        if isinstance(parent, _PASSED_ON) or (isinstance(parent, ast.Attribute) and parent.attr in _INSIDE):
            inside = parent
        elif isinstance(parent, ast.Call):
            function = ast.unparse(parent.func)
            name = f", {inside.arg}=" if isinstance(inside, ast.keyword) and inside.arg else ""
            called = inside is parent.func or function in _KEEP_NOTHING
            return None if called else (f"an argument of {function}{name}", False)
        elif isinstance(parent, (ast.Dict, ast.List, ast.Set, ast.Tuple)):
            return f"an entry of a {type(parent).__name__.lower()}", False
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            called = inside in getattr(parent, "decorator_list", [])
            return None if called else (f"a default argument of {getattr(parent, 'name', 'a lambda')}", False)
        elif isinstance(parent, (ast.Assign, ast.AnnAssign)):
            if inside is not parent.value:
                return None
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            shown = ", ".join(map(ast.unparse, targets))
            named = all(isinstance(one, ast.Name) or _of(one) in names for one in targets)
            return f"another name, {shown}" if named else shown, named
        else:
            return None
    return None


def _of(target: ast.expr) -> str:
    """The name of which an attribute is set; empty where it is none of a name."""
    return getattr(target.value, "id", "") if isinstance(target, ast.Attribute) else ""
