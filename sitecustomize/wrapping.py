"""Wrappers put around their targets: all of a patch's or none, each read back the way its callers find it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import sys
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import captures, executed_text, fingerprint, guard, no_function
from .captures import function_of
from .installed import attribute

_LAZY = getattr(importlib.util, "_LazyModule", None)  # LazyLoader's: executed when it is first used
_LOOKS, _LOOK_SECONDS = 5, 0.001
_REACH = 200
"""How many objects are looked at for what somebody else's wrapper calls."""

StandIn = Callable[[Any, Callable[..., Any], str], Any]  # of the original, the wrapper and the target's name


class ApplyError(Exception):
    """Nothing of the patch is in place. `reason` is one word, `detail` a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Applied:
    """One wrapper in place. `owner` is the class or module whose attribute was replaced, `aliases` its other names.

    `code` is the patch's own function that `wrapper` calls, the same each time that the target's module is loaded.
    Where there is `by`, that changes what stands there, and `wrapper` is what it has left there once it `has_run`.
    """

    target: str
    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    aliases: list[captures.Alias] = field(default_factory=list)
    code: Any = None
    by: no_function.AfterImport | None = None
    has_run: bool = False

    def put(self, thing: Any) -> None:
        """Set what stands there, the original or the wrapper, under all names."""
        setattr(self.owner, self.attribute, thing)
        for alias in self.aliases:
            setattr(alias.owner, alias.attribute, function_of(thing) if alias.inner else thing)


def planned(
    wrappers: Mapping[str, Any],
    stand_in: StandIn,
    known: Iterable[Applied],
    files: Mapping[str, str],
    force: bool,
    beneath: Mapping[str, Any],
) -> list[Applied]:
    """What is to be put in place of every target (module:qualname). Changes nothing; may read sources.

    Raises ApplyError where one of them is not there, is not what its module wrote, cannot be wrapped, or was taken by
    somebody who would call it unpatched.

    `known` is what we put in place before, `files` those of modules whose source we changed: neither counts as somebody
    else's. `force` takes a target that somebody else replaced since its module was written. `beneath` has what a
    wrapper goes around, at those targets where it is not what stands there.
    """
    ours = {id(step.wrapper) for step in known}
    for target in wrappers:
        beyond = no_function.out_of_reach(*_owner(target))
        if beyond is not None:
            raise ApplyError("unwrappable", f"{target} is {beyond}, {no_function.ONLY_A_DIFF}")
    changes = {target: by for target, by in wrappers.items() if isinstance(by, no_function.AfterImport)}
    own = [target for target in wrappers if target not in changes and _is_own(target, ours, files, force)]
    others = _aliases(own, ours)
    steps: list[Applied] = []
    for target, wrapper in wrappers.items():
        owner, attribute, original = _resolve(target)
        original = beneath.get(target, original)
        if target in changes:
            steps.append(Applied(target, owner, attribute, original, original, by=changes[target]))
            continue
        kind = guard.of_another_kind(wrapper, function_of(original))
        if kind:
            raise ApplyError(
                "unwrappable", f"{target} is not {kind}, and its wrapper is: that may return what it gives"
            )
        try:
            made = stand_in(original, wrapper, target)
            steps.append(
                Applied(target, owner, attribute, original, made, others.get(target, []), guard.code_of(wrapper))
            )
        except guard.Unwrappable as error:
            can = "" if isinstance(original, types.FunctionType) else f": {no_function.form_for(original)}"
            raise ApplyError("unwrappable", f"{target} is {error}, which no wrapper can stand for{can}") from None
    return steps


def _is_own(target: str, ours: Collection[int], files: Mapping[str, str], force: bool) -> bool:
    """Whether what stands there is the module's own, or ours. Raises ApplyError where it is not, unless forced."""
    found = _resolve(target)[2]
    replacement = None if id(found) in ours else _replacement(target, found, files)
    if replacement is not None and not force:
        raise ApplyError("foreign", f"{target} was already replaced by {replacement}")
    return replacement is None


def _aliases(targets: Sequence[str], ours: Collection[int]) -> dict[str, list[captures.Alias]]:
    """The other names of those targets that have some. Raises ApplyError where one is held in another way."""
    places = [_resolve(target)[:2] for target in targets]
    known = [id(vars(owner)[attribute]) in ours for owner, attribute in places]
    for _ in range(_LOOKS):
        held = captures.held(places, known)
        if not any(held):
            return {}
        time.sleep(_LOOK_SECONDS)  # a thread that looks it up, as ours does for the report, holds it for a moment
    found = [target for target, more in zip(targets, held, strict=True) if more]
    try:
        others = captures.aliases([_resolve(target)[:2] for target in found], __name__.partition(".")[0])
    except captures.Captured as error:
        raise ApplyError(
            "captured", f"{' or '.join(found)} is held by {error}, which would call it unpatched"
        ) from None
    return dict(zip(found, others, strict=True))


def is_as_planned(step: Applied) -> bool:
    """Whether what is to be replaced still stands there."""
    return lookup(step.target, step.owner) is step.original


def put_in_place(steps: Iterable[Applied]) -> None:
    """Replace every target, or raise ApplyError with all of them as they were."""
    steps = list(steps)
    done: list[Applied] = []
    try:
        for step in steps:
            done.append(step)
            step.put(step.wrapper)
        for step in steps:
            if not in_place(step):
                raise ApplyError("readback", f"{step.target}, looked up again, is {described(lookup(step.target))}")
            for owner, attribute, inner in step.aliases:
                found, wanted = vars(owner).get(attribute), function_of(step.wrapper) if inner else step.wrapper
                if found is not wanted:
                    raise ApplyError("readback", f"{attribute} of {owner}, looked up again, is {described(found)}")
    except BaseException as error:
        undo(done)
        if isinstance(error, Exception) and not isinstance(error, ApplyError):
            raise ApplyError("raised", f"{type(error).__name__} while applying: {error}") from error
        raise


def change(step: Applied) -> None:
    """Run what changes the target, if one does, and read it back: the patch's own code, so without a lock.

    Raises ApplyError, and whatever that raises.
    """
    module = imported(step.target.partition(":")[0])
    if step.by is None or module is None:
        return
    try:
        step.by.change(module)
    finally:
        step.wrapper, step.has_run = lookup(step.target, step.owner), True
    if not _holds(step):
        raise ApplyError("readback", f"{step.target}, looked at again, is not as the patch's own code says that it is")


def put_back(step: Applied) -> None:
    """Undo what `change` has done to the target itself, where it still stands there."""
    if in_place(step):
        undo([step])


def _holds(step: Applied) -> bool:
    module = imported(step.target.partition(":")[0])
    try:
        return step.by is None or module is None or bool(step.by.holds(module))
    except Exception:
        return False


def undo(steps: Iterable[Applied]) -> None:
    """Put the originals back, the last step's first."""
    for step in reversed(list(steps)):
        with contextlib.suppress(Exception):  # what cannot be set back could not be set
            step.put(step.original)


_run: dict[str, types.ModuleType] = {}
_ever_run: weakref.WeakSet[types.ModuleType] = weakref.WeakSet()
"""Also those of which another one has the name since: a program may put such a module back."""
under_way: Mapping[int, Any] = {}
"""The finder's own: outermost imports that have not ended, by thread. At the end of each the hook is called."""


def executed(module: types.ModuleType) -> None:
    """A target module has run to its end."""
    _run[module.__name__] = module
    _ever_run.add(module)


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
    if getattr(spec, "_initializing", False) or (issubclass(type(module), types.ModuleType) and module in _ever_run):
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
    return lookup(step.target, step.owner) is step.wrapper


def overtaken_by(step: Applied) -> str | None:
    """Who replaced our wrapper since, None where it is still reached: in place, or wrapped by somebody else's.

    None, too, while its module is dropped or on its way in: it is applied anew then. And where a class that derives
    from ours has taken its name: whether that overrides the target without calling it, `overrides` says. And where a
    module was put back that was loaded before: it has the patch's wrapper of then.
    """
    if not is_loaded(step.target.partition(":")[0]):
        return None
    found = lookup(step.target, step.owner)
    if step.by is not None:
        return None if not step.has_run or _holds(step) else f"{described(found)}, or changed"
    there = reaches(found, step.wrapper) or (step.code is not None and reaches(found, step.code))
    return None if there else described(found)


def reaches(found: Any, wrapper: Any) -> bool:
    """Whether what was found is a wrapper of ours, or holds it where a function holds what it calls."""
    wanted = (wrapper, function_of(wrapper))  # what the class gives to who takes it from there, to wrap it
    waiting, seen = [found], set[int]()
    while waiting and len(seen) < _REACH:
        one = waiting.pop(0)
        if any(one is ours for ours in wanted):
            return True
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            with contextlib.suppress(Exception):  # somebody's own object, which may raise whatever it is asked
                waiting += [function_of(one), getattr(one, "__wrapped__", None)]
            waiting += [
                value
                for value in _held_by(one)
                if issubclass(type(value), _CALLED) or any(value is ours for ours in wanted)
            ]
    return False


_CALLED = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)


def _held_by(found: Any) -> Iterator[Any]:
    """Where a function, a partial or an object that is called may have what it calls."""
    if type(found) is functools.partial:
        yield from (found.func, *found.args, *found.keywords.values())
    elif type(found) is types.FunctionType:
        names = found.__globals__
        yield from (*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values())
        yield from (names[name] for name in found.__code__.co_names if name in names)
        for cell in found.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
    elif not issubclass(type(found), (type, types.ModuleType)):
        with contextlib.suppress(AttributeError, TypeError):
            yield from list(object.__getattribute__(found, "__dict__").values())


def _resolve(target: str, below: Any = None) -> tuple[Any, str, Any]:
    """The owner, the attribute, and what stands there. Of a class that derives from `below`: what it inherits of that.

    Raises ApplyError.
    """
    try:
        owner, attribute = _owner(target)
        if isinstance(owner, type) and isinstance(below, type) and issubclass(owner, below):
            owner = below
        return owner, attribute, vars(owner)[attribute]
    except (KeyError, TypeError):
        raise _missing(target) from None


def _owner(target: str) -> tuple[Any, str]:
    """The class or module, and the attribute. Raises ApplyError."""
    module_name, _, qualname = target.partition(":")
    *path, attribute = qualname.split(".")
    try:
        owner: Any = imported(module_name)
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute
    except AttributeError:
        raise _missing(target) from None


def _missing(target: str) -> ApplyError:
    return ApplyError("missing", f"{target} is not there in the loaded module")


def lookup(target: str, below: Any = None) -> Any:
    try:
        return _resolve(target, below)[2]
    except ApplyError:
        return None


def _replacement(target: str, found: Any, files: Mapping[str, str]) -> str | None:
    """What stands where the module's own function should, None where it is that function.

    A function of another file may still be the module's doing, by a decorator: then its source has one. What is no
    function, where the source defines none, is the module's own for all that can be known.
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
    is_def = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    other = node is not None and not is_def and not isinstance(function, types.FunctionType)
    if other or getattr(node, "decorator_list", None):
        return None
    return described(found)


def described(found: Any) -> str:
    """Its module, its name and its file, for a sentence."""
    if found is None:
        return "nothing"
    function = getattr(found, "__func__", found)
    where = getattr(function, "__module__", None) or type(found).__module__
    code = getattr(function, "__code__", None)
    file = f" in {code.co_filename}" if code is not None else ""
    return f"{where}.{getattr(function, '__qualname__', type(found).__qualname__)}{file}"
