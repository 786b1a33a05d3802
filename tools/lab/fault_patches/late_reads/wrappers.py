"""A share of NIXL's reads begins later than asked: a fault, for the lab."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker:NixlPullConnectorWorker."
BEGIN, READ = f"{WORKER}start_load_kv", f"{WORKER}_read_blocks_for_req"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    seconds: float = livepatch.options["SECONDS"]
    share: float = livepatch.options["SHARE"]
    draw = random.Random(livepatch.options["SEED"])
    kept: list[tuple[float, tuple[Any, ...]]] = []
    """When a read is to begin (monotonic seconds), and what it was called with, in the order of their moments."""
    due: set[int] = set()
    """The ids of what was kept and may now begin."""

    def begin(original: Callable[..., Any], worker: Any, *rest: Any, **named: Any) -> Any:
        # A read whose handshake took long waits in this queue of the worker's own, which the original empties.
        while kept and kept[0][0] <= time.monotonic():
            _, asked = kept.pop(0)
            due.add(id(asked[1]))
            worker._ready_requests.put(asked)
        return original(*rest, **named)

    def read(original: Callable[..., Any], worker: Any, req_id: str, meta: Any, *rest: Any, **named: Any) -> Any:
        asked = (req_id, meta)
        if id(asked[1]) in due:
            due.discard(id(asked[1]))
        elif draw.random() < share:
            livepatch.count("late")
            kept.append((time.monotonic() + seconds, asked))
            return None
        return original(req_id, meta, *rest, **named)

    return {BEGIN: begin, READ: read}
