# mypy: disable-error-code="import-not-found"
"""Import the real scheduler in a way of its own, and print as JSON which file it is executed from, and what was wrapped.

    executed_text.py WAY FUNCTION

`same` and `other`: by a finder behind the bundle's, of a copy elsewhere, as a vendor's overlay does it; in the other copy
the method FUNCTION of the scheduler has one statement more. `in front`: by a finder in front of the bundle's. `pasted`: a
finder in front of it replaces FUNCTION as soon as it is imported, as start scripts do it.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import ast
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import vllm

SCHEDULER = "vllm.v1.core.sched.scheduler"
WAY, FUNCTION = sys.argv[1:]


def copied(origin: str) -> str:
    """A copy of the release's file, as it is or with one more statement in FUNCTION."""
    text = Path(origin).read_text("utf-8")
    if WAY == "other":
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == FUNCTION:
                node.body.insert(0, ast.parse("vendor = True").body[0])
        text = ast.unparse(tree)
    file = Path("overlay.py").absolute()
    file.write_text(text, "utf-8")
    return str(file)


class Pastes:
    """Executes as another loader does, and replaces FUNCTION."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        setattr(module.Scheduler, FUNCTION, lambda self, *args: None)


class Finder:
    asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SCHEDULER or self.asking:
            return None
        if WAY == "pasted":
            self.asking = True  # for good: it answers once
            spec = importlib.util.find_spec(name)
            assert spec is not None
            spec.loader = Pastes(spec.loader)  # type: ignore[assignment]
            return spec
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        if WAY == "in front":
            return spec
        file = copied(spec.origin)
        return importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, file))


sys.meta_path.insert(0 if WAY in ("in front", "pasted") else 1, Finder())  # type: ignore[arg-type]
from vllm.v1.core.sched import async_scheduler, scheduler

found = vars(scheduler.Scheduler)[FUNCTION]
print_result(
    {
        "file": scheduler.__file__,
        "wrapped": hasattr(found, "__wrapped__"),
        "inherited": getattr(async_scheduler.AsyncScheduler, FUNCTION) is found,
    },
    vllm,
)
