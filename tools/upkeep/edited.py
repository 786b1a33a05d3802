"""Whether proofs tell broken code from code that is only different: `python -m vllm_livepatch.tools.upkeep.edited`.

Each edit changes one function of the newest release that needs the patch: what the patch relies on (`broken`, in
edits.toml, by somebody who did not write the patch), or nothing that matters (`harmless`: those of the table, and two
that every target gets: a statement more, and a parameter more). The patch is judged and proven there as on any build
that nobody has listed. Of broken code none may be patched; of harmless code most is to be.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import matrix, rendering
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry, sources
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import unlisted

EDITS = Path(__file__).with_name("edits.toml")
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
NAME = "edited"
"""Of the markers that the table stands between."""
PATCHED = ("known", "unverified", "proven", "wrong")
"""The columns in which a process would patch the code."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Edit:
    """A change of functions, `module:qualname`: `change` edits a node, and says whether it found what it edits."""

    patch: str
    kind: str
    what: str
    at: tuple[str, ...]
    change: Callable[[Any], bool]


def edits(entries: Mapping[str, catalogue.Entry], file: Path = EDITS) -> Iterator[Edit]:
    """Those of the table, and the two that every patch gets. Raises UserError."""
    table = tomllib.loads(file.read_text("utf-8")) if file.exists() else {}
    for one in table.get("edit", ()):
        yield Edit(one["patch"], one["kind"], one["what"], (one["at"],), _change(one))
    for name, entry in entries.items():
        if not entry.patch.diff:
            targets = entry.patch.targets
            yield Edit(name, "harmless", "each target has a statement more", targets, _begin("_more = None"))
            yield Edit(name, "harmless", "each target has a parameter more", targets, _parameter)


def _change(entry: Mapping[str, Any]) -> Callable[[Any], bool]:
    """The form of an edit: the one key that says how. Raises UserError."""
    forms: dict[str, Callable[[Any], Callable[[Any], bool]]] = {
        "begin": _begin,
        "instead": lambda text: _begin(text, rest=False),
        "drop": lambda name: _statements(name, lambda _: [ast.Pass()]),
        "twice": lambda name: _statements(name, lambda statement: [statement, statement]),
        "negate": _negate,
        "rename": _rename,
    }
    found = [form for form in forms if form in entry]
    if len(found) != 1:
        raise UserError(f"{entry.get('patch')}: an edit has one of {', '.join(forms)}")
    return forms[found[0]](entry[found[0]])


def _begin(text: str, rest: bool = True) -> Callable[[Any], bool]:
    """Statements of ours at a function's beginning; without the `rest`, in its body's place."""

    def change(node: Any) -> bool:
        node.body = [*ast.parse(text).body, *(node.body if rest else ())]
        return True

    return change


def _parameter(node: Any) -> bool:
    """One more, that nobody gives."""
    node.args.kwonlyargs.append(ast.arg(arg="one_more"))
    node.args.kw_defaults.append(ast.Constant(None))
    return True


def _statements(name: str, made: Callable[[ast.stmt], list[ast.stmt]]) -> Callable[[Any], bool]:
    """Replace the simple statements that mention a name."""

    def change(node: Any) -> bool:
        found = False
        for parent in ast.walk(node):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(parent, field, None)
                if not isinstance(block, list):
                    continue
                hit = [not hasattr(one, "body") and _mentions(one, name) for one in block]
                found |= any(hit)
                parts = [made(one) if changed else [one] for one, changed in zip(block, hit, strict=True)]
                setattr(parent, field, [one for part in parts for one in part])
        return found

    return change


def _negate(name: str) -> Callable[[Any], bool]:
    """Turn round the conditions that mention a name."""

    def change(node: Any) -> bool:
        found = False
        for one in ast.walk(node):
            if isinstance(one, (ast.If, ast.While, ast.IfExp)) and _mentions(one.test, name):
                one.test, found = ast.UnaryOp(ast.Not(), one.test), True
        return found

    return change


def _rename(names: list[str]) -> Callable[[Any], bool]:
    """Another name, of a variable or an attribute, wherever it stands in the function."""
    old, new = names

    def change(node: Any) -> bool:
        found = False
        for one in ast.walk(node):
            for field in ("id", "attr", "arg"):
                if getattr(one, field, None) == old:
                    setattr(one, field, new)
                    found = True
        return found

    return change


def _mentions(node: ast.AST, name: str) -> bool:
    return any(name in (getattr(one, "id", None), getattr(one, "attr", None)) for one in ast.walk(node))


def edited(source: str, name: str, change: Callable[[Any], bool]) -> str | None:
    """A module's text with one function changed; None where that, or what the edit is about, is not there."""
    node = fingerprint.find(fingerprint.parsed(source), name)
    if not isinstance(node, Function) or not change(node):
        return None
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    lines = source.splitlines(keepends=True)
    text = textwrap.indent(ast.unparse(ast.fix_missing_locations(node)), " " * node.col_offset) + "\n"
    return "".join([*lines[: first - 1], text, *lines[node.end_lineno :]])


@contextmanager
def tree(edit: Edit, package: str, release: str) -> Iterator[str]:
    """A release's sources with the edit, until the caller is done. Raises UserError where there is nothing to edit."""
    found = False
    with tempfile.TemporaryDirectory(dir=user_cache.directory(), prefix="edited-") as directory:
        place = Path(directory) / "site-packages"
        shutil.copytree(sources.site_packages(package, release), place, copy_function=os.link)
        for at in edit.at:
            module, _, name = at.partition(":")
            path = place / module.replace(".", "/")
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                text = edited(file.read_text("utf-8"), name, edit.change) if file.exists() else None
                if text is not None:
                    file.unlink()  # a link to the release's own
                    file.write_text(text, "utf-8")
                    found = True
        if not found:
            raise UserError(f"{package} {release} has nothing of what the edit is about")
        yield str(place)


def release_of(patch: Patch) -> str:
    """The newest that needs it."""
    return rendering.releases(patch, "needed")[-1]


def column(edit: Edit, entry: catalogue.Entry) -> tuple[str, str]:
    """What is made of the edited code, and why. Raises UserError."""
    package = edit.at[0].partition(":")[0].partition(".")[0]
    newest = {one: registry.pins(one)[-1].version for one in unlisted.UNTIL}
    releases = {**newest, entry.patch.package: release_of(entry.patch)}
    with tree(edit, package, releases[package]) as place:
        path = [place, *(str(sources.site_packages(one, which)) for one, which in releases.items() if one != package)]
        own = f"{entry.patch.package} {releases[entry.patch.package]}, edited"
        (cell,) = unlisted.cells({entry.patch.name: entry}, own, path, unlisted.beside(), frozen=False)
    return cell.column, cell.detail


def table(found: Iterable[tuple[Edit, str]]) -> str:
    """Markdown: of each kind, how many edits there are, and how many came to what."""
    counted: dict[str, Counter[str]] = {}
    for edit, where in found:
        counted.setdefault(edit.kind, Counter())[where] += 1
    columns = sorted({where for one in counted.values() for where in one})
    lines = [f"| edits | of them | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for kind, one in sorted(counted.items()):
        lines.append(f"| {kind} | {one.total()} | {' | '.join(str(one[where] or '') for where in columns)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_livepatch.tools.upkeep.edited", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--patch", action="append", help="a patch's name; may be given again")
    parser.add_argument("--kind", choices=("broken", "harmless"))
    parser.add_argument("--what", help="an edit's sentence, or a part of it")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    asked = parser.parse_args()
    entries = catalogue.load()
    found: list[tuple[Edit, str]] = []
    for edit in edits(entries):
        if asked.patch and edit.patch not in asked.patch:
            continue
        if (asked.kind and edit.kind != asked.kind) or (asked.what or "") not in edit.what:
            continue
        try:
            where, why = column(edit, entries[edit.patch])
        except UserError as error:
            where, why = "no such edit", str(error)
        found.append((edit, where))
        said = {"patch": edit.patch, "kind": edit.kind, "what": edit.what, "column": where, "why": why}
        print(json.dumps(said), flush=True)
    made = table(found)
    print(made, file=sys.stderr)
    if asked.write:
        matrix.write(PAGE, made, NAME)
    return 1 if any(edit.kind == "broken" and where in PATCHED for edit, where in found) else 0


if __name__ == "__main__":
    sys.exit(main())
