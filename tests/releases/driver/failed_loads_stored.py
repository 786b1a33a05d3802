"""Drive a release's schedulers with LMCache through loads that fail, and look at what is stored of who is then computed.

Run by a fresh interpreter with vLLM's and LMCache's sources, and the bundle or not, on PYTHONPATH. Arguments: the connector
classes to play (`builtin`, `lmcache`). Slots have contents, also those that a store takes (`paged_world`).
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, outcome_of, print_result

STARTED = time.perf_counter()
begin_driver()

import gc
import sys
from collections.abc import Callable
from typing import Any

import chunked_lmcache_load as connectors
import lmcache
import paged_world
import real_scheduler as real
import vllm
from paged_world import BLOCK, CHUNK, Plan, Transfer
from vllm.config import KVTransferConfig

gc.enable()

PULLING = {"kv_connector": "PullingDouble", "kv_connector_module_path": "pulling_double", "kv_role": "kv_both"}
STEP = CHUNK - 2
"""Tokens that a step computes: what is computed ends amid a block, also in a chunk's last one."""
PROMPT = 12 * BLOCK + 7


class World(paged_world.World):
    """One in which the first load of LMCache's fails from a block on, and all loads of the connector beside it."""

    first_lost = 0
    """The first token that LMCache's failed load does not bring."""

    def store(self, meta: Any) -> None:
        """Look at what a store takes when its step has ended: of all blocks it must be the prompt's own KV."""
        (blocks,) = paged_world.blocks_in(meta.op)
        taken = [slot for block in blocks for slot in self.slots[block]]
        if taken != self.contents[meta.request_id][0][meta.op.start : meta.op.end]:
            self.wrong.add("a store of KV that is not its prompt's")

    def submit_beside(self, metadata: Any) -> None:
        for name, (prompt, tables) in metadata.begun.items():
            blocks = [table[: -(-len(prompt) // BLOCK)] for table in tables]
            self.transfers.append(Transfer(name, 0, 0, 0, blocks, self.now + 2))

    def complete(self, transfer: Transfer) -> set[int]:
        """Of a load that fails, what comes before the lost blocks has arrived."""
        failed = super().complete(transfer)
        if transfer.end == 0:  # the other connector's
            return {block for blocks in transfer.blocks for block in blocks}
        arrived = range(transfer.start, min(transfer.end, self.first_lost) if failed else 0)
        self.write(transfer, 0, arrived)
        return failed.difference(transfer.blocks[0][: len(arrived) // BLOCK])


Place = tuple[str, Any, tuple[str, str], bool]
"""A scheduler's class, the model's configuration, the connector, and whether a lost load is to be computed."""


def world_of(place: Place, plans: list[Plan], **options: Any) -> World:
    """A world whose step ends amid a block, and whose first plan's load fails."""
    mode, config, connector, recomputes = place
    world = World(mode, config, connector, plans, recomputes=recomputes, **options)
    world.scheduler.max_num_scheduled_tokens = STEP
    world.failing = {plan.name: plan.failing_loads for plan in plans}
    return world


def pulled(place: Place) -> World:
    """Another child of a MultiConnector loads most of a prompt, and fails. Meanwhile somebody takes blocks."""
    prompts = {name: connectors.tokens(name, 20)[:PROMPT] for name in ("lost", "next")}
    plans = [Plan("lost", prompts["lost"]), Plan("next", prompts["next"], arrives=2)]
    world = world_of(place, plans, beside=(PULLING,))
    add = world.scheduler.add_request

    def add_request(request: Any) -> None:
        request.kv_transfer_params = {"pulled": 9 * BLOCK} if request.request_id == "lost" else None
        add(request)

    world.scheduler.add_request = add_request
    return world


def own(place: Place, first_lost: int) -> World:
    """LMCache's own load fails, from a token on."""
    plans = [Plan("lost", connectors.tokens("lost", 20)[:PROMPT], hit=2 * CHUNK, failing_loads=1)]
    world = world_of(place, plans)
    world.first_lost = first_lost
    return world


CASES: dict[str, Callable[[Place], World]] = {
    "pulled": pulled,
    "own": lambda place: own(place, 0),
    "own_in_part": lambda place: own(place, CHUNK),
}


def main() -> None:
    """Play every case with the connector classes asked for, under the default policy and to be computed."""
    connectors.quiet()
    connectors.hide_later_adapter()
    by_default = KVTransferConfig().kv_load_failure_policy == "recompute"

    def play(mode: str, config: Any) -> dict[str, str]:
        found = {}
        for which in sys.argv[1:]:
            module = connectors.MODULES[which]
            connector = (module, connectors.class_name(module))
            for policy, recomputes in (("default", by_default), ("recompute", True)):
                place = (mode, config, connector, recomputes)
                for name, case in CASES.items():
                    found[f"{which} {policy} {name}"] = outcome_of(lambda case=case, place=place: case(place).run())
        return found

    worlds = real.with_each_scheduler(play)
    print_result({"worlds": worlds, "seconds": time.perf_counter() - STARTED}, vllm, lmcache)


if __name__ == "__main__":
    main()
