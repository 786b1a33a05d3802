"""Mooncake's worker takes the CPU for its device where vLLM runs on one: no fault, the lab cannot run without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:MooncakeConnectorWorker.__init__"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""

    def made(original: Callable[..., Any], instance: Any, *rest: Any, **named: Any) -> Any:
        module = sys.modules[TARGET.partition(":")[0]]
        if not vars(module)["current_platform"].is_cpu():
            return original(*rest, **named)
        # The worker asks once, for its own field, which it hands to the platform. Nothing else asks while it is made.
        accelerator = vars(module)["torch"].accelerator
        asked = accelerator.current_device_index
        accelerator.current_device_index = lambda: "cpu"
        try:
            result = original(*rest, **named)
        finally:
            accelerator.current_device_index = asked
        livepatch.count("on_cpu")
        return result

    return {TARGET: made}
