"""The import hook: finds a target module as it would be found anyway, and tells the runtime of it.

Imported by the bundle's entry when the first target module is looked for, and not before.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .changed_module import part_of_import
from .context import to_stderr
from .runtime import Runtime, end_process, guarded


def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """The module's spec as the finders behind ours give it, its loader made to tell us when the module has executed.

    The loader keeps its type and is a copy of its own, since a zip file's loader serves many modules; the only thing
    changed on it is undone before the module's code runs.
    """
    if name in _finding.names:
        return None  # a finder behind us asks all finders again
    _finding.names.add(name)
    try:
        spec = _next_spec(name, path, target)
    finally:
        _finding.names.discard(name)
    runtime = _the_runtime()
    if runtime is None:
        return spec
    if spec is None:
        spec = runtime.added(name)
    if spec is None or spec.loader is None:
        return spec
    guarded(runtime.meet, name)
    changed = runtime.changed(name)
    loader: Any = None

    @part_of_import
    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        if changed is None:
            loader.exec_module(module)
        else:
            runtime.execute(module, loader, changed)
        guarded(runtime.loaded, module)

    try:
        loader = copy.copy(spec.loader)
        if loader is spec.loader or not hasattr(loader, "exec_module"):
            raise TypeError("one for many modules, or of a kind that Python has given up")
        if changed is not None:
            changed.dress(loader)
        loader.exec_module = exec_module
    except Exception as error:  # somebody's own loader: it loads as it does
        guarded(runtime.out_of_reach, name, f"its loader cannot tell when it has run: {error}")
        return spec
    spec.loader = loader
    return spec


def imported_before(name: str) -> None:
    """A target module that was imported before the entry ran."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.meet, name)
        guarded(runtime.loaded, sys.modules[name])


class _Finding(threading.local):
    def __init__(self) -> None:
        self.names: set[str] = set()


_finding = _Finding()
_made_lock = threading.Lock()
_made: list[Runtime | None] = []


def _the_runtime() -> Runtime | None:
    """This process's runtime; None where the bundle itself is broken, which is said once."""
    with _made_lock:
        if not _made:
            try:
                _made.append(_from_bundle())
            except Exception as error:
                why = f"the bundle cannot be used, nothing is patched: {type(error).__name__}: {error}"
                if os.environ.get("LIVEPATCH") == "strict":
                    end_process(why)
                to_stderr(why)
                _made.append(None)
        return _made[0]


def _from_bundle() -> Runtime:
    root = __name__.partition(".")[0]
    package = sys.modules[root]
    where = os.path.dirname(str(package.__file__))
    data = package.__spec__.loader.get_data(os.path.join(where, "catalogue.json"))  # type: ignore[union-attr]
    return Runtime(json.loads(data.decode("utf-8")), root, os.path.dirname(where))


def _next_spec(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    finders: list[Any] = list(sys.meta_path)
    own = [
        place for place, finder in enumerate(finders) if type(finder) is type and finder.__name__ == "LivepatchFinder"
    ]
    # Where somebody put something around every finder, all are asked: around ours, too, which passes while it asks.
    for finder in finders[own[0] + 1 if own else 0 :]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
