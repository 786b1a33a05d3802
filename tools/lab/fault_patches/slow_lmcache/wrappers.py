"""LMCache's server takes longer for each of a worker's stores and loads: a fault, for the lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule._resolve_for_transfer"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of what begins each call; those of one worker are served one after the other, pings beside them."""
    seconds: float = livepatch.options["SECONDS"]

    def slow(original: Callable[..., Any], instance: Any, *rest: Any, **named: Any) -> Any:
        livepatch.count("slowed")
        time.sleep(seconds)
        return original(*rest, **named)

    return {TARGET: slow}
