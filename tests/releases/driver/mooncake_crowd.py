"""The same as in mooncake_layers.py, of a prefill worker with few threads: more asks than it has tasks for them.

`mooncake_crowd.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mooncake_layers as layers
import mooncake_layerwise as chunk
from mooncake_layers import Pair
from mooncake_sides import Side
from result import wait

THREADS = 2
"""That write. The release has twice as many tasks for asks, and half as many early writes are under way at once."""


class Prefill(layers.Prefill):
    def __init__(self, model_config: Any, port: int, side: Side | None = None) -> None:
        few = side or Side(model_config, "kv_producer", "prefill", port, num_workers=THREADS)
        super().__init__(model_config, port, few)


def crowd(pair: Pair) -> Any:
    """All are asked for before the first of their prefills is computed: how many tasks there are; whether any
    block has come after a step; what came in the end.

    A step computes four of them at least, and as many asks have a task: one is both."""
    worker = pair.prefill.worker
    names = [f"crowd-{number}" for number in range(worker.num_sender_tasks + 3)]
    places = {name: pair.ask(name, arrives=False) for name in names}
    # With `mooncake-lost-asks` an ask takes no task while it waits.
    taken = len(names) if "mooncake_lost_asks" in chunk.order(pair) else worker.num_sender_tasks
    assert wait(lambda: len({*names} & {*worker.reqs_need_send}) >= taken)
    for number, name in enumerate(names):
        pair.prefill.compute(name, content=70 + number)
    pair.prefill.step()
    assert pair.settled()
    early = [pair.came(places[name], content=70 + number) for number, name in enumerate(names)]
    came = [pair.end(name, places[name], content=70 + number) for number, name in enumerate(names)]
    return worker.num_sender_tasks, sum(early) > 0, came, pair.left()


def layout(pair: Pair) -> Any:
    """Prefill has forgotten where decode's caches are, of which decode tells it once (0.33.0): it asks for that again."""
    worker = pair.prefill.worker
    if not hasattr(worker, "_layout_by_peer"):
        return None
    first = pair.ask("known")
    pair.prefill.compute("known", content=80)
    came = [pair.end("known", first, content=80)]
    known = len(worker._layout_by_peer)
    worker._layout_by_peer.clear()
    second = pair.ask("told-again")
    pair.prefill.compute("told-again", content=81)
    pair.prefill.step()
    assert pair.settled()
    early = pair.came(second, content=81)
    came.append(pair.end("told-again", second, content=81))
    return known, early, came, pair.left()


if __name__ == "__main__":
    layers.Prefill = Prefill  # type: ignore[misc]
    layers.CASES = (crowd, layout)
    layers.main()
