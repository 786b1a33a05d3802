"""Which tests execute which function, also in processes that tests start: each function writes its name."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Of `posix` and not of `os`, which tests replace parts of. 1025: write, append.
PROBE = (
    "(lambda os: (lambda fd: (os.write(fd, {name!r}), os.close(fd)))(os.open({probes!r}, 1025)))(__import__('posix'))"
)


def functions(tree: ast.Module) -> dict[str, Function]:
    """The functions of a module by their qualified names, the outer ones first."""
    return dict(_functions(tree, ()))


def _functions(node: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        path = (
            (*above, child.name) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else above
        )
        if named and not isinstance(child, ast.ClassDef):
            assert isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield ".".join(path), child
        yield from _functions(child, path)


def enclosing(tree: ast.Module, line: int) -> str | None:
    """The innermost function whose body holds this line; a default or a decorator belongs to what is around."""
    found = [name for name, node in functions(tree).items() if node.body[0].lineno <= line <= (node.end_lineno or 0)]
    return found[-1] if found else None


def instrumented(text: str, module: str, probes: str) -> str:
    """The module, each of whose functions writes `MODULE:FUNCTION` to the file `probes` when it is called."""
    lines = text.splitlines()
    places = []
    for name, node in functions(ast.parse(text)).items():
        body = [part for part in node.body if not _is_text(part)]
        if body:
            first = body[0]
            decorated = getattr(first, "decorator_list", None)
            line = decorated[0].lineno if decorated else first.lineno
            places.append((line, first.col_offset, name))
    for line, column, name in sorted(places, reverse=True):
        probe = PROBE.format(name=f"{module}:{name}\n".encode(), probes=probes)
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        if before.strip() and not before.strip().startswith("@"):
            lines[line - 1] = f"{before}{probe}; {after}"
        else:
            lines.insert(line - 1, " " * column + probe)
    return "\n".join(lines) + "\n"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


QUICK = 0.05
"""A test of so many seconds has its turn, whatever others of its kind there are."""


def reaching(tests: Mapping[str, Mapping[str, Any]], text: str, module: str, line: int, seconds: float) -> list[str]:
    """The tests to run for a change of this line: those that execute its function, one of each kind first, and
    all the quick ones.

    What is outside of functions was executed by all. There, the tests are those of the functions that name what the
    line's statement assigns, if there are any, or of all functions; and those of the module's own test file.
    """
    tree = ast.parse(text)
    name = enclosing(tree, line)
    wanted = {name} if name else _users(tree, line)
    reached = {f"{module}:{one}" for one in wanted or functions(tree)}
    path = PurePosixPath(module)
    own = () if name else (f"tests/unit/test_{path.stem}.py::", f"tests/unit/test_{path.parent.name}.py::")
    found = [
        one
        for one, kept in tests.items()
        if kept["passed"] and (reached.intersection(kept["reached"]) or one.startswith(own))
    ]
    found.sort(key=lambda one: (tests[one]["seconds"], one))
    ranked = []
    seen: dict[str, Iterator[int]] = {}
    for one in found:
        count = seen.setdefault(one.partition("[")[0], itertools.count())
        ranked.append((0 if tests[one]["seconds"] <= QUICK else next(count), one))
    chosen: list[str] = []
    spent = 0.0
    for _, one in sorted(ranked, key=lambda pair: pair[0]):
        if not chosen or spent + tests[one]["seconds"] <= seconds:
            chosen.append(one)
            spent += tests[one]["seconds"]
    return sorted(chosen, key=lambda one: tests[one]["seconds"])


def _users(tree: ast.Module, line: int) -> set[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line <= (node.end_lineno or 0):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            return {name for name, function in functions(tree).items() if names & _named(function)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno > line >= min(
            [node.lineno, *(one.lineno for one in node.decorator_list)]
        ):
            return {name for name, function in functions(tree).items() if function is node}
    return set()


def _named(node: ast.AST) -> set[str]:
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
