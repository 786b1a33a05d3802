# mypy: disable-error-code="import-not-found"
"""An LMCache server that answers a step later, behind LMCache's real connector and both of its real adapters.

Stood in for are the client by which adapters ask a server, and what moves blocks between a worker and the server; their
futures are LMCache's own. The server knows of each prompt how much of it was stored, and moves nothing.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from lmcache.v1.multiprocess.futures import MessagingFuture

MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
ADAPTERS = "lmcache.integration.vllm.vllm_multi_process_adapter"
CHUNK = 64
"""Tokens of a chunk."""


class Server:
    """What was stored, and the answers that are due. Prompts that begin with the same chunk begin each other."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, ...], int] = {}
        self.due: list[tuple[MessagingFuture[Any], Any]] = []
        self.looked_up: dict[str, int] = {}

    def holds(self, prompt: list[int], tokens: int) -> None:
        """So many tokens of a prompt were stored before."""
        self.stored[tuple(prompt[:CHUNK])] = tokens // CHUNK * CHUNK

    def step(self) -> None:
        """A step has passed: all that was asked before is answered."""
        due, self.due = self.due, []
        for future, result in due:
            future.set_result(result)

    def later(self, result: Any) -> MessagingFuture[Any]:
        """An answer that comes a step later."""
        future: MessagingFuture[Any] = MessagingFuture()
        self.due.append((future, result))
        return future

    def at_once(self, result: Any = None) -> MessagingFuture[Any]:
        """An answer that is there."""
        future: MessagingFuture[Any] = MessagingFuture()
        future.set_result(result)
        return future

    # As the adapters' client

    def get_chunk_size(self) -> MessagingFuture[Any]:
        return self.at_once(CHUNK)

    def get_experimental(self) -> MessagingFuture[Any]:
        return self.at_once([])

    def ping(self, instance_id: int | None) -> MessagingFuture[Any]:
        return self.at_once(True)

    def lookup(self, key: Any, tp_size: int) -> MessagingFuture[Any]:
        found = min(self.stored.get(tuple(key.token_ids[:CHUNK]), 0), key.end)
        self.looked_up[key.request_id] = found // CHUNK
        return self.later(None)

    def query_prefetch_status(self, request_id: str) -> MessagingFuture[Any]:
        return self.at_once(self.looked_up.pop(request_id, 0))

    def end_session(self, request_id: str) -> MessagingFuture[Any]:
        self.looked_up.pop(request_id, None)
        return self.at_once()

    def free_lookup_locks(self, key: Any, tp_size: int) -> MessagingFuture[Any]:
        return self.at_once()

    def report_block_allocation(self, *_: Any) -> MessagingFuture[Any]:
        return self.at_once()

    def clear(self, force: bool = False) -> MessagingFuture[Any]:
        return self.at_once()

    def close(self) -> None: ...

    # As the worker's transfer context

    def submit_store(self, request_id: str, key: Any, *_: Any, **__: Any) -> MessagingFuture[Any]:
        first = tuple(key.token_ids[:CHUNK])
        self.stored[first] = max(self.stored.get(first, 0), key.end)
        return self.later(True)

    def submit_retrieve(self, request_id: str, key: Any, *_: Any, **__: Any) -> MessagingFuture[Any]:
        return self.later(True)

    def create_recorded_event(self) -> Any:
        return object()

    def flush_inflight_stores(self) -> None: ...

    def unregister(self) -> MessagingFuture[Any]:
        return self.at_once()


def serve() -> Server:
    """A server, to whom all adapters that are made from now on belong."""
    server, adapters = Server(), cast(Any, importlib.import_module(ADAPTERS))
    adapters.RequestClientFactory = type("Clients", (), {"create": staticmethod(lambda *_, **__: server)})
    return server


def connect(server: Server, worker: Any) -> None:
    """Give a worker's adapter what it has once its caches are registered."""
    worker.worker_adapter.transfer_ctx = server
