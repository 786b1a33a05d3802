"""Wrappers of several patches around one target: which stand there, and how one is put beneath others.

A patch whose modules are imported late may have to stand inside of another that is there already. That one, and what
stands over it, is made anew around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from . import wrapping
from .patch_state import PatchState


class Standing(NamedTuple):
    """The wrapper of one patch, at one target."""

    state: PatchState
    step: wrapping.Applied


def standing(found: Any, states: Iterable[PatchState]) -> list[Standing]:
    """The wrappers of these patches that a call of what was found goes through, the outermost first."""
    ours = {id(step.wrapper): Standing(state, step) for state in states for step in state.applied if step.by is None}
    wrappers = []
    while id(found) in ours:
        wrappers.append(ours[id(found)])
        found = wrappers[-1].step.original
    return wrappers


def over(targets: Iterable[str], outer: Set[str], states: Sequence[PatchState]) -> list[Standing]:
    """Of what stands at these targets, what has to stand over a patch; of each target, the innermost first.

    `outer` are the patches that the patch must be inside of. What stands over one of them stands over it, too.
    """
    found: list[Standing] = []
    for target in targets if outer else ():
        there = standing(wrapping.lookup(target), states)
        last = max((at for at, one in enumerate(there) if one.state.patch.name in outer), default=-1)
        found += reversed(there[: last + 1])
    return found


def beneath(those: Iterable[Standing]) -> dict[str, Any]:
    """What stands beneath these, by target."""
    originals: dict[str, Any] = {}
    for one in those:
        originals.setdefault(one.step.target, one.step.original)
    return originals


def again(
    those: Iterable[Standing],
    planned: Iterable[wrapping.Applied],
    make: Callable[[PatchState, Any, str], Any],
) -> list[wrapping.Applied]:
    """These once more, around what is planned. `make` gives a patch's wrapper, around an original, at a target."""
    tops = {step.target: step for step in planned}
    made = []
    for state, step in those:
        top = tops[step.target]
        aliases = [*step.aliases, *top.aliases]
        wrapper = make(state, top.wrapper, step.target)
        tops[step.target] = replace(step, original=top.wrapper, wrapper=wrapper, aliases=aliases)
        made.append(tops[step.target])
    return made


def are_there(those: Iterable[Standing]) -> bool:
    """Whether what was found still stands there; so does then what it goes around."""
    outermost = {one.step.target: one.step for one in those}
    return all(map(wrapping.in_place, outermost.values()))


def put(planned: Iterable[wrapping.Applied], those: Sequence[Standing], made: Sequence[wrapping.Applied]) -> None:
    """Put what is planned in place, beneath what was made of those: at once, so that no call misses one of them.

    Raises ApplyError with everything as it was.
    """
    outermost = {step.target: step for step in (*planned, *made)}
    try:
        wrapping.put_in_place(outermost.values())
    except BaseException:
        for one in those:
            one.step.put(one.step.wrapper)
        raise
    for one, step in zip(those, made, strict=True):
        one.state.applied = [step if other is one.step else other for other in one.state.applied]
