"""Mooncake's writes take as long as on a link of so many bytes a second: a fault, for the lab."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:MooncakeConnectorWorker._send_blocks"
MEGABYTE = 1_000_000


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    file = livepatch.options["FILE"]
    lock = threading.Lock()
    free_at = 0.0
    """When the link has carried all that it was given so far, in monotonic seconds."""

    def megabytes() -> float:
        if not file:
            found: float = livepatch.options["MB"]
            return found
        with open(file, encoding="utf-8") as text:
            return float(text.read())

    def send(
        original: Callable[..., Any],
        worker: Any,
        remote_session: str,
        src_ptrs: list[int],
        dst_ptrs: list[int],
        lengths: list[int],
        *rest: Any,
        **named: Any,
    ) -> Any:
        nonlocal free_at
        rate = megabytes() * MEGABYTE
        if not rate:
            return original(remote_session, src_ptrs, dst_ptrs, lengths, *rest, **named)
        with lock:  # the worker writes in several threads, by one link
            free_at = max(free_at, time.monotonic()) + sum(lengths) / rate
            done_at = free_at
        result = original(remote_session, src_ptrs, dst_ptrs, lengths, *rest, **named)
        time.sleep(max(0.0, done_at - time.monotonic()))
        livepatch.count("kilobytes", sum(lengths) // 1000)
        return result

    return {TARGET: send}
