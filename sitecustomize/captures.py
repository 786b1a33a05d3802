"""Who holds what stands at a target, besides its class or module: calls of such a holder would pass a wrapper by.

References are counted first, which costs nothing: as many as a probe of ours has are those of the class or module
alone. To find holders means to walk all objects of the process, a third of a second in an engine, so that is done only
where there are more. A holder that is a module's or a class's attribute is an alias, and can be given the wrapper too.

Not looked at: local variables of functions under way, and the keys of an lru_cache.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_LEVELS = 3
"""How far up a holder's own holders are followed, for its name."""


class Captured(Exception):
    """The message names the holder."""


class Alias(NamedTuple):
    """Another name of a target. `inner`: for the function inside of what stands at the target, not for all of it."""

    owner: Any
    attribute: str
    inner: bool


class _Found(list[Any]):
    """What was found, told apart by its class: it holds what it was found for, too."""


class _Probe:
    """One of each kind that can be wrapped, which nobody else holds."""

    def method(self) -> None: ...

    @staticmethod
    def of_static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @property
    def value(self) -> None: ...


_PROBES: Mapping[type, str] = {type(thing): name for name, thing in vars(_Probe).items() if not name.startswith("__")}


def function_of(found: Any) -> Any:
    """The function in a method, a property's getter, or the thing itself."""
    return found.fget if isinstance(found, property) else getattr(found, "__func__", found)


def is_held(owner: Any, attribute: str, by_us: int = 0) -> bool:
    """Whether more holds what stands there than its class or module, and `by_us` references of ours."""
    probe = _PROBES.get(type(vars(owner)[attribute]))
    if probe is None:
        return False
    outer, inner = (
        found - of_probe
        for found, of_probe in zip(_references(owner, attribute), _references(_Probe, probe), strict=True)
    )
    # A plain function is its own inner one.
    return outer > by_us or inner > (by_us if probe == "method" else 0)


def _references(owner: Any, attribute: str) -> tuple[int, int]:
    return sys.getrefcount(vars(owner)[attribute]), sys.getrefcount(function_of(vars(owner)[attribute]))


def aliases(places: Sequence[tuple[Any, str]], root: str) -> list[list[Alias]]:
    """The other names of what stands at each place (owner and attribute). Walks all objects, once for all places.

    Raises Captured where one is held in another way. What a package `root`, which is ours, holds does not count.
    """
    everything = [*places, *((_Probe, name) for name in _PROBES.values())]
    things = [_parts(owner, attribute) for owner, attribute in everything]
    holders = {id(part): _Found() for parts in things for part in parts}
    for referrer in _above(*(part for parts in things for part in parts)):
        for referent in gc.get_referents(referrer):
            if id(referent) in holders:
                holders[id(referent)].append(referrer)
    unseen = [
        sum(sys.getrefcount(part) - len(holders[id(part)]) - _calls_under_way(part) for part in parts)
        for parts in things
    ]
    kinds = dict(zip(_PROBES, unseen[len(places) :], strict=True))
    modules = {id(_names(module)): module for module in list(sys.modules.values()) if _names(module) is not None}
    found = []
    for (owner, attribute), parts, more in zip(places, things, unseen, strict=False):
        found.append(list(_aliases(owner, attribute, parts, holders, modules, root)))
        if more > kinds[type(parts[0])]:
            raise Captured("something that is no Python object, such as a custom operation of torch")
    return found


def _parts(owner: Any, attribute: str) -> _Found:
    """What stands there, and the function inside of it."""
    found = vars(owner)[attribute]
    inner = function_of(found)
    return _Found([found] if inner is found else [found, inner])


def _aliases(
    owner: Any,
    attribute: str,
    parts: _Found,
    holders: Mapping[int, _Found],
    modules: Mapping[int, types.ModuleType],
    root: str,
) -> Iterator[Alias]:
    for part in parts:
        for number, holder in enumerate(holders[id(part)]):
            if any(holder is other for other in holders[id(part)][:number]):
                continue
            own = holder is parts[0] or holder is getattr(parts[0], "__dict__", None)
            if own:
                continue
            place = modules.get(id(holder)) or _class_of(holder)
            if place is None:
                if not _is_passed(holder, root):
                    raise Captured(_described(part, holder, modules))
            elif not _is_of(place, root):
                for name in [name for name, value in list(holder.items()) if value is part]:
                    if (place, name) != (owner, attribute):
                        yield Alias(place, name, part is not parts[0])


def _names(module: Any) -> Any:
    """A module's names. Not vars(): a lazy module's would import it."""
    try:
        return object.__getattribute__(module, "__dict__") if isinstance(module, types.ModuleType) else None
    except AttributeError:  # cffi's libraries, which cryptography has, only call themselves modules
        return None


def _class_of(holder: Any) -> type | None:
    """The class whose names these are."""
    if type(holder) is not dict or "__module__" not in holder:
        return None
    for one in _above(holder):
        if isinstance(one, type) and gc.get_referents(one.__dict__)[0] is holder:
            return one
    return None


def _calls_under_way(part: Any) -> int:
    """A call that is under way holds its function."""
    code, number = getattr(part, "__code__", None), 0
    for frame in sys._current_frames().values() if code is not None else ():
        below: types.FrameType | None = frame
        while below is not None:
            number += below.f_code is code
            below = below.f_back
    return number


def _is_of(thing: Any, root: str) -> bool:
    """Whether it is of a package of ours: a function, a class, a module, the names of one, or an object of such a class."""
    if isinstance(thing, types.FunctionType):
        name = thing.__globals__.get("__name__")  # a wrapper has the module's name of what it wraps
    elif isinstance(thing, types.ModuleType):
        name = thing.__name__
    elif type(thing) is dict:
        name = thing.get("__module__", thing.get("__name__"))
    else:
        name = (thing if isinstance(thing, type) else type(thing)).__module__
    return isinstance(name, str) and name.partition(".")[0] == root


def _is_passed(holder: Any, root: str) -> bool:
    """Whether a holder is ours, by what holds it, such as a variable of a patch's own code; or calls nothing: a cache."""
    if type(holder).__name__ == "_lru_cache_wrapper" or _is_of(holder, root):
        return True
    return _is_held_by(holder, root, _LEVELS)


def _is_held_by(thing: Any, root: str, levels: int) -> bool:
    """Whether all that holds it is of a package of ours, or an lru_cache."""
    above = _above(thing) if levels else _Found()
    return bool(above) and all(
        _is_of(one, root) or type(one).__name__ == "_lru_cache_wrapper" or _is_held_by(one, root, levels - 1)
        for one in above
    )


def _above(*things: Any) -> _Found:
    """What holds one of these, but for variables of calls under way, and what was found here."""
    return _Found(one for one in gc.get_referrers(*things) if not isinstance(one, (types.FrameType, _Found)))


def _described(part: Any, holder: Any, modules: Mapping[int, types.ModuleType]) -> str:
    """The holder's kind, and its name where a module or a function has one for it."""
    above = _above(holder)
    for function in _Found(one for one in above if isinstance(one, types.FunctionType)):
        name = f"{function.__module__}.{function.__qualname__}"
        if function.__defaults__ is holder or function.__kwdefaults__ is holder:
            return f"a default argument of {name}"
        if vars(function) is holder:
            return f"{name}, which wraps it"
    if isinstance(holder, types.CellType):
        for closure in above:
            for function in _above(closure) if type(closure) is tuple else ():
                if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                    return f"a variable of {function.__module__}.{function.__qualname__}"
    kind = f"{type(holder).__module__}.{type(holder).__qualname__}".removeprefix("builtins.")
    place = _place(holder, modules)
    if isinstance(holder, dict):
        key = next((key for key, value in list(holder.items()) if value is part), part)
        entry = f"[{key!r}]" if isinstance(key, (str, int)) else ""
        return f"the dict {place}{entry}" if place else f"a dict{f', as {key!r}' if entry else ''}"
    return f"the {kind} {place}" if place else f"a {kind}"


def _place(thing: Any, modules: Mapping[int, types.ModuleType]) -> str:
    """The name that a module or a class has for it, or for what it is a part of; empty where there is none."""
    for _ in range(_LEVELS):
        above = _above(thing)
        for one in above:
            owner: Any = modules.get(id(one)) or _class_of(one)
            if owner is not None:
                prefix = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
                name = next((name for name, value in list(one.items()) if value is thing), "")
                return f"{prefix}.{name}"
        containers = _Found(one for one in above if isinstance(one, (dict, list, tuple, set)))
        if not containers:
            return ""
        thing = containers[0]
    return ""
