"""Whether a class could be constructed, as far as the calls between the two packages show, from the syntax alone."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace

from vllm_livepatch.tools.compatibility.cross_package import (
    Function,
    FunctionNode,
    Missing,
    Module,
    Packages,
    Problem,
    Sources,
    top,
)

Definition = tuple[Module, ast.AST]
_Kind = inspect.Parameter


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


class Construction:
    """What constructing one class of a module does: `problems` where it cannot succeed."""

    def __init__(self, packages: Packages, module: Module, cls: ast.ClassDef) -> None:
        self.packages, self.module, self.cls = packages, module, cls
        self.reached: set[int] = set()
        self.problems: dict[Problem, None] = {}
        self._wanted: list[FunctionNode] = []
        self._fitting: set[str] = set()

    def run(self) -> tuple[Problem, ...]:
        """Follow `__init__` through this module's own functions and methods."""
        self._abstract()
        self._want(_method(self.cls, "__init__"))
        while self._wanted:
            function = self._wanted.pop()
            scope = replace(self.module, names=dict(self.module.names))
            try:
                self.packages.functions(scope, function.body)
            except Missing as missing:
                self.problems.update(dict.fromkeys(missing.problems))
            own = _local_names(function)
            self._fitting.clear()
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                self._call(call, own)
            for problem in [one for one in self.problems if one.subject in self._fitting]:
                del self.problems[problem]  # it is called in another way too, on a condition, and that one fits
        return tuple(self.problems)

    def _want(self, function: ast.AST | None) -> None:
        if isinstance(function, Function) and id(function) not in self.reached:
            self.reached.add(id(function))
            self._wanted.append(function)

    def _call(self, call: ast.Call, own: set[str]) -> None:
        called = call.func
        if isinstance(called, ast.Name) and called.id not in own:
            found = self.packages.resolve(self.module.names.get(called.id), self.module)
            if found is None:
                return
            if found[0].name == self.module.name:
                node = found[1]
                self._want(_method(node, "__init__") if isinstance(node, ast.ClassDef) else node)
            self._check(call, called.id, found)
        elif isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("self", "cls"):
            self._want(_method(self.cls, called.attr))
        elif isinstance(called, ast.Attribute) and ast.unparse(called.value) == "super()":
            for definition in _bases(self.packages, (self.module, self.cls)):
                method = _method(definition[1], called.attr)
                if method is not None:
                    self._check(call, f"{_name(definition[1])}.{called.attr}", (definition[0], method), bound=True)
                    break

    def _check(self, call: ast.Call, name: str, found: Definition, bound: bool = False) -> None:
        signature = signature_of(self.packages, found, bound)
        mismatch = None if signature is None else _unfit(signature, call)
        home, node = found
        path = name if bound else _name(node)
        if mismatch is None:
            self._fitting.add(f"{home.name}:{path}")
            return
        detail = f"{name} is called with {_described(call)}: {mismatch}; it takes {signature}"
        self._problem(call.lineno, home, path, detail, lambda tree: _fits(tree, home.name, path, call))

    def _problem(
        self, line: int, home: Module, path: str, detail: str, holds: Callable[[Sources], bool] = lambda tree: False
    ) -> None:
        problem = Problem(self.module.name, line, top(home.name), f"{home.name}:{path}", detail, holds)
        self.problems.setdefault(problem, None)

    def _abstract(self) -> None:
        chain = [(self.module, self.cls), *_bases(self.packages, (self.module, self.cls))]
        defined: set[str] = set()
        for home, node in chain:
            for statement in getattr(node, "body", []):
                if not isinstance(statement, Function):
                    continue
                abstract = any("abstractmethod" in ast.unparse(one) for one in statement.decorator_list)
                if abstract and statement.name not in defined:
                    path = f"{_name(node)}.{statement.name}"
                    detail = f"{self.cls.name} lacks {statement.name}, which {_name(node)} asks for"
                    self._problem(self.cls.lineno, home, path, detail)
                defined.add(statement.name)


def signature_of(packages: Packages, found: Definition, bound: bool = False) -> inspect.Signature | None:
    """How a function, or a class, is to be called; None where the syntax does not tell."""
    node = found[1]
    if isinstance(node, Function):
        return _of_function(node, bound)
    if not isinstance(node, ast.ClassDef) or node.keywords:
        return None
    chain = [found, *_bases(packages, found)]
    known = all(_bases_known(packages, one) for one in chain)
    for definition in chain:
        for name in ("__new__", "__init__"):
            method = _method(definition[1], name)
            if method is not None:
                return _of_function(method, True) if name == "__init__" else None
        if _is_dataclass(definition[1]):
            return _of_fields(chain) if known else None
    return inspect.Signature() if known else None


def _of_function(node: FunctionNode, bound: bool) -> inspect.Signature | None:
    names = [_decorator(one) for one in node.decorator_list]
    if any(name not in ("staticmethod", "classmethod", "override", "abstractmethod") for name in names):
        return None  # a decorator may change it
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = len(positional) - len(arguments.defaults)
    parameters = [
        _Kind(
            one.arg,
            _Kind.POSITIONAL_ONLY if number < len(arguments.posonlyargs) else _Kind.POSITIONAL_OR_KEYWORD,
            default=_Kind.empty if number < defaults else _DEFAULT,
        )
        for number, one in enumerate(positional)
    ]
    if bound and "staticmethod" not in names:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(_Kind(arguments.vararg.arg, _Kind.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_Kind(one.arg, _Kind.KEYWORD_ONLY, default=_Kind.empty if default is None else _DEFAULT))
    if arguments.kwarg:
        parameters.append(_Kind(arguments.kwarg.arg, _Kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _of_fields(chain: list[Definition]) -> inspect.Signature | None:
    fields: dict[str, bool] = {}  # whether it has a default
    for _, node in reversed(chain):
        if not (isinstance(node, ast.ClassDef) and _is_dataclass(node)):
            continue
        if any("kw_only" in ast.unparse(one) or "init=" in ast.unparse(one) for one in node.decorator_list):
            return None
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotation = ast.unparse(statement)
                if "ClassVar" in annotation or "KW_ONLY" in annotation or "init=False" in annotation:
                    return None  # rare: no finding then
                default = statement.value is not None
                if isinstance(statement.value, ast.Call) and _decorator(statement.value) == "field":
                    default = any(one.arg in ("default", "default_factory") for one in statement.value.keywords)
                fields[statement.target.id] = default
    kind = _Kind.POSITIONAL_OR_KEYWORD
    try:
        return inspect.Signature(
            [_Kind(name, kind, default=_DEFAULT if has else _Kind.empty) for name, has in fields.items()]
        )
    except ValueError:
        return None


def _unfit(signature: inspect.Signature, call: ast.Call) -> str | None:
    """What is wrong with a call, None where nothing is, or nothing can be known."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    positional = [None for one in call.args if not isinstance(one, ast.Starred)]
    keywords = {one.arg: None for one in call.keywords if one.arg is not None}
    try:
        if starred or any(one.arg is None for one in call.keywords):
            signature.bind_partial(*positional, **keywords)
        else:
            signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def _fits(tree: Sources, module: str, path: str, call: ast.Call) -> bool:
    packages = Packages({top(module): tree})
    home = packages.parsed(module)
    if home is None:
        return False
    first, _, method = path.partition(".")
    found = packages.resolve(home.names.get(first), home)
    if found is not None and method:
        definition = _method(found[1], method)
        found = None if definition is None else (found[0], definition)
    if found is None:
        return False
    signature = signature_of(packages, found, bool(method))
    return signature is not None and _unfit(signature, call) is None


def _described(call: ast.Call) -> str:
    positional = len(call.args)
    keywords = ", ".join(one.arg or "**" for one in call.keywords)
    parts = [f"{positional} positional argument{'s' if positional != 1 else ''}"] if positional else []
    return " and ".join([*parts, *([keywords] if keywords else [])]) or "nothing"


def _bases(packages: Packages, found: Definition) -> Iterator[Definition]:
    """Classes that a class is derived from and whose definitions are in the trees, the nearest first."""
    home, node = found
    for base in getattr(node, "bases", []):
        named = packages.resolve(home.names.get(base.id), home) if isinstance(base, ast.Name) else None
        if named is not None and isinstance(named[1], ast.ClassDef):
            yield named
            yield from _bases(packages, named)


def _bases_known(packages: Packages, found: Definition) -> bool:
    home, node = found
    for base in getattr(node, "bases", []):
        base_name = ast.unparse(base).rpartition(".")[2]
        if base_name in ("ABC", "object") or base_name.startswith("Generic["):
            continue
        named = packages.resolve(home.names.get(base.id), home) if isinstance(base, ast.Name) else None
        if named is None or not isinstance(named[1], ast.ClassDef):
            return False
    return True


def _method(node: ast.AST, name: str) -> FunctionNode | None:
    found = [one for one in getattr(node, "body", []) if isinstance(one, Function) and one.name == name]
    return found[-1] if found else None


def _local_names(function: FunctionNode) -> set[str]:
    """Names that a function binds itself: what they stand for is not the module's."""
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _is_dataclass(node: ast.AST) -> bool:
    return any(_decorator(one) == "dataclass" for one in getattr(node, "decorator_list", []))


def _decorator(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(called).rpartition(".")[2]


def _name(node: ast.AST) -> str:
    return str(getattr(node, "name", ""))
