"""Whether modules of one package still fit together when some of them are changed, by the syntax alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache

from vllm_livepatch.sitecustomize import fingerprint

Source = Callable[[str], "str | None"]
"""A module's text by its name, None where there is no such module."""


def lacking(
    before: Mapping[str, str | None], after: Mapping[str, str], packages: Collection[str], source: Source
) -> list[str]:
    """What the texts of `after` import from their own package, those of `before` did not, and neither `after` nor the
    release (`source`) provides: `module` or `module:name`.

    `packages` are those modules of `after` that are a package's `__init__`. What stands where an ImportError is caught
    is left out.
    """

    found: list[str] = []
    for module, new in after.items():
        old = before.get(module)

        def text(name: str, module: str = module, old: str | None = old) -> str | None:
            if name == module:  # what a package imports from itself is not there because it imports it
                return old
            return after[name] if name in after else source(name)

        known = set() if old is None else set(_imported(module, old, module in packages))
        for origin, name in _imported(module, new, module in packages):
            if (origin, name) not in known and not provides(text, origin, name):
                found.append(f"{origin}:{name}" if name else origin)
    return list(dict.fromkeys(found))


def gone(before: str, after: str) -> frozenset[str]:
    """The names that a module gave others before and gives no more."""
    left = bound_names(after)
    return frozenset() if "*" in left or "__getattr__" in left else frozenset(bound_names(before) - left)


def missed(module: str, text: str, package: bool, taken: Mapping[str, Collection[str]]) -> list[str]:
    """What `text` imports of `taken`, the names that are gone by the module that had them: `module:name`."""
    return [f"{origin}:{name}" for origin, name in _imported(module, text, package) if name in taken.get(origin, ())]


def _imported(module: str, text: str, package: bool) -> Iterator[tuple[str, str]]:
    """(module, name) of every import out of the module's own package; no name in `import module`."""
    top = module.partition(".")[0]
    parents = [*module.split("."), ""] if package else module.split(".")
    for node in statements(parsed(text), functions=True):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == top)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin.partition(".")[0] == top:
                yield from ((origin, alias.name) for alias in node.names)


def provides(text: Source, module: str, name: str) -> bool:
    content = text(module)
    if not name or name == "*":
        return content is not None
    if content is not None:
        bound = bound_names(content)
        # What a module gives on demand it has to name somewhere.
        lazily = "__getattr__" in bound and re.search(rf"\b{name}\b", content) is not None
        if lazily or not bound.isdisjoint({name, "*"}):
            return True
    return text(f"{module}.{name}") is not None


@lru_cache(maxsize=512)
def bound_names(text: str) -> frozenset[str]:
    """The names that a module binds when it is loaded; `*` where it takes all of another's."""
    bound: set[str] = set()
    for node in statements(parsed(text), functions=False):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            bound.update(part.id for part in _names(node) if isinstance(part.ctx, ast.Store))
    return frozenset(bound)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


@lru_cache(maxsize=512)
def parsed(text: str) -> ast.Module:
    """A module's tree, which is shared: not to be changed. Of what does not parse, an empty one."""
    try:
        return fingerprint.parsed(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def statements(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """Every statement and expression outside of definitions, and with `functions` inside of them too, but for what only
    a type checker sees. With `functions`, what may fail to be imported is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            yield from statements(ast.Module(body=child.orelse, type_ignores=[]), functions)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            if functions:
                yield from statements(child, functions)
        elif functions and catches_import_error(child):
            continue
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)):
            yield from statements(child, functions)
        else:
            yield child


def catches_import_error(node: ast.AST) -> bool:
    """Whether it is a `try` with a handler for it, or a `with contextlib.suppress(ImportError)`."""
    if isinstance(node, ast.Try):
        return any(handles_import_error(handler) for handler in node.handlers)
    return isinstance(node, ast.With) and any(_is_import_error(item.context_expr) for item in node.items)


def handles_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or _is_import_error(handler.type)


def _is_import_error(caught: ast.expr) -> bool:
    wide = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return not wide.isdisjoint(name.id for name in _names(caught))


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, (ast.Name, ast.Attribute)) and ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"
