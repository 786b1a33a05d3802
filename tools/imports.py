"""Whether what a changed module newly imports is there, told from the syntax alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping


def lacking(
    before: Mapping[str, str | None], after: Mapping[str, str], source: Callable[[str], str | None]
) -> list[str]:
    """The `module:name` that the texts of `after` import from their own package, those of `before` did not, and that
    neither `after` nor the release (`source`: a module's text, None where it has none) provides."""

    def text(module: str) -> str | None:
        return after.get(module) or source(module)

    found: list[str] = []
    for module, new in after.items():
        old = before.get(module)
        known = set(_imported(module, old)) if old is not None else set()
        for origin, name in _imported(module, new):
            if (origin, name) not in known and not _provides(text, origin, name):
                found.append(f"{origin}:{name}")
    return list(dict.fromkeys(found))


def _imported(module: str, text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from module import name` out of the module's own package, at its top level."""
    package = module.partition(".")[0]
    for node in _top_level(_parsed(text)):
        if isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin == package or origin.startswith(f"{package}."):
                yield from ((origin, alias.name) for alias in node.names)


def _provides(text: Callable[[str], str | None], module: str, name: str) -> bool:
    if text(f"{module}.{name}") is not None or name == "*":
        return True
    content = text(module)
    if content is None:
        return False
    bound: set[str] = set()
    for node in _top_level(_parsed(content)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            bound.update(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
    return name in bound or "*" in bound or "__getattr__" in bound


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported; what only a type checker sees is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _top_level(child)
        elif isinstance(child, ast.stmt):
            yield child
