"""LMCache's compiled modules, which a pinned release's sources do not include: importable, and never run."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = ("lmcache_native", "c_ops", "cuda_ops", "native_storage_ops")


class NativeDouble(ModuleType):
    """A module that has whatever is imported from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def stand_in() -> None:
    """Put the modules where `import` finds them."""
    for name in NAMES:
        sys.modules.setdefault(f"lmcache.{name}", NativeDouble(f"lmcache.{name}"))


def device_ops(lmcache: Any) -> None:
    """Give the package the operations that it chooses, where it does, among the compiled modules."""
    if not hasattr(lmcache, "device_ops"):
        lmcache.device_ops = NativeDouble("lmcache.device_ops")
