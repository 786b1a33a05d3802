"""Classes that override a wrapped method without calling it: calls of theirs never come to the patch.

Decided by looking at the override's code, which is not run. An override passes if it names the method together with
`super` or a class that it derives from, or if it says (`__wrapped__`) that it wraps the patched one. So it is not seen
that a call is made under a condition that never holds, that `super().other()` stands beside `self.method()`, or that
another function is asked to make the call. An override that is no function of Python is left out: its
code cannot be read. So is one that raises when its attributes are asked for, as a lazy proxy does.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from . import captures, wrapping


def bypassing(steps: Sequence[wrapping.Applied]) -> list[str]:
    """One sentence for each loaded class and target that it bypasses."""
    ours = {id(step.wrapper) for step in steps}
    found: dict[str, None] = {}  # a class that several inherit from is named once
    for step in steps:
        for cls in captures.below(step.owner) if isinstance(step.owner, type) else ():
            by = next(one for one in cls.__mro__ if step.attribute in vars(one) or one is step.owner)
            # What stands below another class of these is found there.
            if by is cls or (by is not step.owner and not issubclass(by, step.owner)):
                override = vars(by)[step.attribute]
                if id(override) not in ours and not _calls(cls, step, override):
                    found[f"{by.__module__}.{by.__qualname__} overrides {step.target} without calling it"] = None
    return list(found)


def _calls(cls: type, step: wrapping.Applied, override: Any) -> bool:
    try:
        return wrapping.reaches(override, step.wrapper) or calls_above(cls, step.attribute, override)
    except Exception:  # a lazy proxy's, of what is not bound yet
        return True


def calls_above(cls: type, name: str, override: Any) -> bool:
    """Whether a class's own attribute calls that of a class above; `name` ends with the attribute's."""
    functions = list(_functions(override))
    above = {"super", *(base.__name__ for base in cls.__mro__[1:-1])}
    attribute = name.rpartition(".")[2]
    return not functions or any(_names(function.__code__, attribute, above) for function in functions)


def _functions(found: Any) -> Iterator[types.FunctionType]:
    """The function, and those that it says it wraps."""
    for _ in range(64):
        found = captures.function_of(found)
        if isinstance(found, types.FunctionType):
            yield found
        found = getattr(found, "__wrapped__", None)
        if found is None:
            return


def _names(code: types.CodeType, attribute: str, above: Collection[str]) -> bool:
    """Whether a function names the attribute and a class above; functions inside of it count as its own."""
    names: set[str] = set()
    waiting = [code]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names, code.co_freevars)
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return attribute in names and not names.isdisjoint(above)
