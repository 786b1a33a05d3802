"""Let a bundle decide about every patch in this process, and print nothing: its report says what it decided.

Run by an interpreter that has the bundle and one release's sources on its path. The targets are looked for through the
interpreter's own finders, the bundle's among them, which is when a process decides; they are not executed, and neither
are the packages that they are in (each is put there as an empty module with its search path), so that what a release
would import of others need not be installed.

    verdicts.py MODULE...
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types


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
    module.__path__ = list(spec.submodule_search_locations)
    return module


missing = []
for name in sys.argv[1:]:
    parent = name.rpartition(".")[0]
    if (parent and package(parent) is None) or importlib.util.find_spec(name) is None:
        missing.append(name)
json.dump(missing, sys.stdout)
