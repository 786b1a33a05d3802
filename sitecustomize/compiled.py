"""Loads wrapt's compiled part, when it is imported itself: before wrapt, which then takes that part as it is.

It imports `wrapt.exceptions`, by that name. That must not be the environment's wrapt: nobody asked for it here, it may
be of another release, or there may be none. So our copy has the name for the moment of that import.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Should another thread import wrapt at that very moment, it gets what it looks for all the same."""

    def __getattr__(self, attribute: str) -> Any:
        importlib.import_module(__name__)  # ends when the name is free again
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


def _load(vendor: str) -> None:
    name = f"{vendor}.wrapt"
    place = [f"{part}/wrapt" for part in importlib.import_module(vendor).__path__]
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


if f"{__package__.rpartition('.')[0]}.vendor.wrapt" not in sys.modules:
    _load(f"{__package__.rpartition('.')[0]}.vendor")
