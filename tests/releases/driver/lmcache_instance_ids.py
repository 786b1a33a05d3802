# mypy: disable-error-code="import-not-found"
"""Two workers whose processes have one number, at one real LMCache server that copies KV; what each loads, as JSON.

Containers count their processes from 1 each, so that engines of one image have the same numbers. Here both workers live in
one process. The server, its storage, the adapters and the cache's contents are those of `lmcache_failed_copies`.

The argument is mp-block-transfer's file.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import functools
import importlib
import os
import sys
from typing import Any

import lmcache_failed_copies as copies
from lmcache_failed_copies import FIRST, SECOND, Server, Worker

TOKENS = len(FIRST) * copies.BLOCK
"""Of each prompt."""


def pair(server: Server) -> tuple[Worker, Worker]:
    """Two workers that have registered their caches."""
    return Worker(server, alone=True), Worker(server, alone=True)


def beside(worker: Worker, prompt: int, runs: Worker) -> list[Any]:
    """A worker loads a prompt: how many tokens, whether that ended well and was right; and whether another worker's
    running request, whose blocks have the same numbers, has its KV still."""
    runs.fill(77, SECOND)
    found = worker.loaded(prompt, SECOND)
    return [*found, runs.holds(77, SECOND)]


def loads(server: Server) -> list[Any]:
    one, other = pair(server)
    one.store(5, FIRST)
    other.fill(0, FIRST)
    return [beside(other, 5, one), beside(one, 5, other)]


def stores(server: Server) -> list[Any]:
    one, other = pair(server)
    came = []
    for prompt, stored, loaded in ((15, one, other), (16, other, one)):
        loaded.fill(prompt + 80, FIRST)  # what the other has in blocks of these numbers
        stored.store(prompt, FIRST)
        came.append(loaded.loaded(prompt, SECOND))
    return came


def ended(server: Server) -> list[Any]:
    """What is asked under a number that the server does not know is answered never, or after an error."""
    one, other = pair(server)
    other.store(25, FIRST)
    one.adapter.shutdown()
    return [other.loaded(25, SECOND)]


CASES = {"loads": loads, "stores": stores, "ended": ended}


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
    print_result({"pid": os.getpid(), "cases": found}, sys.modules["lmcache"])
    leave()


if __name__ == "__main__":
    main()
