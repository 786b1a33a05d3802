"""The same as in mooncake_layers.py, of a prefill worker with few threads: more asks than it has tasks for them.

`mooncake_crowd.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mooncake_layers as layers
from mooncake_layers import Pair
from mooncake_sides import Side, wait

THREADS = 2
"""That write. The release has twice as many tasks for asks, and half as many early writes are under way at once."""


class Prefill(layers.Prefill):
    def __init__(self, model_config: Any, port: int, side: Side | None = None) -> None:
        few = side or Side(model_config, "kv_producer", "prefill", port, num_workers=THREADS)
        super().__init__(model_config, port, few)


def crowd(pair: Pair) -> Any:
    """All are asked for before the first of their prefills is computed: how many there are for each task, what came."""
    worker = pair.prefill.worker
    names = [f"crowd-{number}" for number in range(worker.num_sender_tasks + 3)]
    places = {name: pair.ask(name, arrives=False) for name in names}
    assert wait(lambda: len({*names} & {*worker.reqs_need_send}) >= worker.num_sender_tasks)
    for number, name in enumerate(names):
        pair.prefill.compute(name, content=70 + number)
    came = [pair.end(name, places[name], content=70 + number) for number, name in enumerate(names)]
    return worker.num_sender_tasks, came, pair.left()


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
