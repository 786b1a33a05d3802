"""The real OffloadingConnector and schedulers of both kinds: copies to host memory and back that fail or are refused.

Blocks on the device and on the host have contents, and the model samples a wrong token on any but a request's own.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import offloading_failures as driver

SENTENCES = {
    "well": "copies to the host and back succeed",
    "store_failed": "a copy to the host fails",
    "store_refused": "a copy to the host is refused",
    "store_flushed": "a copy to the host fails that was waited for, since others need its blocks",
    "store_flushed_refused": "a copy to the host is refused, and others need its blocks",
    "store_first_worker": "the first of two workers' copies to the host fails",
    "store_second_worker": "the second of two workers' copies to the host is refused",
    "load_failed": "a copy from the host fails",
    "load_refused": "a copy from the host is refused",
    "load_first_worker": "the first of two workers' copies from the host is refused",
    "load_second_worker": "the second of two workers' copies from the host fails",
    "load_fail": "a copy from the host fails, where such requests are to end",
    "load_longer": "a copy from the host fails, of a request that computes more of its prompt",
    "load_longer_fail": "a copy from the host fails, of a longer request, where such requests are to end",
    "load_aborted": "a copy from the host fails, whose client has gone",
    "tiered_store_failed": "a copy to the host fails, which has a second tier behind it",
    "tiered_load_failed": "a copy from the host fails, which has a second tier behind it",
    "sync_well": "copies from the host within a step succeed",
}
"""Left out are errors that a backend raises, and copies that fail within a step: the patch does not mend these."""


def cases() -> dict[str, str | None]:
    """Each copy on each scheduler: who gets a wrong token or none, or how the engine ends."""
    played = driver.found([name for name in SENTENCES if name in driver.CASES])
    return {
        f"{scheduler}: {SENTENCES[name]}": None if case["outcome"] == "right" else case["outcome"]
        for scheduler, found in played.items()
        for name, case in found.items()
    }
