"""A real LMCache server whose stores fail: what others load of them at once, later, and when they are made again."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmcache_failed_copies as driver

TRANSFER = Path(__file__).parents[1] / "mp_block_transfer" / "transfer.py"
"""What moves blocks where LMCache has no stand-in for a device."""
TOKENS = len(driver.FIRST) * driver.BLOCK
STRATEGIES = [
    driver.PLACE / "v1" / "multiprocess" / "modules" / f"{name}_transfer.py" for name in ("server", "non_gpu")
]
"""Where a server takes what its workers copied themselves."""


def cases() -> dict[str, str | None]:
    """Each case: what is given out though its store has failed; what is not stored when that is done again."""
    judges = {name: judge for name, judge in COPIED.items() if driver.RECORDS or name not in ("groups", "traced")}
    if any(file.exists() and "import pickle" in file.read_text("utf-8") for file in STRATEGIES):
        judges |= SENT
    played = driver.played(str(TRANSFER), *judges)
    return {
        what: played[name] if isinstance(played[name], str) else judged(played[name])
        for name, (what, judged) in judges.items()
    }


def _is_harmless(when: str, found: list[Any]) -> str | None:
    """Of a load of what was not stored well: it does not end well with others' contents."""
    wrong = bool(found[0]) and found[1:] == [True, False]
    return f"{when}, {found[0]} tokens are a hit and loaded as good, which are not the prompt's" if wrong else None


def _is_stored(what: str, found: list[Any]) -> str | None:
    """Of a load of what was stored: all of it comes, as it was."""
    missing = None if found == [TOKENS, True, True] else f"{what}: of {TOKENS} tokens {found[0]} are loaded"
    return _is_harmless(what, found) or missing


def _of_failure(came: Any) -> str | None:
    return _of_doubt(came) or _is_stored("when it is stored again", came[-1])


def _of_doubt(came: Any) -> str | None:
    at_once, later, *_, again = came
    wrong = _is_harmless("at once", at_once) or _is_harmless("when LMCache's time for a store is over", later)
    return wrong or _is_harmless("when it is stored again", again)


def _of_shared(came: Any) -> str | None:
    at_once, later, again = came
    lost = (
        None
        if min(at_once[0], later[0]) >= driver.CHUNK
        else "the chunk that another request stored is no hit any more"
    )
    return _of_doubt(came) or lost or _is_stored("when it is stored again", again)


def _of_two_workers(came: Any) -> str | None:
    before, after, again, other = came
    wrong = _is_harmless("before it fails", before) or _is_harmless("when it has failed", after)
    wrong = wrong or _is_harmless("when another has stored it", again)
    return wrong or _is_stored("what another stored meanwhile", other)


def _of_gone(came: Any) -> str | None:
    later, _, again = came
    return _is_harmless("when LMCache's time for a store is over", later) or _is_stored(
        "when it is stored again", again
    )


def _of_many(came: Any) -> str | None:
    _, remembered = came
    return f"{remembered} more things are remembered after thirty stores that failed" if remembered else None


def _of_traced(came: Any) -> str | None:
    return None if came == ["ObjectKey"] else f"LMCache's recorder of calls finds {', '.join(came)} among the keys"


Judge = Callable[[Any], str | None]
COPIED: dict[str, tuple[str, Judge]] = {
    "first copy": ("a store fails at its first copy", _of_failure),
    "amid": ("a store fails amid its copies", _of_failure),
    "last copy": ("a store fails at its last copy", _of_failure),
    "event": ("a store fails when its event is recorded", _of_failure),
    "end": ("a store fails when its end is submitted", _of_failure),
    "groups": ("a store of two groups of layers fails", _of_failure),
    "shared": ("a store fails of which another request has stored the first chunk", _of_shared),
    "beside": ("a store fails beside another worker's of the same prompt", _of_two_workers),
    "gone": ("the worker's registration ends amid its store", _of_gone),
    "many": ("many stores fail", _of_many),
    "traced": ("a store fails whose calls LMCache records", _of_traced),
    "unsynchronized": ("a store fails, and the device does not come to an end", _of_doubt),
}
"""By the driver's case: what it is, and what is found of it. Here the server copies."""
SENT: dict[str, tuple[str, Judge]] = {
    "too few chunks": ("a worker sends too few chunks", _of_failure),
    "an odd chunk": ("a worker sends a chunk that is none", _of_failure),
}
"""Where the server is sent chunks in messages."""
