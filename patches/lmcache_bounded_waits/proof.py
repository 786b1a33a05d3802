"""A real LMCache server that is stopped, killed or raises under a worker's step: what it waits for, and reports."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lmcache_bounded_waits as driver

OPTIONS = {
    "LIVEPATCH_LMCACHE_BOUNDED_WAITS_SECONDS": "2",
    "LIVEPATCH_LMCACHE_BOUNDED_WAITS_PING_SECONDS": "0.5",
}
MQ_TIMEOUT = 2.0
"""How long LMCache lets each call to its server take, in seconds."""
BOUND = 1.0
"""How long a step may wait for a server that does not answer pings, in seconds."""
SECOND, THIRD = driver.SECOND, driver.THIRD


def cases() -> dict[str, str | None]:
    """Each case: steps that wait for long, end with an error or report wrongly, and what does not work again."""
    os.environ.update(OPTIONS)  # they are read at the first import of a target
    played = driver.played(MQ_TIMEOUT, *JUDGES)
    return {
        what: played[name] if isinstance(played[name], str) else judged(played[name])
        for name, (what, judged) in JUDGES.items()
    }


def _of_wait(waited: float) -> str | None:
    return f"it waits for {waited:g} s" if waited > BOUND else None


def _of_step(came: list[Any], sent: list[str], loaded: list[str], failed: list[int]) -> str | None:
    """Of a step: it has not raised, has not waited for long, and reports these requests and at least these blocks."""
    if isinstance(came[0], str):
        return f"the step ends with {came[0]}, and with it the engine, after {came[1]:g} s"
    unsaid = sorted(set(failed) - set(came[2]))
    if unsaid:
        return f"blocks {unsaid} count as loaded, and nothing was loaded into them"
    if came[:2] != [sent, loaded]:
        return f"requests {sent} and {loaded} were to be reported as sent and loaded, and {came[0]} and {came[1]} are"
    wrong = _of_wait(came[3])
    return f"the step, {wrong}" if wrong else None


def _of_use(came: Any) -> str | None:
    """Of a store, lookup and load when the server is well again."""
    hit, (ended, failed), right = came
    if hit and ended and not failed and not right:
        return "when the server is well again, others' KV is loaded"
    return None if (hit, right) == (64, True) else f"when the server is well again, {hit} of 64 tokens are a hit"


def _of_stop(came: Any) -> str | None:
    wrong = _of_step(came["step"], ["c", "d"], ["a", "b"], [*SECOND, *THIRD])
    return wrong or _of_step(came["next step"], ["f"], ["e"], SECOND) or _of_use(came["again"])


def _of_a_load_before(came: Any) -> str | None:
    step, right = came
    return _of_step(step, [], ["a", "b"], THIRD) or (None if right else "the load that had ended has others' KV")


def _of_pings(came: Any) -> str | None:
    (_, failed), _ = came
    unsaid = sorted(set(SECOND) - set(failed))
    return f"blocks {unsaid} count as loaded, and nothing was loaded into them" if unsaid else None


def _of_errors(came: Any) -> str | None:
    reported, _, again = came
    return _of_step([*reported, 0.0], ["a", "b", "c"], [], []) or _of_use(again)


def _of_a_late_store(came: Any) -> str | None:
    step, hit, (ended, failed), right = came
    if hit and ended and not failed and not right:
        return "what the blocks held later is a hit, and loaded as good"
    return _of_step(step, ["late"], [], [])


def _of_lookup(came: Any) -> str | None:
    return _of_wait(came[1])


def _of_kill(came: Any) -> str | None:
    return _of_step(came["step"], ["c", "d"], ["a", "b"], [*SECOND, *THIRD]) or _of_use(came["again"])


def _of_a_kill_under_a_store(came: Any) -> str | None:
    return _of_step(came, ["a", "b"], [], [])


JUDGES: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "stopped": ("the server is stopped under two loads and two stores of a step, and goes on", _of_stop),
    "stopped_after_a_load": ("the server is stopped between two loads of a step", _of_a_load_before),
    "answers_pings_before_the_end": ("the server is stopped under a load, and goes on before the step ends", _of_pings),
    "raises": ("the server answers pings, and no store", _of_errors),
    "stopped_under_a_store": ("the server makes room for a store when it goes on", _of_a_late_store),
    "lookup": ("the server is stopped under a lookup", _of_lookup),
    "session": ("a request ends while its lookup is not answered", _of_wait),
    "killed": ("the server is killed under a load, and another takes its place", _of_kill),
    "killed_under_a_store": ("the server is killed under a store", _of_a_kill_under_a_store),
}
"""By the driver's case: what it is, and what is found of it."""
