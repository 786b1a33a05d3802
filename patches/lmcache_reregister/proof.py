"""A real LMCache server that forgets a real worker, and what the worker stores and loads from then on."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lmcache_reregister as driver
from lmcache_server import Answer

TOKENS = 64
"""What a case stores and loads."""


def cases() -> dict[str, str | None]:
    """Each case: what a forgotten worker cannot store, and what counts as loaded though its memory may be another's."""
    Answer.patience = 20.0  # a forgotten worker is never answered on stock
    played = driver.played(*JUDGES)
    return {
        what: played[name] if isinstance(played[name], str) else judged(played[name])
        for name, (what, judged) in JUDGES.items()
    }


def _of_use(came: dict[str, Any]) -> str | None:
    """Of a store, lookup and load."""
    if not came["hit"]:
        return f"of {TOKENS} tokens that the worker stores none is a hit"
    if came["loaded"] and not came["failed"] and not came["right"]:
        return "the load counts as good, and its blocks do not hold the prompt's"
    return None if (came["hit"], came["right"]) == (TOKENS, True) else f"{came['hit']} tokens are a hit, and not loaded"


def _of_silence(came: dict[str, Any]) -> str | None:
    return _of_use(came) or (None if came["known"] == 1 else f"the server knows {came['known']} workers")


def _of_refusal(came: Any) -> str | None:
    _, untouched = came
    return None if untouched else "its blocks have lost what they held"


def _of_heartbeats(came: dict[str, Any]) -> str | None:
    again, ending = came["known"]
    if again != 1:
        return "the worker's heartbeat leaves it forgotten"
    return "a worker that is about to end has registered again" if ending else None


def _of_doubt(came: dict[str, Any]) -> str | None:
    unsaid = sorted(set(driver.SECOND) - set(came["failed"][1]))
    if came["forgotten"] == [True] and unsaid:
        return (
            f"blocks {unsaid} count as loaded: the server may have given their memory to others before they were read"
        )
    return None


def _of_a_failed_registration(came: Any) -> str | None:
    return _of_use(came[1])


def _of_a_load_under_way(came: Any) -> str | None:
    before, after = map(list, came)
    if before != [[], []]:
        return "the load is reported before the server has said that it ended"
    return None if after == [["e"], []] else "the load is not reported as it ended"


def _of_a_short_silence(came: Any) -> str | None:
    before, _, after, known = came
    return _of_use(before) or _of_silence({**after, "known": known})


JUDGES: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "well": ("nothing is forgotten", _of_use),
    "not_there": ("the server does not have what is to be loaded", _of_refusal),
    "never_pinged": ("an engine is idle from its start until the server has forgotten it", _of_silence),
    "stopped": ("a worker is stopped until the server has forgotten it", _of_silence),
    "by_a_heartbeat": ("a forgotten worker's heartbeats", _of_heartbeats),
    "in_the_midst": ("a worker is forgotten while it loads", _of_doubt),
    "in_the_midst_renewed": ("a worker is forgotten while it loads, and a heartbeat comes before its copy", _of_doubt),
    "registration_fails": ("the server answers pings, and no registration for a while", _of_a_failed_registration),
    "under_way": ("the server carries a load out after a silence", _of_a_load_under_way),
    "silent_and_known": ("a silence that is shorter than the server's patience", _of_a_short_silence),
}
"""By the driver's case: what it is, and what is found of it."""
