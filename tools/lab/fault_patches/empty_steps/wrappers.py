"""An engine whose requests all wait for KV makes fewer empty steps: for benchmarks on shared cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.engine.core:EngineCoreProc._process_engine_step"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target, in wrapt's form (wrapped, instance, args, kwargs)."""
    seconds: float = livepatch.options["SECONDS"]

    def step(wrapped: Callable[..., Any], core: Any, args: Any, kwargs: Any) -> Any:
        computed = wrapped(*args, **kwargs)
        if not computed:
            livepatch.count("paused")
            time.sleep(seconds)
        return computed

    return {TARGET: step}
