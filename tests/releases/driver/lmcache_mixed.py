# mypy: disable-error-code="import-not-found"
"""Let workers with this process's bundle, or none, share a real LMCache server that has another, or none.

`lmcache_mixed.py ROLE BUNDLE`: ROLE is what this process has: the `worker`, or the `server` and a second worker beside it.
BUNDLE is the other process's, a folder or `none`. Nothing fails here. Blocks have contents: those of a prompt are filled
with its number. Print one JSON object: what each worker finds and loads of what each has stored, and what the server keeps.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import halves
import lmcache_server

lmcache_server.compiled()

import lmcache
import vllm
from lmcache_server import BLOCK, Answer, Server, Worker

SCRIPT = str(Path(__file__).resolve())
FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]
MANY = 20
"""So many prompts are stored, one after another, before the first of them is loaded."""


class WorkerHalf(halves.Half):
    """A worker of an engine. It may end and begin again, as an engine that is started anew."""

    requests = 0

    def begin(self, port: int) -> None:
        Answer.servers.setdefault(port, SimpleNamespace(is_silent=lambda: False, leaves_out=False))  # type: ignore[arg-type]
        self.worker = Worker(port, 5.0)
        self.worker.beat()

    def end(self) -> None:
        self.worker.close()

    def name(self) -> str:
        """Of the next request, which is nobody else's and never comes again."""
        self.requests += 1
        return f"{os.getpid()} {self.requests}"

    def store(self, prompt: int, blocks: list[int]) -> bool:
        """Store a prompt's first blocks; whether that is reported once the request has ended."""
        self.worker.fill(prompt, blocks)
        name = self.name()
        self.worker.store(name, prompt, blocks)
        stored, _, _ = self.worker.finished(name)
        return stored == [name]

    def load(self, prompt: int) -> list[Any]:
        """How many tokens of a prompt are a hit, whether their load ends well, and whether they are the prompt's."""
        name = self.name()
        hit = self.worker.hit(name, prompt, len(SECOND) * BLOCK + 1)
        if not hit:
            return [hit]
        into = SECOND[: hit // BLOCK]
        self.worker.fill(-1.0, SECOND)
        self.worker.load(name, prompt, into)
        _, loads, failed = self.worker.finished(name)
        return [hit, loads == [name] and not failed, self.worker.holds(prompt, into)]


class ServerHalf(WorkerHalf):
    """A server, and a worker of the same bundle."""

    def __init__(self) -> None:
        self.server = Server()  # before this process uses ZMQ: it is forked

    def port(self) -> int:
        return self.server.port

    def ask(self, question: str) -> Any:
        return self.server.ask(question)

    def kill(self) -> None:
        self.server.kill()


def story(server: Any, worker: Any) -> dict[str, Any]:
    """Prompts that one of the workers stores, and each loads; one of them begins anew; what the server has then."""
    port = server.do("port")
    both = {"worker": worker, "second": server}
    for half in both.values():
        half.do("begin", port)
    free = server.do("ask", "free")
    result: dict[str, Any] = {}
    for number, (name, storing) in enumerate(both.items()):
        stored = storing.do("store", 10 + number, FIRST)
        loaded = [loading.do("load", 10 + number) for loading in both.values()]
        result[f"stored by {name}"] = [stored, *loaded]
    stored = [worker.do("store", 20, FIRST[:2]), server.do("load", 20), server.do("store", 20, FIRST)]
    result["a half, then the rest by the second"] = [*stored, worker.do("load", 20)]
    for prompt in range(100, 100 + MANY):
        both[["worker", "second"][prompt % 2]].do("store", prompt, FIRST)
    result["many"] = [both[["second", "worker"][prompt % 2]].do("load", prompt) for prompt in range(100, 100 + MANY)]
    worker.do("end")
    result["after one has ended"] = [server.do("load", 11), server.do("ask", "known")]
    worker.do("begin", port)
    result["it begins anew"] = [worker.do("load", 10), worker.do("store", 30, FIRST), server.do("load", 30)]
    for half in both.values():
        half.do("end")
    server.do("ask", "evict")
    result["left"] = {"chunks": free - server.do("ask", "free"), "workers": server.do("ask", "known")}
    server.do("kill")
    return result


def main() -> None:
    role, given, *more = sys.argv[1:]
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    half = ServerHalf() if role == "server" else WorkerHalf()
    if more:
        half.serve()
        leave()
    other = halves.Other(SCRIPT, ["worker" if role == "server" else "server", "none", "other"], given)
    result = story(half, other) if role == "server" else story(other, half)
    other.end()
    print_result({"pid": os.getpid(), "cases": result}, lmcache, vllm)
    leave()


if __name__ == "__main__":
    main()
