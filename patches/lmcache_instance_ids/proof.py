"""Two workers whose processes have one number, as in containers, at a real LMCache server: whose KV is where."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from pathlib import Path

import lmcache_instance_ids as driver

TRANSFER = Path(__file__).parents[1] / "mp_block_transfer" / "transfer.py"
"""What moves blocks where LMCache has no stand-in for a device."""

CASES = {
    "loads": "each loads what the first has stored, beside a request that runs on the other",
    "stores": "each stores a prompt of its own, which the other loads",
    "ended": "one has said goodbye, and the other goes on",
}
"""By the driver's case, what it is."""


def cases() -> dict[str, str | None]:
    """Each case: whose KV is in whose blocks."""
    came = driver.played(str(TRANSFER))
    return {what: came[name] if isinstance(came[name], str) else _found(came[name]) for name, what in CASES.items()}


def _found(came: list[list[object]]) -> str | None:
    """Each load, and whether what runs on the other has its KV still."""
    wrong = [str(number) for number, one in enumerate(came, 1) if one[1:3] == [True, False]]
    if wrong:
        return f"load {', '.join(wrong)} of {len(came)} ended well, and what came is another prompt's"
    if any(one[3:] == [False] for one in came):
        return "a load of the one has overwritten the KV of a request that runs on the other"
    missing = [one for one in came if one[:3] != [driver.TOKENS, True, True]]
    return f"of {driver.TOKENS} tokens that are stored {missing[0][0]} are loaded" if missing else None
