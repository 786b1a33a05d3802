"""The rooms of tools/: each says what belongs there, and imports go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch import tools

ROOT = Path(next(iter(tools.__path__)))
LEVELS = (
    ("comments", "errors", "measured", "threads", "toml", "user_cache"),
    ("in_bundle", "patch_lock"),
    ("releases",),
    ("compatibility",),
    ("diffs",),
    ("bundles",),
    ("deploy", "proving"),
    ("commands",),
    ("lab",),
    ("cli",),
    ("bench", "upkeep"),
)
"""A room imports from itself and from the lines before its own."""
PLACE = {room: number for number, level in enumerate(LEVELS) for room in level}
MODULES = sorted(
    file
    for file in ROOT.rglob("*.py")
    if not {"root", "fault_patches", "shared_cores"} & {*file.relative_to(ROOT).parts}
)


def imported(file: Path) -> Iterator[str]:
    """The rooms that a module imports from."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            above = ["vllm_livepatch", "tools", *file.relative_to(ROOT).parts][: -node.level] if node.level else []
            names = [".".join([*above, *filter(None, [node.module]), name]) for name in names]
        for name in names:
            if name.startswith("vllm_livepatch.tools."):
                yield name.split(".")[2]


def test_every_room_has_its_place() -> None:
    rooms = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in MODULES} - {"__init__"}
    assert rooms == PLACE.keys()


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    wrong = {other for other in imported(file) if other != room and PLACE[other] >= PLACE.get(room, 0)}
    assert not wrong, f"{room} imports from {', '.join(sorted(wrong))}, which is above it"


@pytest.mark.parametrize("room", sorted(place.parent.name for place in ROOT.glob("*/__init__.py")))
def test_a_room_says_what_belongs_there(room: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8"))), room
