"""What importing modules of two packages comes to where they import of each other, from the syntax alone.

Nothing is executed. A module's statements are gone through in order: what it imports out of the other package must be
there, and where it is not, that is an ImportError, which a surrounding `try` may catch, as it would in a process.
Modules of third parties are taken to be there, and each package to be at one with itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm_livepatch.tools.compatibility import imports

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Sources(Protocol):
    """As much of `installed.Tree` as is needed."""

    def source(self, module: str) -> str | None: ...


@dataclass(frozen=True)
class Problem:
    """Something that `module` asks of `package`, at `line`, and does not get."""

    module: str
    line: int = field(compare=False)
    package: str
    subject: str  # module:name in the package
    detail: str
    holds: Callable[[Sources], bool] = field(compare=False, repr=False, default=lambda tree: False)
    """Whether a release of the package, given as its tree, has it."""


class Missing(Exception):
    """An ImportError, and what would raise it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__()
        self.problems = tuple(dict.fromkeys(problems))


@dataclass(frozen=True)
class Imported:
    """What a name is bound to by an import; `name` is empty where it is the module itself."""

    module: str
    name: str = ""


Bound = Imported | ast.AST | None


@dataclass
class Module:
    """A module as far as it was gone through: what its names are bound to (None: nothing that can be known)."""

    name: str
    body: ast.Module
    is_package: bool
    names: dict[str, Bound] = field(default_factory=dict)


class Packages:
    """Two packages' trees, by package, and the modules gone through so far."""

    def __init__(self, trees: Mapping[str, Sources]) -> None:
        self.trees = trees
        self.optional: dict[Problem, None] = {}  # lacking, but caught, or where some branch or function may be run
        self._sources: dict[str, str | None] = {}
        self._static: dict[str, Module | None] = {}
        self.loaded: dict[str, Module] = {}
        self._failed: dict[str, Missing] = {}
        self._follow = True

    def source(self, module: str) -> str | None:
        """The text of a module of either package."""
        if module not in self._sources:
            tree = self.trees.get(top(module))
            self._sources[module] = None if tree is None else tree.source(module)
        return self._sources[module]

    @property
    def read(self) -> list[str]:
        """The modules of either package whose text was asked for, and is there."""
        return [name for name, text in self._sources.items() if text is not None]

    def load(self, name: str) -> Module | None:
        """Go through a module as importing it would, once. None where it has no source. Raises Missing."""
        if name in self._failed:
            raise self._failed[name]
        if name in self.loaded or self.source(name) is None:
            return self.loaded.get(name)
        parent = name.rpartition(".")[0]
        if parent:
            self._enter(parent)
        module = self.parsed(name)
        if module is None:
            return None
        module = replace(module, names={})
        self.loaded[name] = module
        try:
            self.run(module.body.body, module)
        except Missing as missing:
            self._failed[name] = missing
            raise
        return module

    def parsed(self, name: str) -> Module | None:
        """A module with what its names could be bound to on some way through it; the first way wins."""
        if name not in self._static:
            text = self.source(name)
            module = None if text is None else Module(name, imports.parsed(text), self._is_package(name))
            if module is not None:
                for statement in imports.statements(module.body, functions=False):
                    for bound, value in self._bindings(statement, module):
                        module.names.setdefault(bound, value)
            self._static[name] = module
        return self._static[name]

    def resolve(self, value: Bound, module: Module) -> tuple[Module, ast.AST] | None:
        """The definition that a binding leads to, through as many modules as it takes, and the module it is in."""
        for _ in range(10):
            if not isinstance(value, Imported):
                if isinstance(value, ast.Name):
                    value = module.names.get(value.id)
                    continue
                return None if value is None else (module, value)
            found = self.loaded.get(value.module) or self.parsed(value.module)
            if found is None or not value.name:
                return None
            module, value = found, found.names.get(value.name)
        return None

    def run(self, statements: Iterable[ast.stmt], module: Module) -> None:
        """Go through statements. Raises Missing with everything that would, each by itself, end them."""
        problems: list[Problem] = []
        for statement in statements:
            try:
                self._statement(statement, module)
            except Missing as missing:
                problems += missing.problems
        if problems:
            raise Missing(problems)

    def functions(self, module: Module, statements: Iterable[ast.stmt]) -> None:
        """Go through the body of a function: what it imports of its own package is not gone through."""
        before, self._follow = self._follow, False
        try:
            self.run(statements, replace(module, names=dict(module.names)))
        finally:
            self._follow = before

    def _statement(self, statement: ast.stmt, module: Module) -> None:
        try:
            self._gone_through(statement, module)
        finally:  # of a name that is bound in another way than by an assignment of its own, nothing is known
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            plain = isinstance(statement, (ast.Assign, ast.AnnAssign))
            own = {one.id for one in targets if isinstance(one, ast.Name)} if plain else set()
            for node in ast.walk(statement):
                if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)) or node.id in own:
                    continue
                if isinstance(module.names.get(node.id), ast.Call):
                    module.names[node.id] = None

    def _gone_through(self, statement: ast.stmt, module: Module) -> None:
        if isinstance(statement, ast.If):
            option = _option(statement.test, module)
            if imports.is_type_checking(statement.test):
                self.run(statement.orelse, module)
            elif option is not None:
                self._by_default(statement, module, *option)
            else:
                self._either([statement.body, statement.orelse], module)
        elif isinstance(statement, ast.Try):
            self._try(statement, module)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            try:
                self.run(statement.body, module)
            except Missing as missing:
                if not imports.catches_import_error(statement):
                    raise
                self.optional.update(dict.fromkeys(missing.problems))
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            self.run([*statement.body, *statement.orelse], module)
        elif isinstance(statement, ast.Import):
            self._import(statement, module)
        elif isinstance(statement, ast.ImportFrom):
            self._import_from(statement, module)
        else:
            if isinstance(statement, ast.ClassDef):
                self.run(statement.body, replace(module, names=dict(module.names)))
            elif not isinstance(statement, Function):
                self._attributes(statement, module)
            module.names.update(self._bindings(statement, module))

    def _either(self, branches: list[list[ast.stmt]], module: Module) -> None:
        """One of several branches is taken: only what ends all of them is sure to be needed."""
        failed: list[Missing] = []
        for branch in branches:
            try:
                self.run(branch, module)
            except Missing as missing:
                failed.append(missing)
        problems = [problem for missing in failed for problem in missing.problems]
        if len(failed) == len(branches):
            raise Missing(problems)
        self.optional.update(dict.fromkeys(problems))

    def _by_default(self, statement: ast.If, module: Module, option: str, value: object, taken: bool) -> None:
        """The branch that is taken where nobody sets the option counts; of the other one only whether it would do."""
        default, other = (statement.body, statement.orelse) if taken else (statement.orelse, statement.body)
        lacking: list[Missing] = []
        try:
            self.run(other, module)
        except Missing as missing:
            lacking.append(missing)
        try:
            self.run(default, module)
        except Missing as missing:
            if lacking:
                raise
            hint = f"; works only where kv_connector_extra_config sets {option} (default: {value!r})"
            raise Missing([replace(one, detail=one.detail + hint) for one in missing.problems]) from None
        self.optional.update(dict.fromkeys(problem for missing in lacking for problem in missing.problems))

    def _try(self, statement: ast.Try, module: Module) -> None:
        try:
            self.run(statement.body, module)
        except Missing as missing:
            handler = next((one for one in statement.handlers if imports.handles_import_error(one)), None)
            if handler is None:
                raise
            if any(isinstance(part, ast.Raise) for part in handler.body):
                raise
            self.optional.update(dict.fromkeys(missing.problems))
            self.run(handler.body, module)
        else:
            self.run(statement.orelse, module)
        self.run(statement.finalbody, module)

    def _import(self, statement: ast.Import, module: Module) -> None:
        problems: list[Problem] = []
        for alias in statement.names:
            if top(alias.name) in self.trees:
                if top(alias.name) != top(module.name) and self.source(alias.name) is None:
                    problems.append(self._lacking(statement, module, alias.name, ""))
                    continue
                self._enter(alias.name)
            bound = alias.asname or top(alias.name)
            module.names[bound] = Imported(alias.name if alias.asname else bound)
        if problems:
            raise Missing(problems)

    def _import_from(self, statement: ast.ImportFrom, module: Module) -> None:
        origin = self._origin(statement, module)
        problems: list[Problem] = []
        if top(origin) in self.trees:
            across = top(origin) != top(module.name)
            if across and self.source(origin) is None:
                raise Missing([self._lacking(statement, module, origin, alias.name) for alias in statement.names])
            self._enter(origin)
            for alias in statement.names:
                if across and not imports.provides(self.source, origin, alias.name):
                    problems.append(self._lacking(statement, module, origin, alias.name))
                elif self._is_module(origin, alias.name) or (
                    origin == module.name and self.source(f"{origin}.{alias.name}")
                ):
                    self._enter(f"{origin}.{alias.name}")
        module.names.update(self._bindings(statement, module))
        if problems:
            raise Missing(problems)

    def _attributes(self, statement: ast.AST, module: Module) -> None:
        """What a statement takes from a module of the other package that was imported as a whole."""
        problems: list[Problem] = []
        for node in ast.walk(statement) if self.names_other(module.name) else ():
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            bound = module.names.get(node.value.id)
            if not isinstance(bound, Imported) or top(bound.module) == top(module.name):
                continue
            if bound.name and not self._is_module(bound.module, bound.name):
                continue
            whole = f"{bound.module}.{bound.name}" if bound.name else bound.module
            if self.source(whole) is not None and not imports.provides(self.source, whole, node.attr):
                problems.append(self._lacking(node, module, whole, node.attr))
        if problems:
            raise Missing(problems)

    def _lacking(self, node: ast.stmt | ast.expr, module: Module, origin: str, name: str) -> Problem:
        package = top(origin)
        there = self.source(origin) is not None
        what = f"{name or 'it'}" if there or not name else f"{name}, nor such a module"
        return Problem(
            module.name,
            node.lineno,
            package,
            f"{origin}:{name}" if name else origin,
            f"{package} has no {what} in {origin}" if name else f"{package} has no module {origin}",
            lambda tree: imports.provides(tree.source, origin, name),
        )

    def prefetch(self, modules: Iterable[str]) -> None:
        """Have the trees read these modules and what they import, a round of all at once for each step from them."""
        seen: set[str] = set()
        wanted = set(modules)
        while wanted:
            for package, tree in self.trees.items():
                ahead = getattr(tree, "prefetch", None)
                if ahead is not None:
                    ahead([name for name in wanted if top(name) == package])
            seen |= wanted
            wanted = {name for module in wanted if self._is_followed(module) for name in self._imported(module)} - seen

    def _imported(self, name: str) -> Iterator[str]:
        module = self.parsed(name)
        for bound in module.names.values() if module is not None else ():
            if isinstance(bound, Imported) and top(bound.module) in self.trees:
                parts = f"{bound.module}.{bound.name}".rstrip(".").split(".")
                yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))

    def names_other(self, module: str) -> bool:
        """Whether the other package's name stands in a module's text: one without it asks nothing of it by itself."""
        text = self.source(module) or ""
        return any(package in text for package in self.trees if package != top(module))

    def _enter(self, name: str) -> None:
        """Load a module, if it may import something of the other package."""
        if self._follow and self._is_followed(name):
            self.load(name)

    def _is_followed(self, name: str) -> bool:
        """Few of vLLM's modules know LMCache, and they say so; any of LMCache's may lead to one that knows vLLM."""
        others = "|".join(re.escape(package) for package in self.trees if package != top(name))
        text = self.source(name)
        if text is None or top(name) != "vllm" or "lmcache" in name:
            return text is not None
        return re.search(rf"^\s*(from|import)\s+({others})\b", text, re.MULTILINE) is not None

    def _bindings(self, statement: ast.AST, module: Module) -> Iterator[tuple[str, Bound]]:
        if isinstance(statement, (*Function, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                bound = alias.asname or top(alias.name)
                yield bound, Imported(alias.name if alias.asname else bound)
        elif isinstance(statement, ast.ImportFrom):
            origin = self._origin(statement, module)
            for alias in statement.names:
                yield alias.asname or alias.name, Imported(origin, alias.name)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value

    def _origin(self, statement: ast.ImportFrom, module: Module) -> str:
        parents = [*module.name.split("."), *([""] if module.is_package else [])]
        base = parents[: -statement.level] if statement.level else []
        return ".".join([*base, *([statement.module] if statement.module else [])])

    def _is_module(self, origin: str, name: str) -> bool:
        text = self.source(origin)
        defined = text is not None and name in imports.bound_names(text)
        return not defined and self.source(f"{origin}.{name}") is not None

    def _is_package(self, name: str) -> bool:
        origin = getattr(self.trees[top(name)], "origin", None)
        return origin is not None and str(origin(name)).endswith("__init__.py")


def _option(test: ast.expr, module: Module) -> tuple[str, object, bool] | None:
    """Of a condition that is an option's value: its name, its default, and whether that fulfils the condition."""
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    value: object = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if isinstance(value, ast.Name):
        value = module.names.get(value.id)
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return None
    asks = value.func.attr == "get_from_extra_config" or (
        value.func.attr == "get" and ast.unparse(value.func.value).endswith("kv_connector_extra_config")
    )
    given = [one.value for one in value.args if isinstance(one, ast.Constant)]
    if not asks or len(value.args) != 2 or len(given) != 2:
        return None
    return str(given[0]), given[1], bool(given[1]) is not negated


def top(module: str) -> str:
    return module.partition(".")[0]
