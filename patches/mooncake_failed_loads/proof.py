"""vLLM's real Mooncake connectors and Mooncake's real engine, on CPU memory: loads that fail, and what comes late.

Decode is looked at: of which loads its scheduler is told, and what lies in the blocks of its requests. What is written
late comes through Mooncake's engine; a model that writes a number into each block stands for one.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mooncake.engine  # noqa: F401  (vLLM imports it, and goes on without it)
import mooncake_asks as driver
from judging import Judge, Judged, findings
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
    MooncakeXferMetadata,
)

PATIENCE = 8.0
"""Seconds in which the patch looks at a connection several times."""
driver.PATIENCE = PATIENCE
FAILED, NOTHING, OWN = "failed", "nothing is told", "its own"
REPORTS = hasattr(MooncakeConnector, "get_transfer_results")
"""Whether the connector reports loads that failed. Where it does not, a load that may still be written waits."""
SIZES_DIFFER = hasattr(MooncakeXferMetadata, "block_lens")
"""Whether an engine can load from one that has another number of workers."""
WRITTEN = "what a request computes on was written over by a load that had failed"


def loads(outcome: str) -> Judged:
    return outcome == OWN, f"a load that could be made comes to: {outcome}"


def fails(outcome: str) -> Judged:
    return outcome == FAILED, f"of a load that cannot be made the scheduler is told: {outcome}"


def in_turn(outcome: str, let_go: bool) -> list[Judged]:
    """Decode asks when its prefill has ended"""
    return [loads(outcome)]


def at_once(outcome: str, let_go: bool) -> list[Judged]:
    """Decode asks before its prefill has begun"""
    return [loads(outcome)]


def fewer(outcome: str, beside: str) -> list[Judged]:
    """Prefill has fewer blocks than decode asks for, and all of another request of the same ask"""
    return [fails(outcome), loads(beside)]


def no_leg(outcome: str, left: bool) -> list[Judged]:
    """The prefill never comes, and its time is over"""
    return [fails(outcome)]


def unreachable(outcome: str) -> list[Judged]:
    """The bootstrap server is not there"""
    return [fails(outcome)]


def unknown(outcome: str) -> list[Judged]:
    """The bootstrap server does not know the prefill engine"""
    return [fails(outcome)]


def some_unknown(early: str, asked: bool, outcome: str, untouched: bool) -> list[Judged]:
    """The bootstrap server knows one of two workers that decode is to ask"""
    return [fails(outcome), (untouched, "blocks of a load that had failed were written")]


def never_sent(outcome: str, arrived: bool, later: str) -> list[Judged]:
    """Decode has no socket left to ask by, and then has some again"""
    return [fails(outcome), loads(later)]


def known_later(before: str, then: str) -> list[Judged]:
    """The bootstrap server knows another worker than the one that decode is to ask, and later knows that one"""
    return [fails(before), loads(then)]


def uneven(outcome: str, even: str) -> list[Judged]:
    """The workers of a prefill engine cannot be matched with decode's; those of another can"""
    return [fails(outcome), *([loads(even)] if SIZES_DIFFER else [])]


def killed(waited: str, after: str, back: str) -> list[Judged]:
    """The prefill engine's process is killed amid a load, and comes back"""
    return [*([fails(waited)] if REPORTS else []), fails(after), loads(back)]


def one_of_two(early: bool, outcome: str, untouched: bool) -> list[Judged]:
    """One of two workers of a prefill engine has too few blocks, and the other still writes"""
    return [(untouched, "blocks were given to others while a worker wrote them"), fails(outcome)]


ASKS: tuple[Judge, ...] = (
    in_turn,
    at_once,
    fewer,
    no_leg,
    unreachable,
    unknown,
    some_unknown,
    never_sent,
    known_later,
    uneven,
    killed,
    one_of_two,
)


def failed(runs: bool, before: bool, after: bool, held: int) -> list[Judged]:
    """A write fails, decode computes the request itself, and the write comes after all"""
    return [(runs and before, "the request does not run"), (after, WRITTEN)]


def failed_behind_a_hit(written: float, runs: bool, before: bool, after: bool) -> list[Judged]:
    """A write fails for a request of which decode has the first blocks, and comes after all"""
    return [(runs and before, "the request does not run"), (after, WRITTEN)]


def given_away(ended: bool, several: bool, before: bool, after: bool) -> list[Judged]:
    """A write fails and so does its request; the write comes after all, when others have taken all free blocks"""
    return [(ended and several and before, "the requests do not run"), (after, WRITTEN)]


def overdue(runs: bool, before: bool, after: bool, held: int, back: bool) -> list[Judged]:
    """A write takes longer than decode waits, and then comes"""
    return [(runs and before, "the request does not run"), (after, WRITTEN), (back, "the blocks never come back")]


HELD: tuple[Judge, ...] = (failed, failed_behind_a_hit, given_away, overdue)


def cases() -> dict[str, str | None]:
    """Each case, by its sentence."""
    found: dict[str, str | None] = findings(ASKS, driver.played(judge.__name__ for judge in ASKS))
    return {**found, **(written_late() if REPORTS else {})}


def written_late() -> dict[str, str | None]:
    """Loads of which the connector itself says that they failed, and what comes for them later."""
    import mooncake_engines as engines
    import mooncake_held as held

    engines.PATIENCE = held.PATIENCE = PATIENCE
    worlds = {judge.__name__ for judge in HELD}
    # A world for each: what one case holds for good counts against the share of the cache that may be held.
    played = engines.found(
        lambda config: {
            name: came
            for case in held.CASES
            if case.__name__ in worlds
            for name, came in engines.played([case], held.World(config)).items()
        }
    )
    found: dict[str, str | None] = findings(HELD, played)
    return found
