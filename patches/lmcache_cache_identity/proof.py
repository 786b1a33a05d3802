"""One prompt to several adapters, images and embeddings of engines that share an LMCache: whose KV a request gets."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import lmcache_identity as driver

OWN = "lmcache.integration.vllm.lmcache_mp_connector"
IN_PROCESS = "lmcache.integration.vllm.vllm_v1_adapter"

SEVERAL: dict[str, tuple[str, tuple[int, ...]]] = {
    "adapters": ("two adapters and the base model, whose ids differ between engines", (3, 4, 5)),
    "two_pods": ("adapters of one name, with other files and with the same", (2,)),
    "new_weights": ("an adapter is loaded again with other files", ()),
}
"""By the driver's case: what it is, and which of its requests are to get what another engine has stored."""
BY_SERVER: dict[str, tuple[str, tuple[int, ...]]] = {
    "tensor_parallel": ("an adapter and the base model, on two workers", (2, 3)),
    "within_multi": ("an adapter and the base model, within a MultiConnector", ()),
    "unknown": ("adapters whose files are not those that were loaded", ()),
    "images": ("three images behind one text, two of which end alike", (3,)),
    "embeddings": ("two prompts of embeddings, which begin alike", (2,)),
}
WITHIN: dict[str, tuple[str, tuple[int, ...]]] = {
    "images_in_process": ("three images behind one text, two of which end alike", (3,)),
    "by_layer": ("two adapters and the base model, each layer by itself", (3, 4, 5)),
    "users_tags": ("a user's tag, and a client that sends the patch's own", ()),
    "preempted": ("a request that is not looked up is preempted", ()),
}


def cases() -> dict[str, str | None]:
    """Each case: who is given KV of another adapter, image or embedding, and who nothing of its own."""
    found: dict[str, str | None] = {}
    whose = _server_connector()
    if whose is not None:
        judged = {**SEVERAL, **BY_SERVER}
        found |= _findings(f"{whose}'s connector", judged, driver.played(whose, *judged, "salts"))
    if _offers(IN_PROCESS):
        judged = {**SEVERAL, **WITHIN}
        within = importlib.import_module("lmcache_identity_in_process")
        found |= _findings("in the engine's process", judged, within.played(*judged))
    return found


def _offers(name: str) -> bool:
    """Whether there is such a module, and this vLLM has what it imports."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _server_connector() -> str | None:
    """Whose connector to an LMCache server there is: LMCache's own, else vLLM's."""
    return next((whose for whose, name in (("lmcache", OWN), ("vllm", driver.MODULES["vllm"])) if _offers(name)), None)


def _findings(
    where: str, judged: Mapping[str, tuple[str, tuple[int, ...]]], played: Mapping[str, Any]
) -> dict[str, str | None]:
    found = {f"{where}: {what}": _finding(played[name], shared) for name, (what, shared) in judged.items()}
    if "salts" in played:
        found[f"{where}: the salts of two tenants"] = _of_salts(played["salts"])
    return found


def _finding(came: Any, shared: tuple[int, ...]) -> str | None:
    if isinstance(came, str):
        return came
    answered = list(_requests(came))
    foreign = [str(number) for number, (_, right) in enumerate(answered, 1) if not right]
    if foreign:
        return f"of {len(answered)} requests the KV of number {', '.join(foreign)} is another's"
    alone = [str(number + 1) for number in shared if not answered[number][0]]
    return f"nothing of what is stored comes to request number {', '.join(alone)}" if alone else None


def _requests(came: Any) -> list[tuple[int, bool]]:
    """Of each request how many tokens were loaded, and whether its KV is right."""
    if isinstance(came, bool):
        return [(0, came)]
    if not isinstance(came, list):
        return []
    if len(came) == 2 and isinstance(came[1], bool):
        return [(came[0], came[1])]
    return [request for part in came for request in _requests(part)]


def _of_salts(came: Any) -> str | None:
    if isinstance(came, str):
        return came
    others = sorted(set(came) - {"tenant-1", "tenant-2", ""})
    return f"chunks are stored with the salts {others}, which no tenant has" if others else None
