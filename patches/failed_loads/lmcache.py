"""What LMCache's connectors note of a request, also as a MultiConnector's children, where its load was lost.

LMCache in an engine's process keeps what it was asked. The multi-process connector, vLLM's copy and LMCache's own,
keeps the request's blocks and how many of its tokens are computed, and stores by these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...sitecustomize.kit import leaves


def begins_at(connector: Any, name: str, computed: int) -> None:
    """Tell LMCache in the engine's process that a request begins behind `computed` tokens.

    It notes what it was asked, and of a request that is let in again it asserts that it begins there, or where
    LMCache's hit ends.
    """
    for leaf in leaves(connector):
        specs = getattr(getattr(leaf, "_lmcache_engine", None), "load_specs", {})
        if name in specs:
            specs[name].vllm_cached_tokens = computed
            specs[name].lmcache_cached_tokens = min(specs[name].lmcache_cached_tokens, computed)


def begin_anew(connector: Any, request: Any) -> None:
    """Let the multi-process connector begin anew with a request that lost all blocks, as with one that was preempted.

    It would go on with the blocks that it noted for the load, which may be anybody's by now, and store these. With one
    that *was* preempted it begins anew itself, and then drops the stores that it has put off (`lazy_offload`), too.
    """
    if request.status.name == "PREEMPTED":
        return
    name = request.request_id
    for trackers in _trackers(connector, name):
        tracker = trackers[name]
        # LMCache's own from 0.5.5 on does it where the request had a hit, and then asks its server nothing more.
        by_itself = hasattr(type(tracker.state), "BYPASS_LMCACHE") and tracker.num_lmcache_hit_tokens
        if tracker.state.name == "READY" and not by_itself:
            del trackers[name]


def counts(connector: Any, name: str, computed: int) -> None:
    """Let the multi-process connector count a request's computed tokens from `computed` on.

    It adds those that are scheduled to the hit, of which some was not loaded, and would store a chunk before its end is
    computed. When blocks were allocated, nothing else asks for the hit any more.
    """
    for trackers in _trackers(connector, name):
        tracker = trackers[name]
        for hit in ("num_vllm_hit", "num_lmcache_hit"):
            for unit in ("blocks", "tokens"):  # tokens: LMCache's own, from 0.4.7 on
                if hasattr(tracker, f"{hit}_{unit}"):
                    setattr(tracker, f"{hit}_{unit}", 0)
        tracker.num_scheduled_tokens = computed


def _trackers(connector: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the dict of each multi-process connector that knows the request."""
    for leaf in leaves(connector):
        trackers = getattr(leaf, "request_trackers", None)
        if trackers and name in trackers:
            yield trackers
