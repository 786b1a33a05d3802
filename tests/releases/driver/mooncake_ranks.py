"""KV that leaves early, with tensor parallelism: engines of one or two workers each; print what came, as JSON.

Real, the release's own: each engine's scheduler, the connectors of all its workers, their order of calls in a step, the
aggregation of what workers answer, and Mooncake's engine for each worker, over tcp. Set: all workers are in one process
and step one after the other; each is told its rank and size, by the release's own group, while it is made. What a
scheduler sends its workers, and what they answer, is pickled, as between processes. A model that writes a number into
each head's K and V of each block stands for one. `mooncake_ranks.py PATIENCE SHAPE...`: 2-1 is two workers of prefill's
and one of decode's.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import mooncake_engines as engines
import mooncake_layers as layers
import mooncake_sides as sides
from mooncake_engines import PATIENCE, PROMPT, SIZE
from mooncake_sides import LAYERS, Side, ranked
from ports import free_port
from result import wait
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

HEADS = 4
"""Of the model. Each worker has its share."""
WHOLE = -(-PROMPT // SIZE)


def number(layer: int, content: int, place: int, tokens: int, head: int, value: bool) -> int:
    """What a head's K or V of a block holds: whole numbers that a float32 has."""
    return (((content * 8 + place) * 33 + tokens) * len(LAYERS) + layer) * 2 * HEADS + 2 * head + value


def workers(model_config: Any, role: str, engine_id: str, port: int, size: int) -> list[Side]:
    made = []
    for rank in range(size):
        with ranked(rank, size):
            made.append(Side(model_config, role, engine_id, port, size, HEADS))
        assert (made[-1].worker.tp_rank, made[-1].worker.tp_size) == (rank, size)
    return made


def parts(side: Side, layer: str, block: int) -> Iterator[tuple[int, bool, Any]]:
    """A block's memory: of which head of the model's, whether V, and which."""
    here = side.caches[layer].select(side.dimension, block)
    for head in range(side.heads):
        of = side.worker.tp_rank * side.heads + head
        if here.dim() == 4:  # K and V, each with its heads
            yield from ((of, bool(value), here[value, head]) for value in (0, 1))
        else:
            yield from ((of, bool(value), here[head, :, 32 * value : 32 * value + 32]) for value in (0, 1))


def right(side: Side, layer: str, blocks: list[int], content: int) -> int | str:
    """How many blocks hold what they are to hold, from the first on; or what is wrong."""
    found = []
    for place, block in enumerate(blocks):
        tokens = min(PROMPT - place * SIZE, SIZE)
        held = [(of, value, memory.unique().tolist()) for of, value, memory in parts(side, layer, block)]
        wanted = [
            (of, value, [number(LAYERS.index(layer), content, place, tokens, of, value)]) for of, value, _ in held
        ]
        if held != wanted and {tuple(one) for _, _, one in held} != {(engines.OLD,)}:
            return f"wrong: {held} for {wanted}"
        found.append(held == wanted)
    came = sum(found)
    return came if all(found[:came]) else f"wrong: {found}"


class Workers(engines.Engine):
    """An engine of several workers."""

    ranks: list[Side]
    aggregator: Any = None

    def work(self, scheduled: Any) -> Any:
        if self.aggregator is None:
            self.aggregator = KVOutputAggregator.from_connector(self.side.connector, len(self.ranks))
        outputs = []
        for side in self.ranks:
            self.side = side
            outputs.append(pickle.loads(pickle.dumps(super().work(pickle.loads(pickle.dumps(scheduled))))))
        self.side = self.ranks[0]
        return self.aggregator.aggregate(outputs, 0)


class Prefill(Workers, layers.Prefill):
    def __init__(self, model_config: Any, port: int, size: int) -> None:
        self.ranks = workers(model_config, "kv_producer", "prefill", port, size)
        super().__init__(model_config, port, self.ranks[0])
        self.links = [self.link, *(engines.linked(side) for side in self.ranks[1:])]

    def layer(self, scheduled: Any, layer_name: str) -> None:
        for block, *what in self.written(scheduled):
            for head, value, memory in parts(self.side, layer_name, block):
                memory.fill_(number(LAYERS.index(layer_name), *what, head, value))

    def waits(self, number: int) -> None: ...


class Decode(Workers):
    def __init__(self, model_config: Any, size: int) -> None:
        self.ranks = workers(model_config, "kv_consumer", "decode", 0, size)
        super().__init__(model_config, "kv_consumer", self.ranks[0])
        self.computes_on: dict[str, list[Any]] = {}

    def forward(self, scheduled: Any) -> None:
        """On what a request's first step computes: how many tokens, and how many blocks that each worker has of them."""
        for new in scheduled.scheduled_new_reqs:
            has = self.came(self.side, new.req_id, new.prompt_token_ids[0] - 1)
            self.computes_on.setdefault(new.req_id, [new.num_computed_tokens]).append(has)

    def came(self, side: Side, name: str, content: int) -> Any:
        found = [right(side, layer, self.blocks(name), content) for layer in LAYERS]
        return found[0] if len(set(found)) == 1 else found


def asks_of(writes: Any, transfer: str) -> int:
    """How many asks for a transfer a worker of prefill's knows."""
    return sum(transfer in [one for one, _ in ask.meta.req_blocks.values()] for ask in writes._asks.values())


class World:
    def __init__(self, model_config: Any, prefill: int, decode: int) -> None:
        self.port = free_port()
        self.prefill = Prefill(model_config, self.port, prefill)
        self.decode = Decode(model_config, decode)
        self.asks = max(1, decode // prefill)  # of one worker of prefill's, for a request
        self.early = decode >= prefill and hasattr(self.prefill.worker, "_livepatch_writes")

    def on_loop(self, look: Any) -> bool:
        """Whether it holds for the writes of each of prefill's workers, on its own loop."""

        async def looked(worker: Any) -> bool:
            writes = getattr(worker, "_livepatch_writes", None)
            return writes is None or bool(look(writes))

        found = [
            asyncio.run_coroutine_threadsafe(looked(one.worker), one.worker.sender_loop) for one in self.prefill.ranks
        ]
        return all(one.result() for one in found)

    def settled(self) -> None:
        def now() -> bool:
            idle = self.on_loop(lambda writes: not any(part.under_way for part in writes._parts()))
            return idle and all(link.begun == link.ended for link in self.prefill.links)

        assert wait(now)

    def ask(self, name: str, content: int, arrives: bool = True) -> None:
        for side in self.decode.ranks:
            for cache in side.caches.values():
                cache.fill_(engines.OLD)
        for link in self.prefill.links:
            link.bytes = 0
        where = {"remote_engine_id": "prefill", "remote_bootstrap_addr": f"http://127.0.0.1:{self.port}"}
        self.decode.add(f"d-{name}", content=content, do_remote_prefill=True, transfer_id=name, **where)
        self.decode.step()
        if arrives:
            assert wait(lambda: all(name in one.worker.reqs_need_send for one in self.prefill.ranks))
            assert wait(lambda: self.on_loop(lambda writes: asks_of(writes, name) == self.asks))

    def came(self, name: str, content: int) -> list[Any]:
        return [self.decode.came(side, f"d-{name}", content) for side in self.decode.ranks]

    def end(self, name: str) -> list[Any]:
        """Both go on to the end: on what decode computed, what each link brought, and the blocks that do not come back."""

        def over() -> bool:
            self.prefill.step()
            self.decode.step()
            return not self.prefill.scheduler.requests and not self.decode.scheduler.requests

        assert wait(over), f"{name} does not end"
        brought = [link.blocks() for link in self.prefill.links]
        return [self.decode.computes_on[f"d-{name}"], brought, self.prefill.taken(), self.decode.taken()]


def early(world: World) -> Any:
    """Asked before prefill begins: what has come after each layer of each worker's first step, and after each step."""
    world.ask("early", 1)
    world.prefill.compute("early", content=1)
    after: list[Any] = []

    def look(number: int) -> None:
        world.settled()
        after.append(world.came("early", 1))

    world.prefill.between = look
    world.prefill.step()
    world.prefill.between = world.prefill.waits
    steps = []
    for _ in range(3):
        world.settled()
        steps.append(world.came("early", 1))
        world.prefill.step()
    return after, steps, world.end("early")


def late(world: World) -> Any:
    """Asked when prefill has ended."""
    world.prefill.compute("late", content=2)
    for _ in range(5):
        world.prefill.step()
    world.ask("late", 2, arrives=False)
    return world.end("late")


def aborted(world: World) -> Any:
    """Prefill is given up while an early write of its last worker is under way: until its end no block comes back."""
    link = world.prefill.links[-1]
    world.ask("aborted", 3)
    world.prefill.compute("aborted", content=3)
    link.open.clear()
    world.prefill.step()
    under_way = wait(lambda: link.begun > link.ended, sides.SECONDS if world.early else PATIENCE)
    world.prefill.abort("p-aborted")

    def free() -> bool:
        world.prefill.step()
        return not world.prefill.taken()

    held = not wait(free, PATIENCE if world.early else sides.SECONDS)
    link.open.set()
    return under_way, held, wait(free)


def failed(world: World) -> Any:
    """An early write of prefill's last worker fails: its request is not answered, and the blocks of all are held."""
    link = world.prefill.links[-1]
    world.ask("failed", 4)
    world.prefill.compute("failed", content=4)
    link.refuse = 1
    world.prefill.step()
    wait(lambda: not link.refuse, sides.SECONDS if world.early else PATIENCE)
    for _ in range(5):
        world.prefill.step()

    def waits() -> bool:
        world.prefill.step()
        world.decode.step()
        return "d-failed" not in world.decode.computes_on and "d-failed" in world.decode.scheduler.requests

    # From 0.30.0 the release tells decode's scheduler of a failed write at its end.
    reports_failures = hasattr(world.decode.worker, "_invalid_block_ids") and not world.early
    waited = not wait(lambda: not waits(), sides.SECONDS if reports_failures else PATIENCE)
    link.refuse = 0
    held = world.prefill.taken()
    link.later()
    for entry in [one for side in world.prefill.ranks for one in side.worker.reqs_need_send.values()]:
        if entry.p_req_id:
            entry.expire_time = 0.0
    wait(lambda: world.prefill.step() or not world.prefill.taken(), 10)
    return waited, world.decode.computes_on.get("d-failed"), held, world.prefill.taken()


CASES = (early, late, failed, aborted)
AT_THE_END = (early, late)
"""Where prefill has more workers than decode."""


def play(model_config: Any) -> Any:
    result = {}
    for shape in sys.argv[2:]:
        world = World(model_config, *map(int, shape.split("-")))
        engines.any_size_by_layer()
        result[shape] = engines.played(
            CASES if len(world.decode.ranks) >= len(world.prefill.ranks) else AT_THE_END, world
        )
    return result


def main() -> None:
    engines.drive(play, HEADS)


if __name__ == "__main__":
    main()
