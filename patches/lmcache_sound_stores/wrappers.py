"""A store keeps only tokens that are computed, from blocks that have their KV.

LMCache's connector counts what was scheduled as computed, rejected drafts too: a streaming session's next input makes
a chunk whole that is not. And where a group's blocks left its window, or hold no state, vLLM's tables have the null
block. Its contents are stored as the group's KV: to LMCache 0.5.3 always, then unless all blocks of a chunk are it.

Source: read and run here; nothing upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
GROUPS = "lmcache.v1.kv_layer_groups:KVLayerGroupsManager._detect_object_groups"
MASKS = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer:all_null_chunk_masks"

NULL = 0
"""The number of vLLM's null block."""

MANAGER = "_livepatch_manager"
"""Attribute of an object group: the manager that it belongs to, which knows what of a chunk is copied."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At the engine's scheduler: what is stored when. At LMCache's server: what of it is kept, from 0.5.4 on."""
    masks_at_server: bool = livepatch.facts.get("masks_at_server", True)

    def build_connector_meta(connector: Any, scheduler_output: Any, *rest: Any, **named: Any) -> None:
        """Count as computed what the scheduler does. LMCache adds this step's tokens, and stores what is whole then."""
        trackers, chunk = connector.request_trackers, connector.scheduler_adapter.lmcache_tokens_per_chunk
        scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        new = [(one.req_id, one.num_computed_tokens) for one in scheduler_output.scheduled_new_reqs]
        for requests in (new, zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            for name, computed in requests:
                tracker = trackers.get(name)
                if tracker is None:
                    continue
                hits = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
                counted = tracker.num_scheduled_tokens + hits
                if counted > computed:
                    tracker.num_scheduled_tokens = computed - hits
                    whole = min(counted + scheduled[name], len(tracker.all_token_ids)) // chunk * chunk
                    if whole > max(computed + scheduled[name], tracker.num_stored_tokens):
                        livepatch.count("not_computed")

    def update_state_after_alloc(_: None, connector: Any, request: Any, *rest: Any, **named: Any) -> None:
        """Begin to store behind the last null block: vLLM's own prefix cache had what is before it."""
        tracker = connector.request_trackers.get(request.request_id)
        if masks_at_server or tracker is None:
            return
        chunk = connector.scheduler_adapter.lmcache_tokens_per_chunk
        stored = tracker.num_stored_tokens
        for group, tokens in enumerate(connector._group_tokens_per_block):
            blocks = tracker.allocated_block_ids.get(group, ())
            if NULL in blocks:
                end = (len(blocks) - blocks[::-1].index(NULL)) * tokens
                tracker.num_stored_tokens = max(tracker.num_stored_tokens, -(-end // chunk) * chunk)
        if tracker.num_stored_tokens > stored:
            livepatch.count("null_blocks", (tracker.num_stored_tokens - stored) // chunk)

    def detect_object_groups(groups: Any, manager: Any, *rest: Any, **named: Any) -> None:
        for group in groups:
            setattr(group, MANAGER, manager)

    def all_null_chunk_masks(
        original: Call,
        block_ids: Any,
        object_groups: Any,
        blocks_per_chunk: Any,
        num_chunks: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Keep nothing of a group in a chunk of which a block that is copied is the null block."""
        masks = original(block_ids, object_groups, blocks_per_chunk, num_chunks, *rest, **named)
        null = named.get("null_block_id", rest[0] if rest else NULL)
        for group, mask in zip(object_groups, masks, strict=True):
            manager = getattr(group, MANAGER, None)
            if manager is None:
                continue
            several = any(one.engine_group_idx for one in manager._kernel_groups)
            for number in group.kernel_group_indices:
                if null not in block_ids[number] or not (several or manager._kernel_groups[number].sw_size_tokens > 0):
                    continue
                size = blocks_per_chunk[number]
                copied = manager.calculate_num_blocks(number, manager.get_subchunk_sw_size_tokens(number))
                for chunk in range(num_chunks):
                    end = (chunk + 1) * size
                    if not mask[chunk] and null in block_ids[number][end - copied : end]:
                        mask[chunk] = True
                        livepatch.count("null_blocks")
        return masks

    return {
        f"{CONNECTOR}.build_connector_meta": livepatch.before(build_connector_meta),
        f"{CONNECTOR}.update_state_after_alloc": livepatch.after(update_state_after_alloc),
        GROUPS: livepatch.after(detect_object_groups),
        MASKS: all_null_chunk_masks,
    }
