"""Real schedulers with NIXL's, Mooncake's and the OffloadingConnector, and real NIXL workers: parameters do no harm.

NIXL is needed. Where Mooncake's transfer engine is not installed, an empty one has its place: no scheduler calls it.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import request_params as driver
import request_params_offloading as offloading

WELL = {"contents": ["its own"], "failed": False, "invalid": None}
LOADS = ("waits", "computed")


def cases() -> dict[str, Callable[[], str | None] | str | None]:
    """Each kind of request on each connector's scheduler, and blocks that do not fit on workers."""
    driver.real.quiet()
    gc.enable()
    if importlib.util.find_spec("mooncake") is None:
        stand_in_for_mooncake()
    directory = Path(tempfile.mkdtemp())
    model_config = driver.real.make_model_config(directory)
    found: dict[str, Callable[[], str | None] | str | None] = {}
    for name, (connector, role) in driver.connectors().items():
        played = driver.play(model_config, connector, role)
        found |= {f"{name}: {sentence}": wrong for sentence, wrong in of_scheduler(played).items()}
    found |= of_offloading(offloading.play(model_config))
    played_by_workers = functools.cache(lambda: driver.workers(model_config, directory))
    return found | of_workers(played_by_workers)


def stand_in_for_mooncake() -> None:
    """Let the connector's module be imported."""
    engine = types.ModuleType("mooncake.engine")
    vars(engine)["TransferEngine"] = type("TransferEngine", (), {})
    sys.modules |= {"mooncake": types.ModuleType("mooncake"), "mooncake.engine": engine}


def of_scheduler(played: dict[str, Any]) -> dict[str, str | None]:
    """What is wrong with what came of each kind of request."""
    odd = played["not_computed"]
    found = {
        "requests with incomplete or odd parameters are computed here, and hold no block afterwards": (
            f"{len(odd)} are not: {'; '.join(odd[:3])}" if odd else None
        ),
        "a request without parameters is computed": unless(played["none"], "computed"),
        "a request with another connector's parameters is computed": unless(played["another's"], "computed"),
        "a request that another engine is to load is computed": unless(played["prefill"], "computed"),
    }
    if "whole" in played:
        found["a request with all of its parameters waits for its KV"] = unless(played["whole"], "waits")
        found["a request that loads, and that another engine is to load, ends no engine"] = unless(
            played["both"], *LOADS
        )
    if "numpy" in played:
        found["a request whose numbers are numpy's waits for its KV"] = unless(played["numpy"], "waits")
    if "read_back" in played:
        found["a request whose KV may be read back is computed"] = unless(played["read_back"], "computed")
        held = played["clients_that_left"]
        found["clients that leave before their KV could be asked for leave no block held"] = (
            None if held == 0 else f"{held} blocks are held" if isinstance(held, int) else str(held)
        )
    return found


def of_offloading(played: dict[str, Any]) -> dict[str, str | None]:
    """What is wrong with what came of requests on the OffloadingConnector, where the release has this."""
    found: dict[str, str | None] = {}
    if "peers" in played:
        peers = played["peers"]
        odd = peers["odd"]
        found |= {
            "P2P tier: requests that name another engine oddly are computed here, and hold no block afterwards": (
                f"{len(odd)} are not: {'; '.join(odd[:3])}" if odd else None
            ),
            "P2P tier: a request that names another engine well waits for it": unless(peers["well"], "waits"),
            "P2P tier: and that engine is talked to": None if peers["sessions"] == 1 else f"{peers['sessions']} are",
            "P2P tier: a request that another engine is to load is computed": unless(peers["served"], "computed"),
            "P2P tier: a request that names no other engine is computed": unless(peers["neither"], "computed"),
        }
        if "asks" in peers:
            found["P2P tier: a request that asks another engine first waits for it"] = unless(peers["asks"], "waits")
            found["P2P tier: two requests with one id end no engine"] = unless(peers["shared"], *LOADS)
    for limit, stored in played.get("limits", {}).items():
        found[f"of a Mamba hybrid's prompt, max_offload_tokens {limit} ends no engine"] = (
            None if isinstance(stored, int) else str(stored)
        )
    if "limits" in played:
        limits = played["limits"]
        within = [limit for limit in ("96", "-1", "True", "'16'", "[16]", "1000") if limits[limit] != limits["None"]]
        found["of a Mamba hybrid's prompt, what is within max_offload_tokens is stored"] = (
            f"less is stored with {', '.join(within)}" if within else None
        )
    return found


def unless(outcome: str, *right: str) -> str | None:
    return None if outcome in right else outcome


def of_workers(played: Callable[[], dict[str, Any]]) -> dict[str, Callable[[], str | None]]:
    """The same of what workers are told to read, once their schedulers have been played."""
    odd = {
        "too_few": "a load of fewer blocks than the request has is a failed load of all its blocks",
        "none": "a load of no block at all is a failed load of all the request's blocks",
    }
    found: dict[str, Callable[[], str | None]] = {
        "a worker reads what fits": lambda: unless_well(played()["well"]),
        **{sentence: functools.partial(not_failed, played, case) for case, sentence in odd.items()},
        "a worker reads what fits after what did not": lambda: unless_well(played()["after"]),
    }
    return found


def unless_well(read: Any) -> str | None:
    return None if read == WELL else f"the load ended otherwise than well: {read}"


def not_failed(played: Callable[[], dict[str, Any]], case: str) -> str | None:
    read = played()[case]
    if isinstance(read, str):
        return read
    if not read["failed"]:
        return "it is reported as a load that went well"
    return None if read["blocks"] == [5, 6] else f"its blocks are 5 and 6, and reported are {read['blocks']}"
