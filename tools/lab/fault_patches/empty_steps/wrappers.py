"""An engine whose requests all wait for KV makes fewer empty steps: for benchmarks on shared cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.engine.core:EngineCoreProc._process_engine_step"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    seconds: float = livepatch.options["SECONDS"]

    def step(original: Callable[..., Any], core: Any, *rest: Any, **named: Any) -> Any:
        computed = original(*rest, **named)
        if not computed:
            livepatch.count("paused")
            time.sleep(seconds)
        return computed

    return {TARGET: step}
