"""A module whose source is not the one on disk: compiled from the changed text, cached by content, shown as changed."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import linecache
import marshal
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from . import cache

_F = TypeVar("_F", bound=Callable[..., None])
_MAGIC = importlib.util.MAGIC_NUMBER


def part_of_import(function: _F) -> _F:
    """The interpreter cuts its import machinery out of tracebacks by these two names: ours is part of it."""
    code = function.__code__.replace(co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed")
    function.__code__ = code
    return function


class ChangedModule:
    """One module's changed text, and the code made of it.

    The changed source is a file in the cache, and the code names that file: tracebacks, debuggers and coverage read
    files, and so they show the lines that run. What keys a cache by the contents of the files that it traced (vLLM's
    compile cache) has another key than in an unpatched run. The file's name is not that of the unpatched one: coverage
    would take the one for the other.
    """

    def __init__(self, module: str, text: str, origin: str | None, place: str | None) -> None:
        """`place` is the cache directory, None where there is none."""
        self.module = module
        self.text = text
        self.origin = origin  # the unpatched file: the module's __file__ stays this
        self._data = text.encode("utf-8", "surrogatepass")
        self._code: CodeType | None = None
        tail = os.path.join("changed", hashlib.sha256(self._data).hexdigest()[:20], *module.split(".")) + ".changed.py"
        self._cached = place is not None and self._kept(os.path.join(place, tail))
        self.filename = os.path.join(place, tail) if place is not None and self._cached else self._in_memory(tail)

    def code(self) -> CodeType:
        """Compiled once per content: the cache spares a large module its compilation."""
        if self._code is None:
            self._code = self._cached_code() or self._compiled()
        return self._code

    def substitute(self, loader: Any) -> None:
        """Make a loader give the changed text to whoever asks it."""
        loader.get_source = lambda fullname=None: self.text
        loader.get_code = lambda fullname=None: self.code()

    def restore(self, loader: Any) -> None:
        """Let the loader, and who asks for lines, speak of the file on disk again."""
        del loader.get_source, loader.get_code
        if self.origin is not None:
            linecache.cache.pop(self.origin, None)

    def spec(self, package: bool) -> ModuleSpec:
        """The spec of a module that only the diff has."""
        spec = ModuleSpec(self.module, _AddedLoader(self), origin=self.filename, is_package=package)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    @part_of_import
    def execute(self, module: ModuleType) -> None:
        if self.origin is not None:
            # inspect.getsource(module) goes by __file__; an entry without a time is never compared with the disk.
            lines = io.StringIO(self.text).readlines()
            linecache.cache[self.origin] = (len(self.text), None, lines, self.origin)
        exec(self.code(), module.__dict__)

    def in_place(self, module: ModuleType | None) -> bool:
        """Whether the module that callers import was made of the changed text."""
        if module is None:
            return False
        source = getattr(module.__loader__, "get_source", None)
        functions = (value for value in vars(module).values() if isinstance(value, FunctionType))
        files = {function.__code__.co_filename for function in functions if function.__module__ == self.module}
        return source is not None and source(self.module) == self.text and self.origin not in files

    def _kept(self, path: str) -> bool:
        kept = cache.in_time(cache.read, path) == self._data or cache.in_time(cache.replace, path, self._data)
        return bool(kept)

    def _in_memory(self, tail: str) -> str:
        """The name of a file for this process alone, where nothing can be written; at worst a name without a file."""
        try:
            file = os.memfd_create(f"{self.module}.changed.py")
            with open(file, "wb", closefd=False) as stream:
                stream.write(self._data)
            return f"/proc/self/fd/{file}"
        except (AttributeError, OSError):  # not Linux, or not allowed
            return os.path.join("vllm-livepatch", tail)

    def _compiled(self) -> CodeType:
        code: CodeType = compile(self.text, self.filename, "exec", dont_inherit=True)
        if self._cached:
            data = marshal.dumps(code)
            cache.in_time(cache.replace, self._bytecode(), _MAGIC + hashlib.sha256(data).digest() + data)
        return code

    def _cached_code(self) -> CodeType | None:
        found = cache.in_time(cache.read, self._bytecode()) if self._cached else None
        if found is None or not found.startswith(_MAGIC):
            return None
        digest, data = found[len(_MAGIC) : len(_MAGIC) + 32], found[len(_MAGIC) + 32 :]
        if hashlib.sha256(data).digest() != digest:  # a damaged disk; marshal must not see it
            return None
        code = marshal.loads(data)
        return code if isinstance(code, CodeType) and code.co_filename == self.filename else None

    def _bytecode(self) -> str:
        return f"{self.filename}.{sys.implementation.cache_tag}-{sys.flags.optimize}.code"


class _AddedLoader:
    """Loads a module that is on no disk."""

    def __init__(self, changed: ChangedModule) -> None:
        self._changed = changed
        changed.substitute(self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    @part_of_import
    def exec_module(self, module: ModuleType) -> None:
        self._changed.execute(module)

    def get_filename(self, fullname: str) -> str:
        return self._changed.filename
