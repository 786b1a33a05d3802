"""Targets that are no functions of Python, and what a patch's code gives for them.

A callable gets wrapt's proxy around it: an object that binds and is asked as the callable is. Whatever else a module
has (a constant, a class, a registry) the patch changes by itself when the module has run, and says how that is seen.
The rest no form reaches: what a class of these has is copied when the class is made, into places that nobody knows.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import guard

if TYPE_CHECKING:
    from .context import PatchContext


class Proxy:
    """In a wrapper's place, for a callable that is no function of Python: wrapt's proxy stands there."""

    __slots__ = ("__weakref__", "wrapper")

    def __init__(self, wrapper: guard.Wrapper) -> None:
        self.wrapper = wrapper


class AfterImport:
    """In a wrapper's place, for what is not called: `change(module)` once the module has run, which `holds(module)`
    then and later.
    """

    __slots__ = ("__weakref__", "change", "holds")

    def __init__(self, change: Callable[[ModuleType], object], holds: Callable[[ModuleType], object]) -> None:
        self.change = change
        self.holds = holds


def out_of_reach(owner: Any, attribute: str) -> str | None:
    """What a target is that nothing in a process can change, in words; None of any other."""
    if isinstance(owner, enum.EnumMeta) and attribute in owner.__members__:
        return "a member of an enumeration"
    return "a field of a class that is made of its fields" if attribute in _fields(owner) else None


def _fields(owner: Any) -> Collection[str]:
    """The names of the fields that a class is made of: a dataclass, msgspec's, pydantic's, a named tuple."""
    if not isinstance(owner, type):
        return ()
    if _known(owner, "__dataclass_fields__"):
        return [field.name for field in dataclasses.fields(owner)]
    if issubclass(owner, tuple):
        return _known(owner, "_fields")
    return _known(owner, "__struct_fields__") or _known(owner, "__pydantic_fields__")


def _known(owner: type, kind: str) -> Collection[str]:
    """What a class has of this name, if that can be names of fields: a metaclass may answer anything, or raise."""
    try:
        found = getattr(owner, kind, ())
    except Exception:
        return ()
    return found if type(found) in (tuple, dict) else ()


ONLY_A_DIFF = "which only a diff can change (vllm-livepatch from-diff)"


def form_for(found: Any) -> str:
    """What a patch's code can give for something that no function can stand for, in words."""
    if _is_kernel(found):
        return "wrap the function that starts it"
    if callable(found) and not isinstance(found, type):
        return "livepatch.wrapt(wrapper) can"
    return "livepatch.after_import(change, holds) can change it"


def _is_kernel(found: Any) -> bool:
    """Whether it is started as `kernel[grid](...)`, which a proxy gives on: its wrapper would never be called."""
    return type(found).__module__.partition(".")[0] == "triton"


def in_place_of(original: Any, proxy: Proxy, context: PatchContext, target: str) -> Any:
    """wrapt's proxy for what stands at the target, guarded as any wrapper is. Raises guard.Unwrappable."""
    if type(original) is staticmethod:
        return staticmethod(_proxy(original.__func__, proxy, context, target, False))
    if not callable(original) or isinstance(original, type) or _is_kernel(original):
        raise guard.Unwrappable(f"a {type(original).__module__}.{type(original).__qualname__}")
    binds = "." in target.partition(":")[2] and hasattr(type(original), "__get__")
    return _proxy(original, proxy, context, target, binds)


def _proxy(original: Any, proxy: Proxy, context: PatchContext, target: str, binds: bool) -> Any:
    if context.lasts(proxy):
        context.lasting(proxy.wrapper)
    call = (guard.of_method if binds else guard.of_function)(original, proxy.wrapper, context, target)

    def answer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not binds:
            return call(*args, **kwargs)
        return wrapped(*args, **kwargs) if instance is None else call(instance, *args, **kwargs)

    return (_kind() if binds else _traceable(call, type(original)))(original, answer)


def _traceable(call: Callable[..., Any], of: type) -> type:
    """wrapt's proxy for one callable, with a call in Python: torch.compile traces that, and none of C's.

    It takes what says that it is an operation of torch for that operation, and would trace it without its wrapper.
    """

    def by_python(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    honest = {"__class__": property(type)} if of.__module__ == "torch._ops" else {}
    return type("Standing", (_kind(),), {"__call__": by_python, **honest})


@functools.cache
def _kind() -> type:
    """wrapt's proxy of functions, copied as they are, and pickled as what it stands for."""
    wrapt = _wrapt()

    class Standing(wrapt.FunctionWrapper):  # type: ignore[misc, name-defined]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return operator.getitem, ((self.__wrapped__,), 0)

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    return Standing


def _wrapt() -> Any:
    """The bundle's copy; outside of a bundle, where patches are looked at and tested, the one that is installed."""
    vendor = f"{__name__.partition('.')[0]}.vendor"
    try:
        __import__(f"{vendor}.wrapt")
        return sys.modules[vendor].wrapt
    except ModuleNotFoundError:
        __import__("wrapt")
        return sys.modules["wrapt"]
