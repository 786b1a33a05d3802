# mypy: disable-error-code="import-not-found"
"""Stop or kill a real LMCache server under a real worker's calls; print what each step came to, as JSON."""

from __future__ import annotations

import gc
import os

gc.disable()
# vLLM and LMCache log to stdout, which here belongs to the result.
RESULT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import importlib
import json
import signal
import sys
import threading
import time
import traceback
from typing import Any

import lmcache_server

lmcache_server.compiled()

import lmcache
from lmcache_server import Server, Worker, until

TIMEOUT = 5.0
"""mq_timeout, in seconds; the patch's SECONDS is a tenth of it."""

FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


def waits() -> list[float]:
    """Note how many seconds each wait of this thread was that came to nothing, from now on."""
    noted: list[float] = []
    futures = importlib.import_module("lmcache.v1.multiprocess.futures")
    main, wait = threading.current_thread(), futures.MessagingFuture.wait

    def noting(self: Any, timeout: float | None = None) -> bool:
        answered = bool(wait(self, timeout))
        if threading.current_thread() is main and not answered:
            noted.append(-1.0 if timeout is None else timeout)
        return answered

    futures.MessagingFuture.wait = noting
    return noted


def stored(worker: Worker, prompt: int) -> None:
    worker.fill(prompt, FIRST)
    worker.store(f"store {prompt}", prompt, FIRST)
    worker.finished(f"store {prompt}")


def step_with_a_stopped_server(server: Server) -> Any:
    """Two loads and two stores of one step, to which nobody answers; then the server goes on."""
    worker = Worker(server.port, TIMEOUT, interval=0.3)
    stored(worker, 5)
    hits = [worker.hit(name, 5, 65) for name in ("a", "b")]
    server.stop()
    noted = waits()
    worker.load("a", 5, SECOND)
    worker.load("b", 5, THIRD)
    worker.store("c", 6, FIRST)
    worker.store("d", 6, FIRST)
    result = {"hits": hits, "step": worker.finished("c", "d"), "waits": sorted(set(noted))}
    worker.store("e", 6, FIRST)
    result["next step"] = [worker.finished("e"), worker.adapter.is_healthy]
    os.kill(server.pid, signal.SIGCONT)
    until(lambda: bool(worker.adapter.is_healthy and worker.scheduler.is_healthy))
    worker.fill(7, FIRST)
    worker.store("f", 7, FIRST)
    worker.finished("f")
    hit = worker.hit("g", 7, 65)
    worker.load("g", 7, SECOND)
    return {**result, "again": [hit, worker.finished()[1:], worker.holds(7, SECOND)]}


def first_of_two_loads(server: Server) -> Any:
    """The server is stopped between two loads of one step: the first has come."""
    worker = Worker(server.port, TIMEOUT, interval=30.0)
    stored(worker, 5)
    for name in ("a", "b"):
        worker.hit(name, 5, 65)
    worker.load("a", 5, SECOND)
    server.stop()
    noted = waits()
    worker.load("b", 5, THIRD)
    result = [worker.finished()[1:], worker.holds(5, SECOND), sorted(set(noted))]
    os.kill(server.pid, signal.SIGCONT)
    return result


def refused(server: Server) -> Any:
    """A load of what the server does not have: answered at once, and failed."""
    worker = Worker(server.port, TIMEOUT)
    stored(worker, 5)
    worker.load("a", 9, SECOND)
    return [worker.finished()[1:], worker.adapter.is_healthy]


def lookup(server: Server) -> Any:
    """The scheduler asks a server that does not answer."""
    worker = Worker(server.port, TIMEOUT, interval=30.0)
    stored(worker, 5)
    server.stop()
    hit = worker.hit("a", 5, 65)
    os.kill(server.pid, signal.SIGCONT)
    return [hit, worker.scheduler._mq_timeout]


CASES: dict[str, Any] = {
    "step_with_a_stopped_server": step_with_a_stopped_server,
    "first_of_two_loads": first_of_two_loads,
    "refused": refused,
    "lookup": lookup,
}


def main() -> None:
    result: dict[str, Any] = {"lmcache": lmcache.__file__, "cases": {}}
    result["vllm"] = importlib.import_module("vllm").__file__
    # All servers first: a process that has used ZMQ cannot be forked.
    servers = {name: Server() for name in sys.argv[1:] or CASES}
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
