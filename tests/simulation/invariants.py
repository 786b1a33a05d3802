"""What must never be, whatever happens: checked in each step, and at a world's end."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import real_scheduler as real

from tests.simulation.plan import BLOCK

if TYPE_CHECKING:
    from tests.simulation.transfers import Transfer
    from tests.simulation.world import World

KINDS = {
    "engine died": "an exception left the scheduler",
    "freed while being loaded": "a block is in the pool, or another's, while a load may still write it",
    "freed while being sent": "a block is in the pool, or another's, while a send may still read it",
    "load into another's block": "a load wrote a slot that another request owned",
    "load past a step in flight": "a load wrote a slot that a step in flight had yet to write",
    "load into a cached block": "a load wrote a slot that the prefix cache promises to whoever asks",
    "load into a free block": "a load wrote a slot that the pool may hand out",
    "sent another's contents": "a send read what was not its request's",
    "computed on wrong KV": "a request computed on a slot that did not hold its own KV",
    "never ends": "a request neither answers nor ends",
    "wrong answer": "a request got a token that was sampled on lost KV, or ended with another number of tokens than asked for",
    "computed past its end": "a request was scheduled beyond the last token that it may answer with",
    "left behind": "a block, an id or a record is left when all is over",
    "counters": "the scheduler's figures do not add up",
}
"""Each invariant's name, and what breaks it."""

SCHEDULER_STATE = (
    "requests",
    "running",
    "waiting",
    "skipped_waiting",
    "kv_holding_waiting",
    "deferred_waiting",
    "finished_recving_kv_req_ids",
    "failed_recving_kv_req_ids",
    "deferred_frees",
    "deferred_loads",
    "_inflight_prefills",
    "_kv_fetch_stages",
)
"""What a scheduler of some release keeps of requests, and what must be empty at the end."""


def owner_of(world: World, block: int) -> str | None:
    """The request that holds a block, None where nobody does (it is free, or fenced)."""
    for name, request in world.scheduler.requests.items():
        if any(block in table for table in world.tables(name)):
            client = world.by_request.get(id(request))
            return str(client or name)
    return None


def holds(world: World, transfer: Transfer, block: int) -> bool:
    """Whether the request of a transfer still has the block."""
    client = transfer.owner
    held = world.scheduler.requests.get(client.plan.name)
    if held is not client.request:
        return False
    return any(block in table for table in world.tables(client.plan.name))


def check_transfer(world: World, transfer: Transfer) -> None:
    """No block of a transfer that may still touch it is in the pool, or somebody else's."""
    if transfer.kind == "send" and transfer.early and transfer.lease_ends is not None:
        return  # its lease has ended: what counts is whether its reader believes what it has read
    what = "loaded" if transfer.kind == "load" else "sent"
    blocks = world.pool.blocks
    for block in transfer.blocks:
        if blocks[block].ref_cnt == 0:
            world.wrong(f"freed while being {what}", f"block {block} of {transfer.owner} is free")
        elif not holds(world, transfer, block):
            other = owner_of(world, block)
            if other is not None:
                world.wrong(f"freed while being {what}", f"block {block} of {transfer.owner} is {other}'s")


def check_write(world: World, transfer: Transfer, block: int) -> None:
    """A load writes only its own request's block, and none that a step in flight has yet to compute."""
    for step in world.steps:
        for client, tables, start, end, _ in () if step.executed else step.work:
            if any(block in table[start // BLOCK : -(-end // BLOCK)] for table in tables):
                world.wrong("load past a step in flight", f"{transfer.owner}'s load: {client} computes block {block}")
    if holds(world, transfer, block):
        return
    kept = world.pool.blocks[block]
    if kept.ref_cnt == 0:
        kind = "load into a cached block" if kept.block_hash is not None else "load into a free block"
        world.wrong(kind, f"{transfer.owner}'s load writes block {block}")
        return
    other = owner_of(world, block)
    if other is not None:
        world.wrong("load into another's block", f"{transfer.owner}'s load writes block {block} of {other}")


def check_counts(world: World) -> None:
    """The scheduler knows of at least as many unfinished requests as there are clients that wait."""
    waiting = sum(not client.ended for client in world.clients)
    counted = world.scheduler.get_num_unfinished_requests()
    if counted < waiting:
        world.wrong("counters", f"{counted} unfinished requests are counted, {waiting} clients wait")
    if real.counts_fetches() and min(world.scheduler._kv_fetch_counts.values(), default=0) < 0:
        world.wrong("counters", "a stage of loads is counted below 0")


def check_end(world: World) -> None:
    """All is over: every block, id and record has come back."""
    scheduler = world.scheduler
    excused = world.lost_names()
    for name in SCHEDULER_STATE:
        if name == "failed_recving_kv_req_ids" and not clears_failures():
            continue
        kept = getattr(scheduler, name, None)
        left = {_id_of(each) for each in kept or ()} - excused
        if left and not (excused and name.startswith(("deferred", "_"))):
            world.wrong("left behind", f"scheduler.{name}: {sorted(left)}")
    # What the request of a lost word holds cannot come back by itself; all else has.
    held = {block for name in excused if name in scheduler.requests for table in world.tables(name) for block in table}
    held.discard(world.pool.null_block.block_id)
    left_over = set(real.held_blocks(scheduler)) - held
    missing = world.all_free - real.free_blocks(scheduler) - len(held)
    if missing or left_over:
        world.wrong("left behind", f"{missing} blocks have not come back: {sorted(left_over)}")
    if not excused and real.counts_fetches() and any(scheduler._kv_fetch_counts.values()):
        world.wrong("counters", f"loads are still counted: {dict(scheduler._kv_fetch_counts)}")
    names = {client.plan.name for client in world.clients} - excused
    for path, kept in ours(scheduler):
        left = names.intersection(str(each) for each in kept)
        if left:
            world.wrong("left behind", f"{path}: {sorted(left)}")


def clears_failures() -> bool:
    """Whether a release forgets that a load failed when its request is aborted; the first two do not."""
    return "failed_recving_kv_req_ids" in inspect.unwrap(real.Scheduler.finish_requests).__code__.co_names


def _id_of(entry: Any) -> str:
    return str(getattr(entry, "request_id", entry))


def ours(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Everything that our patches keep on a scheduler or its connector, by where it is."""
    for owner in (scheduler, scheduler.connector):
        for name, value in vars(owner).items():
            if name.startswith("_livepatch"):
                yield from _containers(f"{type(owner).__name__}.{name}", value, 0)


def _containers(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > 3 or value is None or isinstance(value, (str, int, float, bool, type)) or callable(value):
        return
    if isinstance(value, Mapping):
        yield path, list(value)
        for key, each in value.items():
            yield from _containers(f"{path}[{key!r}]", each, depth + 1)
        return
    if isinstance(value, (set, frozenset, list, tuple)) or type(value).__name__ == "deque":
        yield path, [_id_of(each) for each in value]
        return
    if not type(value).__module__.startswith(("vllm_livepatch", "_vllm_livepatch")) and depth:
        return
    fields = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", {})]
    for name in fields:
        if not name.startswith("__") and name not in ("scheduler", "connector"):
            yield from _containers(f"{path}.{name}", getattr(value, name, None), depth + 1)
