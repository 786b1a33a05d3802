"""vLLM's real prefill and decode over Mooncake's real engine, on CPU memory: which blocks leave while prefill computes.

A model that writes a number into each block stands for one. Nothing leaves early on stock; what does must be right, and
must not be read after its blocks were given away.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mooncake.engine  # noqa: F401  (vLLM imports it, and goes on without it)
import mooncake_engines as engines
import mooncake_layerwise as driver
from judging import Judge, Judged, findings

PATIENCE = 2.0
engines.PATIENCE = driver.PATIENCE = PATIENCE
LOADED, NOTHING = "loaded", "nothing is told"
ALL = [LOADED, 8]
TOO_LATE = "no block leaves before the prefill has ended"


def ends(*came: Any) -> list[Judged]:
    """Decode's loads come to an end with all of their blocks."""
    return [(list(one) == ALL, f"decode's load comes to {one}") for one in came]


def nothing_left(left: int) -> Judged:
    return not left, f"{left} of prefill's blocks do not come back"


def right(came: Any) -> Judged:
    """What has come so far is what prefill has computed."""
    return not isinstance(came, str), f"decode's blocks are {came}"


def chunks(after: Any, end: Any, writes: Any, left: int) -> list[Judged]:
    """Decode asks before a prefill of several steps begins"""
    return [*map(right, after), (any(after), TOO_LATE), *ends(end), nothing_left(left)]


def late(end: Any, writes: Any, left: int) -> list[Judged]:
    """Decode asks when the prefill has ended"""
    return [*ends(end), nothing_left(left)]


def amid(came: bool, end: Any, first: Any, written: Any, left: int) -> list[Judged]:
    """Decode asks after two of the prefill's steps"""
    return [(came, TOO_LATE), *ends(end), nothing_left(left)]


def hits(before: Any, came: Any, left: int) -> list[Judged]:
    """Prefill has the first blocks of a prompt, for which two decode requests ask"""
    first, *rest = came
    return [
        *map(right, before),
        (any(before), TOO_LATE),
        (list(first) == [LOADED, 5], f"decode's load comes to {first}"),
        (list(rest[0]) == [LOADED, 6], f"decode's load comes to {rest[0]}"),
        *ends(*rest[1:]),
        nothing_left(left),
    ]


def same_step(before: Any, one: Any, other: Any, left: int) -> list[Judged]:
    """Two prefills of one prompt begin in one step"""
    return [*map(right, before), (any(before), TOO_LATE), *ends(one, other), nothing_left(left)]


def aborted(under_way: bool, held: int, early: str, outcome: str, came: Any, left: int) -> list[Judged]:
    """The prefill is aborted amid an early write, and other prompts take the blocks that are free"""
    told = early != NOTHING and under_way
    return [(not told, f"decode is told {early} while a write is under way"), right(came), nothing_left(left)]


def begun_again(under_way: bool, waits: bool, held: int, outcome: str, end: Any, left: int) -> list[Judged]:
    """A prefill that was aborted amid an early write comes again under its transfer"""
    return [(not waits, "the next step waits for the write"), *ends(end), nothing_left(left)]


def preempted(under_way: bool, held: bool, end: Any, writes: Any, left: int) -> list[Judged]:
    """The prefill is preempted amid an early write, and computed anew"""
    return [(held or not under_way, "blocks are computed anew while they are read"), *ends(end), nothing_left(left)]


def computed_anew(outcome: str, contents: bool, writes: Any, left: int) -> list[Judged]:
    """The scheduler goes back in a prefill, and computes a part of it anew"""
    return [(outcome == LOADED and contents, "decode has what was computed first"), nothing_left(left)]


def drained(early: str, end: Any, writes: Any, left: int) -> list[Judged]:
    """An early write is under way when the prefill ends"""
    return [(early == NOTHING, f"decode is told {early} while a write is under way"), *ends(end), nothing_left(left)]


def many(every: Any, left: int) -> list[Judged]:
    """Decode asks for several prompts that are computed at once"""
    return [*ends(*every), nothing_left(left)]


def failed(outcome: str, writes: Any, held: int, came: Any, freed: bool, left: int) -> list[Judged]:
    """A write fails, and a rest of it comes when other prompts were computed"""
    return [(outcome != LOADED, "decode is told that all has come"), right(came), nothing_left(left)]


def failed_and_aborted(outcome: str, held: int, came: Any, freed: bool, left: int) -> list[Judged]:
    """A write fails, its prefill is aborted, and a rest of the write comes when other prompts were computed"""
    return [(outcome != LOADED, "decode is told that all has come"), right(came), nothing_left(left)]


def decode_aborted(
    under_way: bool, number: int, apart: bool, came: bool, others: int, taken: int, left: int
) -> list[Judged]:
    """Decode's request is aborted amid a write for it, and others are computed"""
    return [
        (apart and others == 6, "blocks that are being written were given to others"),
        (came, "prefill never gives its blocks back"),
        (not taken, f"{taken} of decode's blocks do not come back"),
        nothing_left(left),
    ]


def stuck(under_way: bool, goes_on: bool, end: Any, writes: Any, left: int) -> list[Judged]:
    """The prefill is preempted amid an early write that does not end"""
    return [(goes_on, "the engine waits for a write that does not end"), *ends(end), nothing_left(left)]


def forgotten(remembered: int) -> list[Judged]:
    """All prefills are over"""
    return [(not remembered, f"{remembered} prefills are remembered")]


EVERY: tuple[Judge, ...] = (
    chunks,
    late,
    amid,
    hits,
    same_step,
    aborted,
    begun_again,
    preempted,
    computed_anew,
    drained,
    many,
    failed,
    failed_and_aborted,
    decode_aborted,
    stuck,
    forgotten,
)


def cases() -> dict[str, str | None]:
    """Each case, by its sentence."""
    names = [judge.__name__ for judge in EVERY]
    played = engines.found(lambda config: engines.played(driver.CASES, engines.Pair(config), names))
    found: dict[str, str | None] = findings(EVERY, played)
    return found
