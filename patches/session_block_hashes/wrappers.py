"""A streaming session's blocks are hashed with the tokens that are in them, not with one that was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    def update_request_as_session(
        original: Callable[..., Any], scheduler: Any, session: Any, update: Any, *rest: Any, **named: Any
    ) -> Any:
        """Remove the hashes of blocks that are not wholly computed: the token that is dropped may be in one."""
        whole = session.num_computed_tokens // scheduler.kv_cache_manager.block_pool.hash_block_size
        # To an AuxOutputConnector (0.31.0) each hash is sent once, by its number.
        if len(session.block_hashes) > whole and getattr(scheduler, "aux_output_connector", None) is None:
            # Behind a hash the release looks at the last image alone; the block may have an earlier one.
            del session.block_hashes[0 if session.mm_features or update.mm_features else whole :]
            livepatch.count("rehashed")
        return original(session, update, *rest, **named)

    return {TARGET: update_request_as_session}
