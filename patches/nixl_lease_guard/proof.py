"""Real NIXL workers with real agents on CPU memory: what is read after its lease has ended is a failed load.

NIXL is needed.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lease_guard as driver

OWN = ["its own"]


def cases() -> dict[str, Callable[[], str | None]]:
    """Reads under leases that hold, and under leases that end."""
    driver.real.quiet()
    directory = Path(tempfile.mkdtemp())
    played = driver.played(driver.real.make_model_config(directory), directory)

    def case(name: str, judged: Callable[[Any], str | None]) -> Callable[[], str | None]:
        return lambda: judged(played[name]())

    # In the order in which they are played: some leave their leases to the next.
    return {
        "a read under a lease is a load of the request's own KV, and frees prefill's blocks": case("in_time", well),
        "a read that begins after its lease has ended is a failed load": case("late", own_or_failed),
        "a read during which its lease ends is a failed load": case("stopped", failed),
        "a second read of a request that was read already is a failed load": case("again", second_fails),
        "a read after its lease, when another request has its id, is a failed load": case("same_id", own_or_failed),
        "a read of a request that prefill was told to drop is a failed load": case("aborted", own_or_failed),
        "a read after a lease that is over behind one that runs is a failed load": case("passed", own_or_failed),
        "a late read of a model with several kinds of layers is a failed load": case("hybrid", fails_by_request),
        "a late read in two parts fails once, after both have ended": case("two_reads", fails_once),
        "a decode worker without the patch reads under a lease": case("decode_without", well),
        "from a prefill worker without the patch a read under a lease is a load": case(
            "prefill_without", lambda found: well(found["in_time"])
        ),
        "a read that begins after its lease has ended, of a model with sleep mode, is a failed load": case(
            "asleep", own_or_failed
        ),
    }


def well(read: dict[str, Any]) -> str | None:
    if read["failed"] or read["contents"] != OWN:
        return f"the load is {'a failed' if read['failed'] else 'a good'} one, and its blocks hold {read['contents']}"
    return None if read.get("was_notified", True) else "prefill was not told, and does not free the blocks"


def own_or_failed(read: dict[str, Any]) -> str | None:
    if read["failed"]:
        return None if read["invalid"] or driver.BY_REQUEST else "not all blocks of the failed load are reported"
    return None if read["contents"] == OWN else f"the load counts, and its blocks hold {', '.join(read['contents'])} KV"


def fails_by_request(read: dict[str, Any]) -> str | None:
    if driver.BY_REQUEST and read["failed"] and read["invalid"] is not None:
        return "the failed load is named by its blocks too, whose numbers are of one kind of layer only"
    return own_or_failed(read)


def failed(read: dict[str, Any]) -> str | None:
    return None if read["failed"] else "the load counts, though its blocks might have been another's"


def second_fails(reads: dict[str, Any]) -> str | None:
    first = well(reads["first"])
    return f"the first read: {first}" if first else own_or_failed(reads["second"])


def fails_once(read: dict[str, Any]) -> str | None:
    if read["while_read"]:
        return "the load is reported while a part of it is still under way"
    return failed(read) or ("the load is reported again" if read["afterwards"] else None)
