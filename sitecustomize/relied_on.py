"""What a patch calls and does not wrap, looked at in memory: whether it is still what the modules' files say.

The decision was made on the files. Another program may assign its own function over a method of the release, before the
patch comes or later. A wrapper around it, or a subclass's method that calls it, is none.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import fingerprint, overrides, wrapping
from .captures import function_of
from .decision import module_of

RELIED_ON = "relied-on"
"""The reason of a patch that is not applied, or no longer, for what is found here."""
_KINDS = (types.FunctionType, staticmethod, classmethod, property, type)
"""Other attributes change as a program runs."""


class ReliedOn:
    """Of one patch. Each name counts as it is when it is first seen, if that is what its file has."""

    def __init__(self, names: Sequence[str], files: Callable[[], Mapping[str, str]]) -> None:
        """`files` gives those of modules whose source we changed."""
        self._names = names
        self._files = files
        self._first: dict[str, Any] = {}

    def replaced(self, known: Sequence[wrapping.Applied]) -> str | None:
        """A sentence on the first name that is another's now, None where there is none. `known` are our wrappers."""
        originals = {id(step.wrapper): step.original for step in known if step.by is None}
        for name in self._names:
            if wrapping.is_loaded(module_of(name)):
                cls, found = _stands(name)
                while id(found) in originals:
                    found = originals[id(found)]
                if issubclass(type(found), _KINDS) and not self._is_right(name, cls, found):
                    return f"{name}, which it relies on, was replaced by {wrapping.described(found)}"
        return None

    def _is_right(self, name: str, cls: type | None, found: Any) -> bool:
        first = self._first.get(name)
        if first is None and (issubclass(type(found), type) or self._is_of_file(name, found)):
            self._first[name] = found
            return True
        if first is None or first is found:
            return first is found
        if issubclass(type(found), type):
            return issubclass(type(first), type) and issubclass(found, first)
        if wrapping.reaches(found, first) or (cls is not None and overrides.calls_above(cls, name, found)):
            return True
        if getattr(function_of(found), "__qualname__", "") == name.partition(":")[2] and self._is_of_file(name, found):
            self._first[name] = found  # its module was loaded again
            return True
        return False

    def _is_of_file(self, name: str, found: Any) -> bool:
        """Whether its module's file has it: where a file has a plain function, that is the one."""
        module_name, _, qualname = name.partition(":")
        module, function = wrapping.imported(module_name), function_of(found)
        file = self._files().get(module_name) or getattr(module, "__file__", None)
        if module is None or not isinstance(function, types.FunctionType) or function.__code__.co_filename == file:
            return True
        try:
            node = fingerprint.find(fingerprint.parsed(inspect.getsource(module)), qualname)
        except (OSError, TypeError, SyntaxError):
            return True
        return not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or bool(node.decorator_list)


def _stands(name: str) -> tuple[type | None, Any]:
    """What a name gives, not bound to anything, and the class whose own it is; None where it gives nothing."""
    module_name, _, qualname = name.partition(":")
    owner: Any = wrapping.imported(module_name)
    cls: type | None = None
    for part in qualname.split("."):
        if isinstance(owner, type):
            cls = next((one for one in owner.__mro__ if part in vars(one)), None)
            owner = None if cls is None else vars(cls)[part]
        elif isinstance(owner, types.ModuleType):
            owner = object.__getattribute__(owner, "__dict__").get(part)  # not getattr, which may import
        else:
            return None, None
    return cls, owner
