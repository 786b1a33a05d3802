"""Requests that have one id, at a real LMCache server: whose KV is loaded, and under whose keys it is stored."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from pathlib import Path

import lmcache_session_hashes as driver
from result import attempted

TRANSFER = Path(__file__).parents[1] / "mp_block_transfer" / "transfer.py"
"""What moves blocks where LMCache has no stand-in for a device."""

RIGHT = [driver.TOKENS, True, True]

CASES: dict[str, tuple[str, list[object]]] = {
    "replicas": ("two engines have a request of one id each", [RIGHT, RIGHT, RIGHT, RIGHT, True]),
    "again": ("one engine's id comes again, and the server has the earlier request's session still", [RIGHT, RIGHT]),
    "goes on": ("one request stores its prompt in parts", [RIGHT, RIGHT]),
}
"""By the driver's case, what it is, and what its loads come to."""


def cases() -> dict[str, str | None]:
    """Each case: whose KV is loaded."""
    came = driver.played(str(TRANSFER))
    found = {what: _found(came[name], right) for name, (what, right) in CASES.items()}
    wrong = attempted(driver.at_once)
    found["several threads ask one session for hashes, each of its own tokens"] = (
        None if wrong == 0 else f"{wrong} of {driver.ROUNDS * driver.THREADS} answers are of another thread's tokens"
    )
    return found


def _found(came: list[object] | str, right: list[object]) -> str | None:
    """Each load: how many tokens were promised, whether it ended well, and whether what came is the prompt's."""
    if isinstance(came, str):
        return came
    wrong = [number for number, (one, other) in enumerate(zip(came, right, strict=True), 1) if one != other]
    if not wrong:
        return None
    return f"load {', '.join(map(str, wrong))} of {len(came)} is another prompt's, or finds nothing of what was stored"
