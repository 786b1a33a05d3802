# mypy: disable-error-code="import-not-found"
"""Requests that have one id, at one real LMCache server that copies KV; what each loads, as JSON.

A gateway may give all calls of a trace one id, and vLLM keeps it where its ids are not made random. The server, its
storage, the adapters and the cache's contents are those of `lmcache_failed_copies`.

The argument is mp-block-transfer's file.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, until

begin_driver()

import functools
import importlib
import sys
import threading
from typing import Any

import lmcache_failed_copies as copies
from lmcache_failed_copies import FIRST, SECOND, Server, Worker
from lmcache_operations import packed

TOKENS = len(FIRST) * copies.BLOCK
"""Of each prompt."""


def stores(worker: Worker, name: str, prompt: int, blocks: list[int] = FIRST) -> None:
    """A request of this id stores what it has of a prompt."""
    worker.fill(prompt, blocks)
    worker.adapter.submit_store_request(name, worker.operation(prompt, blocks), worker.event())
    worker.is_done()


def loads(worker: Worker, name: str, prompt: int) -> list[Any]:
    """How many tokens of a prompt a request of this id is promised, whether its load ended well and was right."""
    worker.scheduler.maybe_submit_lookup_request(name, packed([prompt] * (TOKENS + 1)))
    found: list[int] = []

    def answered() -> bool:
        found.extend([one for one in [worker.scheduler.check_lookup_result(name)] if one is not None])
        return bool(found)

    until(answered)
    (tokens,) = found
    return [tokens, *(worker.load(name, prompt, SECOND[: tokens // copies.BLOCK]) if tokens else [])]


def replicas(server: Server) -> list[Any]:
    """Two engines have a request of one id each: what the other one loads; and what third ones load of what it stores."""
    one, other, third = Worker(server), Worker(server), Worker(server)
    third.store(6)
    stores(one, "trace", 5)
    came = [loads(other, "trace", 6)]
    stores(other, "trace", 7)
    came += [third.loaded(7), loads(one, "trace", 5)]
    server.ask("evict")
    stores(other, "trace", 8)
    came.append(third.loaded(8))
    # Prompt 5 is gone, or still there where a lookup has it locked: but it is nobody else's KV.
    return [*came, third.loaded(5) in ([0], [TOKENS, True, True])]


def again(server: Server) -> list[Any]:
    """One engine's id comes again, and the server still has the session of the request that had it before."""
    one = Worker(server)
    one.store(16)
    stores(one, "again", 15)
    came = [loads(one, "again", 16)]
    stores(one, "again", 17)
    return [*came, one.loaded(17)]


def goes_on(server: Server) -> list[Any]:
    """One request stores its prompt in parts, and loads it."""
    one, other = Worker(server), Worker(server)
    for blocks in (FIRST[:2], FIRST[:4], FIRST):
        stores(one, "goes on", 25, blocks)
    return [other.loaded(25), loads(one, "goes on", 25)]


CASES = {"replicas": replicas, "again": again, "goes on": goes_on}

ROUNDS, THREADS = 300, 4


def at_once() -> int:
    """How many of the hashes that one session gives to several threads are another thread's."""
    sessions = importlib.import_module("lmcache.v1.multiprocess.session")
    hasher = importlib.import_module("lmcache.v1.multiprocess.token_hasher").TokenHasher(copies.CHUNK)
    shared = sessions.SessionManager(hasher).get_or_create("trace")
    wrong = [0] * THREADS
    begin = threading.Barrier(THREADS)

    def messages(thread: int) -> None:
        tokens = [thread] * (8 * copies.CHUNK)
        own = sessions.SessionManager(hasher).get_or_create("own")
        own.set_tokens(tokens)
        hashes = own.get_hashes(0, len(tokens))
        begin.wait()
        for number in range(ROUNDS):
            end = (1 + number % 8) * copies.CHUNK
            shared.set_tokens(tokens[:end])
            wrong[thread] += shared.get_hashes(0, end) != hashes[: end // copies.CHUNK]

    threads = [threading.Thread(target=messages, args=(number,)) for number in range(THREADS)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # between any two operations
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    sys.setswitchinterval(switch)
    return sum(wrong)


def played(transfer: str) -> dict[str, Any]:
    """What each case came to, with a server of its own."""
    copies.without_device(transfer)
    importlib.import_module("lmcache")
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    importlib.import_module("lmcache.v1.multiprocess.token_hasher").TokenHasher(copies.CHUNK)
    # All servers first: a process that has used ZMQ cannot be forked.
    servers = {name: Server() for name in CASES}
    came: dict[str, Any] = {}
    for name, server in servers.items():
        server.start()
        came[name] = attempted(functools.partial(CASES[name], server))
        server.kill()
    return came


def main() -> None:
    found = played(sys.argv[1])
    print_result({"cases": found, "at once": attempted(at_once)}, sys.modules["lmcache"])
    leave()


if __name__ == "__main__":
    main()
