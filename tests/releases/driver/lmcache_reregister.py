# mypy: disable-error-code="import-not-found"
"""Let a real LMCache server forget a real worker, and ask both for a store and a load; print what comes of it, as JSON."""

from __future__ import annotations

import gc
import os

gc.disable()
# vLLM and LMCache log to stdout, which here belongs to the result.
RESULT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import importlib
import json
import sys
import time
import traceback
from typing import Any

import lmcache_server

lmcache_server.compiled()

import lmcache
from lmcache_server import Server, Worker, until

REAP, GRACE = 1.0, 2.0
"""After so many seconds without a word the server forgets a worker: one that pinged, and one that never did."""

TIMEOUT = 1.0
"""mq_timeout, in seconds: how long an unpatched worker waits for an answer that does not come."""

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


def stored_and_loaded(worker: Worker, name: str, prompt: int) -> dict[str, Any]:
    """A prompt is stored, asked for, and loaded to other blocks."""
    worker.fill(prompt, FIRST)
    worker.store(f"{name}-store", prompt, FIRST)
    worker.finished(f"{name}-store")
    hit = worker.hit(f"{name}-load", prompt, 64 + 1)
    result: dict[str, Any] = {"hit": hit}
    if hit:
        worker.fill(0, SECOND)
        worker.load(f"{name}-load", prompt, SECOND)
        _, loaded, failed = worker.finished()
        result |= {"loaded": bool(loaded), "failed": failed, "right": worker.holds(prompt, SECOND)}
    return result


def well(server: Server) -> Any:
    """Nothing is forgotten."""
    return stored_and_loaded(Worker(server.port, TIMEOUT), "a", 5)


def never_pinged(server: Server) -> Any:
    """The engine is idle from its start until the server has forgotten it."""
    worker = Worker(server.port, TIMEOUT)
    server.forgets()
    return {**stored_and_loaded(worker, "a", 5), "known": server.ask("known")}


def stopped(server: Server) -> Any:
    """The worker's process is stopped until the server has forgotten it; what was stored before is still there."""
    worker = Worker(server.port, TIMEOUT)
    result = [stored_and_loaded(worker, "a", 5)["hit"]]
    pinged(worker)
    server.stop_me_until_forgotten()
    return {**stored_and_loaded(worker, "b", 6), "before": result, "known": server.ask("known")}


def pinged(worker: Worker) -> None:
    """Wait until the worker has pinged the server, so that the server expects more."""
    beat = worker.adapter._heartbeat
    runs = beat.total_runs
    until(lambda: beat.total_runs > runs + 1)


def in_the_midst(server: Server) -> Any:
    """The worker is stopped, and forgotten, between the server's answer and its own copy of what the server has."""
    worker = Worker(server.port, TIMEOUT)
    worker.fill(5, FIRST)
    worker.store("a", 5, FIRST)
    worker.finished("a")
    hit = worker.hit("b", 5, 65)
    pinged(worker)
    module = importlib.import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")
    copy = module.scatter_cpu_to_paged_kv

    def stopped_before(*args: Any, **kwargs: Any) -> None:
        server.stop_me_until_forgotten()
        copy(*args, **kwargs)

    module.scatter_cpu_to_paged_kv = stopped_before
    try:
        worker.load("b", 5, SECOND)
    finally:
        module.scatter_cpu_to_paged_kv = copy
    return {"hit": hit, "load": worker.finished()[1:]}


def silent_and_known(server: Server) -> Any:
    """A silence that is shorter than the server's patience: to register again does no harm."""
    worker = Worker(server.port, TIMEOUT, interval=0.6)
    result = stored_and_loaded(worker, "a", 5)
    pinged(worker)
    return [result, stored_and_loaded(worker, "b", 6), server.ask("known")]


def server_gone(server: Server) -> Any:
    """The server is gone when the worker would register again: a store is left out, a load is reported as failed."""
    worker = Worker(server.port, TIMEOUT, interval=30.0)
    registration = getattr(worker.adapter, "_livepatch_registration", None)
    server.kill()
    until(lambda: registration is None or registration.in_doubt())
    worker.store("a", 5, FIRST)
    worker.load("b", 5, SECOND)
    return worker.finished("a")


def preempted(server: Server) -> Any:
    """What was begun under an earlier registration is waited for at a preemption."""
    worker = Worker(server.port, TIMEOUT)
    if not hasattr(worker.adapter, "handle_preemptions"):
        return ["earlier", "now"]
    flushed: list[str] = []
    worker.adapter.transfer_ctx.flush_inflight_stores = lambda: flushed.append("earlier")
    server.forgets()
    worker.store("a", 5, FIRST)
    worker.adapter.transfer_ctx.flush_inflight_stores = lambda: flushed.append("now")
    worker.adapter.handle_preemptions(False)
    worker.adapter.handle_preemptions(True)
    return sorted(flushed)


def event_left_out(server: Server) -> Any:
    """No event was made in doubt, and the doubt is gone when a store is asked for with it."""
    worker = Worker(server.port, TIMEOUT)
    adapter = worker.adapter
    if not hasattr(adapter, "create_recorded_event"):
        return [None, [], True]
    adapter._ensure_heartbeat_started()
    pinged(worker)
    adapter._heartbeat.stop()
    adapter._heartbeat._execute = lambda: None
    until(adapter._livepatch_registration.in_doubt)
    event = worker.event()
    adapter._livepatch_registration.answered += 60
    worker.adapter.submit_store_request("a", worker.operation(5, FIRST), event)
    begun = list(adapter.store_futures)
    worker.store("b", 5, FIRST)
    return [event, begun, "b" in adapter.store_futures]


CASES: dict[str, Any] = {
    "well": well,
    "never_pinged": never_pinged,
    "stopped": stopped,
    "in_the_midst": in_the_midst,
    "silent_and_known": silent_and_known,
    "server_gone": server_gone,
    "preempted": preempted,
    "event_left_out": event_left_out,
}


def main() -> None:
    result: dict[str, Any] = {"lmcache": lmcache.__file__, "cases": {}}
    result["vllm"] = importlib.import_module("vllm").__file__
    # All servers first: a process that has used ZMQ cannot be forked.
    servers = {name: Server(REAP, GRACE) for name in sys.argv[1:] or CASES}
    for name, server in servers.items():
        began = time.monotonic()
        try:
            result["cases"][name] = CASES[name](server)
        except Exception:
            traceback.print_exc()
            result["cases"][name] = "raises: " + traceback.format_exc().strip().splitlines()[-1]
        finally:
            server.kill()
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    json.dump(result, RESULT)
    RESULT.flush()
    os._exit(0)  # not by the adapters' shutdown: their servers are gone


if __name__ == "__main__":
    main()
