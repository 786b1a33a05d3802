"""Our copy of wrapt, with its compiled part where the bundle has one for this interpreter."""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_lock = threading.RLock()


def wrapt(vendor: str) -> Any:
    """The copy in the package `vendor`."""
    name = f"{vendor}.wrapt"
    with _lock:
        if name not in sys.modules:
            _load_compiled(importlib.import_module(vendor), name)
    return importlib.import_module(name)


def _load_compiled(vendor: ModuleType, name: str) -> None:
    """Load wrapt's compiled part before wrapt itself, which then takes it as it is.

    It imports `wrapt.exceptions`, by that name. That must not be the environment's wrapt: nobody asked for it here, it
    may be of another release, or there may be none. So our copy has the name for the moment of that import.
    """
    place = [f"{part}/wrapt" for part in vendor.__path__]
    compiled = PathFinder.find_spec(f"{name}._wrappers", place)
    exceptions = PathFinder.find_spec(f"{name}.exceptions", place)
    if compiled is None or exceptions is None:
        return
    stand_ins = {"wrapt": _StandIn("wrapt"), "wrapt.exceptions": _executed(exceptions)}
    put = {known: module for known, module in stand_ins.items() if sys.modules.setdefault(known, module) is module}
    try:
        _executed(compiled)
    except ImportError:
        sys.modules[compiled.name] = None  # type: ignore[assignment]  # wrapt does without, and is not to try again
    finally:
        for known in put:
            del sys.modules[known]


class _StandIn(ModuleType):
    """Should another thread import wrapt at that very moment, it gets what it looks for all the same."""

    def __getattr__(self, attribute: str) -> Any:
        with _lock:
            real = importlib.import_module("wrapt")
        if real is self:  # asked by the thread that put it there
            raise AttributeError(attribute)
        return getattr(real, attribute)


def _executed(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
