"""Who holds what stands at a target, besides its class or module: calls of such a holder would pass a wrapper by.

References are counted first, which costs nothing: as many as a probe of ours has are those of the class or module
alone. To find holders means to walk all objects of the process, a third of a second in an engine, so that is done only
where there are more. A holder that is a module's or a class's attribute is an alias, and can be given the wrapper too.

Not looked at: local variables of functions under way, and the keys of an lru_cache.

What is looked for must not be held by what looks for it. So lists here are `_Found`, and no generator, comprehension or
`enumerate` runs over holders while others are looked for: each keeps what it is at in an object of its own.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Place = tuple[Any, str]
"""A class or module, and the name of its attribute."""

_FROZEN = 1_000
"""So many objects may be frozen of an interpreter's own: 3.12 begins with some hundreds. Who freezes has thousands."""

_NOT_SHOWN = "something that is no Python object, such as a custom operation of torch, or that gc.freeze has hidden"
_NAMES: Any = vars(type)["__dict__"]
_LEVELS = 3
"""How far up a holder's own holders are followed, for its name."""
_CALLS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""What holds a function while a call of it waits."""


class Captured(Exception):
    """The message names the holder."""


class Alias(NamedTuple):
    """Another name of a target. `inner`: for the function inside of what stands at the target, not for all of it."""

    owner: Any
    attribute: str
    inner: bool


class _Found(list[Any]):
    """What was found, told apart by its class from what else holds the same."""


def function_of(found: Any) -> Any:
    """The function in a method, a property's getter, or the thing itself."""
    return found.fget if isinstance(found, property) else getattr(found, "__func__", found)


def held(places: Sequence[Place], by_us: Sequence[bool]) -> list[bool]:
    """Whether more holds what stands at each place than its class or module.

    `by_us` says of which one reference is ours: a wrapper that we put there, and remember.
    """
    probes = _probes()
    answers = []
    for place, ours in zip(places, by_us, strict=True):
        probe = probes.get(type(vars(place[0])[place[1]]))
        if probe is None or type(function_of(vars(place[0])[place[1]])) is not types.FunctionType:  # nor can be wrapped
            answers.append(False)
            continue
        (outer, inner), (of_probe, of_inner) = _references(*place), _references(*probe)
        plain = probe[1] == "method"  # then the two are one
        answers.append(outer > of_probe + ours or inner > of_inner + (ours and plain))
    return answers


def _probes() -> dict[type, Place]:
    """One of each kind that can be wrapped, which nobody else holds."""

    class Probe:
        def method(self) -> None: ...

        @staticmethod
        def of_static() -> None: ...

        @classmethod
        def of_class(cls) -> None: ...

        @property
        def value(self) -> None: ...

    return {type(vars(Probe)[name]): (Probe, name) for name in ("method", "of_static", "of_class", "value")}


def _references(owner: Any, attribute: str) -> tuple[int, int]:
    return sys.getrefcount(vars(owner)[attribute]), sys.getrefcount(function_of(vars(owner)[attribute]))


def aliases(places: Sequence[Place], root: str) -> list[list[Alias]]:
    """The other names of what stands at each place. Walks all objects, once for all places.

    Raises Captured where one is held in another way. What a package `root`, which is ours, holds does not count.
    """
    probes = _probes()
    things = [_parts(*place) for place in (*places, *probes.values())]
    owners = {**_modules(), **_classes()}
    holders = _holders(things, owners)
    try:
        unseen = _unseen(things, holders)
        found = []
        for place, parts, more in zip(places, things, unseen, strict=False):
            found.append(_aliases(place, parts, holders, owners, root))
            if more > unseen[len(places) + list(probes).index(type(parts[0]))]:
                raise Captured(_NOT_SHOWN)
        return found
    finally:  # an error's traceback would keep them
        things.clear()
        holders.clear()


def _parts(owner: Any, attribute: str) -> _Found:
    """What stands there, and the function inside of it."""
    found = vars(owner)[attribute]
    inner = function_of(found)
    return _Found([found] if inner is found else [found, inner])


def _holders(things: Sequence[_Found], owners: Mapping[int, Any]) -> dict[int, _Found]:
    """By the identity of each part, what holds it, as often as it does."""
    found = {id(part): _Found() for parts in things for part in parts}
    above = _above(_Found(part for parts in things for part in parts))
    if gc.get_freeze_count() > _FROZEN:
        above = _with_frozen(above, things, owners)
    for referrer in above:
        for referent in gc.get_referents(referrer):
            if id(referent) in found:
                found[id(referent)].append(referrer)
    return found


def _with_frozen(above: _Found, things: Sequence[_Found], owners: Mapping[int, Any]) -> _Found:
    """Also those holders that the program has put out of the garbage collector's sight (`gc.freeze`): names, and what
    makes a static method of a function. Any other that is frozen stays unseen, and refuses the patch.

    Nothing is unfrozen for a look: no way leads back, since `gc.freeze` takes all that there is.
    """
    candidates = {id(one): one for one in above}
    for owner in owners.values():
        names = _names_of(owner)
        candidates.setdefault(id(names), names)
    for parts in things:
        if len(parts) > 1:
            candidates.setdefault(id(parts[0]), parts[0])
            names = getattr(parts[0], "__dict__", None)
            candidates.setdefault(id(names), names)
    return _Found(candidates.values())


def _unseen(things: Sequence[_Found], holders: Mapping[int, _Found]) -> list[int]:
    """How many references to the parts of each are of no object that the garbage collector knows, nor of a call."""
    found = []
    for parts in things:
        number = 0
        for part in parts:
            number += sys.getrefcount(part) - len(holders[id(part)])
        found.append(number)
    for name, value in _of_calls():  # later: on some Pythons a look at variables makes copies of them
        for index, parts in enumerate(things):
            found[index] -= sum(
                value is part or (name == "" and value is getattr(part, "__code__", 0)) for part in parts
            )
    return found


def _of_calls() -> Iterator[tuple[str, Any]]:
    """The local variables of all calls under way, and of each, with no name, its function's code: it holds that too."""
    for frame in sys._current_frames().values():
        call: types.FrameType | None = frame
        while call is not None:
            code = call.f_code
            yield "", code
            if code.co_flags & inspect.CO_OPTIMIZED and code not in _OWN:  # a module's and a class's are no copies
                for name, value in list(call.f_locals.items()):
                    if name not in code.co_cellvars and name not in code.co_freevars:  # cells are found as such
                        yield name, value
            call = call.f_back


def _aliases(
    place: Place, parts: _Found, holders: Mapping[int, _Found], owners: Mapping[int, Any], root: str
) -> list[Alias]:
    found = []
    for part in parts:
        seen: set[int] = set()
        for holder in holders[id(part)]:
            own = holder is parts[0] or holder is getattr(parts[0], "__dict__", None)
            if own or id(holder) in seen or isinstance(holder, _CALLS):
                continue
            seen.add(id(holder))
            owner = owners.get(id(holder))
            if owner is None:
                if not _lists_all(holder, part) and not _is_ours(holder, root, _LEVELS):
                    raise Captured(_described(part, holder, owners))
            elif not _is_of(owner, root):
                for name in _keys(part, holder):
                    if (owner, name) != place:
                        found.append(Alias(owner, name, part is not parts[0]))
    return found


def _keys(thing: Any, names: Mapping[Any, Any]) -> list[Any]:
    return [key for key, value in list(names.items()) if value is thing]


def _modules() -> dict[int, types.ModuleType]:
    """All modules, by the identity of what has their names."""
    found = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            try:
                # Not vars(): a lazy module's would import it.
                found[id(object.__getattribute__(module, "__dict__"))] = module
            except AttributeError:  # cffi's libraries, which cryptography has, only call themselves modules
                continue
    return found


def _classes() -> dict[int, type]:
    """All classes, by the identity of what has their names."""
    return {id(_names_of(cls)): cls for cls in below(object)}


def below(owner: type) -> Iterator[type]:
    """Every loaded class that derives from `owner`, once. Not those of an old module that was loaded again."""
    seen: dict[int, type] = {}  # not by equality: a metaclass may have its own, and no hash
    waiting: deque[type] = deque(type.__subclasses__(owner))
    while waiting:
        cls = waiting.popleft()
        if id(cls) not in seen:
            seen[id(cls)] = cls
            yield cls
            waiting += type.__subclasses__(cls)


def _names_of(owner: Any) -> Any:
    """The dictionary of a module's or a class's names, itself and not a view of it. Asks no code of theirs."""
    if isinstance(owner, type):
        return gc.get_referents(_NAMES.__get__(owner))[0]
    return object.__getattribute__(owner, "__dict__")


def _lists_all(holder: Any, part: Any) -> bool:
    """Whether it is a list of whatever there is, as `gc.get_objects` gives: with a function it has the names of the
    function's module, themselves. A program that looks for what its memory goes to keeps such lists, and calls nothing.
    """
    names = getattr(function_of(part), "__globals__", None)
    return type(holder) is list and any(one is names for one in holder)


def _is_ours(thing: Any, root: str, levels: int) -> bool:
    """Whether it or all that holds it is ours, such as a variable of a patch's code; or a cache, which calls none."""
    if _is_of(thing, root) or type(thing).__name__ == "_lru_cache_wrapper":
        return True
    above = _above(_Found([thing])) if levels else _Found()
    for one in above:
        if not _is_ours(one, root, levels - 1):
            return False
    return bool(above)


def _is_of(thing: Any, root: str) -> bool:
    """Whether it is of a package of ours: a function, a class, a module, their names, an object of such a class."""
    if isinstance(thing, types.FunctionType):
        name = thing.__globals__.get("__name__")  # a wrapper has the module's name of what it wraps
    elif isinstance(thing, types.ModuleType):
        name = thing.__name__
    elif type(thing) is dict:
        name = thing.get("__module__", thing.get("__name__"))
    else:
        name = (thing if isinstance(thing, type) else type(thing)).__module__
    return isinstance(name, str) and name.partition(".")[0] == root


def _above(things: _Found) -> _Found:
    """What holds one of these, but for variables of calls under way, and what was found here."""
    asked = tuple(things)  # since Python 3.13 it is found as well
    found = gc.get_referrers(*asked)
    return _Found(one for one in found if one is not asked and not isinstance(one, (types.FrameType, _Found)))


def _described(part: Any, holder: Any, owners: Mapping[int, Any]) -> str:
    """The holder's kind, and its name where a module, a class or a function has one for it."""
    for function in _above(_Found([holder])):
        if isinstance(function, types.FunctionType):
            name = f"{function.__module__}.{function.__qualname__}"
            if function.__defaults__ is holder or function.__kwdefaults__ is holder:
                return f"a default argument of {name}"
            if vars(function) is holder:
                return f"{name}, which wraps it"
    if isinstance(holder, types.CellType):
        for closure in _above(_Found([holder])):
            for function in _above(_Found([closure])) if type(closure) is tuple else ():
                if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                    return f"a variable of {function.__module__}.{function.__qualname__}"
    kind = f"{type(holder).__module__}.{type(holder).__qualname__}".removeprefix("builtins.")
    where = _name(holder, owners)
    keys = _keys(part, holder) if isinstance(holder, dict) else []
    entry = f"[{keys[0]!r}]" if keys and isinstance(keys[0], (str, int)) else ""
    return f"the {kind} {where}{entry}" if where else f"a {kind}{f', as {keys[0]!r}' if entry else ''}"


def _name(thing: Any, owners: Mapping[int, Any]) -> str:
    """The name that a module or a class has for it, or for what it is a part of; empty where there is none."""
    for _ in range(_LEVELS):
        container = None
        for one in _above(_Found([thing])):
            owner = owners.get(id(one))
            if owner is not None:
                of_class = isinstance(owner, type)
                prefix = f"{owner.__module__}.{owner.__qualname__}" if of_class else owner.__name__
                return f"{prefix}.{next(iter(_keys(thing, one)), '')}"
            container = one if container is None and isinstance(one, (dict, list, tuple, set)) else container
        if container is None:
            return ""
        thing = container
    return ""


_OWN = frozenset(function.__code__ for function in (aliases, _unseen, _of_calls))
"""Whose variables hold a probe as they hold a target."""
