"""Each store of MooncakeStoreConnector begins later: a fault, for the lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
TARGET = f"{MODULE}:KVCacheStoreSendingThread._handle_request"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    seconds: float = livepatch.options["SECONDS"]

    def handle(original: Callable[..., Any], thread: Any, *rest: Any, **named: Any) -> Any:
        time.sleep(seconds)  # the fault itself
        livepatch.count("delayed")
        return original(*rest, **named)

    return {TARGET: handle}
