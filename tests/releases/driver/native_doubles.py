"""LMCache's compiled extensions, which the pinned sources lack: enough of them to import what only names their types."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NATIVE = ("lmcache.native_storage_ops", "lmcache.lmcache_native")


class _Names(type):
    """Every attribute of such a class is there, a number of its own: as of an enumeration nobody looks into."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return {key: value for key, value in vars(cls).items() if not key.startswith("__")}
        if name.startswith("__"):
            raise AttributeError(name)
        value = len([key for key in vars(cls) if not key.startswith("__")])
        setattr(cls, name, value)
        return value


def _of_format(name: str, layout: int) -> bool:
    """What a layout of KV is said to be, by the release's own table of them."""
    registry = importlib.import_module("lmcache.v1.gpu_connector.kv_format.specs.registry")
    return bool(getattr(registry.get_spec_class(layout), name))


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return functools.partial(_of_format, name)
        made = _Names(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in NATIVE else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Behind the finders that find a release's own, where it has them."""
    sys.meta_path.append(_Finder())


class Stream:
    """A device's stream. What it does with a call in its order is its own."""

    cuda_stream = ptr = 7

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1
