# mypy: disable-error-code="import-not-found"
"""Let a real LMCache server forget a real worker, and ask both for a store and a load; print what comes of it, as JSON."""

from __future__ import annotations

from result import attempted, begin_driver, print_result

begin_driver()

import importlib
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import lmcache_server

lmcache_server.compiled()

import lmcache
from lmcache_server import AFTER_A_PING, CLOCK, NEVER_PINGED, PATIENCE, Server, Worker, silence

TIMEOUT = 1.0
"""mq_timeout, in seconds: how long an unpatched worker waits for an answer that does not come."""

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


def step_waits(seconds: float) -> None:
    """How long an engine's step waits for a registration, where the patch is; no case but one says anything of that."""
    for name, module in list(sys.modules.items()):
        if name.endswith("lmcache_reregister.wrappers"):
            module.WAIT_SECONDS = seconds  # type: ignore[attr-defined]


def stored_and_loaded(worker: Worker, prompt: int) -> dict[str, Any]:
    """A prompt is stored, asked for, and loaded to other blocks, by requests of its own."""
    worker.fill(prompt, FIRST)
    worker.store(f"store {prompt}", prompt, FIRST)
    worker.finished(f"store {prompt}")
    hit = worker.hit(f"load {prompt}", prompt, 64 + 1)
    result: dict[str, Any] = {"hit": hit}
    if hit:
        worker.fill(0, SECOND)
        worker.load(f"load {prompt}", prompt, SECOND)
        _, loaded, failed = worker.finished()
        result |= {"loaded": bool(loaded), "failed": failed, "right": worker.holds(prompt, SECOND)}
    worker.rest()
    return result


def well(server: Server, worker: Worker) -> Any:
    """Nothing is forgotten."""
    return stored_and_loaded(worker, 5)


def not_there(server: Server, worker: Worker) -> Any:
    """A load of what the server does not have is refused: its blocks hold what they held."""
    worker.fill(5, SECOND)
    worker.load("not there", 9, SECOND)
    return [worker.finished()[1:], worker.holds(5, SECOND)]


def never_pinged(server: Server, worker: Worker) -> Any:
    """The engine is idle from its start until the server has forgotten it."""
    forgotten = silence(server, NEVER_PINGED) == 0
    return {"forgotten": forgotten, **stored_and_loaded(worker, 6), "known": server.ask("known")}


def stopped(server: Server, worker: Worker) -> Any:
    """The worker's process is stopped until the server has forgotten it; what was stored before is still there."""
    before = stored_and_loaded(worker, 5)["hit"]
    worker.beat()
    forgotten = silence(server, AFTER_A_PING) == 0
    server.leaves_out = not hasattr(worker.adapter, "_livepatch_registration")  # for ever
    after = {"before": before, "forgotten": forgotten, **stored_and_loaded(worker, 7)}
    return {**after, "known": server.ask("known")}


def by_a_heartbeat(server: Server, worker: Worker) -> Any:
    """Nothing is asked of the engine: its next heartbeat registers it again, but not when it is about to end."""
    worker.beat()
    forgotten = [silence(server, AFTER_A_PING) == 0]
    worker.beat()
    known = [server.ask("known")]
    forgotten.append(silence(server, NEVER_PINGED) == 0)
    worker.adapter._heartbeat.stop()
    worker.beat()
    return {"forgotten": forgotten, "known": [*known, server.ask("known")]}


def in_the_midst(server: Server, worker: Worker, beats: bool = False, healthy: bool = True) -> Any:
    """The worker is stopped, and forgotten, between the server's answer and its own copy of what the server has.

    A heartbeat may register it again before the copy, or LMCache itself, where it found the server gone and back.
    """
    worker.fill(5, FIRST)
    worker.store("a", 5, FIRST)
    worker.finished("a")
    hit = worker.hit("b", 5, 65)
    worker.beat()
    module = importlib.import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")
    copy = module.scatter_cpu_to_paged_kv
    forgotten = []

    def stopped_before(*args: Any, **kwargs: Any) -> None:
        forgotten.append(silence(server, AFTER_A_PING) == 0)
        server.leaves_out = not beats
        if not healthy:
            worker.adapter._health_event.clear()
        if beats:
            worker.beat()
        copy(*args, **kwargs)

    module.scatter_cpu_to_paged_kv = stopped_before
    try:
        worker.load("b", 5, SECOND)
    finally:
        module.scatter_cpu_to_paged_kv = copy
    _, loaded = worker.adapter.get_finished(set())
    requests = sorted(getattr(worker.adapter, "_failed_request_ids", ()))
    blocks = sorted(worker.adapter.get_block_ids_with_load_errors())
    if not hasattr(worker.adapter, "_failed_request_ids"):  # reported from 0.5.6 on, by requests and by blocks
        requests = ["b"] * bool(blocks)
    return {"hit": hit, "forgotten": forgotten, "loaded": sorted(loaded), "failed": [requests, blocks]}


def in_a_registration(server: Server, worker: Worker) -> Any:
    """The worker is stopped, and forgotten, as it has just registered again: by the patch, and by LMCache itself."""
    adapter = worker.adapter
    register = adapter._send_register_kv_caches_request
    result = []

    def stopped_after(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        result.append(silence(server, NEVER_PINGED) == 0)

    for prompt, healthy in ((3, True), (4, False)):
        worker.beat()
        CLOCK.ahead += AFTER_A_PING
        if not healthy:
            adapter._health_event.clear()
        adapter._send_register_kv_caches_request = stopped_after
        worker.beat()
        adapter._send_register_kv_caches_request = register
        result.append(stored_and_loaded(worker, prompt))
    return result


def registration_fails(server: Server, worker: Worker) -> Any:
    """The server answers a ping and no registration: nothing is asked of it until it does."""
    adapter = worker.adapter
    worker.beat()
    register = adapter._send_register_kv_caches_request

    def unanswered(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError

    adapter._send_register_kv_caches_request = unanswered
    CLOCK.ahead += AFTER_A_PING
    worker.store("c", 5, FIRST)
    worker.load("d", 5, SECOND)
    finished = worker.finished("c")
    adapter._send_register_kv_caches_request = register
    return [finished, stored_and_loaded(worker, 5)]


def under_way(server: Server, worker: Worker) -> Any:
    """A load that the server carries out itself goes on: it ends by the server's word."""
    begun = importlib.import_module("lmcache.v1.multiprocess.futures").MessagingFuture()

    def submit(*args: Any, **kwargs: Any) -> Any:
        CLOCK.ahead += AFTER_A_PING
        return begun

    worker.beat()
    worker.adapter.transfer_ctx.submit_retrieve = submit
    worker.load("e", 5, SECOND)
    before = worker.finished()[1:]
    begun.set_result(True)
    return [before, worker.finished()[1:]]


def silent_and_known(server: Server, worker: Worker) -> Any:
    """A silence that is shorter than the server's patience: to register again does no harm."""
    before = stored_and_loaded(worker, 5)
    worker.rest()
    forgotten = silence(server, AFTER_A_PING - 10) == 0
    return [before, forgotten, stored_and_loaded(worker, 8), server.ask("known")]


def between_heartbeats(server: Server, worker: Worker) -> Any:
    """How often the worker registers again when it stores shortly before its next heartbeat, which comes every 30 s."""
    adapter, asked = worker.adapter, list[Any]()
    register = adapter._send_register_kv_caches_request
    adapter._send_register_kv_caches_request = lambda *args, **kwargs: asked.append(register(*args, **kwargs))
    worker.beat()
    CLOCK.ahead += 29.0
    return [stored_and_loaded(worker, 5), len(asked)]


def busy(server: Server, worker: Worker) -> Any:
    """How often the worker registers again with a busy server, which answers each ping at last: in the midst of one."""
    adapter, asked = worker.adapter, list[Any]()
    register = adapter._send_register_kv_caches_request
    adapter._send_register_kv_caches_request = lambda *args, **kwargs: asked.append(register(*args, **kwargs))
    ping, amid = worker.module.send_ping, list[Any]()

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # else another one's: the scheduler's
            CLOCK.ahead += 25.0
            amid.append(stored_and_loaded(worker, 5 + len(amid)))
        return ping(*args, **kwargs)

    adapter._ensure_heartbeat_started()
    worker.rest()
    worker.module.send_ping = slow
    adapter._heartbeat._execute()
    CLOCK.ahead += 30.0
    adapter._heartbeat._execute()
    worker.module.send_ping = ping
    return [*amid, len(asked)]


def preempted(server: Server, worker: Worker) -> Any:
    """What was begun under an earlier registration is waited for at a preemption; what has ended is not kept."""
    if not hasattr(worker.adapter, "handle_preemptions"):
        return ["earlier", "now"]
    flushed: list[str] = []
    over = weakref.ref(worker.adapter.transfer_ctx)
    silence(server, NEVER_PINGED)
    worker.store("a", 5, FIRST)
    worker.rest()
    assert over() is None, "the pool of a server that has gone would stay mapped"
    stores = worker.adapter.transfer_ctx
    stores.flush_inflight_stores = lambda: flushed.append("earlier")
    worker.rest()
    silence(server, AFTER_A_PING)
    worker.store("b", 5, FIRST)
    worker.adapter.transfer_ctx.flush_inflight_stores = lambda: flushed.append("now")
    worker.adapter.handle_preemptions(False)
    worker.adapter.handle_preemptions(True)
    return sorted(flushed)


def event_left_out(server: Server, worker: Worker) -> Any:
    """No event was made in doubt, and the doubt is gone when a store is asked for with it."""
    adapter = worker.adapter
    if not hasattr(adapter, "create_recorded_event"):
        return [None, [], True]
    worker.beat()
    adapter._heartbeat.stop()
    execute, adapter._heartbeat._execute = adapter._heartbeat._execute, lambda: None
    CLOCK.ahead += AFTER_A_PING
    event = worker.event()
    adapter._heartbeat._execute = execute
    adapter._livepatch_registration.answered += AFTER_A_PING
    adapter.submit_store_request("a", worker.operation(5, FIRST), event)
    begun = list(adapter.store_futures)
    worker.store("b", 5, FIRST)
    return [event, begun, "b" in adapter.store_futures]


def server_gone(server: Server, worker: Worker) -> Any:
    """The server is gone when the worker would register again: a store is left out, a load is reported as failed.

    The engine waits once, and not for the answer's whole time, which is the heartbeat's interval.
    """
    worker.beat()
    server.kill()
    step_waits(0.1)
    CLOCK.ahead += AFTER_A_PING
    worker.store("a", 5, FIRST)
    asking = worker.adapter._livepatch_registration.asking
    worker.load("b", 5, SECOND)
    waits_on = asking.is_alive() and worker.adapter._livepatch_registration.asking is asking
    return [*worker.finished("a"), waits_on]


def shut_down(server: Server, worker: Worker) -> Any:
    """The worker shuts down while it registers again, which a step has asked for: the server knows it no more.

    What has not registered when the goodbye was answered does so now; afterwards there is nothing to send it with.
    """
    adapter = worker.adapter
    worker.beat()
    register, close = adapter._send_register_kv_caches_request, adapter.transfer_ctx.close
    goes_on = threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> None:
        goes_on.wait(PATIENCE)
        register(*args, **kwargs)

    def closing() -> None:
        goes_on.set()
        join(PATIENCE)
        close()

    def waited_for(timeout: float) -> None:
        goes_on.set()
        join(PATIENCE)

    adapter._send_register_kv_caches_request = slowly
    step_waits(0.1)
    CLOCK.ahead += AFTER_A_PING
    worker.store("a", 5, FIRST)
    asking = adapter._livepatch_registration.asking
    join, asking.join = asking.join, waited_for
    adapter.transfer_ctx.close = closing
    adapter.shutdown()
    worker.scheduler.shutdown()
    return [goes_on.is_set(), server.ask("known")]


CASES: dict[str, Any] = {
    "well": well,
    "not_there": not_there,
    "never_pinged": never_pinged,
    "stopped": stopped,
    "by_a_heartbeat": by_a_heartbeat,
    "in_the_midst": in_the_midst,
    "in_the_midst_renewed": lambda *of: in_the_midst(*of, beats=True),
    "in_the_midst_recovered": lambda *of: in_the_midst(*of, beats=True, healthy=False),
    "in_a_registration": in_a_registration,
    "registration_fails": registration_fails,
    "under_way": under_way,
    "silent_and_known": silent_and_known,
    "between_heartbeats": between_heartbeats,
    "busy": busy,
    "preempted": preempted,
    "event_left_out": event_left_out,
    "shut_down": shut_down,
    "server_gone": server_gone,
}
"""Of one server: the last one ends it."""


def with_a_worker(name: str, server: Server) -> Any:
    """Play a case with a worker of its own."""
    server.leaves_out = False
    worker = Worker(server.port, TIMEOUT)
    step_waits(PATIENCE)
    came = CASES[name](server, worker)
    if name not in ("shut_down", "server_gone"):
        worker.close()
    return came


def played(*names: str) -> dict[str, Any]:
    """What each of these cases, or all, came to."""
    importlib.import_module("lmcache.v1.multiprocess.server")
    server = Server()  # before anything else: a process that has used ZMQ cannot be forked
    came: dict[str, Any] = {}
    for name in names or CASES:
        began = time.monotonic()
        came[name] = attempted(partial(with_a_worker, name, server))
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    server.kill()
    return came


def main() -> None:
    vllm = importlib.import_module("vllm")
    print_result({"cases": played(*sys.argv[1:])}, lmcache, vllm)


if __name__ == "__main__":
    main()
