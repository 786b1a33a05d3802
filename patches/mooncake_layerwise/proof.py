"""vLLM's real prefill and decode over Mooncake's real engine, on CPU memory: which blocks leave while prefill computes.

A model that writes a number into each block stands for one. Nothing leaves early on stock; what does must be right, and
must not be read after its blocks were given away. Beside windows or states only full attention's blocks leave early:
where the release writes each group's blocks to that group's layers.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import model_runner
import mooncake.engine  # noqa: F401  (vLLM imports it, and goes on without it)
import mooncake_engines as engines
import mooncake_groups as groups
import mooncake_hybrids as hybrids
import mooncake_layerwise as driver
import mooncake_sides as sides
from judging import Judge, Judged, findings

PATIENCE = 2.0
engines.PATIENCE = driver.PATIENCE = groups.PATIENCE = hybrids.PATIENCE = PATIENCE
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


def all_there(computes_on: Any, ends: bool, taken: int, held: int) -> list[Judged]:
    """Of the end of a hybrid's prompt: what decode computes on, and which blocks do not come back."""
    parts = [part.split(" of ") for part in (computes_on or [0, "0 of 1"])[1:]]
    return [
        (all(there == whole for there, whole in parts), f"decode computes on {computes_on}"),
        (ends, "an engine does not come to its end"),
        nothing_left(taken),
        (not held, f"{held} of decode's blocks do not come back"),
    ]


def only_full_attention(after: Any, end: Any, brought: float) -> list[Judged]:
    """What has come after each step: of the first layer, and not of the last, which is of the other group."""
    came = [one for step in after for one in step]
    return [*map(right, came), (any(step[0] for step in after), TOO_LATE), *all_there(*end)]


def beside_windows(after: Any, end: Any, brought: float) -> list[Judged]:
    """Beside sliding windows in the same memory: decode asks before a prefill of several steps begins"""
    return only_full_attention(after, end, brought)


def beside_states(after: Any, end: Any, brought: float) -> list[Judged]:
    """Beside Mamba's states: decode asks before a prefill of several steps begins"""
    return only_full_attention(after, end, brought)


def hybrid_aborted(under_way: bool, held: bool, came: bool, left: int) -> list[Judged]:
    """Beside sliding windows: the prefill is aborted amid an early write, and other prompts take the free blocks"""
    return [(came or not under_way, "decode's blocks are wrong"), nothing_left(left)]


def hybrid_preempted(under_way: bool, held: bool, end: Any) -> list[Judged]:
    """Beside sliding windows: the prefill is preempted amid an early write, and computed anew"""
    return [(held or not under_way, "blocks are computed anew while they are read"), *all_there(*end)]


HYBRIDS: tuple[Judge, ...] = (beside_windows, beside_states, hybrid_aborted, hybrid_preempted)


def beside(config: Any) -> dict[str, Any]:
    """What the hybrids' cases came to."""
    engines.wait_at_most(10 * PATIENCE)  # `stuck` has steps wait for less
    sides.MODEL = hybrids.Shared()
    played: dict[str, Any] = {}
    pair = hybrids.Pair(config)
    # Of the aborted one decode may be told nothing: it comes last.
    cases = {"beside_windows": hybrids.chunks, "hybrid_preempted": hybrids.preempted, "hybrid_aborted": hybrids.aborted}
    for name, case in cases.items():
        (played[name],) = engines.played([case], pair).values()
    sides.MODEL = groups.Mamba(prefix_caching=False)
    (played["beside_states"],) = engines.played([hybrids.chunks], hybrids.Pair(config)).values()
    return played


def second_chunks(after: Any, end: Any, writes: Any, left: int) -> list[Judged]:
    """The V2 model runner: decode asks before a prefill of several steps begins"""
    return chunks(after, end, writes, left)


def second_begun_again(*came: Any) -> list[Judged]:
    """The V2 model runner: a prefill is aborted, and begun again"""
    return begun_again(*came)


SECOND: tuple[Judge, ...] = (second_chunks, second_begun_again)


def with_second(config: Any) -> dict[str, Any]:
    """What came of cases where the worker is asked as the V2 model runner does it."""
    engines.Engine.v2 = True
    try:
        pair = engines.Pair(config)
    finally:
        engines.Engine.v2 = False
    cases = (driver.chunks, driver.begun_again)
    return {f"second_{name}": came for name, came in engines.played(cases, pair).items()}


def cases() -> dict[str, str | None]:
    """Each case, by its sentence."""

    def play(config: Any) -> dict[str, Any]:
        pair = engines.Pair(config)
        played: dict[str, Any] = engines.played(driver.CASES, pair, [judge.__name__ for judge in EVERY])
        if model_runner.SECOND is not None:
            played |= with_second(config)
        return {**played, **beside(config)} if hasattr(pair.prefill.worker, "registered_group_indices") else played

    found: dict[str, str | None] = findings((*EVERY, *SECOND, *HYBRIDS), engines.found(play))
    return found
