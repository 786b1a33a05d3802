"""A real LMCache server that shares memory with workers, which go within a store: what others load then."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import lmcache_unfilled_stores as driver
from lmcache_server import MODULES, Answer

KEPT = 2
"""Chunks of the prompt that others stored meanwhile, which is all that the cache may lack afterwards."""


def cases() -> dict[str, str | None]:
    """Each case: what is given out that nobody filled, or others filled; what is not stored, or kept for ever."""
    Answer.patience = 20.0  # the end of a store that began before a goodbye is never answered on stock
    judges = {**JUDGES, **(OF_SERVERS_THAT_FORGET if forgets() else OF_SERVERS_THAT_NEVER_FORGET)}
    played = driver.played(*judges)
    return {
        what: played[name] if isinstance(played[name], str) else judged(played[name])
        for name, (what, judged) in judges.items()
    }


def forgets() -> bool:
    """Whether a server forgets workers that are silent."""
    name = f"{MODULES}.engine_driven_transfer"
    if importlib.util.find_spec(name) is None:
        return False
    return hasattr(importlib.import_module(name).EngineDrivenTransferModule, "reap_stale_instances")


def _is_harmless(loads: Mapping[str, Any]) -> str | None:
    """Of loads of what was not stored well: none ends well with others' contents."""
    for what, (hit, *ended) in loads.items():
        if hit and ended == [True, False]:
            return f"{what}: {hit} tokens are a hit, and loaded as good, which are not the prompt's"
    return None


def _is_stored(loads: Mapping[str, Any], tokens: int = 64) -> str | None:
    """Of loads of what was stored: all of it comes, as it was."""
    wrong = _is_harmless(loads)
    for what, found in loads.items():
        wrong = wrong or (
            None if found == [tokens, True, True] else f"{what}: of {tokens} tokens {found[0]} are loaded"
        )
    return wrong


def _of_goodbye(came: Any) -> str | None:
    first, again = came
    return _is_harmless({"what it stored": first}) or _is_stored({"what another stored then": again})


def _of_death(came: Any) -> str | None:
    known, *loads = came
    return f"the server still knows {known} workers" if known else _of_goodbye(loads)


def _of_a_late_copy(came: Any) -> str | None:
    late, before, within, lacking = came
    others = {"what others had stored": before, "what others stored meanwhile": within}
    return _is_harmless({"what it copied": late}) or _is_stored(others) or _of_room(lacking)


def _of_room(lacking: int) -> str | None:
    return f"the cache lacks room for {lacking} chunks, and {KEPT} were stored" if lacking > KEPT else None


def _of_a_long_copy(came: Any) -> str | None:
    return _is_harmless(dict(zip(("before it has ended", "after it has ended"), came, strict=True)))


def _of_messages(came: Any) -> str | None:
    _, within, after, lacking = came  # that its own load fails is not mended, nor that some releases do not say so
    return _is_harmless({"by another": within, "after its goodbye": after}) or _of_room(lacking)


def _of_two_engines(came: Any) -> str | None:
    return _is_stored(dict(zip(("the prompt of both", "what others stored meanwhile"), came, strict=True)))


def _of_two_stores(came: Any) -> str | None:
    return _is_harmless(dict(zip(("when one has ended", "when both have ended"), came, strict=True)))


def _of_many_stores(came: Any) -> str | None:
    lacking, remembered = came
    if lacking > 60:
        return f"the cache lacks room for {lacking} chunks after sixty requests"
    return f"{remembered} more things are remembered after sixty requests" if remembered else None


Judge = Callable[[Any], str | None]
JUDGES: dict[str, tuple[str, Judge]] = {
    "goodbye": ("an engine ends with an error within a store", _of_goodbye),
    "copies_after_its_goodbye": ("a worker copies after its goodbye", _of_a_late_copy),
    "copies_for_long": ("a worker copies for longer than its room is reserved", _of_a_long_copy),
    "cannot_map_the_pool": ("a worker cannot map the server's memory", _of_messages),
    "two_of_one_request": ("a request is preempted and stores a prompt twice", _of_two_stores),
    "many_of_one_request": ("many requests store a prompt twice", _of_many_stores),
}
"""By the driver's case: what it is, and what is found of it."""
OF_SERVERS_THAT_FORGET: dict[str, tuple[str, Judge]] = {
    "death": ("an engine is killed within a store", _of_death),
}
OF_SERVERS_THAT_NEVER_FORGET: dict[str, tuple[str, Judge]] = {
    "another_of_its_number": ("two engines' workers have one number", _of_two_engines),
}
