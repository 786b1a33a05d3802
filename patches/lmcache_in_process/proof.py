"""LMCache's real connector, lookups and memory: clients that go, lookups that time out, an LMCache that did not start.

The copies between vLLM's KV cache and LMCache's memory, the group of workers and the model are stand-ins.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import lmcache_in_process as driver
from lmcache.v1.event_manager import EventManager

HOW = {
    "enable_async_loading": "loaded asynchronously",
    "hit_miss_ratio": "with hits limited",
    "use_layerwise": "by layers",
}
"""Options that differ between the cases, in words."""


def sentence(scheduler: str, name: str) -> str:
    """What is looked at in a case."""
    play, config = (driver.CASES | driver.DEGRADED)[name]
    how = [scheduler, *(HOW[option] for option in config)]
    return f"{', '.join(how)}: {(play.__doc__ or '').strip().splitlines()[0]}"


def cases() -> dict[str, str | None]:
    """Each case with each scheduler: what went wrong in it."""
    every = driver.CASES | driver.DEGRADED
    played = driver.played(name for name in every if gives_back_late() or "enable_async_loading" not in every[name][1])
    return {
        sentence(scheduler, name): None if came == "right" else came
        for scheduler, cases in played.items()
        for name, came in cases.items()
    }


def gives_back_late() -> bool:
    """Tell whether LMCache keeps an asynchronous load's event until its clean-up.

    Where the load itself takes the event, the pins of what it copied, and a lookup that timed out, stay as on stock:
    the patch does not mend that.
    """
    return hasattr(EventManager, "get_event_future")
