# mypy: disable-error-code="import-not-found"
"""LMCache's multi-process connector, vLLM's copy of it and LMCache's own: what each says of an aborted load."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lmcache
import native_double
from completion_world import ID, V1, Load, bare, found, play, reported, request


class QueueFuture:
    """In place of the future of a message to LMCache's server."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def result(self, timeout: float | None = None) -> Any:
        return AllOf()


class AllOf(list[bool]):
    """A result that is true as a whole (LMCache's own adapter) and in all its parts (vLLM's copy)."""

    def __init__(self) -> None:
        super().__init__([True])


def lmcache_adapter(adapter_class: type, **attributes: Any) -> Any:
    """Return a worker's adapter that has done nothing yet."""
    sets = ("finished_stores", "previously_finished", "error_block_ids", "_returned_finished")
    more = ("_dropped_retrieves", "_failed_request_ids", "_failed_store_requests")
    dicts = ("store_futures", "retrieve_futures", "store_events", "retrieve_events", "_pending_store_kv_events")
    given: dict[str, Any] = {name: set() for name in (*sets, *more)}
    given |= {name: {} for name in (*dicts, "_completed_store_requests")}
    given |= {"request_telemetry": MagicMock(), "model_name": "m", "world_size": 1, "worker_id": 0, "dispatcher": None}
    given |= {"_health_event": threading.Event(), "_heartbeat_started": True}
    given |= {"parallel_strategy": MagicMock(), "_heartbeat": MagicMock(), **attributes}
    given["_health_event"].set()
    return bare(adapter_class, **given)


def working_adapter(module: Any, begin: Callable[..., Any], **others: Any) -> Any:
    """Return a worker's adapter of a module of LMCache's, in which `begin` stands for what sends the server a store or load."""
    if hasattr(module, "send_lmcache_request"):  # to 0.4.5 they are sent without a context
        module.send_lmcache_request = begin
    given: dict[str, Any] = {
        "_create_key": MagicMock(),
        "_block_ids_per_group": MagicMock(),
        "_ensure_heartbeat_started": MagicMock(),
        "transfer_ctx": SimpleNamespace(submit_store=begin, submit_retrieve=begin),
        "mq_client": None,
        "instance_id": 1,
        "kv_caches": {},
        "blocks_in_chunk": 1,
        "lazy_offload": False,
        "_kv_events_enabled": False,
    }
    return lmcache_adapter(module.LMCacheMPWorkerAdapter, **{**given, **others})


def lmcache_connector(connector_class: type) -> Any:
    """Return the scheduler's side, which has seen the request."""
    given = {"request_trackers": {}, "scheduler_adapter": MagicMock(), "lazy_offload": False, "_can_store": True}
    return bare(connector_class, **given)


def lmcache_load(connector_class: type, adapter_class: type) -> Load:
    connector, adapter = lmcache_connector(connector_class), lmcache_adapter(adapter_class)
    future = QueueFuture()
    # vLLM's copy keeps the other requests of a batch beside the future, LMCache's own adapter the blocks.
    adapter.retrieve_futures[ID] = (future, [])
    return Load(
        lambda: setattr(future, "done", True),
        lambda: bool(connector.request_finished(request(), [])[0]),
        adapter.get_finished,
    )


def vllm_lmcache_mp() -> dict[str, Any]:
    # Imported beside the adapter that is needed, it wants names of LMCache's that are gone; nothing of it runs here.
    other = f"{V1}.lmcache_integration.vllm_v1_adapter"
    sys.modules[other] = native_double.NativeDouble(other)
    adapter = found("LMCacheMPWorkerAdapter", "lmcache_integration.multi_process_adapter")
    name = "LMCacheMPConnector"
    connector = found(f"{name}Upstream", "lmcache_mp_connector") or found(name, "lmcache_mp_connector")
    return play(lambda: lmcache_load(connector, adapter))


def lmcache_stores(adapter_class: type) -> list[str]:
    """What is reported where two stores of a request are under way, it finishes, and the first of them ends."""
    adapter = lmcache_adapter(adapter_class)
    first, second = QueueFuture(), QueueFuture()
    adapter.store_futures[ID] = first
    adapter.store_futures[ID] = second  # as the second submission does
    reports = [reported(adapter.get_finished({ID}))]
    first.done = True
    reports.append(reported(adapter.get_finished(set())))
    second.done = True
    reports += [reported(adapter.get_finished(set())) for _ in range(2)]
    return reports


def lmcache_store_after_another(adapter_class: type) -> list[str]:
    """What is reported where a request finishes whose first store has ended and whose second is under way."""
    adapter = lmcache_adapter(adapter_class)
    first, second = QueueFuture(), QueueFuture()
    adapter.store_futures[ID] = first
    first.done = True
    reports = [reported(adapter.get_finished(set()))]
    adapter.store_futures[ID] = second
    return [*reports, reported(adapter.get_finished({ID}))]


def unhealthy(adapter: Any) -> None:
    """The heartbeat found LMCache's server gone."""
    adapter._health_event.clear()
    if adapter.is_healthy:
        raise AssertionError("the adapter still thinks that its server is well")


def lmcache_own() -> dict[str, Any]:
    """LMCache's own adapter and connector: well, with its server gone at several moments, and an id used twice."""
    package = "lmcache.integration.vllm"
    native_double.device_ops(lmcache)
    adapter_class = importlib.import_module(f"{package}.vllm_multi_process_adapter").LMCacheMPWorkerAdapter
    connector_class = importlib.import_module(f"{package}.lmcache_mp_connector").LMCacheMPConnector

    def drained_with_abort() -> list[str]:
        adapter = lmcache_adapter(adapter_class)
        adapter.retrieve_futures[ID] = (QueueFuture(), [])
        unhealthy(adapter)
        return [reported(adapter.get_finished(ids)) for ids in ({ID}, set(), set())]

    def drained_after_abort() -> list[str]:
        adapter = lmcache_adapter(adapter_class)
        adapter.retrieve_futures[ID] = (QueueFuture(), [])
        reports = [reported(adapter.get_finished({ID}))]
        unhealthy(adapter)
        return [*reports, *(reported(adapter.get_finished(set())) for _ in range(2))]

    def refused() -> list[str]:
        adapter = lmcache_adapter(adapter_class)
        unhealthy(adapter)
        operation = SimpleNamespace(flat_block_ids=[1], block_ids=[1], token_ids=[1])
        adapter.submit_retrieve_request(ID, operation, None)
        return [reported(adapter.get_finished(ids)) for ids in (set(), {ID}, set())]

    def used_again() -> list[str]:
        adapter = lmcache_adapter(adapter_class)
        return [reported(adapter.get_finished(ids)) for ids in ({ID}, set(), {ID}, set())]

    result: dict[str, Any] = {"well": play(lambda: lmcache_load(connector_class, adapter_class))}
    cases = (drained_with_abort, drained_after_abort, refused, used_again)
    result |= {case.__name__: case() for case in cases}
    result["store_after_another"] = lmcache_store_after_another(adapter_class)
    result["two_stores"] = lmcache_stores(adapter_class)
    return result
