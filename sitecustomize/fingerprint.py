"""Fingerprints that mean the code, not its looks.

A fingerprint is the first 16 hexadecimal digits of a SHA-256 over a definition's syntax tree, written in a form of our
own, because `ast.dump` differs between Python releases. Comments, docstrings, formatting, type annotations, `pass` and
the interpreter that parses it (3.10 to 3.14) do not change it; a constant, a call or a default does. So do, in a class,
annotations that say what is a field (`ClassVar`, `InitVar`, `KW_ONLY`, `Annotated`), and those of a class that decodes
by them (a msgspec Struct, a pydantic model or dataclass).

A name is a function, a class, what a module or class assigns, what a module imports under that name, and besides:
`Class.attribute`, what `__init__` assigns to the attribute; `Class.__bases__`, the class statement without its body.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

FILE = "<vllm-livepatch reads>"
_QUIET = ("ignore", None, Warning, re.compile(FILE), 0)  # as warnings.filterwarnings makes it
# Fields that carry looks or typing, not behaviour. `kind` is the u of u"...", `type_params` are those of def f[T]().
_IGNORED = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "type_ignores"})
_BODIES = frozenset({"body", "orelse", "finalbody"})
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Import = (ast.Import, ast.ImportFrom)
_MEAN_A_FIELD = frozenset({"ClassVar", "InitVar", "KW_ONLY", "Annotated"})
_DECODED = frozenset({"Struct", "BaseModel"})  # bases whose fields' annotations are behaviour: msgspec's, pydantic's


class SourceError(ValueError):
    """A module's source could not be parsed."""


def of_names(source: str, names: Mapping[str, str]) -> dict[str, str | None]:
    """Fingerprint several definitions of one module.

    `names` maps a key of the caller's to a qualified name such as `Scheduler._free_blocks`; an empty name stands for
    the whole module. The answer has the same keys; None where the source defines no such name. Raises SourceError.
    """
    try:
        tree = parsed(source)
        found = {key: find(tree, name) for key, name in names.items()}
        return {key: None if node is None else of_node(node) for key, node in found.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise SourceError(f"the source does not parse: {str(error) or type(error).__name__}") from error


def parsed(source: str) -> ast.Module:
    """An invalid escape in somebody's source is not ours to report.

    What a `catch_warnings` puts back may be what another thread's has set, so our filter stays, for this name of a file
    only. Up to 3.12 all threads share one count of the depth in ast.parse, and a thread that parses too may upset it.
    """
    for _ in range(10):
        try:
            if _QUIET not in warnings.filters:
                warnings.filterwarnings("ignore", module=FILE)
            return ast.parse(source, FILE)
        except SystemError:
            continue
    return ast.parse(source, FILE)


def find(tree: ast.Module, qualname: str) -> ast.AST | None:
    """The definition that `qualname` names; the last one where there are several, as in the running module.

    What several statements of `__init__` assign is a Module of those statements.
    """
    node: ast.AST = tree
    for part in qualname.split(".") if qualname else ():
        inner = _member(node, part)
        if inner is None:
            return None
        node = inner
    return node


def of_node(node: ast.AST) -> str:
    """The fingerprint of one parsed definition."""
    digest = hashlib.sha256("".join(_written(node)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _member(node: ast.AST, name: str) -> ast.AST | None:
    if isinstance(node, ast.ClassDef) and name == "__bases__":
        head = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
        head.lineno, head.end_lineno = node.lineno, max(node.lineno, node.body[0].lineno - 1)
        return head
    if isinstance(node, ast.ClassDef):
        _mark(node)
    named = [child for child in _definitions(node) if name in _names(child)]
    if named:
        return _only(named[-1], name)
    if not isinstance(node, ast.ClassDef) or name == "__init__":
        return None
    begin = _member(node, "__init__")
    if not isinstance(begin, ast.FunctionDef) or not begin.args.args:
        return None
    assigned = list(_assigning(begin, begin.args.args[0].arg, name))
    return ast.Module(body=assigned, type_ignores=[]) if assigned else None


def _only(node: ast.AST, name: str) -> ast.AST:
    """Of an import statement, the part that binds `name`."""
    if not isinstance(node, _Import):
        return node
    names = [alias for alias in node.names if name == (alias.asname or alias.name.partition(".")[0])][-1:]
    part = ast.Import(names) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, names, node.level)
    return ast.copy_location(part, node)


def _mark(node: ast.ClassDef) -> None:
    """Mark those annotations of a class body that are behaviour, so that they are written.

    Known by what the class statement itself names: bases of bases are not looked at.
    """
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    decoded = bool(bases & _DECODED) or any("pydantic" in ast.unparse(one) for one in node.decorator_list)
    for child in _definitions(node):
        if isinstance(child, ast.AnnAssign):
            annotation = ast.unparse(child.annotation)
            child.annotation.is_behaviour = decoded or any(word in annotation for word in _MEAN_A_FIELD)  # type: ignore[attr-defined]


def _assigning(node: ast.AST, own: str, attribute: str) -> Iterator[ast.stmt]:
    """The statements of a function that assign the attribute of `own`, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            stored = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute))
            if any(
                isinstance(part.value, ast.Name) and (part.value.id, part.attr) == (own, attribute) for part in stored
            ):
                yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(child, _Definition):
            yield from _assigning(child, own, attribute)


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Definitions directly inside `node`, those under if, try and with included: they bind in the same scope."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_Definition, *_Import, ast.Assign, ast.AnnAssign)):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _definitions(child)


def _names(node: ast.AST) -> Sequence[str]:
    """The names that a definition binds."""
    if isinstance(node, _Definition):
        return [node.name]
    if isinstance(node, _Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return [node.targets[0].id]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _written(node: object) -> Iterator[str]:
    """The canonical text of a node: class name, then each field that means something, in the order of its name."""
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _written(item)
            yield ","
        yield "]"
    elif isinstance(node, ast.AnnAssign):
        if getattr(node.annotation, "is_behaviour", False):
            yield "Annotation("
            yield from _written(node.annotation)
            yield ")"
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
        if isinstance(node, ast.ClassDef):
            _mark(node)
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
