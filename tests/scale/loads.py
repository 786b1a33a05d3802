# mypy: disable-error-code="import-not-found"
"""Loads without a fault, each a function: what comes to a release's engine, in order, and what is looked at meanwhile.

A load returns what must be the same on stock (`ends`), what the bundle's code executes for it once and for twice as much
(`operations`), and what the bundle keeps at even distances of it (`kept`), each where it looks at that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import real_scheduler as real

from tests.scale import lmcache_double
from tests.scale.engine import BLOCK, Client, Engine
from tests.scale.lmcache_double import CHUNK
from tests.scale.ours import Operations, kept, slow_fronts

LMCACHE = (lmcache_double.MODULE, "LMCacheMPConnector")
MULTI = ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
QUIET = ("tests.scale.quiet", "QuietConnector")
HEARTBEAT = {"lmcache.mp.heartbeat_interval": 3600}
QUIET_STEPS = 200
"""Steps in which no client gets anything before an engine counts as one that hangs."""
LOOKS = 8
"""How often it is looked at what a life keeps."""

Load = Callable[..., dict[str, Any]]


def prompt(name: str, tokens: int) -> list[int]:
    """A prompt like no other name's."""
    return random.Random(name).choices(range(3, 250), k=tokens)


def make(model_config: Any, lmcache: bool, **options: Any) -> tuple[Engine, lmcache_double.Server]:
    """An engine, with LMCache or with no connector."""
    server = lmcache_double.serve()
    engine = Engine(model_config, LMCACHE if lmcache else None, extra=HEARTBEAT, **options)
    if engine.worker is not None:
        lmcache_double.connect(server, engine.worker)
    return engine, server


def ended(model_config: Any, *, requests: int, at_once: int = 256) -> dict[str, Any]:
    """What a worker with two connectors hears of very many requests: that they have ended. One of the two sends none."""
    server = lmcache_double.serve()
    engine = Engine(model_config, MULTI, extra={"connectors": [connector(*LMCACHE, HEARTBEAT), connector(*QUIET, {})]})
    lmcache_double.connect(server, engine.worker._connectors[0])
    looks: list[dict[str, int]] = []
    slow: set[str] = set()
    sent = 0
    for step in range(requests // at_once):
        scheduled = engine.scheduler.schedule()
        scheduled.finished_req_ids = {f"request {step * at_once + number}" for number in range(at_once)}
        sent += len(engine.work(scheduled.kv_connector_metadata, scheduled).finished_sending or ())
        server.step()
        if (step + 1) * at_once * LOOKS // requests > len(looks):
            looks.append(kept(engine.roots()))
            slow.update(slow_fronts(engine.roots()))
    return {"ends": {"sent": sent}, "kept": looks, "slow": sorted(slow)}


def connector(module: str, name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """One of several connectors, as a configuration names it."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def settle(engine: Engine, server: lmcache_double.Server) -> None:
    """Let the last steps and transfers end."""
    for _ in range(8):
        engine.step()
        server.step()


def left_in(engine: Engine) -> dict[str, int]:
    """What an engine holds when all has ended: requests, and blocks."""
    return {"requests held": len(engine.scheduler.requests), "blocks held": len(real.held_blocks(engine.scheduler))}


def twice(play: Callable[[int], tuple[Any, dict[str, int]]], size: int) -> dict[str, Any]:
    """A load, and the same of twice the size: how each ends, and what it costs."""
    results = [play(size), play(2 * size)]
    return {"ends": [ends for ends, _ in results], "operations": [operations for _, operations in results]}


def long_prompt(model_config: Any, *, tokens: int, step: int = 64, lmcache: bool = True) -> dict[str, Any]:
    """One prompt, computed a part a step, each stored a step later."""

    def play(size: int) -> tuple[Any, dict[str, int]]:
        engine, server = make(model_config, lmcache, blocks=size // BLOCK + 16, budget=step, pickled=False)
        client = Client(0, "long", prompt("long", size), 4)
        with Operations() as operations:
            engine.come(client)
            run(engine, server, [client])
        return {client.outcome(): 1, **left_in(engine)}, dict(operations.counted)

    return twice(play, tokens)


def crowd(
    model_config: Any, *, requests: int, lmcache: bool = True, hits: bool = True, **options: Any
) -> dict[str, Any]:
    """So many requests at once, whose prompts LMCache holds, or not: what the most expensive step takes, too."""

    def play(size: int) -> tuple[Any, dict[str, int]]:
        blocks = (6 + 1) * size + 16
        engine, server = make(model_config, lmcache, blocks=blocks, running=size, budget=6 * BLOCK * size, **options)
        clients = [Client(n, f"request {n}", prompt(f"crowd {n}", 6 * BLOCK - 5), 4) for n in range(size)]
        for client in clients if hits else ():
            server.holds(client.prompt, CHUNK)
        with Operations() as operations:
            for client in clients:
                engine.come(client)
            run(engine, server, clients)
        return {**Counter(c.outcome() for c in clients), **left_in(engine)}, dict(operations.counted)

    return twice(play, requests)


def run(engine: Engine, server: lmcache_double.Server, clients: list[Client]) -> None:
    """Step until all have ended, or none gets anything any more."""
    quiet, seen = 0, None
    while any(not client.end for client in clients) and quiet < QUIET_STEPS:
        engine.step()
        server.step()
        now = (
            sum(client.got for client in clients),
            sum(r.num_computed_tokens for r in engine.scheduler.requests.values()),
        )
        quiet, seen = (quiet + 1 if now == seen else 0), now
    settle(engine, server)
