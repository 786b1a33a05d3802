"""Cases of mooncake_asks.py: prefill's workers register with the bootstrap server one by one, and decode asks meanwhile."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import mooncake_sides as sides
from mooncake_sides import Side, decoding, prefilling, ranked
from ports import free_port

HEADS = 4
"""Of the model: with as many workers as heads 0.19.1 takes each worker's part for the whole, and sends the first one's."""


def known_later(pair: Any) -> Any:
    """The bootstrap server does not know the worker that decode is to ask, but another one; then it does."""
    server = pair.prefill.worker.bootstrap_server
    kind = vars(sys.modules[type(server).__module__])["EngineEntry"]
    result = []
    for name, rank in (("not-yet", 1), ("by-now", 0)):
        server.workers[7] = kind(engine_id="later", worker_addr={rank: {0: address(pair.prefill)}})
        pair.leg(name, [1, 2])
        pair.ask(name, [1, 2], SimpleNamespace(engine_id="later", port=pair.prefill.port))
        result.append(pair.loaded(name, [1, 2]))
    del server.workers[7]
    return result


def uneven(pair: Any) -> Any:
    """Decode has two workers, and knows three of prefill's; in the same step it is to ask another engine, of one."""
    with ranked(0, 2):
        decode = Side(pair.decode.model_config, "kv_consumer", "decode-of-two", free_port(), 2, HEADS)
    two, worker = type(pair)(pair.prefill, decode), decode.worker
    sizes = [worker._tp_size, getattr(getattr(worker, "kv_topo", None), "remote_tp_size", {})]
    engines = {}
    for name, number in (("uneven", 3), ("even", 1)):
        worker._remote_agents[name] = {rank: {0: address(pair.prefill)} for rank in range(number)}
        for size in sizes:
            size[name] = number
        engines[name] = SimpleNamespace(engine_id=name, port=pair.prefill.port)
    two.leg("even", [4, 5])
    decode.admit(decoding("d-uneven", "uneven", 2, engines["uneven"]), [21, 22])
    two.ask("even", [4, 5], engines["even"])
    return two.loaded("uneven", [1, 2]), two.loaded("even", [4, 5])


def registering(pair: Any) -> Any:
    """Decode asks a prefill engine of two workers when the first of them has registered, and again when both have."""
    port, result, workers = free_port(), [], []
    for rank, name in enumerate(("one-has", "both-have")):
        with ranked(rank, 2):
            workers.append(Side(pair.decode.model_config, "kv_producer", "registering", port, 2, HEADS))
            workers[-1].fill(range(sides.BLOCKS), pair.OWN)
            for side in workers if rank else ():
                request = prefilling(f"p-{name}", name, 2)
                side.admit(request, [1, 2])
                side.step()
                side.finish(request, [1, 2], "FINISHED_LENGTH_CAPPED")
                side.step()
            pair.ask(name, [1, 2], workers[0])
            result.append(pair.loaded(name, [1, 2], 60 if rank else None))
    return result


def address(side: Side) -> str:
    """Where a prefill worker takes asks."""
    return f"tcp://127.0.0.1:{side.worker.side_channel_port}"


CASES = (known_later, uneven, registering)
