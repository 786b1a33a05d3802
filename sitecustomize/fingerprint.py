"""Fingerprints that mean the code, not its looks.

A fingerprint is the first 16 hexadecimal digits of a SHA-256 over a function's (or class's) syntax tree, written in a
form of our own, because `ast.dump` differs between Python releases. Comments, docstrings, formatting, type annotations,
`pass` and the interpreter that parses it (3.10 to 3.14) do not change it; a constant, a call or a default does.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator, Mapping

# Fields that carry looks or typing, not behaviour. `kind` is the u of u"...", `type_params` are those of def f[T]().
_IGNORED = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "type_ignores"})
_BODIES = frozenset({"body", "orelse", "finalbody"})
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class SourceError(ValueError):
    """A module's source could not be parsed."""


def of_names(source: str, names: Mapping[str, str]) -> dict[str, str | None]:
    """Fingerprint several definitions of one module.

    `names` maps a key of the caller's to a qualified name such as `Scheduler._free_blocks`; an empty name stands for
    the whole module. The answer has the same keys; None where the source defines no such name. Raises SourceError.
    """
    try:
        with warnings.catch_warnings():  # an invalid escape in somebody's source is not ours to report
            warnings.simplefilter("ignore")
            tree = parsed(source)
        found = {key: find(tree, name) for key, name in names.items()}
        return {key: None if node is None else of_node(node) for key, node in found.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise SourceError(f"the source does not parse: {error or type(error).__name__}") from error


def parsed(source: str) -> ast.Module:
    """Up to 3.12 all threads share one count of the depth in ast.parse, and a thread that parses too may upset it."""
    for _ in range(10):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def find(tree: ast.Module, qualname: str) -> ast.AST | None:
    """The definition that `qualname` names; the last one where there are several, as in the running module."""
    node: ast.AST = tree
    for part in qualname.split(".") if qualname else ():
        named = [child for child in _definitions(node) if _name(child) == part]
        if not named:
            return None
        node = named[-1]
    return node


def of_node(node: ast.AST) -> str:
    """The fingerprint of one parsed definition."""
    digest = hashlib.sha256("".join(_written(node)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Definitions directly inside `node`, those under if, try and with included: they bind in the same scope."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_Definition, ast.Assign, ast.AnnAssign)):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _definitions(child)


def _name(node: ast.AST) -> str | None:
    if isinstance(node, _Definition):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _written(node: object) -> Iterator[str]:
    """The canonical text of a node: class name, then each field that means something, in the order of its name."""
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _written(item)
            yield ","
        yield "]"
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from _written(ast.Assign(targets=[node.target], value=node.value))
        else:
            yield "Declare("
            yield from _written(node.target)
            yield ")"
    elif isinstance(node, ast.JoinedStr):
        yield "JoinedStr("
        yield from _written(_merged(node.values))
        yield ")"
    elif isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for field in sorted(node._fields):
            value = getattr(node, field, None)
            if field in _BODIES and isinstance(value, list):
                value = _statements(value, in_class=isinstance(node, ast.ClassDef))
            if field in _IGNORED or value is None or value == []:
                continue
            yield f"{field}="
            yield from _written(value)
            yield ";"
        yield ")"
    elif isinstance(node, int) and node.bit_length() > 1024:
        yield f"int:{node:#x}"  # a decimal of that size may be refused
    else:
        yield f"{type(node).__name__}:{node!a}"  # not repr: what it escapes depends on the interpreter's Unicode


def _statements(body: list[ast.stmt], in_class: bool) -> list[ast.stmt]:
    """A body without what does nothing: `pass`, bare strings (docstrings), and bare annotations.

    In a class a bare annotation may be a dataclass's field, so there its name stays.
    """
    return [
        statement
        for statement in body
        if not isinstance(statement, ast.Pass)
        and not (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        )
        and not (isinstance(statement, ast.AnnAssign) and statement.value is None and not in_class)
    ]


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with neighbouring texts joined: before and after 3.12 they are split differently."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(value=str(last.value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            merged.append(value)
    return merged
