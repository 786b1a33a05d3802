"""A module whose source is not the one on disk: compiled from the changed text, cached by content, shown as changed."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., None])


def part_of_import(function: _F) -> _F:
    """The interpreter cuts its import machinery out of tracebacks by these two names: ours is part of it."""
    code = function.__code__.replace(co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed")
    function.__code__ = code
    return function


def cache_directory(environ: Mapping[str, str]) -> str | None:
    """Where changed sources and their bytecode are kept; None where nothing can be written."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in (home, os.path.join(tempfile.gettempdir(), f"vllm-livepatch-{os.getuid()}-cache")):
        place = os.path.join(base, "vllm-livepatch", "changed")
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
        except OSError:
            continue
        if os.stat(place).st_uid == os.getuid() and os.access(place, os.W_OK):
            return place
    return None


class ChangedModule:
    """One module's changed text, and the code made of it.

    The changed source is written into the cache and the code names that file, so that tracebacks, debuggers and
    coverage, which read files, show the lines that run; and so that what keys a cache by the contents of the files it
    traced (vLLM's compile cache) has another key than an unpatched run. Without a cache the loader alone has the text.
    """

    def __init__(self, module: str, text: str, origin: str | None, cache: str | None) -> None:
        self.module = module
        self.text = text
        self.origin = origin  # the unpatched file: the module's __file__ stays this
        self._cache = cache
        self._code: CodeType | None = None
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]
        tail = os.path.join(digest, *module.split(".")) + ".py"
        self.filename = os.path.join(cache, tail) if cache is not None else os.path.join("vllm-livepatch", tail)

    def code(self) -> CodeType:
        """Compiled once per content: the cache spares a large module its compilation."""
        if self._code is None:
            self._code = self._cached_code() or self._compiled()
        return self._code

    def dress(self, loader: Any) -> None:
        """Make a loader give the changed text to whoever asks it."""
        loader.get_source = lambda fullname=None: self.text
        loader.get_code = lambda fullname=None: self.code()

    def undress(self, loader: Any) -> None:
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
            lines = self.text.splitlines(keepends=True)
            linecache.cache[self.origin] = (len(self.text), None, lines, self.origin)
        exec(self.code(), module.__dict__)

    def in_place(self, module: ModuleType | None) -> bool:
        """Whether the module that callers import was made of the changed text."""
        if module is None:
            return False
        source = getattr(module.__loader__, "get_source", None)
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == self.module]
        codes = [value.__code__ for value in own if hasattr(value, "__code__")]
        return (
            source is not None
            and source(self.module) == self.text
            and all(
                code.co_filename == self.filename for code in codes if code.co_filename in (self.filename, self.origin)
            )
        )

    def _compiled(self) -> CodeType:
        code: CodeType = compile(self.text, self.filename, "exec", dont_inherit=True)
        if self._cache is not None:
            _replace(self.filename, self.text.encode("utf-8", "surrogatepass"))
            _replace(self._bytecode(), importlib.util.MAGIC_NUMBER + marshal.dumps(code))
        return code

    def _cached_code(self) -> CodeType | None:
        if self._cache is None:
            return None
        try:
            with open(self.filename, "rb") as file:
                if file.read() != self.text.encode("utf-8", "surrogatepass"):
                    return None
            with open(self._bytecode(), "rb") as file:
                data = file.read()
            magic = importlib.util.MAGIC_NUMBER
            code = marshal.loads(data[len(magic) :]) if data.startswith(magic) else None
        except (OSError, ValueError, EOFError, TypeError):
            return None
        return code if isinstance(code, CodeType) and code.co_filename == self.filename else None

    def _bytecode(self) -> str:
        return f"{self.filename}.{sys.implementation.cache_tag}-{sys.flags.optimize}.code"


class _AddedLoader:
    """Loads a module that is on no disk."""

    def __init__(self, changed: ChangedModule) -> None:
        self._changed = changed
        changed.dress(self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    @part_of_import
    def exec_module(self, module: ModuleType) -> None:
        self._changed.execute(module)

    def get_filename(self, fullname: str) -> str:
        return self._changed.filename


def _replace(path: str, data: bytes) -> None:
    """Whole or not at all; a full or read-only place only costs the next process its time."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            return
