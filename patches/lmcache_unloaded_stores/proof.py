"""LMCache in the engine's process, and real schedulers: what is stored when a load within the step fails."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import lmcache_within_step as driver

CASES = {
    "first_chunk": "a prompt's first chunk cannot be loaded",
    "second_chunk": "a prompt's second chunk cannot be loaded",
    "first_chunk_in_parts": "the first chunk cannot be loaded, and steps take a chunk each",
    "second_chunk_in_parts": "the second chunk cannot be loaded, and steps take a chunk each",
    "shared": "another request has the same prompt",
    "shared_in_parts": "another request has the same prompt, and steps take a chunk each",
    "aborted": "the client goes before the failure is known",
    "aborted_in_parts": "the client goes before the failure is known, and steps take a chunk each",
    "chats": "others get the blocks of a request that was aborted",
    "of_two_workers": "one of two workers cannot load a chunk",
    "of_two_workers_in_parts": "one of two workers cannot load a chunk, and steps take a chunk each",
    "of_two_stages": "the first of two stages cannot load a chunk",
    "speculative": "stores come when the step's failed loads were fetched",
    "speculative_of_two": "stores come when the failed loads were fetched, and one of two workers cannot load",
}
"""By the driver's case: what it is. Then others load what was stored.

Left out is the case of the last of two stages' two workers: some releases need `failed-loads` for it too.
"""

BESIDES = ("second", "next")
"""Whose load failed, and who shared it: what they are answered is the scheduler's, and another patch's."""


def cases() -> dict[str, str | None]:
    """Each case with each scheduler: what is stored wrong, or not at all, and who is given it."""
    return {
        f"{scheduler}: {CASES[name]}": None if came == "right" else came
        for scheduler, played in driver.played(*CASES, besides=BESIDES).items()
        for name, came in played.items()
    }
