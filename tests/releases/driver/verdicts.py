"""Let a bundle decide about every patch in this process, and print nothing: its report says what it decided.

Run by an interpreter that has the bundle and one release's sources on its path. The targets are found through the
interpreter's own finders, the bundle's among them, and executed by their loaders, which is when a process decides; but
nothing of their code is run, nor of the packages that they are in (each is put there as an empty module with its search
path), so that what a release would import of others need not be installed.

    verdicts.py MODULE...
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from typing import Any


def package(name: str) -> types.ModuleType | None:
    """The package without its code, in `sys.modules`; None where there is none."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, _ = name.rpartition(".")
    above = package(parent) if parent else None
    if parent and above is None:
        return None
    spec = importlib.machinery.PathFinder.find_spec(name, None if above is None else list(above.__path__))
    if spec is None or spec.submodule_search_locations is None:
        return None
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__, module.__path__ = spec, list(spec.submodule_search_locations)
    return module


class Empty:
    """Finds the targets, to be executed as if they were empty."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in sys.argv[1:] else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = lambda module: None  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(1, Empty)  # type: ignore[arg-type]  # right behind the bundle's
missing = []
for name in sys.argv[1:]:
    parent = name.rpartition(".")[0]
    spec = None if parent and package(parent) is None else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        missing.append(name)
    else:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
json.dump(missing, sys.stdout)
