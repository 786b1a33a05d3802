"""A streaming session's blocks are hashed with the tokens and images that are in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

SESSION = "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session"
KEYS = "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys"


def first_behind(features: Any, start: int) -> int:
    """The number of the first image (audio, video) that ends behind a token; that of none is how many there are."""
    number = len(features)
    while number and (place := features[number - 1].mm_position).offset + place.length > start:
        number -= 1
    return number


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    def update_request_as_session(
        original: Callable[..., Any], scheduler: Any, session: Any, update: Any, *rest: Any, **named: Any
    ) -> Any:
        """Remove the hashes of blocks that are not wholly computed: the token that is dropped may be in one."""
        whole = session.num_computed_tokens // scheduler.kv_cache_manager.block_pool.hash_block_size
        # To an AuxOutputConnector (0.31.0) each hash is sent once, by its number.
        if len(session.block_hashes) > whole and getattr(scheduler, "aux_output_connector", None) is None:
            del session.block_hashes[whole:]
            livepatch.count("rehashed")
        return original(session, update, *rest, **named)

    def generate_block_hash_extra_keys(
        original: Callable[..., Any],
        request: Any,
        start_token_idx: int,
        end_token_idx: int,
        start_mm_idx: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Begin with the first image that can be in the block, where the release begins with the last that there is."""
        found = first_behind(request.mm_features, start_token_idx)
        return original(request, start_token_idx, end_token_idx, found, *rest, **named)

    def behind_a_hash(release: Callable[..., Any], guarded: Callable[..., Any]) -> Callable[..., Any]:
        def generate_block_hash_extra_keys(
            request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
        ) -> Any:
            chosen = guarded if start_mm_idx < 0 and len(request.mm_features) > 1 else release
            return chosen(request, start_token_idx, end_token_idx, start_mm_idx)

        return generate_block_hash_extra_keys

    return {SESSION: update_request_as_session, KEYS: livepatch.shortcut(behind_a_hash, generate_block_hash_extra_keys)}
