"""Each copy of SimpleCPUOffloadConnector begins later: a fault, for the lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.simple_kv_offload.copy_backend:DmaCopyBackend._copy_loop"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    seconds: float = livepatch.options["SECONDS"]

    class Slow:
        """The thread's queue, whose items come later."""

        def __init__(self, q: Any) -> None:
            self.get_at_once = q.get

        def get(self) -> Any:
            item = self.get_at_once()
            if item is not None:
                time.sleep(seconds)  # the fault itself
                livepatch.count("delayed")
            return item

    def loop(original: Callable[..., Any], q: Any, *rest: Any, **named: Any) -> Any:
        return original(Slow(q), *rest, **named)

    return {TARGET: loop}
