"""Real NIXL push workers with real agents on CPU memory: decode hears of KV that prefill will not write.

NIXL is needed. What fails is made to fail where NIXL's own library is called.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import push_failures as driver

SECONDS = 5.0
"""How long decode may take to hear of it: prefill answers within a second."""
OWN = ["its own"]


def cases() -> dict[str, Callable[[], str | None]]:
    """Writes that end well, that fail, that never come, and that may still come."""
    driver.real.quiet()
    directory = Path(tempfile.mkdtemp())
    played = driver.played(driver.real.make_model_config(directory), directory, SECONDS)

    def case(name: str, judged: Callable[[Any], str | None]) -> Callable[[], str | None]:
        return lambda: judged(played[name]())

    # In the order in which they are played: each leaves its engines to the next.
    return {
        "KV is pushed whichever engine is first": case("pushed", lambda one: well(one["first"]) or well(one["second"])),
        "a write that NIXL was never given is a failed load": case("prepare_fails", ends),
        "a load whose write may be under way in part holds its blocks": case("post_fails", held),
        "while a write is under way prefill keeps its blocks, and its failure ends no engine": case(
            "write_fails", kept_until_it_failed
        ),
        "a load that is asked for after its lease has ended is a failed one": case("late", ends),
        "a load of a request that was aborted on prefill is a failed one": case(
            "aborted", lambda one: ends(one["before"]) or ends(one["after"])
        ),
        "a request that comes with the id of an earlier one is pushed": case("same_id", well),
        "blocks that decode gave to another request are not written any more": case("never", not_written_over),
        "a decode worker without the patch is pushed to": case("without", lambda one: well(one["well"])),
        "a failed write of a model with several kinds of layers is a failed load": case("hybrid", ends_by_request),
        "a load from a prefill engine that cannot shake hands is a failed one": case("handshake_fails", ends),
        "a handshake that outlasts the lease brings no other request's KV": case("handshake_late", ends),
        "when prefill ends, a write that was not begun is a failed load, and one that was begun holds its blocks": case(
            "ended", lambda one: ends(one["waits"]) or held(one["begun"])
        ),
    }


def well(load: dict[str, Any]) -> str | None:
    if load["heard"] == "received" and load["contents"] == OWN and not load["invalid"]:
        return None
    return f"decode hears {load['heard']}, and its blocks hold {', '.join(load['contents'])} KV"


def ends(load: dict[str, Any]) -> str | None:
    """What is wrong unless the load is a failed one, with its blocks, or has the request's own KV."""
    if load["heard"] == "nothing":
        return "decode hears nothing: its request waits, and holds its blocks"
    if load["heard"] == "failed":
        named = load["invalid"] or driver.lease_guard.BY_REQUEST
        return None if named else "not all blocks of the failed load are reported"
    return well(load)


def ends_by_request(load: dict[str, Any]) -> str | None:
    if driver.lease_guard.BY_REQUEST and load["heard"] == "failed" and load["invalid"]:
        return "the failed load is named by its blocks too, whose numbers are of one kind of layer only"
    return ends(load)


def held(load: dict[str, Any]) -> str | None:
    if load["heard"] == "failed":
        return "decode takes the load for a failed one, and gives blocks away that may still be written"
    return None if load["heard"] == "nothing" else well(load)


def kept_until_it_failed(load: dict[str, Any]) -> str | None:
    if load["meanwhile"] != "nothing":
        return f"decode hears {load['meanwhile']} while the write is under way"
    if not load["blocks kept"]:
        return "prefill gives the blocks away while they are read"
    if "prefill" in load:
        return f"prefill ends: {load['prefill']}"
    return None if load["heard"] in ("nothing", "failed") else well(load)


def not_written_over(load: dict[str, Any]) -> str | None:
    wanted = ["another's"] if load["given"] else OWN
    held = load["afterwards"]
    return None if held == wanted else f"afterwards they hold {', '.join(held)} KV instead of {wanted[0]}"
