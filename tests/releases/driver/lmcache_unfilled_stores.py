# mypy: disable-error-code="import-not-found"
"""End a real worker's registration within its store, at a real LMCache server; print what others load then, as JSON.

The arguments are the cases. Blocks have contents: those of a prompt are filled with its number.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmcache_server

lmcache_server.compiled()

import lmcache
from lmcache_server import AFTER_A_PING, BLOCK, PATIENCE, Server, Worker, silence, until

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


@contextlib.contextmanager
def within_the_copy(act: Callable[[], None], copied: bool = False) -> Iterator[None]:
    """A worker has been told where to copy, and has not begun to; or it has `copied`, and has not said so."""
    module = importlib.import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")
    copy = module.gather_paged_kv_to_cpu

    def gather(*args: Any, **kwargs: Any) -> Any:
        module.gather_paged_kv_to_cpu = copy
        if copied:
            copy(*args, **kwargs)
        act()
        return copy(*args, **kwargs)

    module.gather_paged_kv_to_cpu = gather
    try:
        yield
    finally:
        module.gather_paged_kv_to_cpu = copy


class Died(Exception):
    pass


def dies() -> None:
    raise Died


def begun(server: Server, prompt: int, act: Callable[[Worker], None]) -> Worker:
    """A worker that stores a prompt, and acts within its copy."""
    worker = Worker(server.port, 1.0)
    worker.beat()
    worker.fill(prompt, FIRST)
    with within_the_copy(lambda: act(worker)), contextlib.suppress(Died, TimeoutError):
        worker.store("store", prompt, FIRST)
    return worker


def loaded(worker: Worker, name: str, prompt: int, into: list[int] = SECOND) -> list[Any]:
    """How many tokens of a prompt are a hit, whether its load ends well, and whether what came is the prompt's."""
    hit = worker.hit(name, prompt, len(into) * BLOCK + 1)
    if not hit:
        return [hit]
    worker.load(name, prompt, into)
    _, loads, failed = worker.finished()
    return [hit, loads == [name] and not failed, worker.holds(prompt, into)]


def stored_and_loaded(worker: Worker, name: str, prompt: int) -> list[Any]:
    worker.fill(prompt, FIRST)
    worker.store(f"store {name}", prompt, FIRST)
    worker.finished(f"store {name}")
    return loaded(worker, name, prompt)


def goodbye(server: Server) -> Any:
    """An engine ends with an error within a store. What it stored is a hit for nobody; another stores it, and it is."""
    begun(server, 10, lambda worker: dies()).close()
    reader = Worker(server.port, 1.0)
    result = [loaded(reader, "10", 10), stored_and_loaded(reader, "10 again", 10)]
    reader.close()
    return result


def death(server: Server) -> Any:
    """An engine is killed within a store, and the server has not heard of it for long."""
    worker = begun(server, 20, lambda worker: dies())
    worker.adapter._heartbeat.stop()
    known = silence(server, AFTER_A_PING)
    reader = Worker(server.port, 1.0)
    result = [known, loaded(reader, "20", 20), stored_and_loaded(reader, "20 again", 20)]
    reader.close()
    return result


def late(server: Server, end: Callable[[Worker], None], prompt: int) -> Any:
    """A worker's registration ends within its copy, others store, and then it copies and says so.

    Whether what it copied is a hit; what is loaded of the others' prompts, which filled what room there was; how many
    chunks the cache lacks after that.
    """
    others = Worker(server.port, 1.0)
    stored_and_loaded(others, "before", prompt + 1)
    free = server.ask("free")

    def act(worker: Worker) -> None:
        end(worker)
        assert len(stored_and_loaded(others, "within", prompt + 2)) == 3

    worker = begun(server, prompt, act)
    result = [loaded(others, "it", prompt), *(loaded(others, f"{one} again", one) for one in (prompt + 1, prompt + 2))]
    lacking = free - server.ask("free")
    worker.adapter._heartbeat.stop()
    others.close()
    return [*result, lacking]


def says_goodbye(worker: Worker) -> None:
    """And no more than that: to 0.5.5 the adapter itself does."""
    if hasattr(worker.adapter.transfer_ctx, "unregister"):
        worker.adapter.transfer_ctx.unregister().result(PATIENCE)
        return
    if hasattr(worker.adapter, "req_client"):
        worker.adapter.req_client.unregister_kv_cache_engine_driven_context(worker.adapter.instance_id).result(PATIENCE)
        return
    kinds = worker.module.RequestType
    known = "ENGINE_DRIVEN" if hasattr(kinds, "UNREGISTER_KV_CACHE_ENGINE_DRIVEN_CONTEXT") else "NON_GPU"
    kind = kinds[f"UNREGISTER_KV_CACHE_{known}_CONTEXT"]
    client = worker.adapter.mq_client
    worker.module.send_lmcache_request(client, kind, [worker.adapter.instance_id]).result(PATIENCE)


def copies_after_its_goodbye(server: Server) -> Any:
    """As a worker on a GPU does, whose copies are in threads of their own."""
    return late(server, says_goodbye, 30)


def copies_after_it_was_forgotten(server: Server) -> Any:
    """It was suspended."""
    return late(server, lambda worker: (silence(server, AFTER_A_PING), None)[1], 40)


def copies_for_long(server: Server) -> Any:
    """The time for which LMCache reserves room is over, here a second. The worker is heard of."""
    server.ask("short")
    reader = Worker(server.port, 1.0)
    result: list[Any] = []

    def act(worker: Worker) -> None:
        server.ask("reserve")
        until(lambda: not server.ask("reserved"))
        result.append(loaded(reader, "within", 50))

    worker = begun(server, 50, act)
    worker.finished("store")
    server.ask("long")
    result.append(loaded(reader, "after", 50))
    for one in (worker, reader):
        one.close()
    return result


@contextlib.contextmanager
def hidden(server: Server) -> Iterator[None]:
    """A worker that begins meanwhile cannot map the server's memory."""
    pool = Path("/dev/shm", f"lmcache_l1_pool_lmcache-{server.port}")
    elsewhere = pool.rename(pool.with_name(f"hidden-{pool.name}"))
    try:
        yield
    finally:
        elsewhere.rename(pool)


def cannot_map_the_pool(server: Server) -> Any:
    """A worker in a container of its own: it sends what it stores in messages.

    Its own load of that, and another's, before its goodbye and after it; how many chunks the cache lacks then.
    """
    reader = Worker(server.port, 1.0)
    stored_and_loaded(reader, "before", 61)
    free = server.ask("free")
    with hidden(server):
        worker = Worker(server.port, 1.0)
    worker.fill(60, FIRST)
    worker.store("store", 60, FIRST)
    worker.finished("store")
    result = [loaded(worker, "its own", 60), loaded(reader, "within", 60)]
    worker.close()
    result.append(loaded(reader, "after", 60))
    lacking = free - server.ask("free")
    reader.close()
    return [*result, lacking]


def another_of_its_number(server: Server) -> Any:
    """Two engines have one number, as two containers may to 0.4.7. While one copies, the other sends the same prompt.

    What others load then: that prompt, and one that was stored meanwhile.
    """
    others = Worker(server.port, 1.0)

    def act(worker: Worker) -> None:
        with hidden(server):
            other = Worker(server.port, 1.0, number=worker.adapter.instance_id)
        other.fill(70, FIRST)
        other.store("sent", 70, FIRST)
        other.finished("sent")
        server.ask("evict")
        assert len(stored_and_loaded(others, "within", 71)) == 3

    begun(server, 70, act).finished("store")
    result = [loaded(others, "70", 70), loaded(others, "71 again", 71)]
    others.close()
    return result


def two_of_one_request(server: Server) -> Any:
    """A request stores a prompt's second half, is preempted, and stores both, since the first half was evicted. The end
    of the first store comes when the second has begun: from 0.5.2 on a worker's threads say it one after the other.

    What others load of the first half then, and when the second store has ended too.
    """
    others, worker = Worker(server.port, 1.0), Worker(server.port, 1.0)
    context = getattr(worker.adapter.transfer_ctx, "_engine_driven_context", None)
    context = context or worker.adapter.transfer_ctx._non_gpu_context  # to 0.4.7
    asked: list[tuple[Any, ...]] = []
    prepare = context.prepare_store
    context.prepare_store = lambda *store: (asked.append(store), prepare(*store))[1]
    worker.fill(80, FIRST)
    result = []

    def first_half(prompt: int) -> None:
        others.fill(prompt, FIRST)
        others.store(f"half of {prompt}", prompt, FIRST[:2])
        others.finished(f"half of {prompt}")

    def first_ends() -> None:
        context.commit_store(*asked[0], [])
        result.append(loaded(others, "within", 80, SECOND[:2]))

    def preempted() -> None:
        server.ask("evict")
        first_half(81)  # in the same memory
        server.ask("evict")
        with within_the_copy(first_ends):
            worker.store("request", 80, FIRST)
        dies()  # its end has been said

    first_half(80)
    with within_the_copy(preempted, copied=True), contextlib.suppress(Died):
        worker.store("request", 80, FIRST)
    result.append(loaded(others, "after", 80, SECOND[:2]))
    for one in (worker, others):
        one.close()
    return result


def many_of_one_request(server: Server) -> Any:
    """What `two_of_one_request` does, of many requests, whose stores all end; and asks that are given no room.

    How many chunks the cache lacks then, and whether the server remembers more after sixty requests than after one.
    """
    worker = Worker(server.port, 1.0)
    context = getattr(worker.adapter.transfer_ctx, "_engine_driven_context", None)
    context = context or worker.adapter.transfer_ctx._non_gpu_context  # to 0.4.7
    own = context.prepare_store
    asked: list[tuple[Any, ...]] = []

    def named(name: str, prompt: int, blocks: list[int]) -> tuple[Any, ...]:
        """The names by which the worker would store this. As where all is there, it does not."""
        context.prepare_store = lambda *store: (asked.append(store), ([], []))[1]
        worker.store(name, prompt, blocks)
        worker.finished(name)
        context.prepare_store = own
        return asked.pop()

    def stores(*store: Any) -> None:
        context.prepare_store(*store)
        context.commit_store(*store, [])

    def request(prompt: int) -> None:
        stores(*named(f"half of {prompt}", prompt, FIRST[:2]))
        store = named(f"request {prompt}", prompt, FIRST)
        context.prepare_store(*store)
        context.prepare_store(*store)  # all is reserved: it is given no room
        server.ask("evict")
        context.prepare_store(*store)
        for _ in range(2):
            context.commit_store(*store, [])
        server.ask("evict")

    server.ask("evict")
    free = server.ask("free")
    request(100)
    remembered = server.ask("remembered")
    for prompt in range(101, 160):
        request(prompt)
    lacking = free - server.ask("free")
    result = [lacking, server.ask("remembered") - remembered]
    worker.close()
    return result


CASES: tuple[Callable[[Server], Any], ...] = (
    goodbye,
    death,
    copies_after_its_goodbye,
    copies_after_it_was_forgotten,
    copies_for_long,
    cannot_map_the_pool,
    another_of_its_number,
    two_of_one_request,
    many_of_one_request,
)


def played(*names: str) -> dict[str, Any]:
    """What each of these cases came to."""
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    # All servers first: a process that has used ZMQ cannot be forked.
    cases = [case for case in CASES if case.__name__ in names]
    servers = [Server(held=True) for _ in cases]
    came: dict[str, Any] = {}
    for case, server in zip(cases, servers, strict=True):
        server.start()
        came[case.__name__] = attempted(partial(case, server))
        server.kill()
    return came


def main() -> None:
    vllm = importlib.import_module("vllm")
    print_result({"cases": played(*sys.argv[1:])}, lmcache, vllm)
    leave()  # not by the adapters' shutdown: their servers are gone


if __name__ == "__main__":
    main()
