"""What was computed on KV that LMCache did not load is not stored in LMCache.

LMCache in the engine's process loads within the step that computes, and stores at that step's end. The scheduler hears
of a load that failed after that, and with asynchronous scheduling the next step is under way by then. LMCache keeps the
first KV that it is given for a chunk, so what was stored wrong stays, and is loaded by whoever has that prompt.

Source: read and run here; nothing upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CONNECTOR = "lmcache.integration.vllm.vllm_v1_adapter:LMCacheConnectorV1Impl"

LOST = "_livepatch_lost"
"""Attribute of a worker's connector: its `_Lost`."""


class _Lost:
    """What is known of one worker's blocks."""

    __slots__ = ("blocks", "seen")

    def __init__(self) -> None:
        self.blocks: set[int] = set()  # that were not loaded, or computed on such; until somebody writes them anew
        self.seen: dict[str, int] = {}  # of a request: how many tokens it had when it was last told of

    def step(self, requests: list[Any], failed: set[int], size: int) -> list[Any]:
        """Who in a step has such blocks. `failed`: the blocks whose load failed in it; `size`: a block's, in tokens."""
        hit: list[Any] = []
        if failed or self.blocks:
            tables = [(request, blocks_of(request, size)) for request in requests]
            for request, blocks in tables:
                self.blocks.difference_update(blocks[self.written_from(request, len(blocks), size) :])
            self.blocks |= failed
            hit = self.spread(tables)
        self.seen.update((request.req_id, len(request.slot_mapping)) for request in requests)
        return hit

    def written_from(self, request: Any, number: int, size: int) -> int:
        """The first of a request's `number` blocks that this step or one since it was last told of has written."""
        if request.load_spec is not None:  # it begins, or begins anew, behind what the prefix cache has
            tokens = request.load_spec.vllm_cached_tokens
        elif request.req_id in self.seen:
            tokens = self.seen[request.req_id]
        else:
            return number
        return int(-(-tokens // size))

    def spread(self, tables: list[tuple[Any, list[int]]]) -> list[Any]:
        """Who has a lost block has lost what lies behind it, and so has who shares that."""
        hit: dict[str, Any] = {}
        before = -1
        while before != len(self.blocks):
            before = len(self.blocks)
            for request, blocks in tables:
                first = next((place for place, block in enumerate(blocks) if block in self.blocks), None)
                if first is not None:
                    hit[request.req_id] = request
                    self.blocks.update(blocks[first:])
        return list(hit.values())


def blocks_of(request: Any, size: int) -> list[int]:
    """The blocks of a request's tokens, in their order, from the slots of these."""
    return [int(slot) // size for slot in request.slot_mapping[::size].tolist()]


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a look at its calls."""

    def wait_for_save(connector: Any, args: Any, kwargs: Any) -> None:
        """Whoever has lost blocks stores nothing in this step. It stores when it has begun anew."""
        lost: _Lost = vars(connector).setdefault(LOST, _Lost())
        requests = connector._parent._get_connector_metadata().requests
        for request in lost.step(requests, connector._invalid_block_ids, connector._block_size):
            save = request.save_spec
            if save is not None and save.can_save:
                save.can_save = False
                save.skip_leading_tokens = len(request.token_ids)  # what else a producer goes by
                livepatch.count("not_stored")
                livepatch.say("not_stored", "what was computed on KV that LMCache did not load is not stored")

    def get_finished(connector: Any, args: Any, kwargs: Any) -> None:
        lost: _Lost = vars(connector).setdefault(LOST, _Lost())
        for name in args[0] if args else kwargs["finished_req_ids"]:
            lost.seen.pop(name, None)

    # Blocks that are lost when the patch stands aside stay so.
    return {
        f"{CONNECTOR}.wait_for_save": livepatch.lasting(livepatch.before(wait_for_save)),
        f"{CONNECTOR}.get_finished": livepatch.lasting(livepatch.before(get_finished)),
    }
