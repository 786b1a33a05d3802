"""What was computed on KV that LMCache did not load is not stored in LMCache.

LMCache in the engine's process loads within the step that computes, and stores at that step's end. The scheduler hears
of a load that failed after that, and with asynchronous scheduling the next step is under way by then. LMCache keeps the
first KV that it is given for a chunk, so what was stored wrong stays, and is loaded by whoever has that prompt. Of
several workers each loads and stores for itself: one's failed load makes what all of them compute wrong, so they tell
each other of it within the step (workers.py).

Source: read and run here; nothing upstream.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached
from .workers import Workers

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

CONNECTOR = "lmcache.integration.vllm.vllm_v1_adapter:LMCacheConnectorV1Impl"

LOST = "_livepatch_lost"
"""Attribute of a worker's connector: its `_Lost`."""

GIVEN = "_livepatch_given"
"""Attribute of a step's metadata: the blocks that somebody begins to write in it."""

LOADS = "_livepatch_loads"
"""Attribute of a step's metadata, where the step loads: the `Step` by which the workers talk of it. Of a scheduler's
connector: what makes these."""


class _Lost:
    """What is known of one worker's blocks."""

    __slots__ = ("blocks", "failed", "workers")

    def __init__(self, parallel: Any) -> None:
        self.blocks: set[int] = set()  # that were not loaded, or computed on such; until they are given to be written
        self.failed: set[int] = set()  # that this worker did not load in this step
        self.workers = Workers(parallel.rank, parallel.world_size, parallel.pipeline_parallel_size)

    def step(self, requests: list[Any], failed: set[int], given: Iterable[int], size: int) -> list[Any]:
        """Who in a step has such blocks. `failed`: the blocks whose load failed in it; `given`: those that somebody
        begins to write in it, after which nobody has what was there; `size`: a block's, in tokens."""
        self.blocks.difference_update(given)
        self.blocks |= failed
        return self.spread([(request, blocks_of(request, size)) for request in requests]) if self.blocks else []

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


def lost_of(connector: Any) -> _Lost:
    """A worker's, made when it is first asked for."""
    return attached(connector, LOST, lambda: _Lost(connector._vllm_config.parallel_config))


def loads(request: Any) -> bool:
    return request.load_spec is not None and bool(request.load_spec.can_load)


def blocks_of(request: Any, size: int) -> list[int]:
    """The blocks of a request's tokens, in their order, from the slots of these."""
    return [int(slot) // size for slot in request.slot_mapping[::size].tolist()]


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a look at its calls."""

    def build_connector_meta(metadata: Any, connector: Any, scheduler_output: Any, *rest: Any, **named: Any) -> None:
        """Tell the workers which blocks are given to be written. Of most of a request's blocks LMCache does not tell
        them: of the last part of a chunk, and of answers."""
        vars(metadata)[GIVEN] = blocks_given(scheduler_output, metadata.requests, connector._block_size)
        if any(map(loads, metadata.requests)):
            steps = attached(connector, LOADS, lambda: zip(itertools.repeat(uuid.uuid4().hex), itertools.count()))
            vars(metadata)[LOADS] = next(steps)

    def start_load_kv(answer: Any, connector: Any, *rest: Any, **named: Any) -> None:
        """What failed of this step's loads is known here. With speculative decoding vLLM fetches it before the step's
        stores (from 0.20)."""
        lost = lost_of(connector)
        lost.failed = set(connector._invalid_block_ids)
        step = getattr(connector._parent._get_connector_metadata(), LOADS, None)
        if step is not None:
            lost.workers.tell(step, lost.failed)

    def failed_anywhere(lost: _Lost, metadata: Any, size: int) -> set[int]:
        """The blocks that were not loaded in this step, by this worker or by one whose results it computed with."""
        step = getattr(metadata, LOADS, None)
        elsewhere = lost.workers.hear(step) if step is not None else set()
        if elsewhere is None:
            livepatch.tell("not_heard", "another worker does not say what it loaded: that is not stored")
            elsewhere = blocks_loaded(metadata.requests, size)
        return lost.failed | elsewhere

    def wait_for_save(connector: Any, *rest: Any, **named: Any) -> None:
        """Whoever has lost blocks stores nothing in this step. It stores when it has begun anew."""
        lost, size = lost_of(connector), connector._block_size
        metadata = connector._parent._get_connector_metadata()
        failed = failed_anywhere(lost, metadata, size)
        for request in lost.step(metadata.requests, failed, getattr(metadata, GIVEN, ()), size):
            save = request.save_spec
            if save is not None and save.can_save:
                save.can_save = False
                # What a producer goes by, which it sends to a decode engine.
                save.skip_leading_tokens = len(request.token_ids)
                request.disagg_spec = None
                livepatch.tell("not_stored", "what was computed on KV that LMCache did not load is not stored")

    # Blocks that are lost when the patch stands aside stay so.
    return {
        f"{CONNECTOR}.build_connector_meta": livepatch.lasting(livepatch.after(build_connector_meta)),
        f"{CONNECTOR}.start_load_kv": livepatch.lasting(livepatch.after(start_load_kv)),
        f"{CONNECTOR}.wait_for_save": livepatch.lasting(livepatch.before(wait_for_save)),
    }


def blocks_given(scheduled: Any, metas: list[Any], size: int) -> list[int]:
    """The blocks that somebody begins to write in a step: all that it gets but what the prefix cache has for it."""
    # Where a request begins, or begins anew; vLLM's own number counts what is loaded, too.
    begins = {one.req_id: one.load_spec.vllm_cached_tokens for one in metas if one.load_spec is not None}
    given: list[int] = []
    for new in scheduled.scheduled_new_reqs:
        given += new.block_ids[0][-(-begins.get(new.req_id, new.num_computed_tokens) // size) :]
    cached = scheduled.scheduled_cached_reqs
    for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if blocks is not None:
            cached_tokens = begins.get(name, computed) if name in cached.resumed_req_ids else 0
            given += blocks[0][-(-cached_tokens // size) :]
    return given


def blocks_loaded(metas: list[Any], size: int) -> set[int]:
    """All blocks that a step loads, and those that it computes behind them."""
    of_loads = [(blocks_of(one, size), one.load_spec.vllm_cached_tokens // size) for one in metas if loads(one)]
    return {block for blocks, first in of_loads for block in blocks[first:]}
