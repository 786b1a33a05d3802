"""The text that a loader executes: what a decision may rely on, and nothing else."""

from __future__ import annotations

import _imp
import importlib.util
import marshal
import os
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from . import fingerprint

_MAGIC = importlib.util.MAGIC_NUMBER
_WORD = 0xFFFFFFFF
_CLOSE_SECONDS = 2.0
"""Bytecode that was written so soon after its source may be that of the text before."""
_STEPS = ("exec_module", "get_code", "source_to_code", "get_data", "get_source", "get_filename", "path_stats")
"""The methods of a SourceFileLoader that lead from the file to the module. A loader with its own may do anything."""
_CHAINED = "_ImportHookChainedLoader"
"""The class of wrapt's and ddtrace's loaders that only tell somebody when another loader has run."""
_ANYWHERE = ("co_filename", "co_linetable", "co_lnotab")
_PARTS = [
    name
    for name in dir(CodeType)
    if name.startswith("co_") and name not in _ANYWHERE and not callable(getattr(CodeType, name))
]


class Unknown(Exception):
    """What a module executes is not known to come from a text. The message goes on where the module's name stands."""


def of(loader: Any, module: str) -> str:
    """The text of `module` that `loader` executes. Executes nothing. Raises Unknown."""
    loader = innermost(loader)
    kind = type(loader)
    get_source = getattr(loader, "get_source", None)
    if get_source is None:
        raise Unknown(f"is loaded by {kind.__module__}.{kind.__qualname__}, which shows no source")
    try:
        text = get_source(module)
        if not isinstance(text, str):
            raise Unknown(f"is loaded by {kind.__module__}.{kind.__qualname__}, which has no source of it")
        why = _bytecode(loader, module, text) if _is_plain(loader) else _other_code(loader, module, text)
    except Unknown:
        raise
    except Exception as error:  # somebody's own loader
        raise Unknown(f"cannot be read: {type(error).__name__}: {error}") from error
    if why is not None:
        raise Unknown(why)
    return text


def innermost(loader: Any) -> Any:
    """The loader that executes: neither ours, which is there until it has run, nor one that only looks on."""
    for _ in range(16):
        attributes = getattr(loader, "__dict__", {})
        if "livepatch_loader" in attributes:
            loader = attributes["livepatch_loader"]
        elif type(loader).__name__ == _CHAINED and hasattr(loader, "__wrapped__"):  # a proxy, since wrapt 1.15
            loader = loader.__wrapped__
        elif type(loader).__name__ == _CHAINED and "loader" in attributes:
            loader = attributes["loader"]
        else:
            break
    return loader


def is_same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same. Files and lines do not count, nor do the tables of `-X no_debug_ranges`."""
    return bool(_parts(one) == _parts(other))


def _is_plain(loader: Any) -> bool:
    """Whether it goes from the file to the module as the interpreter's own loader does."""
    own = getattr(loader, "__dict__", {})
    return isinstance(loader, SourceFileLoader) and all(
        name not in own and getattr(type(loader), name) is getattr(SourceFileLoader, name) for name in _STEPS
    )


def _bytecode(loader: SourceFileLoader, module: str, text: str) -> str | None:
    """What is wrong with the bytecode that the interpreter would run in the text's place; None where it runs the text.

    The interpreter compares a time and a size, or a hash, with the source. It does not where the bytecode's flags say
    so: then its hash is compared here. And a source that is written twice within a second, or in a build that gives all
    files one time, may have the time and the size of another: where the bytecode's own file is not younger than that,
    or the source was put there after the bytecode, its code is compared.
    """
    path = loader.get_filename(module)
    try:
        cached = importlib.util.cache_from_source(path)
        with open(cached, "rb") as file:
            head = file.read(16)
            written = os.fstat(file.fileno())
            flags = int.from_bytes(head[4:8], "little")
            if len(head) < 16 or head[:4] != _MAGIC or flags & 0b11 != flags:
                return None
            if flags & 0b01:
                return _hashed(loader, path, cached, flags, head[8:])
            stats = loader.path_stats(path)
            known = [int(stats["mtime"]) & _WORD, stats["size"] & _WORD]
            timed = known == [int.from_bytes(head[at : at + 4], "little") for at in (8, 12)]
            younger = written.st_mtime - stats["mtime"] > _CLOSE_SECONDS
            first = os.stat(path).st_ctime - written.st_ctime <= _CLOSE_SECONDS  # nobody can set these back
            if not timed or (younger and first):
                return None
            code = marshal.load(file)
    except (NotImplementedError, OSError, EOFError, ValueError, TypeError):
        return None
    if isinstance(code, CodeType) and is_same_code(code, _compiled(text)):
        return None
    return f"runs {cached}, which has the time and the size of its source, and was not made of it"


def _hashed(loader: SourceFileLoader, path: str, cached: str, flags: int, digest: bytes) -> str | None:
    """The same of bytecode that has a hash of its source."""
    mode = _imp.check_hash_based_pycs
    if mode == "always" or (flags & 0b10 and mode != "never"):
        return None
    if digest == importlib.util.source_hash(loader.get_data(path)):
        return None
    return f"runs {cached}, which nobody compares with its source, and which was not made of it"


def _other_code(loader: Any, module: str, text: str) -> str | None:
    """How what a loader of somebody's own would run differs from its text; None where it is the text's code."""
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    get_code = getattr(loader, "get_code", None)
    if get_code is None:  # its text is all that it shows
        return None
    code = get_code(module)
    if isinstance(code, CodeType) and is_same_code(code, _compiled(text)):
        return None
    return f"is loaded by {kind}, which runs other code than that of its source"


def _compiled(text: str) -> CodeType:
    """The code of a text. What its compiler warns of is not ours to report."""
    code: CodeType = compile(fingerprint.parsed(text), fingerprint.FILE, "exec", dont_inherit=True)
    return code


def _parts(value: Any) -> Any:
    """What makes a code object do what it does: equal to another's where both do the same."""
    if isinstance(value, CodeType):
        return tuple(_parts(getattr(value, name)) for name in _PARTS)
    if isinstance(value, (tuple, frozenset)):
        return type(value), type(value)(map(_parts, value))
    return type(value), repr(value)  # a number's sign and kind count
