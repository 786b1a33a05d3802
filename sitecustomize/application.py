"""Wrappers put around their targets: all of a patch's or none, each read back the way its callers find it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import executed_text, fingerprint, guard
from .installed import attribute

_LAZY = getattr(importlib.util, "_LazyModule", None)  # LazyLoader's: executed when it is first used
StandIn = Callable[[Any, Callable[..., Any], str], Any]  # of the original, the wrapper and the target's name


class ApplyError(Exception):
    """Nothing of the patch is in place. `reason` is one word, `detail` a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Applied:
    """One wrapper in place. `owner` is the class or module whose attribute was replaced."""

    target: str
    owner: Any
    attribute: str
    original: Any
    wrapper: Any


def planned(
    wrappers: Mapping[str, Callable[..., Any]],
    stand_in: StandIn,
    known: Iterable[Any],
    files: Mapping[str, str],
    force: bool,
) -> list[Applied]:
    """What is to be put in place of every target (module:qualname). Changes nothing; may read sources.

    Raises ApplyError where one of them is not there, is not what its module wrote, or cannot be wrapped.

    `known` are wrappers that we put in place before, `files` those of modules whose source we changed: neither
    counts as somebody else's. `force` takes a target that somebody else replaced since its module was written.
    """
    ours = {id(wrapper) for wrapper in known}
    steps: list[Applied] = []
    for target, wrapper in wrappers.items():
        owner, attribute, original = _resolve(target)
        replacement = None if force or id(original) in ours else _replacement(target, original, files)
        if replacement is not None:
            raise ApplyError("foreign", f"{target} was already replaced by {replacement}")
        try:
            steps.append(Applied(target, owner, attribute, original, stand_in(original, wrapper, target)))
        except guard.Unwrappable as error:
            raise ApplyError("unwrappable", f"{target} is {error}, which no wrapper can stand for") from None
    return steps


def is_as_planned(step: Applied) -> bool:
    """Whether what is to be replaced still stands there."""
    return _lookup(step.target) is step.original


def put_in_place(steps: Iterable[Applied]) -> None:
    """Replace every target, or raise ApplyError with all of them as they were."""
    steps = list(steps)
    done: list[Applied] = []
    try:
        for step in steps:
            done.append(step)
            setattr(step.owner, step.attribute, step.wrapper)
        for step in steps:
            if not in_place(step):
                raise ApplyError("readback", f"{step.target}, looked up again, is {_described(_lookup(step.target))}")
            holder = _bound_in(step)
            if holder is not None:
                raise ApplyError(
                    "bound", f"{holder} imported {step.target} by name earlier, and would call it unpatched"
                )
    except BaseException as error:
        undo(done)
        if isinstance(error, Exception) and not isinstance(error, ApplyError):
            raise ApplyError("raised", f"{type(error).__name__} while applying: {error}") from error
        raise


def undo(steps: Iterable[Applied]) -> None:
    """Put the originals back, the last step's first."""
    for step in reversed(list(steps)):
        with contextlib.suppress(Exception):  # what cannot be set back could not be set
            setattr(step.owner, step.attribute, step.original)


_run: dict[str, types.ModuleType] = {}
under_way: Mapping[int, Any] = {}
"""The finder's own: outermost imports that have not ended, by thread. At the end of each the hook is called."""


def executed(module: types.ModuleType) -> None:
    """A target module has run to its end."""
    _run[module.__name__] = module


def is_loaded(name: str) -> bool:
    """Whether the module is there with all that is in it.

    A module is in sys.modules from the beginning of its import. Its spec says that it is being imported, but a moment
    longer than it is: of two threads that end their imports together, each would leave a patch to the other. Of a
    LazyLoader's module the spec says nothing, and to ask the module itself would load it.
    """
    module = imported(name)
    if module is None:
        return False
    spec = _spec(module)
    lazy = "__class__" in (getattr(spec, "loader_state", None) or ())
    return module is _run.get(name) or not (lazy or getattr(spec, "_initializing", False))


def has_run(name: str) -> bool:
    """Whether a module of this name was executed by way of us."""
    return name in _run


def is_program(name: str) -> bool:
    """Whether the module runs as `__main__`: `python -m`."""
    return getattr(_spec(sys.modules.get("__main__")), "name", None) == name


def passed_by(name: str) -> str | None:
    """How a module was loaded that is loaded and was not executed by way of us; None of any other."""
    module = sys.modules.get(name)
    if module is None or module is _run.get(name) or type(module) is _LAZY:
        return None
    spec = _spec(module)
    if getattr(spec, "_initializing", False):
        return None
    loader = getattr(spec, "loader", None)
    if executed_text.innermost(loader) is not loader:  # ours is there until it runs
        return None
    kind = loader if isinstance(loader, type) else type(loader)
    by = "without a loader" if loader is None else f"by {kind.__module__}.{kind.__qualname__}"
    return f"was put into sys.modules {by}, past the bundle's finder"


def imported(name: str) -> types.ModuleType | None:
    """The module as importers find it, also at the moment for which the import of one that has run takes it away."""
    found, run = sys.modules.get(name), _run.get(name)
    if found is None and run is not None:
        return run if getattr(_spec(run), "_initializing", False) else sys.modules.get(name)
    return found


def _spec(module: Any) -> Any:
    return attribute(module, "__spec__")


def in_place(step: Applied) -> bool:
    """Whether a fresh look-up of the target finds our wrapper itself."""
    return _lookup(step.target) is step.wrapper


def overtaken_by(step: Applied) -> str | None:
    """Who replaced our wrapper since, None where it is still reached: in place, or wrapped by somebody else's.

    None, too, while its module is dropped or on its way in: it is applied anew then.
    """
    if not is_loaded(step.target.partition(":")[0]):
        return None
    found = _lookup(step.target)
    return None if reaches(found, step) else _described(found)


def reaches(found: Any, step: Applied) -> bool:
    """Whether what was found is our wrapper, or says that it wraps it."""
    function = function_of(step.wrapper)  # what the class gives to who takes it from there, to wrap it
    for _ in range(64):
        if found is step.wrapper or found is function:
            return True
        inner = function_of(found)
        found = inner if inner is not found else getattr(found, "__wrapped__", None)
        if found is None:
            break
    return False


def function_of(found: Any) -> Any:
    """The function in a method, a property's getter, or the thing itself."""
    return found.fget if isinstance(found, property) else getattr(found, "__func__", found)


def _resolve(target: str) -> tuple[Any, str, Any]:
    module_name, _, qualname = target.partition(":")
    *path, attribute = qualname.split(".")
    try:
        owner: Any = imported(module_name)
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute, vars(owner)[attribute]
    except (KeyError, AttributeError, TypeError):
        raise ApplyError("missing", f"{target} is not there in the loaded module") from None


def _lookup(target: str) -> Any:
    try:
        return _resolve(target)[2]
    except ApplyError:
        return None


def _replacement(target: str, found: Any, files: Mapping[str, str]) -> str | None:
    """What stands where the module's own function should, None where it is that function.

    A function of another file may still be the module's doing, by a decorator: then its source has one.
    """
    module_name, _, qualname = target.partition(":")
    module = imported(module_name)
    assert module is not None
    function = function_of(found)
    file = files.get(module_name) or getattr(module, "__file__", None)
    if isinstance(function, types.FunctionType) and function.__code__.co_filename == file:
        return None
    try:
        node = fingerprint.find(fingerprint.parsed(inspect.getsource(module)), qualname)
    except (OSError, TypeError, SyntaxError):
        node = None
    if getattr(node, "decorator_list", None):
        return None
    return _described(found)


def _bound_in(step: Applied) -> str | None:
    """Another module that has the original of a module's function, by `from module import function`."""
    if not isinstance(step.owner, types.ModuleType):
        return None
    ours = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if module is step.owner or not isinstance(module, types.ModuleType) or name.partition(".")[0] == ours:
            continue
        try:
            # Not vars(): a lazy module's would import it.
            names = object.__getattribute__(module, "__dict__")
        except AttributeError:  # cffi's libraries, which cryptography has, only call themselves modules
            continue
        if any(value is step.original for value in list(names.values())):
            return name
    return None


def _described(found: Any) -> str:
    if found is None:
        return "nothing"
    function = getattr(found, "__func__", found)
    where = getattr(function, "__module__", None) or type(found).__module__
    code = getattr(function, "__code__", None)
    file = f" in {code.co_filename}" if code is not None else ""
    return f"{where}.{getattr(function, '__qualname__', type(found).__qualname__)}{file}"
