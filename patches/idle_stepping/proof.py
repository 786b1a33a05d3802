"""A release's engine core while a finished request's blocks are held, and the queue of its worker.

Time is the driver's own: no figure is of the machine. What is to be left alone is played a second time as the release
does it, in the same code without the patch.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import idle_stepping as driver

Played = Mapping[str, Any]

TURN = 0.003
"""Seconds between the beginnings of two steps that follow each other."""
STEPS = 50
"""As many a second are enough for an engine that only holds blocks, or for a worker that looks for its next step."""
LATE = 0.06
LEFT_ALONE = {
    "loading": "a request waits for its KV beside the held blocks",
    "no_room": "a request waits for held blocks",
    "pausing": "somebody waits for the engine to be idle",
    "scaling": "an elastic engine looks at its queue amid its work",
    "ending": "the engine is asked to end",
    "data_parallel": "the engine is one of several that step together",
}
"""More than holds remain here, or an engine steps for others."""
RESTS = {
    "apart": "a worker is told of steps far apart",
    "a request": "a worker is told of a request after steps far apart",
    "another call": "a worker is told of something else than a step",
    "not told of": "a step comes without its notification after steps far apart",
}
BUSY = {
    "after a request": "a worker is told of a step after a request's",
    "together": "a worker is told of steps close together",
    "after another call": "a worker is told of a step after another call",
    "something else": "a worker hears of something else",
}


def cases() -> dict[str, str | None]:
    """How often the engine steps and its worker looks where nothing is to be done, and who has to wait for that."""
    found = driver.found()
    released = found["stock"]
    played = found.get("patched", released)
    findings: dict[str, str | None] = {}
    for scheduler in driver.real.SCHEDULERS:
        for sentence, wrong in _of_engine(played[scheduler], released[scheduler]):
            findings[f"{scheduler}: {sentence}"] = wrong
    return {**findings, **dict(_of_worker(played["queue"], released["queue"]))}


def _of_engine(played: Played, released: Played) -> Iterator[tuple[str, str | None]]:
    seconds = driver.HELD - 1
    yield (
        "the engine only holds blocks",
        _too_often(played["held"]["steps"], seconds) or _too_late(played["held"], LATE),
    )
    yield "the engine only holds blocks, for a moment", _too_late(played["held_shortly"], 0.1 / 8 + 2 * TURN)
    yield (
        "a request comes while blocks are held, and ends before they are sent",
        _too_often(played["newcomer"]["steps"], driver.HELD - 1.5) or _too_late(played["newcomer"], TURN),
    )
    waits, waited = played["room_unseen"], released["room_unseen"]
    more = waits["steps before it"] - waited["steps before it"]
    yield (
        "a request comes before a step has told that there is room for it",
        None if more <= 1 else f"{more} steps more than the release's go by",
    )
    pushes, pushed = played["pushing"], released["pushing"]
    yield (
        "the connector pushes KV in the engine's steps, and then no more",
        _another(pushes["steps"], pushed["steps"]) or _too_often(pushes["steps then"], driver.HELD - 1.5),
    )
    for name, sentence in LEFT_ALONE.items():
        later = (played[name].get("late") or 0) - (released[name].get("late") or 0)
        wrong = None if later <= TURN else f"{later:g} s later than the release's"
        yield sentence, _another(played[name]["steps"], released[name]["steps"]) or wrong


def _of_worker(played: Played, released: Played) -> Iterator[tuple[str, str | None]]:
    if not played:  # it has another queue
        return
    for name, sentence in RESTS.items():
        spins = played[name]["spins"]
        yield sentence, f"it looked {spins} times without a pause" if spins > STEPS else _too_late(played[name], 0.02)
    for name, sentence in BUSY.items():
        yield sentence, None if played[name] == released[name] else "it waits otherwise than the release's"


def _too_often(steps: int, seconds: float) -> str | None:
    return None if steps <= STEPS * seconds else f"{steps} steps in {seconds:g} s, in which there was nothing to do"


def _too_late(found: Mapping[str, Any], seconds: float) -> str | None:
    late = found["late"]
    if late is None:
        return "that never is seen to end"
    return None if late <= seconds else f"that is seen {late:g} s too late"


def _another(steps: int, released: int) -> str | None:
    return None if abs(steps - released) <= 1 else f"{steps} steps where the release makes {released}"
