"""A streaming session's blocks are hashed with the tokens that are in them, not with one that was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    def update_request_as_session(
        original: Callable[..., Any], scheduler: Any, session: Any, *rest: Any, **named: Any
    ) -> Any:
        """Remove the hashes of blocks that are not wholly computed: the token that is dropped may be in one."""
        whole = session.num_computed_tokens // scheduler.kv_cache_manager.block_pool.hash_block_size
        if len(session.block_hashes) > whole:
            del session.block_hashes[whole:]
            livepatch.count("rehashed")
        return original(session, *rest, **named)

    return {TARGET: update_request_as_session}
